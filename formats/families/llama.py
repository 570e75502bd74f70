"""Llama 2 and 3.x, SmolLM, Mistral without a sliding window, and Mixtral, whose layers have experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..decoder import Decoder
from ..family import TensorSpec, UnsupportedFeatureError
from ..metadata import Metadata
from ..stacked import StackedTensor
from ..tensor import Tensor

if TYPE_CHECKING:
    from ..huggingface.weights import Weights

_MIXTURE = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}


class Llama(Decoder):
    name = "llama"
    model_types = ("llama", "mistral", "mixtral")
    huggingface_class = "LlamaForCausalLM"
    interleaved = True
    qkv_bias = "config"
    mixtures = (
        "block_sparse_moe.gate", "block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3", "block_sparse_moe.experts.{}.w2",
    )  # fmt: skip

    def spelling(self) -> dict[str, str]:
        return super().spelling() | {f"{self.name}.{ours}": theirs for ours, theirs in _MIXTURE.items()}

    def from_huggingface(self, config: Metadata) -> tuple[dict[str, Any], dict[str, np.ndarray], list[str]]:
        keys, computed, notes = super().from_huggingface(config)
        if config.require("model_type", str) == "mixtral":
            keys |= {f"{self.name}.{ours}": config.count(theirs) for ours, theirs in _MIXTURE.items()}
        return keys, computed, notes

    def to_huggingface(self, metadata: Metadata, tensors: dict[str, Tensor]) -> dict[str, Any]:
        config = super().to_huggingface(metadata, tensors)
        if not metadata.get(f"{self.name}.expert_count", 0, int):
            return config
        mixture = {theirs: metadata.count(f"{self.name}.{ours}") for ours, theirs in _MIXTURE.items()}
        return config | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"} | mixture

    def check_config(self, config: Metadata) -> None:
        super().check_config(config)
        if config.has("sliding_window"):
            window = config.require("sliding_window")
            raise UnsupportedFeatureError(f"{config.source}: 'sliding_window' ({window!s:.20}) is not supported yet for {self.name}")

    def tensor(self, spec: TensorSpec, weights: Weights, names: tuple[str, ...]) -> Tensor:
        if len(spec.shape) == 3:  # the experts of a layer, one by one
            return StackedTensor(spec.name, [weights.tensor(name, spec.name) for name in names])
        return super().tensor(spec, weights, names)


FAMILY = Llama()
