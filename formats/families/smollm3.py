"""SmolLM3: Llama's layer, with no rotary embedding in every fourth one (Bakouch et al. 2025; NoPE: Kazemnejad et al. 2023)."""

from dataclasses import replace
from typing import Any

from ..decoder import Decoder
from ..layers import LayerSpec
from ..metadata import Metadata, MetadataTypeError

_STEP = 4
"""Every fourth layer; GGUF has no key for it, and llama.cpp knows no other."""
_WITHOUT = "halfbyte.rope.layers_without"
"""Numbers of the layers without a rotary embedding, where they are others."""


def _usual(layers: int) -> list[int]:
    return list(range(_STEP - 1, layers, _STEP))


def _keys(config: Metadata) -> dict[str, Any]:
    layers = config.count("num_hidden_layers")
    step = config.count("no_rope_layer_interval", default=_STEP)
    with_rope = config.get("no_rope_layers", [int((i + 1) % step != 0) for i in range(layers)], list)
    if len(with_rope) != layers or not all(flag in (0, 1) for flag in with_rope):
        raise MetadataTypeError(f"{config.source}: 'no_rope_layers' must be {layers} numbers, 1 for a layer with a rotary embedding or 0")
    without = [i for i, flag in enumerate(with_rope) if not flag]
    return {} if without == _usual(layers) else {_WITHOUT: without}


def _config(metadata: Metadata) -> dict[str, Any]:
    layers = metadata.count("smollm3.block_count")
    without = metadata.get(_WITHOUT, _usual(layers), list)
    return {"no_rope_layers": [int(i not in without) for i in range(layers)]}


def _layer(layer: LayerSpec, index: int, metadata: Metadata) -> LayerSpec:
    without = metadata.get(_WITHOUT, None, list)
    has_rope = index not in without if without is not None else (index + 1) % _STEP != 0
    return layer if has_rope else replace(layer, attention=replace(layer.attention, rope=""))


FAMILY = Decoder(
    name="smollm3",
    model_types=("smollm3",),
    huggingface_class="SmolLM3ForCausalLM",
    interleaved=True,
    qkv_bias="config",
    refused=("use_sliding_window",),
    layer=_layer,
    more_keys=_keys,
    more_config=_config,
)
