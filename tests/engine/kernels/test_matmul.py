"""The matrix kernel of every block format against NumPy, and its promise that a token's result does not depend on its neighbours."""


import numpy as np
import pytest

from halfbyte.quant.block import BUILT_IN, Scales, get_format
from support import kernelbox as box

CASES = [(name, kind) for name in BUILT_IN for kind in ("int8", "f32") if kind == "f32" or get_format(name).integers]
SHAPES = [(1, 1), (40, 100), (16, 32), (33, 64), (65, 7), (96, 72)]


def multiply(name, kind, tiles, rows, columns, panels, tokens, workers=1, bias=None, residual=None):
    """float32[tokens, rows]. Rows of the output that are not asked for must stay as they are."""
    padded = -(-rows // 16) * 16
    out = box.floats(-(-tokens // 6) * 6 + 1, padded + 16)
    if residual is not None:
        out[:tokens, :rows] = residual
    box.run(
        "matmul", (name, kind), workers, step=box.Step(tokens), weights=tiles, columns=columns, rows=rows, x=panels, x_worker=0,
        out=out, out_stride=out.strides[0], bias=0 if bias is None else bias, add=int(residual is not None),
    )  # fmt: skip
    assert np.isnan(out[:, padded:]).all() and np.isnan(out[-1]).all(), "written outside of its rows"
    return out[:tokens, :rows].copy()


def matrix(name, rows, columns, rng, scale=1.0):
    form = get_format(name)
    blocks = form.encode((rng.standard_normal((rows, columns)) * scale).astype(np.float32), method="nearest")
    return box.copied(form.tile(blocks)), form.decode(blocks, columns)


def expected(kind, weights, x):
    if kind == "int8":
        codes, scales = box.quantized(x)
        x = (codes * scales[..., None].astype(np.float64)).reshape(len(x), -1)[:, : x.shape[1]]
    return x.astype(np.float64) @ weights.T.astype(np.float64)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_against_numpy(name, kind):
    rng = np.random.default_rng(1)
    for rows, columns in SHAPES:
        tiles, weights = matrix(name, rows, columns, rng)
        bias = box.floats(1, -(-rows // 16) * 16, 0.0)
        bias[0, :rows] = rng.standard_normal(rows)
        for tokens in (*range(1, 15), 18, 19, 20):
            x = rng.standard_normal((tokens, columns)).astype(np.float32)
            residual = rng.standard_normal((tokens, rows)).astype(np.float32)
            reference = expected(kind, weights, x)
            size = np.abs(x).astype(np.float64) @ np.abs(weights).T.astype(np.float64) + 1
            panels = box.make_panels(kind, x)
            plain = multiply(name, kind, tiles, rows, columns, panels, tokens)
            assert (np.abs(plain - reference) < 1e-6 * size).all(), (rows, columns, tokens)
            both = multiply(name, kind, tiles, rows, columns, panels, tokens, 2, bias, residual)
            assert (np.abs(both - reference - bias[0, :rows] - residual) < 2e-6 * size).all(), (rows, columns, tokens)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_token_does_not_see_its_neighbours(name, kind):
    """Alone, in a batch, at any place of a panel, with any number of workers: the same bits."""
    rng = np.random.default_rng(2)
    rows, columns = 112, 100
    tiles, _ = matrix(name, rows, columns, rng)
    x = (rng.standard_normal((23, columns)) * np.exp(rng.uniform(-8, 8, (23, 1)))).astype(np.float32)
    alone = np.concatenate([multiply(name, kind, tiles, rows, columns, box.make_panels(kind, x[t : t + 1]), 1) for t in range(23)])
    for first, last in ((0, 23), (1, 3), (2, 6), (3, 8), (5, 12), (9, 22)):
        for workers in (1, 2, 3, 5):
            got = multiply(name, kind, tiles, rows, columns, box.make_panels(kind, x[first:last]), last - first, workers)
            np.testing.assert_array_equal(got, alone[first:last])


@pytest.mark.parametrize("name", [n for n in BUILT_IN if get_format(n).integers])
def test_integers_are_exact(name):
    """With scales of 1 the sums are whole numbers below 2**24, which float32 holds exactly; extremes of codes included."""
    rng = np.random.default_rng(3)
    form = get_format(name)
    rows, columns, tokens = 48, 96, 7
    if form.header_bytes:
        scales = rng.integers(-2, 3, (rows, columns // form.scale_columns))
        codes = rng.integers(0, len(form.levels), (rows, columns)).astype(np.uint8)
        random = form.pack(Scales(scales, None, (np.ones(rows, np.float32), scales.astype(np.int8))), codes)
        random[:3, 2:].reshape(3, columns // 32, -1)[..., 32 // form.scale_columns :] = [[[0x00]], [[0xFF]], [[0x80]]]
    else:
        random = rng.integers(0, 256, (rows, columns // 32, form.block_bytes), np.uint8)
        size = form.scales.block_bytes
        random[:3, ..., size:] = [[[0x00]], [[0xFF]], [[0x80]]]
        ones = np.array([1, -3][: form.scales.numbers], np.float16).view(np.uint8)
        random[..., :size] = 128 if size == 1 else ones
    weights = form.decode(random)
    assert (weights == np.rint(weights)).all()
    codes = rng.integers(-127, 128, (tokens, columns // 32, 32)).astype(np.int8)
    codes[0], codes[1] = 127, -127
    x = box.make_panels("int8", codes=codes, scales=np.ones((tokens, columns // 32), np.float32))
    got = multiply(name, "int8", box.copied(form.tile(random)), rows, columns, x, tokens)
    np.testing.assert_array_equal(got, codes.reshape(tokens, -1).astype(np.int64) @ weights.T.astype(np.int64))


@pytest.mark.parametrize("kind", ["int8", "f32"])
def test_a_lone_token_has_a_panel_per_worker(kind):
    rng = np.random.default_rng(4)
    tiles, weights = matrix("q8_0", 64, 64, rng)
    xs = [rng.standard_normal((1, 64)).astype(np.float32) for _ in range(2)]
    panels = [box.make_panels(kind, x) for x in xs]
    both = box.copied(np.concatenate([p[: p.size // 64 * 64 + 64] if p.size % 64 == 0 else np.pad(p, (0, -p.size % 64)) for p in panels]))
    out = box.floats(6, 64)
    box.run(
        "matmul", ("q8_0", kind), 2, step=box.Step(1), weights=tiles, columns=64, rows=64, x=both, x_worker=both.size // 2,
        out=out, out_stride=256, bias=0, add=0,
    )  # fmt: skip
    np.testing.assert_allclose(out[0, :32], expected(kind, weights, xs[0])[0, :32], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out[0, 32:], expected(kind, weights, xs[1])[0, 32:], rtol=1e-5, atol=1e-5)
    assert np.isnan(out[1:]).all()
