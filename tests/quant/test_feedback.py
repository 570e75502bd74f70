"""Error feedback against a plain GPTQ and an exact loss, both in float64, and what must hold for any matrix whatever."""

import itertools
import os
import platform
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.quant import FormatError, get_format
from halfbyte.quant.block import Scales
from halfbyte.quant.cholesky import unit_factor
from halfbyte.quant.encoders import encode
from halfbyte.quant.feedback import choose_codes, prepare

FORMATS = ("q4_0", "q4_1", "nl4", "nl4_16", "mxfp4")
"""Even levels and tables; with a minimum; scales in f16, as codes of a row's number, and powers of two; 32 and 16 columns to a scale."""


def inputs(columns: int, tokens: int = 400, seed: int = 0) -> np.ndarray:
    """Second moments of inputs whose columns depend on each other and differ in size."""
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((columns, columns)) * rng.random(columns) ** 2 + np.eye(columns) * 0.3
    x = rng.standard_normal((tokens, columns)) @ mix
    return (x.T @ x / tokens).astype(np.float32)


def weights(rows: int, columns: int, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_t(4, (rows, columns)) * 0.05 * 10.0 ** rng.integers(-2, 3, (rows, 1))).astype(np.float32)


def damped(gram: np.ndarray, damping: float) -> np.ndarray:
    """float64"""
    return gram.astype(np.float64) + damping * np.eye(len(gram))


def row_losses(w: np.ndarray, decoded: np.ndarray, h: np.ndarray) -> np.ndarray:
    """float64[rows]: d H dᵀ."""
    rest = w.astype(np.float64) - decoded
    return ((rest @ h) * rest).sum(axis=1)


def expanded(block_format, scales: Scales) -> tuple[np.ndarray, np.ndarray]:
    """Scale and minimum of every column, float64."""
    scale = np.repeat(scales.scale.astype(np.float64), block_format.scale_columns, axis=1)
    if scales.minimum is None:
        return scale, np.zeros_like(scale)
    return scale, np.repeat(scales.minimum.astype(np.float64), block_format.scale_columns, axis=1)


def plain_gptq(block_format, w: np.ndarray, h: np.ndarray, scales: Scales) -> np.ndarray:
    """GPTQ as its paper has it, with the inverse of H: uint8[rows, columns] codes, scales as given, columns by falling diagonal."""
    order = np.argsort(h.diagonal(), kind="stable")[::-1]
    upper = np.linalg.cholesky(np.linalg.inv(h[np.ix_(order, order)])).T
    scale, minimum = expanded(block_format, scales)
    x, codes = w.astype(np.float64)[:, order], np.zeros(w.shape, np.uint8)
    for i, column in enumerate(order):
        y = (x[:, i] - minimum[:, column]) / scale[:, column]
        codes[:, column] = np.abs(y[:, None] - block_format.levels).argmin(axis=1)
        value = scale[:, column] * block_format.levels[codes[:, column]] + minimum[:, column]
        error = (x[:, i] - value) / upper[i, i]
        x[:, i + 1 :] -= error[:, None] * upper[i, i + 1 :]
    return codes


@pytest.mark.parametrize("name", FORMATS)
def test_feedback_is_gptq(name):
    """Codes of the two agree but where float32 rounds another way, after which a row may go on differently."""
    block_format, w, gram = get_format(name), weights(48, 96), inputs(96)
    hessian = prepare(gram, 0.01)
    h = damped(gram, hessian.damping)
    scales, _ = block_format.unpack(encode(block_format, w, "blocks", importance=hessian.importance, method="search").data)
    oracle = plain_gptq(block_format, w, h, scales)
    found = choose_codes(block_format, w, hessian, rounds=1, passes=0)
    search = row_losses(w, block_format.decode(block_format.pack(scales, block_format.nearest_codes(w, scales))), h)
    wanted = row_losses(w, block_format.decode(block_format.pack(scales, oracle)), h)
    gained = wanted < 0.999 * search
    assert gained.mean() > 0.8
    assert (block_format.levels[found.codes] == block_format.levels[oracle]).all(axis=1)[gained].mean() > 0.9
    np.testing.assert_array_equal(found.scales.scale, scales.scale)
    assert found.loss[1].sum() == pytest.approx(np.minimum(wanted, search).sum(), rel=0.01)


@pytest.mark.parametrize("name", FORMATS)
def test_each_step_gains(name):
    """Feedback halves the loss of search, descent never adds to that of feedback, rounds never to that of the first."""
    block_format, w, gram = get_format(name), weights(40, 128), inputs(128)
    hessian = prepare(gram, 0.01)
    losses = [choose_codes(block_format, w, hessian, rounds=r, passes=p).loss[1] for r, p in ((0, 0), (1, 0), (1, 1), (1, 2), (1, 6))]
    for before, after in itertools.pairwise(losses):
        assert (after <= before * (1 + 1e-4)).all()
    assert losses[1].sum() < 0.6 * losses[0].sum()
    assert losses[2].sum() < 0.97 * losses[1].sum()
    more = choose_codes(block_format, w, hessian, rounds=4, passes=2).loss[1]
    assert (more <= losses[3]).all()
    assert name == "mxfp4" or more.sum() < 0.995 * losses[3].sum()  # few scales are better twice as large


@pytest.mark.parametrize("name", FORMATS)
def test_losses_are_those_of_the_blocks(name):
    block_format, w, gram = get_format(name), weights(37, 96), inputs(96)
    for scale in (1.0, 1e-14, 1e20):
        hessian = prepare(gram * np.float32(scale))
        found = choose_codes(block_format, w, hessian)
        h = damped(gram, hessian.damping * hessian.unit / scale) * scale
        search = encode(block_format, w, "blocks", importance=hessian.importance, method="search").data
        blocks = block_format.pack(found.scales, found.codes)
        np.testing.assert_allclose(found.loss[0], row_losses(w, block_format.decode(search), h), rtol=1e-3)
        np.testing.assert_allclose(found.loss[1], row_losses(w, block_format.decode(blocks), h), rtol=1e-3)


def test_no_code_can_be_bettered_alone():
    """After enough passes every code is the best one while all others stay."""
    block_format, w, gram = get_format("nl4"), weights(20, 64), inputs(64)
    hessian = prepare(gram)
    found = choose_codes(block_format, w, hessian, rounds=1, passes=40)
    h = damped(gram, hessian.damping)
    rest = w - block_format.decode(block_format.pack(found.scales, found.codes)).astype(np.float64)
    slope, (scale, _) = rest @ h, expanded(block_format, found.scales)
    for step in (-1, 1):
        other = (found.codes.astype(int) + step).clip(0, len(block_format.levels) - 1)
        change = scale * (block_format.levels[other].astype(np.float64) - block_format.levels[found.codes])
        gain = 2 * change * slope - change**2 * h.diagonal()
        assert gain.max() < 1e-4 * found.loss[1].max()


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(FORMATS),
    st.integers(1, 70),
    st.integers(1, 100),
    st.integers(0, 2**32 - 1),
    st.sampled_from(("dense", "rank one", "dead columns", "one column", "few tokens", "diagonal")),
    st.sampled_from(("normal", "zero rows", "constant blocks", "outliers", "huge", "tiny", "subnormal", "one weight")),
)
def test_never_worse_than_search_whatever_comes(name, rows, columns, seed, gram_kind, weight_kind):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((200, columns)).astype(np.float32)
    if gram_kind == "rank one":
        x = x[:, :1] * rng.random(columns).astype(np.float32)
    elif gram_kind == "dead columns":
        x[:, rng.random(columns) < 0.5] = 0
    elif gram_kind == "one column":
        x[:, 1:] = 0
    elif gram_kind == "few tokens":
        x = x[: rng.integers(1, 5)]
    gram = x.T @ x
    if gram_kind == "diagonal":
        gram = np.diag(rng.random(columns) ** 8).astype(np.float32)
    w = rng.standard_normal((rows, columns)).astype(np.float32)
    if weight_kind == "zero rows":
        w[rng.random(rows) < 0.5] = 0
    elif weight_kind == "constant blocks":
        w[:, : columns // 2] = 0.3
    elif weight_kind == "outliers":
        w[rng.random(w.shape) < 0.02] *= 1e4
    elif weight_kind in ("huge", "tiny", "subnormal"):
        w *= np.float32({"huge": 5e37, "tiny": 1e-12, "subnormal": 1e-41}[weight_kind])
    elif weight_kind == "one weight":
        w[:] = 0
        w[0, columns // 2] = 1
    block_format, hessian = get_format(name), prepare(gram)
    if hessian is None:
        assert not gram.any()
        return
    found = choose_codes(block_format, w, hessian, rounds=2, passes=1)
    decoded = block_format.decode(block_format.pack(found.scales, found.codes))
    assert np.isfinite(decoded).all()
    assert np.isfinite(found.scales.scale).all() and (found.codes < len(block_format.levels)).all()
    search = encode(block_format, w, "blocks", importance=hessian.importance, method="search").data
    h = damped(gram / hessian.unit, hessian.damping)
    before, after = row_losses(w, block_format.decode(search, columns), h), row_losses(w, decoded[:, :columns], h)
    assert (after <= before * (1 + 1e-3) + 1e-6 * (w.astype(np.float64) ** 2 @ h.diagonal())).all()


@pytest.mark.parametrize("name", FORMATS)
def test_columns_never_active_are_rounded_and_padding_is_nothing(name):
    block_format, w, gram = get_format(name), weights(20, 71), inputs(71)
    gram[:, 5] = gram[5] = 0
    found = choose_codes(block_format, w, prepare(gram))
    decoded = block_format.decode(block_format.pack(found.scales, found.codes))
    scale, minimum = expanded(block_format, found.scales)
    values = scale[..., None] * block_format.levels + minimum[..., None]
    nearest = np.abs(values[:, 5] - w[:, 5, None]).min(axis=1)
    np.testing.assert_allclose(np.abs(decoded[:, 5] - w[:, 5]), nearest, rtol=1e-3, atol=1e-7)
    np.testing.assert_allclose(np.abs(decoded[:, 71:]), np.abs(values[:, 71:]).min(axis=-1), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("columns", [32, 64, 96, 352])
def test_the_factor_is_numpys_on_any_number_of_threads(columns):
    gram = inputs(columns, tokens=columns // 2)
    order = np.random.default_rng(2).permutation(columns)
    damping = 0.01 * gram.diagonal().mean()
    lower = np.linalg.cholesky(damped(gram, damping)[np.ix_(order, order)])
    found = np.tril(unit_factor(gram, damping, order, threads=1))
    np.testing.assert_allclose(found.diagonal(), lower.diagonal() ** 2, rtol=1e-3)
    np.fill_diagonal(again := found.copy(), 1)
    np.testing.assert_allclose(again, lower / lower.diagonal(), rtol=1e-3, atol=1e-4 * np.abs(lower / lower.diagonal()).max())
    for threads in (2, 5):
        np.testing.assert_array_equal(np.tril(unit_factor(gram, damping, order, threads)), found)


def test_a_hessian_that_cannot_be_factored_gets_more_damping():
    gram = np.eye(32, dtype=np.float32)
    gram[0, 1] = gram[1, 0] = 1.05  # no sum of squares: the least eigenvalue is -0.05
    assert prepare(gram, 0.01).damping == pytest.approx(0.1)
    gram[0, 1] = gram[1, 0] = 5
    assert prepare(gram) is None


def test_what_is_no_hessian_is_refused():
    for damping in (0.0, -0.1, np.nan, np.inf):
        with pytest.raises(FormatError, match="damping must be"):
            prepare(inputs(32), damping)
    unknown = inputs(300)
    unknown[200, 3] = unknown[3, 200] = np.nan
    for bad, words in (
        (unknown, "columns 0 to 127 are not all finite"),
        (np.zeros((3, 4), np.float32), "3, 4"),
        (np.zeros((3, 3), np.int32), "int32"),
        (np.diag([1.0, np.nan]), "column 1 is nan"),
        (np.diag([-1.0, 2]), "column 0 is -1"),
    ):
        with pytest.raises(FormatError, match=words):
            prepare(bad)
    with pytest.raises(FormatError, match="of 32 columns, the matrix has 64"):
        choose_codes(get_format("q4_0"), weights(16, 64), prepare(inputs(32)))
    assert prepare(np.zeros((8, 8), np.float32)) is None
    assert prepare(np.zeros((0, 0), np.float32)) is None


CHILD = """
import sys, zlib
sys.path.insert(0, sys.argv[1])
from test_feedback import *
hessian = prepare(inputs(96))
for name in ("q4_1", "nl4_16"):
    f = get_format(name)
    found = choose_codes(f, weights(70, 96), hessian)
    print(zlib.crc32(f.pack(found.scales, found.codes)))
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the test names an x86 processor")
def test_narrow_registers_give_the_same_blocks(tmp_path):
    """Tiles of 4 columns instead of 16, 256 bits: every sum has its order whatever the tile."""
    outputs = []
    for cpu in ("haswell", "x86-64-v3"), ("", ""):
        env = os.environ | {"NUMBA_CPU_NAME": cpu[0], "HALFBYTE_CACHE": str(tmp_path)}
        if not cpu[0]:
            env = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_CPU")}
        child = [sys.executable, "-c", CHILD, os.path.dirname(__file__)]
        run = subprocess.run(child, capture_output=True, text=True, env=env, timeout=120)
        assert run.returncode == 0, run.stderr
        outputs.append(run.stdout)
    assert outputs[0] == outputs[1]
