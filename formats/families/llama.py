"""Llama 2 and 3.x, SmolLM, Mistral with and without its window, Mixtral (Touvron et al. 2023; Jiang et al. 2023, 2024)."""

from typing import Any

from ..decoder import Decoder, Mixture
from ..family import UnsupportedFeatureError
from ..metadata import Metadata


def _windows_are_mistrals(config: Metadata) -> dict[str, Any]:
    """transformers' Llama does not look at a window; a config with one is not what it says it is."""
    if config.get("sliding_window", 0) and config.get("model_type", "llama") == "llama":
        raise UnsupportedFeatureError(f"{config.source}: 'sliding_window' is not supported for model_type llama, only for mistral")
    return {}


def _mistral(metadata: Metadata) -> dict[str, Any]:
    windowed = metadata.get("llama.attention.sliding_window", 0)
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral"} if windowed else {}


FAMILY = Decoder(
    name="llama",
    model_types=("llama", "mistral", "mixtral"),
    huggingface_class="LlamaForCausalLM",
    interleaved=True,
    qkv_bias="config",
    windowed=True,
    more_keys=_windows_are_mistrals,
    more_config=_mistral,
    mixture=Mixture(
        model_type="mixtral",
        huggingface_class="MixtralForCausalLM",
        count="num_local_experts",
        used="num_experts_per_tok",
        router="block_sparse_moe.gate",
        expert="block_sparse_moe.experts.{}.",
        matrices=("w1", "w3", "w2"),
    ),
)
