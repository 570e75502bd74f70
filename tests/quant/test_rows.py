"""Formats whose scales are small integers times a number per row: any magnitude, any block, and scales that are chosen well."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from halfbyte.quant import get_format
from halfbyte.quant.block import BUILT_IN

NAMES = [name for name in BUILT_IN if get_format(name).header_bytes]
METHODS = ("nearest", "search")

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
rows = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.integers(1, 70)),
    elements=st.one_of(finite, st.floats(-2, 2, width=32), st.sampled_from([0.0, 1.0, -1.0, 1e-45, 3.4e38])),
)


def gaussian(n: int, columns: int, seed: int = 1) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((n, columns)) * 0.05).astype(np.float32)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(w=rows)
def test_any_weights_stay_finite_and_near(name, method, w):
    form = get_format(name)
    scales = form.choose(w, method=method)
    number, codes = scales.stored
    most = form.scales.largest(form.grid)
    assert (number.view(np.uint32) & 0xFFFF == 0).all() and (number <= most).all() and (number >= 0).all(), "a bf16"
    assert np.abs(codes.astype(int)).max(initial=0) <= form.scales.top
    decoded = form.decode(form.encode(w, method=method))
    assert np.isfinite(decoded).all()
    most = np.abs(w).max(axis=1, keepdims=True).astype(np.float64)
    error = np.abs(decoded[:, : w.shape[1]] - w.astype(np.float64))
    bound = 0.2 if method == "nearest" else 0.6  # a search gives large weights up where that serves the rest
    assert (error <= bound * most + 2.0**-110).all()
    assert (decoded[(w == 0).all(axis=1)] == 0).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("power", [-90, -30, 20, 90])
def test_magnitude_does_not_matter(name, method, power):
    """A number per row has the range of float32: rows of any size lose the same share."""
    form, w = get_format(name), gaussian(20, 96)
    factor = np.float32(2.0**power)
    np.testing.assert_array_equal(
        form.decode(form.encode(w * factor, method=method)), form.decode(form.encode(w, method=method)) * factor
    )


@pytest.mark.parametrize(("name", "gain"), [("q6_r", 0.89), ("q5_r", 0.91), ("nl5", 0.88), ("nl4_16", 0.85), ("nl4", 0.88)])
def test_search_gains_on_gaussian_weights(name, gain):
    form, w = get_format(name), gaussian(200, 576)
    nearest, search = (((form.decode(form.encode(w, method=method)) - w) ** 2).sum() for method in METHODS)
    assert search < gain * nearest


@pytest.mark.parametrize(("name", "like", "more"), [("q6_r", "q6_0", 1.05), ("q5_r", "q5_0", 1.02), ("nl4", "iq4_nl", 1.01)])
def test_small_scales_lose_little(name, like, more):
    """Against the same grid with f16 scales, which take a quarter of a bit more."""
    w = gaussian(200, 576) * np.exp(np.random.default_rng(2).normal(0, 0.5, (200, 18)).repeat(32, axis=1)).astype(np.float32)
    row, each = (((get_format(n).decode(get_format(n).encode(w, method="search")) - w) ** 2).sum() for n in (name, like))
    assert row < more * each


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_rows_do_not_influence_each_other(name, method):
    form, w = get_format(name), gaussian(30, 70)
    w[7] *= np.float32(1e30)
    w[8] = 0
    together = form.encode(w, method=method)
    for i in (0, 8, 29):
        np.testing.assert_array_equal(form.encode(w[i : i + 1], method=method)[0], together[i])


@pytest.mark.parametrize("name", NAMES)
def test_importance_moves_the_error_to_columns_that_do_not_matter(name):
    form, w = get_format(name), gaussian(200, 96)
    importance = np.where(np.arange(96) % 32 < 8, 100, 1).astype(np.float32)
    even, weighed = ((form.decode(form.encode(w, i, "search")) - w) ** 2 for i in (None, importance))
    assert weighed[:, importance > 1].mean() < 0.9 * even[:, importance > 1].mean()


def test_blocks_of_small_weights_beside_a_large_one():
    """A block whose scale would be less than the least code still gets one, unless it is next to nothing."""
    form = get_format("nl4")
    w = gaussian(1, 96) * np.float32(1)
    w[0, :32] *= np.float32(1e-2)
    w[0, 32:64] *= np.float32(1e-6)
    for method in METHODS:
        scales = form.choose(w, method=method)
        assert 1 <= abs(int(scales.stored[1][0, 0])) <= 3 and scales.stored[1][0, 1] == 0
        decoded = form.decode(form.encode(w, method=method))
        assert ((decoded[:, :32] - w[:, :32]) ** 2).sum() < 0.05 * (w[:, :32] ** 2).sum()
