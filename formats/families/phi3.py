"""Phi-3 mini with its usual context: Llama's layer with q, k and v in one matrix, gate and up in another (Abdin et al. 2024)."""

from ..decoder import Decoder, Fused
from ..family import UnsupportedFeatureError
from ..metadata import Metadata


def _refuse_windows(config: Metadata) -> dict[str, object]:
    """A window at least as long as the context hides nothing."""
    window, context = config.count("sliding_window", default=None), config.count("max_position_embeddings")
    if window is not None and window < context:
        problem = f"({window}) below 'max_position_embeddings' ({context}) is not supported yet for phi3"
        raise UnsupportedFeatureError(f"{config.source}: 'sliding_window' {problem}")
    return {}


FAMILY = Decoder(
    name="phi3",
    model_types=("phi3",),
    huggingface_class="Phi3ForCausalLM",
    fused=(
        Fused(("attn_q", "attn_k", "attn_v"), "self_attn.qkv_proj", "attn_qkv"),
        Fused(("ffn_gate", "ffn_up"), "mlp.gate_up_proj", "ffn_up"),
    ),
    more_keys=_refuse_windows,
)
