"""Layers composed as their specs say, held against a forward pass in NumPy: several rotary tables, none, and one of part of a head."""

from dataclasses import replace

import numpy as np
import pytest

from halfbyte.engine.model import Model, Work
from halfbyte.engine.plan.builder import Builder, Limits
from halfbyte.engine.plan.operands import LayerShape
from halfbyte.engine.plan.plan import PlanError
from halfbyte.engine.run.cache import PagedCache, Sequence
from halfbyte.formats.families.llama import FAMILY
from halfbyte.formats.layers import AttentionSpec, RopeSpec
from halfbyte.formats.opening import open_checkpoint
from support import tiny

TABLES = {"rope": RopeSpec(16, 10000.0), "local": RopeSpec(16, 100.0), "part": RopeSpec(6, 500.0)}
NAMES = ["rope", "local", "", "part"]


def rotated(x, spec):
    """[tokens, heads, size] rotated by position, halves of the first spec.dimensions."""
    half = spec.dimensions // 2
    angles = np.arange(len(x))[:, None] / spec.base ** (np.arange(half) / half)
    cosine, sine = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * cosine - b * sine, b * cosine + a * sine, x[..., 2 * half :]], axis=-1)


def forward(w, ids, model):
    """float64 logits of a llama whose layers name their rotary tables."""

    def norm(x, weight, epsilon):
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * weight

    x = w["token_embd.weight"][ids]
    for i, layer in enumerate(model.layers):
        a = layer.attention
        n = norm(x, w[f"blk.{i}.attn_norm.weight"], layer.epsilon)
        q, k, v = (n @ w[f"blk.{i}.attn_{one}.weight"].T for one in "qkv")
        q = q.reshape(len(ids), a.heads, a.key_size)
        k, v = (y.reshape(len(ids), a.kv_heads, a.key_size) for y in (k, v))
        if a.rope:
            q, k = rotated(q, model.ropes[a.rope]), rotated(k, model.ropes[a.rope])
        k, v = (np.repeat(y, a.heads // a.kv_heads, axis=1) for y in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) * a.scale + np.triu(np.full((len(ids),) * 2, -np.inf), 1)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        attended = np.einsum("hts,shd->thd", p / p.sum(axis=-1, keepdims=True), v).reshape(len(ids), -1)
        x = x + attended @ w[f"blk.{i}.attn_output.weight"].T
        n = norm(x, w[f"blk.{i}.ffn_norm.weight"], layer.epsilon)
        gate = n @ w[f"blk.{i}.ffn_gate.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (n @ w[f"blk.{i}.ffn_up.weight"].T)) @ w[f"blk.{i}.ffn_down.weight"].T
    return norm(x, w["output_norm.weight"], model.epsilon) @ w.get("output.weight", w["token_embd.weight"]).T


def test_every_layer_turns_by_its_own_table(tmp_path):
    def layer(spec, index, metadata):
        return replace(spec, attention=replace(spec.attention, rope=NAMES[index]))

    family = replace(FAMILY, ropes=lambda metadata: TABLES, layer=layer)
    config = tiny.llama_config(num_hidden_layers=len(NAMES), head_dim=16)
    tiny.write_folder(tmp_path, config)
    ids = np.random.default_rng(0).integers(0, config["vocab_size"], 40)
    with open_checkpoint(tmp_path) as checkpoint:
        checkpoint.family = family
        weights = {name: tensor.float32().astype(np.float64) for name, tensor in checkpoint.tensors.items()}
        expected = forward(weights, ids, checkpoint.model)
        model = Model(checkpoint, compute="f32", threads=2)
        try:
            together = model.step([Work(Sequence(), ids, "all")]).copy()
            sequence = Sequence()
            apart = np.concatenate([model.step([Work(sequence, [i], "last")]).copy() for i in ids])
        finally:
            model.close()
    assert np.abs(together - expected).max() < 1e-4 * expected.std()
    np.testing.assert_array_equal(apart, together)


class NoWeights:
    def __contains__(self, name):
        return False


@pytest.fixture
def builder():
    return Builder(NoWeights(), PagedCache([LayerShape("f32", 2, 16, 16)], 4), Limits(8, 4, 2, 64, 2), "f32")


def test_a_table_wider_than_a_head_is_refused(builder):
    class Table:
        address, dimensions = 0, 32

    q, k, v = (builder.floats(name, 32) for name in "qkv")
    with pytest.raises(PlanError, match="layer 0: a rotary table of 32 dimensions for heads of 16"):
        builder.attention(0, q, k, v, AttentionSpec(2, 2, 16, 16, 0.25), Table(), None)


def test_a_buffer_asked_for_with_another_size_is_another_buffer(builder):
    """Layers of two sizes share what is equal and nothing else: the smaller must not be given for the larger."""
    one, two = builder._private("scratch", 1000), builder._private("scratch", 2000)
    assert one is not two and two.nbytes >= 2000 and builder._private("scratch", 1000) is one
    assert builder.floats("x", 64) is not builder.floats("x", 96) and builder.floats("x", 64) is builder.floats("x", 64)
    shared, private = builder._panel("norm", "f32", 64, False)[0], builder._panel("norm", "f32", 64, True)[0]
    assert shared is not private


def test_two_buffers_of_one_name_are_an_error(builder):
    builder.plan.buffer("mine", 100)
    with pytest.raises(PlanError, match="two buffers are called 'mine'"):
        builder.plan.buffer("mine", 200)
