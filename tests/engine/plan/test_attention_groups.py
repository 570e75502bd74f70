"""Layers of different sizes, windows and layouts in one plan, each group with pages of its own, against NumPy."""

from types import SimpleNamespace

import numpy as np
import pytest

from halfbyte.engine.kernels.structs import SPLIT
from halfbyte.engine.plan.builder import Builder, Limits
from halfbyte.engine.plan.operands import LayerShape
from halfbyte.engine.plan.plan import PlanError
from halfbyte.engine.run.cache import BEHIND, PagedCache, Sequence
from halfbyte.engine.run.rope import RopeTable
from halfbyte.engine.run.workers import Workers
from halfbyte.formats.layers import AttentionSpec
from support import kernelbox as box

CONTEXT = 700
SINKS = np.array([0.5, 3.0, -1.0, 2.0], np.float32)
SPECS = [
    AttentionSpec(heads=4, kv_heads=2, key_size=24, value_size=40, scale=0.3, window=50, sinks=True),
    AttentionSpec(heads=6, kv_heads=1, key_size=40, value_size=16, scale=0.2, soft_cap=4.0),
    AttentionSpec(heads=4, kv_heads=2, key_size=24, value_size=40, scale=0.3, window=50),
    AttentionSpec(heads=2, kv_heads=2, key_size=16, value_size=16, scale=0.25, rope=""),
]
LAYOUTS = ["f32", "f32", "f32", "q8"]
ROPES = [RopeTable(10.0 ** -np.linspace(0, 2, 12), 1.0, CONTEXT), RopeTable(10.0 ** -np.linspace(0, 2, 8), 1.0, CONTEXT)]
WEIGHTS = SimpleNamespace(vector=lambda name: SINKS)
CONSUMER = SimpleNamespace(integers=False)


def plan_of(cache, workers):
    builder = Builder(WEIGHTS, cache, Limits(64, 1, 4, CONTEXT, workers), "int8")
    inputs, outputs = [], []
    for layer, spec in enumerate(SPECS):
        builder.plan.begin(f"layer.{layer}")
        sizes = {"q": spec.heads * spec.key_size, "k": spec.kv_heads * spec.key_size, "v": spec.kv_heads * spec.value_size}
        q, k, v = (builder.floats(f"{name}{layer}", size) for name, size in sizes.items())
        rope = {0: ROPES[0], 1: ROPES[1], 2: ROPES[0], 3: None}[layer]
        panels = builder.attention(layer, q, k, v, spec, rope, CONSUMER, "sinks" if spec.sinks else None)
        inputs.append((q, k, v))
        outputs.append(panels)
    builder.plan.link()
    return builder, inputs, outputs


def turned(x, rope):
    """float64[positions, heads, size] rotated, each by its position."""
    if rope is None:
        return x
    rope.reach(len(x))
    half = rope.dimensions // 2
    table = rope._table[: len(x), None].astype(np.float64)
    c, s, a, b = table[..., :half], table[..., half:], x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * c - b * s, b * c + a * s, x[..., 2 * half :]], -1)


def expected(spec, rope, q, k, v):
    """float64[positions, heads * value size] of a whole text."""
    n = len(q)
    q = turned(q.reshape(n, spec.heads, -1), rope) * spec.scale
    k, v = turned(k.reshape(n, spec.kv_heads, -1), rope), v.reshape(n, spec.kv_heads, -1)
    k, v = (np.repeat(x, spec.heads // spec.kv_heads, 1) for x in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k)
    if spec.soft_cap:
        scores = spec.soft_cap * np.tanh(scores / spec.soft_cap)
    i, j = np.arange(n)[:, None], np.arange(n)
    scores[:, (j > i) | ((i - j >= spec.window) & (spec.window > 0))] = -np.inf
    if spec.sinks:
        scores = np.concatenate([scores, np.broadcast_to(SINKS[:, None, None], (spec.heads, n, 1))], -1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hij,jhd->ihd", weights[..., :n], v).reshape(n, -1)


def test_layers_of_different_shapes():
    shapes = [LayerShape.of(spec, layout) for spec, layout in zip(SPECS, LAYOUTS, strict=True)]
    cache = PagedCache(shapes, 40)
    assert [cache.group(layer) for layer in range(4)] == [0, 1, 0, 2]
    rng = np.random.default_rng(0)
    lengths = [620, 300]
    data = [[[rng.standard_normal((n, b.width // 4)) for b in three] for three in plan_of(cache, 1)[1]] for n in lengths]
    workers = Workers(2)
    try:
        builder, inputs, outputs = plan_of(cache, 2)
        sequences, got = [Sequence(), Sequence()], [[[] for _ in SPECS] for _ in lengths]
        while any(s.length < n for s, n in zip(sequences, lengths, strict=True)):
            first, rows = 0, []
            for i, (sequence, n) in enumerate(zip(sequences, lengths, strict=True)):
                count = min(n - sequence.length, 1 if rng.random() < 0.3 or sequence.length > n - 5 else 30)
                if count == 0:
                    continue
                start = sequence.length
                cache.reserve(sequence, start + count)
                builder.step.positions[first : first + count] = np.arange(start, start + count)
                splits = -(-(start + 1) // SPLIT) if count == 1 and start >= SPLIT else 0
                builder.step.place(len(rows), sequence.addresses, first, count, start, splits)
                for three, values in zip(inputs, data[i], strict=True):
                    for buffer, x in zip(three, values, strict=True):
                        buffer.floats(64)[first : first + count] = x[start : start + count]
                rows.append((i, first, count))
                first += count
            for rope in ROPES:
                rope.reach(CONTEXT)
            builder.step.set(first, len(rows))
            for layer, panels in enumerate(outputs):  # layers share buffers: one after another
                workers.run(builder.plan, first, builder.plan.sections[f"layer.{layer}"])
                made = box.panel_tokens("f32", panels.buffers["f32"].array, first, panels.columns)[:, : panels.columns]
                for i, at, count in rows:
                    got[i][layer].append(made[at : at + count].copy())
            for i, _, count in rows:
                sequences[i].length += count
                cache.slide(sequences[i])
    finally:
        workers.close()
    assert sequences[0].tables[0].first == (620 - 50 + 1 - BEHIND) // 32 and sequences[0].tables[1].first == 0
    for i in range(len(lengths)):
        for layer, spec in enumerate(SPECS):
            rope = {0: ROPES[0], 1: ROPES[1], 2: ROPES[0], 3: None}[layer]
            sizes = (spec.heads * spec.key_size, spec.kv_heads * spec.key_size, spec.kv_heads * spec.value_size)
            q, k, v = (x.astype(np.float32).astype(np.float64)[:, :size] for x, size in zip(data[i][layer], sizes, strict=True))
            if LAYOUTS[layer] == "q8":
                k, v = (rounded_heads(x, spec.kv_heads) for x in (k, v))
            exact = expected(spec, rope, q, k, v)
            assert np.abs(np.concatenate(got[i][layer]) - exact).max() < 3e-5, (i, layer)


def rounded_heads(x, heads):
    codes = [[box.rounded(head) for head in row] for row in x.reshape(len(x), heads, -1)]
    return np.array([[c.astype(np.float64) * s for c, s in row] for row in codes]).reshape(len(x), -1)


def test_layers_that_do_not_fit_their_cache():
    def build(spec, shape=None, rope=None, sinks=None):
        cache = PagedCache([shape or LayerShape.of(spec, "f16")], 4)
        builder = Builder(WEIGHTS, cache, Limits(6, 1, 1, 32, 1), "int8")
        q, k, v = builder.floats("q", 64), builder.floats("k", 32), builder.floats("v", 32)
        builder.attention(0, q, k, v, spec, rope, CONSUMER, sinks)

    fine = AttentionSpec(4, 2, 16, 16, 0.25)
    build(fine)
    with pytest.raises(PlanError, match=r"layer 0 attends as .* and the cache keeps"):
        build(fine, LayerShape("f16", 2, 16, 16, 8))
    with pytest.raises(PlanError, match="a rotary table of 24 dimensions for heads of 16"):
        build(fine, rope=ROPES[0])
    with pytest.raises(PlanError, match="has sinks or has none"):
        build(fine, sinks="sinks")
    with pytest.raises(PlanError, match="q has room for 64 columns, not 128"):
        build(AttentionSpec(8, 2, 16, 16, 0.25))
    with pytest.raises(PlanError, match="sinks has 4 scores for 8 heads"):
        build(AttentionSpec(8, 2, 8, 8, 0.25, sinks=True), sinks="sinks")
