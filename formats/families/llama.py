"""Llama 2 and 3.x, SmolLM, Mistral without a sliding window (Touvron et al. 2023), and Mixtral with its experts (Jiang et al. 2024)."""

from ..decoder import Decoder, Mixture

FAMILY = Decoder(
    name="llama",
    model_types=("llama", "mistral", "mixtral"),
    huggingface_class="LlamaForCausalLM",
    interleaved=True,
    qkv_bias="config",
    refused=("sliding_window",),
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
