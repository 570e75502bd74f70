"""Every format by every method, over weights and inputs that break careless quantizers: what must hold whatever comes."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from halfbyte.quant import FormatError, get_format, methods
from halfbyte.quant.block import format_names
from halfbyte.quant.encoders import encode
from halfbyte.quant.feedback import choose_codes, prepare
from halfbyte.quant.methods import METHODS, Inputs, quantize

INTEGER = [name for name in format_names() if get_format(name).integers]
F16_RANGE = (1e-5, 6e4)
"""Magnitudes of weights whose scales f16 holds with all its digits, whatever the format."""
F16_STEP = 32 * 2.0**-25
"""What a weight can be off where they are smaller: half of f16's least step in the minimum, and in the scale times a code."""

BLOCKS = {
    "zero": lambda rng, shape: np.zeros(shape),
    "negative zero": lambda rng, shape: np.full(shape, -0.0),
    "constant": lambda rng, shape: np.full(shape, 0.3),
    "constant, negative": lambda rng, shape: np.full(shape, -7.0),
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "positive": lambda rng, shape: rng.random(shape) + 1,
    "sparse": lambda rng, shape: rng.standard_normal(shape) * (rng.random(shape) < 0.1),
    "one weight": lambda rng, shape: np.where(np.arange(shape[1]) == rng.integers(shape[1]), -2.5, 0.0),
    "outlier": lambda rng, shape: rng.standard_normal(shape) * np.where(np.arange(shape[1]) == rng.integers(shape[1]), 1e3, 1),
    "two values": lambda rng, shape: np.where(rng.random(shape) < 0.5, 1.0, -1.0),
    "at f16's end": lambda rng, shape: rng.uniform(-1, 1, shape) * 65504,
    "beyond f16": lambda rng, shape: rng.uniform(-1, 1, shape) * 1e9,
    "at float32's end": lambda rng, shape: rng.uniform(-1, 1, shape) * 3.4e38,
    "subnormal f16": lambda rng, shape: rng.standard_normal(shape) * 1e-7,
    "tiny": lambda rng, shape: rng.standard_normal(shape) * 1e-30,
    "subnormal": lambda rng, shape: rng.standard_normal(shape) * 1e-41,
    "smallest": lambda rng, shape: np.where(rng.random(shape) < 0.5, 1e-45, 0.0),
}
GRAMS = {
    "dense": lambda rng, n: _of(rng.standard_normal((200, n)) @ (np.eye(n) + rng.standard_normal((n, n)) / 4)),
    "few tokens": lambda rng, n: _of(rng.standard_normal((3, n))),
    "rank one": lambda rng, n: _of(rng.random((1, n)) + 0.5),
    "dead columns": lambda rng, n: _of(rng.standard_normal((50, n)) * (rng.random(n) < 0.5)),
    "one live column": lambda rng, n: _of(rng.standard_normal((50, n)) * (np.arange(n) == n // 2)),
    "equal columns": lambda rng, n: _of(np.repeat(rng.standard_normal((50, 1)), n, axis=1)),
    "columns of all sizes": lambda rng, n: _of(rng.standard_normal((50, n)) * 10.0 ** rng.integers(-9, 5, n)),
    "diagonal": lambda rng, n: np.diag(rng.random(n) ** 8 + 1e-9),
    "huge": lambda rng, n: _of(rng.standard_normal((50, n))) * 1e34,
    "tiny": lambda rng, n: _of(rng.standard_normal((50, n))) * 1e-34,
    "subnormal": lambda rng, n: _of(rng.standard_normal((50, n))) * 1e-44,
    "not quite positive": lambda rng, n: _rounded(rng, _of(rng.standard_normal((1, n)))),
    "zero": lambda rng, n: np.zeros((n, n)),
}


def _of(x: np.ndarray) -> np.ndarray:
    return x.T @ x


def _rounded(rng: np.random.Generator, gram: np.ndarray) -> np.ndarray:
    """With errors as of float32 sums, or of correlations in 16 bits: some eigenvalues fall below 0."""
    noise = rng.uniform(-1e-4, 1e-4, gram.shape) * np.sqrt(np.outer(gram.diagonal(), gram.diagonal()))
    return gram + np.triu(noise, 1) + np.triu(noise, 1).T


def made_of(kinds: list[str], rows: int, columns: int, seed: int) -> np.ndarray:
    """float32[rows, columns]: blocks of these kinds, one after another along the rows."""
    rng = np.random.default_rng(seed)
    parts = [np.broadcast_to(BLOCKS[kind](rng, (rows, 32)), (rows, 32)) for kind in kinds]
    return np.tile(np.concatenate(parts, axis=1), -(-columns // (32 * len(kinds))))[:, :columns].astype(np.float32)


def moments(kind: str, columns: int, seed: int) -> np.ndarray:
    return GRAMS[kind](np.random.default_rng(seed), columns).astype(np.float32)


def losses(w: np.ndarray, decoded: np.ndarray, h: np.ndarray) -> np.ndarray:
    """float64[rows]: d H dᵀ."""
    rest = w.astype(np.float64) - decoded
    return ((rest @ h) * rest).sum(axis=1)


shapes = {"rows": st.integers(1, 15), "columns": st.integers(1, 100), "seed": st.integers(0, 2**31)}
mixed = st.lists(st.sampled_from(list(BLOCKS)), min_size=1, max_size=3)


@pytest.mark.parametrize("name", INTEGER)
@settings(max_examples=25, deadline=None)
@given(kinds=mixed, gram=st.sampled_from(list(GRAMS)), **shapes)
@example(kinds=["at float32's end", "subnormal", "zero"], gram="dense", rows=2, columns=96, seed=1)
@example(kinds=["beyond f16", "normal"], gram="columns of all sizes", rows=2, columns=64, seed=2)
@example(kinds=["normal"], gram="not quite positive", rows=3, columns=71, seed=3)
@example(kinds=["normal"], gram="subnormal", rows=3, columns=33, seed=4)
def test_any_blocks_by_any_method(name, kinds, gram, rows, columns, seed):
    block_format, w = get_format(name), made_of(kinds, rows, columns, seed)
    given_gram = moments(gram, columns, seed)
    found = {}
    for method in METHODS:
        inputs = Inputs(gram=given_gram)
        result = quantize(block_format, w, "blocks", inputs=inputs, method=method, threads=1)
        decoded = block_format.decode(result.data, columns)
        assert np.isfinite(decoded).all()
        assert np.isfinite((result.errors.nmse, result.errors.cosine, result.errors.max_error)).all() or np.abs(w).max() < 1e-30
        assert (decoded[~w.any(axis=1)] == 0).all()  # there is a zero everywhere once the scale is one
        assert (np.abs(decoded).max(axis=1) <= 3.0 * np.abs(w).max(axis=1).astype(np.float64) + 1e-6).all() or method == "feedback"
        found[method] = decoded
    if gram == "zero":
        assert result.method == "search" and result.losses is None
        np.testing.assert_array_equal(found["feedback"], found["search"])
        return
    hessian = inputs.hessian
    if hessian is None:  # all sums are below what float32 has
        assert given_gram.max() < 1e-40
        return
    assert result.method == "feedback" and np.isfinite(result.losses).all() and (result.losses >= 0).all()
    assert (result.losses[1] <= result.losses[0]).all()
    h = given_gram.astype(np.float64) / hessian.unit + hessian.damping * np.eye(columns)
    start = block_format.decode(encode(block_format, w, "blocks", importance=hessian.importance, method="search").data, columns)
    before, after, energy = losses(w, start, h), losses(w, found["feedback"], h), losses(w, 0 * w, np.diag(h.diagonal()))
    assert (after <= before * (1 + 1e-3) + 1e-6 * energy).all()


@pytest.mark.parametrize("name", INTEGER)
@settings(max_examples=15, deadline=None)
@given(kind=st.sampled_from(list(BLOCKS)), **shapes)
def test_errors_of_alike_blocks_are_bounded(name, kind, rows, columns, seed):
    """A row loses less than a fifth of its energy, whatever its weights, if f16 has the scales; if not, no more than it has."""
    block_format, w = get_format(name), made_of([kind], rows, columns, seed)
    peak, energy = np.abs(w).max(), (w.astype(np.float64) ** 2).sum(axis=1)
    for method in METHODS[:2]:
        decoded = block_format.decode(quantize(block_format, w, "blocks", method=method, threads=1).data, columns)
        lost = ((w.astype(np.float64) - decoded) ** 2).sum(axis=1)
        assert (lost <= energy * 1.001 + columns * F16_STEP**2).all()
        if F16_RANGE[0] < peak < F16_RANGE[1]:
            assert (lost <= 0.2 * energy).all()


@pytest.mark.parametrize("name", INTEGER)
def test_zeros_between_other_weights(name):
    """A block of zeros is zeros, also in formats without a level 0: its scale is. Single zeros are the level nearest to 0."""
    block_format, w = get_format(name), made_of(["normal", "zero", "sparse"], 15, 96, 5)
    levels = block_format.levels
    for method in METHODS[:2]:
        decoded = block_format.decode(quantize(block_format, w, "blocks", method=method, threads=1).data)
        assert not decoded[:, 32:64].any()
        zeros, largest = decoded[:, 64:][w[:, 64:] == 0], np.abs(decoded[:, 64:]).max()
        if 0 in levels and levels[0] < 0:
            assert not zeros.any()
        else:
            step = 1 / 113 if levels[0] < 0 else 1 / levels[-1]
            assert np.abs(zeros).max() <= 1.001 * step * largest


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "nl4", "nl4_16"])
@pytest.mark.parametrize("gram", ["dead columns", "rank one", "huge", "not quite positive"])
def test_the_same_bytes_on_any_number_of_threads(name, gram, monkeypatch):
    """Rows of all kinds, in runs of 64 and a rest that is no multiple of 16; columns that are none of 32."""
    monkeypatch.setattr(methods, "RUN_WEIGHTS", 64 * 70)
    w = np.concatenate([made_of([kind, "normal"], 9, 70, seed) for seed, kind in enumerate(BLOCKS)])
    inputs = Inputs(gram=moments(gram, 70, 1))
    for order in ("tiles", "blocks"):
        alone = quantize(get_format(name), w, order, inputs=inputs, threads=1)
        for threads in (2, 3):
            again = quantize(get_format(name), w, order, inputs=inputs, threads=threads)
            np.testing.assert_array_equal(again.data, alone.data)
            np.testing.assert_array_equal(again.losses, alone.losses)
            assert again.errors == alone.errors
    few = quantize(get_format(name), w[64:79], "blocks", inputs=inputs)  # no kernel encodes so few rows
    np.testing.assert_array_equal(few.data, alone.data[64:79])


@pytest.mark.parametrize("name", INTEGER)
def test_compiled_search_is_the_reference_on_all_kinds(name):
    block_format = get_format(name)
    w = np.concatenate([made_of([kind, "normal"], 3, 96, seed) for seed, kind in enumerate(BLOCKS)])
    importance = np.random.default_rng(3).random(96).astype(np.float32)
    importance[:40] = 0
    for weigh in (importance, importance * np.float32(1e-30), np.zeros(96, np.float32)):
        data = encode(block_format, w, importance=weigh, method="search", threads=2).data
        np.testing.assert_array_equal(data, block_format.tile(block_format.encode(w, weigh, "search")))


@pytest.mark.parametrize("name", INTEGER)
def test_importance_with_zeros(name):
    """Columns that do not matter may become anything finite; those that do are better off, also where a whole block matters nothing."""
    block_format, w = get_format(name), made_of(["normal", "positive", "normal"], 15, 96, 8)
    diagonal = np.where(np.arange(96) % 7 == 0, 1.0, 0.0)
    diagonal[64:] = 0
    found = quantize(block_format, w, "blocks", inputs=Inputs(diagonal=diagonal), threads=1)
    even = quantize(block_format, w, "blocks", threads=1)
    decoded, other = block_format.decode(found.data), block_format.decode(even.data)
    assert found.method == "search" and np.isfinite(decoded).all()
    share = 0.99 if name == "mxfp4" else 0.9  # of scales that are powers of two there are few to choose from
    assert losses(w, decoded, np.diag(diagonal)).sum() < share * losses(w, other, np.diag(diagonal)).sum()


@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from([k for k in GRAMS if k != "zero"]), columns=st.integers(1, 200), seed=st.integers(0, 2**31))
def test_any_moments_give_a_factor_or_nothing(kind, columns, seed):
    gram = moments(kind, columns, seed)
    one, other = prepare(gram, threads=1), prepare(gram, threads=3)
    if one is None:
        assert other is None and gram.max() < 1e-40
        return
    n = one.matrix.shape[0]
    lower = np.tril_indices(n)
    np.testing.assert_array_equal(one.factor[lower], other.factor[lower])
    assert np.isfinite(one.factor[lower]).all() and (one.dampings[:columns] > 0).all() and not one.dampings[columns:].any()
    assert sorted(one.order) == list(range(n)) and (one.importance > 0).all()
    unit, pivots = np.tril(one.factor, -1).astype(np.float64) + np.eye(n), one.factor.diagonal().astype(np.float64)
    assert (pivots[one.order < columns] > 0).all() and not pivots[one.order >= columns].any()
    again = (unit * pivots) @ unit.T
    wanted = np.pad(gram.astype(np.float64) / one.unit + one.damping * np.eye(columns), (0, n - columns))[np.ix_(one.order, one.order)]
    assert np.abs(again - wanted).max() <= 1e-5 * wanted.max()


def test_moments_that_are_not_finite_are_refused():
    w = made_of(["normal"], 4, 64, 0)
    for place in ((3, 3), (5, 60)):
        for value in (np.nan, np.inf):
            gram = moments("dense", 64, 0)
            gram[place] = gram[place[::-1]] = value
            with pytest.raises(FormatError, match="second moment"):
                quantize(get_format("nl4"), w, inputs=Inputs(gram=gram))
    for value in (np.nan, np.inf, -1.0):
        diagonal = np.ones(64)
        diagonal[9] = value
        with pytest.raises(FormatError, match="second moment of column 9"):
            quantize(get_format("nl4"), w, inputs=Inputs(diagonal=diagonal))
        with pytest.raises(FormatError, match="second moment of column 9"):
            quantize(get_format("nl4"), w, inputs=Inputs(gram=np.diag(diagonal)), method="search")


def test_damping_of_any_size():
    w, gram = made_of(["normal"], 8, 64, 0), moments("rank one", 64, 0)
    for damping in (1e-30, 1e-6, 1.0, 50.0):
        found = quantize(get_format("nl4"), w, "blocks", inputs=Inputs(gram=gram, damping=damping))
        assert found.method == "feedback" and (found.losses[1] <= found.losses[0]).all()
    for damping in (0.0, -1.0, np.nan):
        with pytest.raises(FormatError, match="damping must be"):
            quantize(get_format("nl4"), w, inputs=Inputs(gram=gram, damping=damping))


def test_effort_of_nothing_is_search():
    block_format, w, hessian = get_format("nl5"), made_of(["normal", "sparse"], 15, 64, 0), prepare(moments("dense", 64, 0))
    found = choose_codes(block_format, w, hessian, rounds=0)
    np.testing.assert_array_equal(found.loss[0], found.loss[1])
    blocks = block_format.pack(found.scales, found.codes)
    search = encode(block_format, w, "blocks", importance=hessian.importance, method="search").data
    h = moments("dense", 64, 0) + hessian.damping * np.eye(64)
    np.testing.assert_allclose(losses(w, block_format.decode(blocks), h), losses(w, block_format.decode(search), h), rtol=1e-4)
