"""Phi-3 mini with its usual context: Llama's layer with q, k and v in one matrix, gate and up in another (Abdin et al. 2024)."""

from ..decoder import Decoder, Fused

FAMILY = Decoder(
    name="phi3",
    model_types=("phi3",),
    huggingface_class="Phi3ForCausalLM",
    fused=(
        Fused(("attn_q", "attn_k", "attn_v"), "self_attn.qkv_proj", "attn_qkv"),
        Fused(("ffn_gate", "ffn_up"), "mlp.gate_up_proj", "ffn_up"),
    ),
    windowed=True,
)
