"""A decoder as rows of a plan: the section "embed", a section for each layer, the section "head", composed as its ModelSpec says."""

from __future__ import annotations

from collections.abc import Mapping

from ...formats.decoder import EMBEDDING, HEAD, ROUTER
from ...formats.layers import AttentionSpec, FeedForwardSpec, ModelSpec
from ..kernels.structs import ALWAYS, NEVER
from .builder import Builder
from .experts import experts
from .operands import RotaryTable
from .plan import Buffer


def decoder(b: Builder, model: ModelSpec, ropes: Mapping[str, RotaryTable]) -> None:
    """Writes the plan. ropes: the tables that the layers call by name."""
    table = b.weights.matrix(EMBEDDING)
    head = b.weights.matrix(HEAD) if HEAD in b.weights else table

    b.plan.begin("embed")
    x = b.embed(table)
    for index, layer in enumerate(model.layers):
        b.plan.begin(f"layer.{index}")
        rope = ropes[layer.attention.rope] if layer.attention.rope else None
        attention(b, x, index, layer.attention, rope, layer.epsilon)
        feed_forward(b, x, index, layer.feed_forward, layer.epsilon)

    b.plan.begin("head")
    x = b.select_outputs(x, model.width)
    normed = b.rms_norm(x, "output_norm.weight", model.width, model.epsilon, [head])
    b.plan.results["logits"] = b.matmul(normed, head, b.floats("logits", head.rows))


def attention(b: Builder, x: Buffer, index: int, spec: AttentionSpec, rope: RotaryTable | None, epsilon: float) -> None:
    """x += output · attention(q, k, v) of the normalized x."""
    prefix = f"blk.{index}."
    wq, wk, wv, wo = (b.weights.matrix(f"{prefix}{name}.weight") for name in ("attn_q", "attn_k", "attn_v", "attn_output"))
    normed = b.rms_norm(x, f"{prefix}attn_norm.weight", wq.columns, epsilon, [wq, wk, wv])
    q = b.matmul(normed, wq, b.floats("q", wq.rows), b.optional(f"{prefix}attn_q.bias"), barrier=NEVER)
    k = b.matmul(normed, wk, b.floats("k", wk.rows), b.optional(f"{prefix}attn_k.bias"), barrier=NEVER)
    v = b.matmul(normed, wv, b.floats("v", wv.rows), b.optional(f"{prefix}attn_v.bias"), barrier=ALWAYS)
    attended = b.attention(index, q, k, v, spec, rope, wo)
    b.matmul(attended, wo, x, b.optional(f"{prefix}attn_output.bias"), add=True)


def feed_forward(b: Builder, x: Buffer, index: int, spec: FeedForwardSpec, epsilon: float) -> None:
    """x += down · (activation(gate) * up) of the normalized x, or what a mixture of such networks gives."""
    prefix = f"blk.{index}."
    if spec.experts is not None:
        names = (ROUTER, "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
        router, gate, up, down = (b.weights.matrix(f"{prefix}{name}.weight") for name in names)
        normed = b.rms_norm(x, f"{prefix}ffn_norm.weight", router.columns, epsilon, [router, gate, up])
        experts(b, normed, x, router, gate, up, down, spec.experts, spec.activation)
        return
    gate, up, down = (b.weights.matrix(f"{prefix}{name}.weight") for name in ("ffn_gate", "ffn_up", "ffn_down"))
    normed = b.rms_norm(x, f"{prefix}ffn_norm.weight", gate.columns, epsilon, [gate, up])
    biases = b.optional(f"{prefix}ffn_gate.bias"), b.optional(f"{prefix}ffn_up.bias")
    hidden = b.gated(normed, gate, up, down, spec.activation, biases)
    b.matmul(hidden, down, x, b.optional(f"{prefix}ffn_down.bias"), add=True)
