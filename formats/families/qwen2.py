"""Qwen2 and Qwen2.5, Coder included: Llama's layer with biases on q, k and v; rotary rows lie in halves in GGUF too (Yang et al. 2024)."""

from ..decoder import Decoder

FAMILY = Decoder(
    name="qwen2",
    model_types=("qwen2",),
    huggingface_class="Qwen2ForCausalLM",
    qkv_bias="always",
    refused=("use_sliding_window",),  # a window stands in the configs of Qwen2.5 too; this switches it on
)
