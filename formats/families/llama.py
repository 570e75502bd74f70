"""Llama 2 and 3.x, SmolLM, and Mistral without a sliding window (Touvron et al. 2023)."""

from ..decoder import Decoder

FAMILY = Decoder(
    name="llama",
    model_types=("llama", "mistral"),
    huggingface_class="LlamaForCausalLM",
    interleaved=True,
    qkv_bias="config",
    refused=("sliding_window",),
)
