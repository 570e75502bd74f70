"""The decoder that llama and its relatives are: what differs between them is which optional tensors a checkpoint holds."""

from __future__ import annotations

from ....formats.decoder import EMBEDDING, HEAD, ROUTER, Dimensions
from ....formats.metadata import Metadata
from ...kernels.structs import ALWAYS, NEVER
from ...run.rope import RopeTable
from ..builder import Builder
from ..experts import experts


def decoder(b: Builder, metadata: Metadata, rope: RopeTable) -> None:
    """Writes the plan: section "embed", a section per layer, section "head"."""
    arch = metadata.require("general.architecture", str)
    size = Dimensions.of(metadata, arch)
    epsilon = metadata.number(f"{arch}.attention.layer_norm_rms_epsilon")
    weights = b.weights
    table = weights.matrix(EMBEDDING)
    head = weights.matrix(HEAD) if HEAD in weights else table

    b.plan.begin("embed")
    x = b.embed(table)
    for layer in range(size.layers):
        b.plan.begin(f"layer.{layer}")
        prefix = f"blk.{layer}."
        wq, wk, wv, wo = (weights.matrix(f"{prefix}{n}.weight") for n in ("attn_q", "attn_k", "attn_v", "attn_output"))
        mixture = "" if size.experts is None else "_exps"
        gate, up, down = (weights.matrix(f"{prefix}{n}{mixture}.weight") for n in ("ffn_gate", "ffn_up", "ffn_down"))

        def bias(name: str, prefix: str = prefix) -> str | None:
            return f"{prefix}{name}.bias" if f"{prefix}{name}.bias" in weights else None

        normed = b.rms_norm(x, f"{prefix}attn_norm.weight", size.width, epsilon, [wq, wk, wv])
        q = b.matmul(normed, wq, b.floats("q", wq.rows), bias("attn_q"), barrier=NEVER)
        k = b.matmul(normed, wk, b.floats("k", wk.rows), bias("attn_k"), barrier=NEVER)
        v = b.matmul(normed, wv, b.floats("v", wv.rows), bias("attn_v"), barrier=ALWAYS)
        attended = b.attention(layer, q, k, v, size.heads, size.kv_heads, size.head, rope, wo)
        b.matmul(attended, wo, x, bias("attn_output"), add=True)
        if size.experts is not None:
            router = weights.matrix(f"{prefix}{ROUTER}.weight")
            normed = b.rms_norm(x, f"{prefix}ffn_norm.weight", size.width, epsilon, [router, gate, up])
            experts(b, normed, x, router, gate, up, down, size.experts, "silu")
            continue
        normed = b.rms_norm(x, f"{prefix}ffn_norm.weight", size.width, epsilon, [gate, up])
        hidden = b.gated(normed, gate, up, down, "silu", (bias("ffn_gate"), bias("ffn_up")))
        b.matmul(hidden, down, x, bias("ffn_down"), add=True)

    b.plan.begin("head")
    x = b.select_outputs(x, size.width)
    normed = b.rms_norm(x, "output_norm.weight", size.width, epsilon, [head])
    b.matmul(normed, head, b.floats("logits", head.rows))
