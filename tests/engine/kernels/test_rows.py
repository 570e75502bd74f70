"""The kernels that work on a token's row, against NumPy: embedding, norm, quantization, gated activation, gathering, rotation."""


import numpy as np
import pytest

from halfbyte.engine.kernels import structs as layout
from halfbyte.quant.block import BUILT_IN, get_format
from support import kernelbox as box


def padded(columns):
    return -(-columns // 32) * 32


def rows_of(x):
    """float32[tokens, columns] as the engine holds it: zero up to a multiple of 32."""
    out = box.floats(len(x), padded(x.shape[1]), 0.0)
    out[:, : x.shape[1]] = x
    return out


def into_panels(name, kind, parameters, tokens, columns, workers, **arguments):
    """The panels that a kernel made, one set per worker where a lone token has its own."""
    own = -(-layout.panel_bytes(kind, 1, columns) // 128) * 128
    out = box.aligned(max(layout.panel_bytes(kind, tokens, columns), own * workers))
    extra = {"out_worker": own} if name != "gated" else {}
    step = arguments.pop("step", None) or box.Step(tokens)
    box.run(name, parameters, workers, step=step.address, columns=columns, out=out, **extra, **arguments)
    if tokens == 1 and extra:
        return [out[w * own : (w + 1) * own] for w in range(workers)]
    return [out]


def check_panels(kind, panels, tokens, columns, exact):
    """exact: float64[tokens, columns], what should be in them."""
    wide = np.pad(exact, ((0, 0), (0, padded(columns) - columns)))
    if kind == "f32":
        got = box.panel_tokens(kind, panels, tokens, columns)
        np.testing.assert_allclose(got, wide, rtol=2e-6, atol=1e-30)
        return
    codes, scales, sums, firsts = box.panel_tokens(kind, panels, tokens, columns)
    blocks = wide.reshape(tokens, -1, 32)
    largest = np.abs(blocks).max(-1)
    np.testing.assert_allclose(scales, largest / 127, rtol=2e-6, atol=1e-30)
    assert (np.abs(codes * scales[..., None].astype(np.float64) - blocks) <= 0.5001 * scales[..., None] + 1e-30).all()
    np.testing.assert_array_equal(sums, codes.astype(np.int32).sum(-1))
    np.testing.assert_array_equal(firsts, codes[..., :16].astype(np.int32).sum(-1))


@pytest.mark.parametrize("kind", ["int8", "f32"])
@pytest.mark.parametrize("columns", [1, 40, 64, 100])
def test_rms_norm(kind, columns):
    rng = np.random.default_rng(0)
    weight = rows_of(rng.standard_normal((1, columns)))
    for tokens in (1, 2, 3, 5, 6, 7, 11, 13):
        x = rows_of(rng.standard_normal((tokens, columns)) * np.exp(rng.uniform(-6, 6, (tokens, 1))))
        if tokens > 2:
            x[1] = 0  # a row of zeros: epsilon keeps it finite
        real = x[:, :columns].astype(np.float64)
        exact = real / np.sqrt((real**2).mean(-1, keepdims=True) + 1e-5) * weight[0, :columns]
        for workers in (1, 3):
            for panels in into_panels(
                "rms_norm", kind, (kind,), tokens, columns, workers, x=x, x_stride=x.strides[0], weight=weight, epsilon=1e-5
            ):
                check_panels(kind, panels, tokens, columns, exact)


@pytest.mark.parametrize("kind", ["int8", "f32"])
def test_panels_are_rounded_to_nearest(kind):
    """By attention's last row, which only converts what was attended to in one piece."""
    rng = np.random.default_rng(1)
    columns = 72
    for tokens in (1, 4, 9):
        x = rows_of(rng.standard_normal((tokens, columns)))
        x[0, :32] = np.linspace(-127, 127, 32).round() + np.resize([0.5, -0.5, 0.25], 32)
        x[0, 0] = 127
        x[-1, 32:64] = 0
        step = box.Step(tokens, sequences=[(0, tokens, [0], 0)])
        for panels in into_panels(
            "attention_merge", kind, (24, kind), tokens, columns, 2, step=step, x=x, x_stride=x.strides[0], heads=3, parts=0,
            scratch=0, scratch_worker=0, window=0, sinks=0,
        ):  # fmt: skip
            if kind == "f32":
                np.testing.assert_array_equal(box.panel_tokens(kind, panels, tokens, columns), x)
            else:
                codes, scales, sums, firsts = box.panel_tokens(kind, panels, tokens, columns)
                wanted, wanted_scales = box.quantized(x)
                np.testing.assert_array_equal(codes, wanted)  # ties to even, as np.rint
                np.testing.assert_array_equal(scales, wanted_scales)
                np.testing.assert_array_equal(sums, wanted.astype(int).sum(-1))
                np.testing.assert_array_equal(firsts, wanted[..., :16].astype(int).sum(-1))


@pytest.mark.parametrize("kind", ["int8", "f32"])
@pytest.mark.parametrize("columns", [32, 40, 100])
def test_gated(kind, columns):
    rng = np.random.default_rng(2)
    for tokens in (1, 3, 8):
        gate, up = (rows_of(rng.standard_normal((tokens, columns)) * 4) for _ in "gu")
        gate[0, :4] = 100, -100, -200, 0  # far beyond where e**x ends
        g, u = (v[:, :columns].astype(np.float64) for v in (gate, up))
        exact = g / (1 + np.exp(-g)) * u
        (panels,) = into_panels("gated", kind, (kind, "silu"), tokens, columns, 3, gate=gate, up=up, stride=gate.strides[0])
        if kind == "f32":
            got = box.panel_tokens(kind, panels, tokens, columns)[:, :columns]
            np.testing.assert_allclose(got, exact, rtol=1e-6, atol=1e-35)
        else:
            check_panels(kind, panels, tokens, columns, exact)


@pytest.mark.parametrize("name", BUILT_IN)
def test_embed_gives_the_rows_of_the_table(name):
    """Bit for bit what the format decodes to, and zero in the columns that only pad a block, whatever the padding decodes to."""
    rng = np.random.default_rng(3)
    form = get_format(name)
    for rows, columns in ((50, 40), (33, 96)):
        weights = (rng.standard_normal((rows, columns)) + 1).astype(np.float32)
        blocks = form.encode(weights, method="nearest")
        table, decoded = box.copied(form.tile(blocks)), form.decode(blocks, columns)
        for ids in ([rows - 1], [0, 15, 16, rows - 1, 0], list(rng.integers(0, rows, 13))):
            out = box.floats(len(ids) + 1, padded(columns))
            scratch = box.aligned(2048 * 3)
            box.run(
                "embed", (name,), 3, step=box.Step(len(ids), ids), table=table, columns=columns, out=out, out_stride=out.strides[0],
                scratch=scratch, scratch_worker=2048,
            )  # fmt: skip
            np.testing.assert_array_equal(out[:-1, :columns], decoded[ids])
            assert (out[:-1, columns:] == 0).all()
            assert np.isnan(out[-1]).all()


def test_gather():
    rng = np.random.default_rng(4)
    x = rows_of(rng.standard_normal((9, 40)))
    for rows in ([8], [0, 3, 8], [5, 5, 1, 0]):
        out = box.floats(len(rows) + 1, 64)
        box.run("gather", (), 2, step=box.Step(len(rows), rows), x=x, x_stride=x.strides[0], columns=40, out=out)
        np.testing.assert_array_equal(out[:-1, :40], x[rows, :40])
        assert np.isnan(out[-1]).all()


SIZES = [(24, 24, 24), (64, 64, 64), (64, 64, 32), (80, 80, 80), (40, 24, 0), (20, 64, 20)]


@pytest.mark.parametrize("cache_type", ["f16", "f32", "q8"])
@pytest.mark.parametrize(("key_size", "value_size", "rotated"), SIZES)
def test_rope_store(key_size, value_size, rotated, cache_type):
    """Pairs (i, i + rotated / 2) turned by the position's angle; keys and values where attention looks, nothing else written."""
    rng = np.random.default_rng(5)
    heads, kv_heads = 4, 2
    angles = np.arange(200)[:, None] * (10.0 ** -np.linspace(0, 3, rotated // 2))
    table = box.copied(np.concatenate([np.cos(angles), np.sin(angles)], -1).astype(np.float32))
    for sequences in ([(70, 1, [4, 1, 7], 0)], [(0, 40, [2, 0], 0), (63, 1, [5, 3], 0), (95, 3, [1, 6, 4, 7], 0)]):
        tokens = sum(s[1] for s in sequences)
        sizes = (heads * key_size, kv_heads * key_size, kv_heads * value_size)
        q, k, v = (box.copied(rng.standard_normal((tokens, size)).astype(np.float32)) for size in sizes)
        v[-1, :value_size] = 0  # one that is nothing
        step = box.Step(tokens, sequences=sequences)
        c, s = (f[step.positions][:, None] for f in (table[:, : rotated // 2].astype(float), table[:, rotated // 2 :].astype(float)))

        def turned(x, n, c=c, s=s, tokens=tokens):
            x = x.reshape(tokens, n, key_size).astype(float)
            a, b = x[..., : rotated // 2], x[..., rotated // 2 : rotated]
            return np.concatenate([a * c - b * s, b * c + a * s, x[..., rotated:]], -1)

        for workers in (1, 2):
            pages = box.Pages(8, kv_heads, key_size, value_size, cache_type)
            out, lone = box.floats(tokens, heads * key_size), box.floats(workers, heads * key_size)
            own = layout.rope_scratch(key_size)
            box.run(
                "rope_store", (key_size, value_size, rotated, cache_type), workers, step=step.address, q=q, k=k, v=v,
                q_stride=q.strides[0], k_stride=k.strides[0], v_stride=v.strides[0], heads=heads, kv_heads=kv_heads, table=table,
                cache=pages.memory, page_bytes=pages.page_bytes, out=out, lone=lone, lone_worker=lone.strides[0],
                scratch=box.aligned(own * workers), scratch_worker=own, scale=0.25,
            )  # fmt: skip
            for rows in lone if tokens == 1 else [out]:
                np.testing.assert_allclose(rows.reshape(tokens, heads, key_size), turned(q, heads) * 0.25, rtol=1e-5, atol=1e-6)
            numbers = [p for s in sequences for p in [s[2]] * s[1]]
            exact_k, exact_v = turned(k, kv_heads), v.reshape(tokens, kv_heads, value_size)
            for t in range(tokens):
                got_k, got_v = (x[-1] for x in pages.get(numbers[t], step.positions[t] + 1))
                if cache_type == "q8":
                    for got, exact in ((got_k, exact_k[t]), (got_v, exact_v[t])):
                        assert (np.abs(got - exact) <= np.abs(exact).max(-1, keepdims=True) * (0.5001 / 127)).all()
                    page, slot = numbers[t][step.positions[t] // layout.PAGE], step.positions[t] % layout.PAGE
                    for h in range(kv_heads):
                        codes, scale = box.rounded(exact_v[t, h])
                        np.testing.assert_array_equal(pages.values(page, h)[slot, :value_size], codes)
                        assert pages.value_scales(page, h)[slot] == scale
                else:
                    tolerance = {"f16": 1e-3, "f32": 1e-5}[cache_type]
                    np.testing.assert_allclose(got_k, exact_k[t], rtol=tolerance, atol=tolerance)
                    np.testing.assert_array_equal(got_v, exact_v[t].astype(pages.dtype))  # values are only rounded
            blank = box.Pages(8, kv_heads, key_size, value_size, cache_type)
            for t in range(tokens):
                page, slot = numbers[t][step.positions[t] // layout.PAGE], step.positions[t] % layout.PAGE
                for h in range(kv_heads):
                    for written, unwritten in zip(pages.slot(page, h, slot), blank.slot(page, h, slot), strict=True):
                        written[...] = unwritten
            np.testing.assert_array_equal(pages.memory, blank.memory, err_msg="something else was written")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [24, 64])
def test_what_is_not_finite_is_seen_in_a_cache_of_8_bits(bad, size):
    k, v = np.ones((2, 2 * size), np.float32), np.ones((2, 2 * size), np.float32)
    k[1, size + 3], v[0, size - 1] = bad, bad
    pages, own = box.Pages(1, 2, size, size, "q8"), layout.rope_scratch(size)
    table, q = box.copied(np.zeros((64, size), np.float32)), box.copied(np.ones((2, 2 * size), np.float32))
    step = box.Step(2, sequences=[(0, 2, [0], 0)])
    box.run(
        "rope_store", (size, size, 0, "q8"), 1, step=step.address, q=q, k=box.copied(k), v=box.copied(v), q_stride=q.strides[0],
        k_stride=q.strides[0], v_stride=q.strides[0], heads=2, kv_heads=2, table=table, cache=pages.memory, page_bytes=pages.page_bytes,
        out=box.floats(2, 2 * size), lone=0, lone_worker=0, scratch=box.aligned(own), scratch_worker=own, scale=1.0,
    )  # fmt: skip
    finite = [[np.isfinite(scales(0, h)[:2]).tolist() for h in range(2)] for scales in (pages.key_scales, pages.value_scales)]
    assert finite == [[[True, True], [True, False]], [[False, True], [True, True]]]
