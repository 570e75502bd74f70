"""Llama 2 and 3.x, SmolLM, and Mistral without a sliding window."""

from __future__ import annotations

from ..decoder import Decoder
from ..family import UnsupportedFeatureError
from ..metadata import Metadata


class Llama(Decoder):
    name = "llama"
    model_types = ("llama", "mistral")
    huggingface_class = "LlamaForCausalLM"
    interleaved = True
    qkv_bias = "config"

    def check_config(self, config: Metadata) -> None:
        super().check_config(config)
        if config.has("sliding_window"):
            window = config.require("sliding_window")
            raise UnsupportedFeatureError(f"{config.source}: 'sliding_window' ({window!s:.20}) is not supported yet for {self.name}")


FAMILY = Llama()
