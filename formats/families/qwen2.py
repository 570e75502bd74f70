"""Qwen2 and Qwen2.5, Coder included: Llama's shape with biases on q, k and v; rotary rows lie in halves in GGUF too."""

from __future__ import annotations

from ..decoder import Decoder
from ..family import UnsupportedFeatureError
from ..metadata import Metadata


class Qwen2(Decoder):
    name = "qwen2"
    model_types = ("qwen2",)
    huggingface_class = "Qwen2ForCausalLM"
    qkv_bias = "always"

    def check_config(self, config: Metadata) -> None:
        super().check_config(config)
        # The configs of Qwen2.5 carry a window that use_sliding_window switches off.
        if config.get("use_sliding_window", False, bool):
            raise UnsupportedFeatureError(f"{config.source}: 'use_sliding_window' is not supported yet for {self.name}")


FAMILY = Qwen2()
