"""Scales and codes chosen apart: what methods of error feedback build on. Every registered format of integers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.quant import FormatError, format_names, get_format

INTEGER = [name for name in format_names() if get_format(name).integers]


def weights(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    w = (rng.standard_normal((rows, columns)) * 10.0 ** rng.integers(-3, 2, (rows, 1))).astype(np.float32)
    w[0, :40] = 0
    return w


def weigh(form, scales, codes):
    """levels[codes] * scale (+ minimum), as the contract says it."""
    values = form.levels[codes] * np.repeat(scales.scale, form.scale_columns, axis=1)
    return values if scales.minimum is None else values + np.repeat(scales.minimum, form.scale_columns, axis=1)


@pytest.mark.parametrize("name", INTEGER)
@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 20), columns=st.integers(1, 100), seed=st.integers(0, 1000), method=st.sampled_from(["nearest", "search"]))
def test_any_codes_decode_to_level_times_scale(name, rows, columns, seed, method):
    form, rng = get_format(name), np.random.default_rng(seed)
    scales = form.choose(weights(rows, columns, seed), rng.random(columns).astype(np.float32), method)
    padded = -(-columns // form.block_columns) * form.block_columns
    assert scales.scale.shape == (rows, padded // form.scale_columns) and scales.scale.dtype == np.float32
    codes = rng.integers(0, len(form.levels), (rows, padded)).astype(np.uint8)
    blocks = form.pack(scales, codes)
    assert blocks.shape == form.blocks_shape(rows, columns)
    np.testing.assert_array_equal(form.codes(blocks), codes)
    np.testing.assert_array_equal(form.decode(blocks), weigh(form, scales, codes))
    again, _ = form.unpack(blocks)
    np.testing.assert_array_equal(again.scale, scales.scale)
    np.testing.assert_array_equal(form.pack(again[: rows - 1], codes[: rows - 1]), blocks[: rows - 1])


@pytest.mark.parametrize("method", ["nearest", "search"])
@pytest.mark.parametrize("name", INTEGER)
def test_nearest_codes_are_as_good_as_those_of_encode(name, method):
    form, w = get_format(name), weights(40, 70)
    scales = form.choose(w, method=method)
    codes = form.nearest_codes(w, scales)
    error = np.abs(weigh(form, scales, codes)[:, :70] - w)
    blocks = form.encode(w, method=method)
    encoded = np.abs(form.decode(blocks, 70) - w)
    assert (error <= encoded * (1 + 1e-5) + 1e-9).all(), "no code comes nearer"
    np.testing.assert_array_equal(weigh(form, *form.unpack(blocks)), form.decode(blocks))
    np.testing.assert_array_equal(form.unpack(blocks)[0].scale, scales.scale)
    assert (weigh(form, scales, codes)[0, :32] == 0).all()


@pytest.mark.parametrize("name", INTEGER)
def test_levels_ascend_and_zero_scales_give_the_level_next_to_zero(name):
    form = get_format(name)
    assert form.levels.dtype == np.float32 and (np.diff(form.levels) >= 0).all()
    assert (form.levels[:-1][np.diff(form.levels) == 0] == ([0] if name == "mxfp4" else [])).all(), "the negative zero"
    zero = np.zeros((3, 64), np.float32)
    scales = form.choose(zero)
    codes = form.nearest_codes(zero, scales)
    assert np.abs(form.levels[codes]).max() == np.abs(form.levels).min()
    assert (form.decode(form.pack(scales, codes)) == 0).all()
    assert (codes == codes[0, 0]).all() and codes[0, 0] == np.flatnonzero(np.abs(form.levels) == np.abs(form.levels).min())[-1]


@pytest.mark.parametrize("name", INTEGER)
def test_codes_that_do_not_suit_are_refused(name):
    form = get_format(name)
    scales = form.choose(weights(4, 64))
    for codes in (np.zeros((4, 63), np.uint8), np.zeros((4, 64), np.int32)):
        with pytest.raises(FormatError, match=name):
            form.pack(scales, codes)
    if len(form.levels) < 256:
        with pytest.raises(FormatError, match=f"no code {len(form.levels)}"):
            form.pack(scales, np.full((4, 64), len(form.levels), np.uint8))


def test_formats_without_codes_say_so():
    with pytest.raises(FormatError, match="f16"):
        get_format("f16").choose(weights(2, 64))
