"""Every registered format through the same round trips; GGUF's types bit for bit against the gguf package."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf import quants as ggml
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.quant import FormatError, NonFiniteError, format_names, get_format
from halfbyte.quant.block import BUILT_IN

FORMATS = format_names()
INTEGER = [name for name in FORMATS if get_format(name).integers]
GGUF = [name for name in BUILT_IN if get_format(name).gguf_type]
ROW_SCALED = [name for name in BUILT_IN if get_format(name).header_bytes]
TABLES = ("iq4_nl", "nl4", "nl4_16")  # without a level 0
METHODS = ("nearest", "search")


def weights(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Gaussian rows of many magnitudes."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, columns)) * 10.0 ** rng.integers(-1, 2, (rows, 1))).astype(np.float32)


def awkward() -> np.ndarray:
    """Blocks that break careless encoders, one per row of 64 columns."""
    w = weights(12, 64, seed=3) * 0 + np.float32(0)
    w[1] = 0.3  # constant
    w[2] = np.linspace(-1, 1, 64)
    w[2, 5] = 1000  # an outlier a thousand times the rest
    w[3] = np.linspace(-1, 1, 64) * 1e-7  # scale is subnormal in f16
    w[4] = np.linspace(-1, 1, 64) * 1e-40  # subnormal in float32
    w[5] = np.linspace(-1, 1, 64) * 1e6  # scale overflows f16 for some formats
    w[6] = np.linspace(-1, 1, 64) * 3e38  # max - min overflows float32
    w[7, 10] = -2.5  # one weight alone
    w[8] = 7e4
    w[9] = 1e-45  # the smallest number
    w[10, ::2] = -1.0
    w[11] = -np.linspace(1, 2, 64)
    return w


@pytest.mark.parametrize("name", [name for name in GGUF if name != "iq4_nl"])  # which the package reads but does not write
def test_nearest_equals_gguf_bit_for_bit(name):
    block_format, kind = get_format(name), GGMLQuantizationType[get_format(name).gguf_type]
    w = weights(53, 160)
    w[3, :32], w[4, 32:64], w[5] = 0, 0.7, w[5] * 1e-9
    blocks = block_format.encode(w, method="nearest")
    reference = np.ascontiguousarray(ggml.quantize(w, kind)).view(np.uint8)
    np.testing.assert_array_equal(blocks.reshape(53, -1), reference.reshape(53, -1))
    decoded = ggml.dequantize(reference.view({"f32": np.float32, "f16": np.float16}.get(name, np.uint8)), kind)
    np.testing.assert_array_equal(block_format.decode(blocks).view(np.uint32), decoded.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("name", [n for n in GGUF if get_format(n).integers])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_bytes_decode_as_gguf_decodes_them(name, data):
    block_format = get_format(name)
    raw = np.frombuffer(data.draw(st.binary(min_size=block_format.block_bytes, max_size=block_format.block_bytes)), np.uint8)
    with np.errstate(all="ignore"):  # the scale may be NaN or infinite
        expected = ggml.dequantize(raw.reshape(1, -1), GGMLQuantizationType[block_format.gguf_type])
    np.testing.assert_array_equal(block_format.decode(raw.reshape(1, 1, -1)), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_sizes_are_what_the_format_says(name):
    block_format = get_format(name)
    blocks = block_format.encode(weights(5, 2 * block_format.block_columns))
    assert blocks.shape == block_format.blocks_shape(5, 2 * block_format.block_columns)
    if not block_format.header_bytes:
        assert blocks.shape == (5, 2, block_format.block_bytes)
        assert block_format.tile_bytes == 16 * block_format.block_bytes
    tiles = block_format.tile(blocks)
    assert tiles.shape == (block_format.tiles_nbytes(5, 2 * block_format.block_columns),)
    assert tiles.size == 16 * (block_format.header_bytes + 2 * block_format.tile_bytes // 16)
    assert block_format.bits_per_weight() == 8 * block_format.tile_bytes / (16 * block_format.block_columns)


BITS = {"f32": 32, "f16": 16, "bf16": 16, "q8_0": 8.5, "q6_0": 6.5, "q5_1": 6, "q5_0": 5.5, "q4_1": 5, "q4_0": 4.5}
BITS |= {"q6_r": 6.25, "q5_r": 5.25, "nl5": 5.25, "iq4_nl": 4.5, "nl4_16": 4.375, "mxfp4": 4.25, "nl4": 4.25}


@pytest.mark.parametrize("name", BUILT_IN)
def test_bits_per_weight(name):
    assert get_format(name).bits_per_weight() == BITS[name]
    columns = 70  # three blocks, 96 columns
    assert get_format(name).bits_per_weight(columns) == pytest.approx((BITS[name] * 96 + 8 * get_format(name).header_bytes) / 70)
    assert get_format(name).header_bytes == (2 if name in ROW_SCALED else 0)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 50), columns=st.integers(1, 100), seed=st.integers(0, 1000))
def test_tiles_hold_the_same_bits(name, rows, columns, seed):
    block_format = get_format(name)
    padded = np.random.default_rng(seed).integers(0, 256, block_format.tiles_nbytes(-(-rows // 16) * 16, columns), dtype=np.uint8)
    blocks = block_format.untile(padded, -(-rows // 16) * 16, columns)
    np.testing.assert_array_equal(block_format.tile(blocks), padded)
    blocks = blocks[:rows]
    tiles = block_format.tile(blocks)
    assert tiles.dtype == np.uint8 and tiles.shape == (block_format.tiles_nbytes(rows, columns),)
    np.testing.assert_array_equal(block_format.untile(tiles, rows, columns), blocks)
    padded = np.concatenate([blocks, np.zeros((-rows % 16, *blocks.shape[1:]), np.uint8)])
    np.testing.assert_array_equal(block_format.tile(padded), tiles)  # missing rows are zero blocks


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 20), columns=st.integers(1, 100), seed=st.integers(0, 1000))
def test_padding_is_zero_and_does_not_change_the_rest(name, method, rows, columns, seed):
    block_format, w = get_format(name), weights(rows, columns, seed)
    blocks = block_format.encode(w, method=method)
    width = -(-columns // block_format.block_columns) * block_format.block_columns
    padded = np.pad(w, ((0, 0), (0, width - columns)))
    np.testing.assert_array_equal(blocks, block_format.encode(padded, method=method))
    whole = block_format.decode(blocks)
    np.testing.assert_array_equal(block_format.decode(blocks, columns), whole[:, :columns])
    np.testing.assert_allclose(whole[:, columns:], 0, atol=np.abs(w).max() * ERROR.get(name, 0.1))


LEVELS = {"q8_0": 254, "q6_0": 32, "q5_1": 31, "q5_0": 16, "q4_1": 15, "q4_0": 8, "iq4_nl": 127 / 14, "q6_r": 28, "q5_r": 15}
LEVELS |= {"nl5": 14, "nl4": 8, "nl4_16": 4, "mxfp4": 4}  # few scales for blocks of small weights; one in each octave
ERROR = {"f32": 0, "f16": 2**-11, "bf16": 2**-8} | {name: 1 / levels + 2**-11 for name, levels in LEVELS.items()}
"""Largest error of one weight / largest weight of its block: half a level, a whole one at the short end of a symmetric grid, and
the rounding of the scale to f16.
"""


@pytest.mark.parametrize("name", BUILT_IN)
def test_error_is_bounded_by_the_levels(name):
    block_format, w = get_format(name), weights(64, 96)
    w /= np.abs(w).max(axis=1, keepdims=True)  # rows whose blocks are alike
    error = np.abs(block_format.decode(block_format.encode(w, method="nearest")) - w).reshape(64, 3, 32).max(axis=2)
    largest = np.abs(w).reshape(64, 3, 32).max(axis=2)
    assert (error <= ERROR[name] * largest * 1.001 + 2**-25).all()
    if name.startswith(("f16", "bf16")):
        assert (np.abs(block_format.decode(block_format.encode(w)) - w) <= ERROR[name] * np.abs(w) + 2**-25).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FORMATS)
def test_awkward_blocks_stay_finite(name, method):
    block_format, w = get_format(name), awkward()
    decoded = block_format.decode(block_format.encode(w, method=method))
    assert np.isfinite(decoded).all()
    assert (decoded[0] == 0).all()
    coarse = 0.25 if name == "mxfp4" else 0  # scales are powers of two, so the largest weight is on no level
    np.testing.assert_allclose(decoded[1], 0.3, rtol=coarse or 5e-3)
    assert np.abs(decoded[3] - w[3]).max() <= 1.3e-7
    assert np.abs(decoded[4]).max() < 1e-8 and np.abs(decoded[9]).max() < 1e-8
    assert decoded[2, 5] == pytest.approx(1000, rel=coarse or 0.08)
    table = name in TABLES  # the level nearest to 0 is 1, where others reach from -127 to 113
    assert decoded[7, 10] == pytest.approx(-2.5, rel=coarse or (8e-3 if table else 5e-3))
    assert np.abs(np.delete(decoded[7], 10)).max() < (2.51 / 113 if table else 1e-3)
    for row in (5, 6, 8):  # too large for f16 scales: clamped, signs and order kept
        little = np.abs(w[row]) < (7 / 113 if table else 0) * np.abs(w[row]).max()
        assert (little | (np.sign(decoded[row]) * np.sign(w[row]) >= 0)).all()
        assert (np.diff(decoded[row, :32]) >= 0).all()


@pytest.mark.parametrize("name", FORMATS)
def test_a_scale_just_below_overflow_is_not_clamped(name):
    w = np.full((1, 32), 60000.0, np.float32) * np.linspace(-1, 1, 32, dtype=np.float32)
    decoded = get_format(name).decode(get_format(name).encode(w))
    assert np.abs(decoded - w).max() <= 60000 / (4 if name == "mxfp4" else 7)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", INTEGER)
def test_nonfinite_weights_are_refused(name, value):
    w = weights(40, 70)
    w[33, 61] = value
    with pytest.raises(NonFiniteError, match=r"row 33, column 61"):
        get_format(name).encode(w)


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_floats_keep_nonfinite_values_and_saturate_finite_ones(name):
    w = np.zeros((1, 32), np.float32)
    w[0, :5] = np.nan, np.inf, -np.inf, 3.4028235e38, -3.4028235e38
    decoded = get_format(name).decode(get_format(name).encode(w))[0]
    assert np.isnan(decoded[0]) and decoded[1] == np.inf and decoded[2] == -np.inf
    largest = {"f32": 3.4028235e38, "f16": 65504, "bf16": 3.3895314e38}[name]
    assert decoded[3] == np.float32(largest) and decoded[4] == -np.float32(largest)


@settings(max_examples=200, deadline=None)
@given(bits=st.integers(0, 2**32 - 1))
def test_bf16_rounds_as_ml_dtypes(bits):
    import ml_dtypes

    value = np.array([bits], np.uint32).view(np.float32)
    expected = value.astype(ml_dtypes.bfloat16)
    got = get_format("bf16").to_words(value).view(ml_dtypes.bfloat16)
    if np.isnan(value[0]):
        assert np.isnan(got[0].astype(np.float32))
    elif np.isfinite(expected.astype(np.float32)[0]) or np.isinf(value[0]):
        assert got.view(np.uint16)[0] == expected.view(np.uint16)[0]
    else:
        assert got.view(np.uint16)[0] & 0x7FFF == 0x7F7F


@pytest.mark.parametrize("name", FORMATS)
def test_empty_matrices(name):
    block_format = get_format(name)
    for rows, columns in ((0, 64), (3, 0), (0, 0)):
        blocks = block_format.encode(np.zeros((rows, columns), np.float32))
        assert blocks.shape == block_format.blocks_shape(rows, columns)
        assert block_format.decode(blocks, columns).shape == (rows, columns)
        tiles = block_format.tile(blocks)
        assert tiles.size == block_format.tiles_nbytes(rows, columns)
        np.testing.assert_array_equal(block_format.untile(tiles, rows, columns), blocks)


@pytest.mark.parametrize("name", BUILT_IN)
def test_arrays_that_do_not_suit_are_refused_by_name(name):
    block_format = get_format(name)
    with pytest.raises(FormatError, match=name):
        block_format.encode(np.zeros(32, np.float32))
    with pytest.raises(FormatError, match=name):
        block_format.encode(np.zeros((2, 32), np.int32))
    with pytest.raises(FormatError, match=name):
        block_format.decode(np.zeros((2, 3, block_format.block_bytes + 1), np.uint8))
    with pytest.raises(FormatError, match=name):
        block_format.decode(np.zeros((2, block_format.header_bytes + 3 * block_format.block_bytes - 1), np.uint8))
    with pytest.raises(FormatError, match=name):
        block_format.decode(np.zeros(block_format.blocks_shape(2, 96), np.uint8), columns=97)
    with pytest.raises(FormatError, match=name):
        block_format.tile(np.zeros((2, block_format.block_bytes - 1), np.uint8))
    with pytest.raises(FormatError, match=name):
        block_format.untile(np.zeros(7, np.uint8), 2, 32)


@pytest.mark.parametrize("name", [n for n in BUILT_IN if get_format(n).integers])
def test_methods_and_importance_are_checked(name):
    block_format, w = get_format(name), weights(2, 32)
    with pytest.raises(FormatError, match="known are nearest, search"):
        block_format.encode(w, method="best")
    with pytest.raises(FormatError, match="32"):
        block_format.encode(w, importance=np.ones(31), method="search")
    for bad in (-1.0, np.nan, np.inf):
        importance = np.ones(32)
        importance[7] = bad
        with pytest.raises(FormatError, match="column 7"):
            block_format.encode(w, importance=importance, method="search")


def test_four_bit_formats_search_by_default():
    w = weights(20, 64)
    for name in BUILT_IN:
        block_format = get_format(name)
        if not block_format.integers:
            continue
        expected = "search" if name.startswith(("q4", "iq4", "mxfp4")) or name in ROW_SCALED else "nearest"
        np.testing.assert_array_equal(block_format.encode(w), block_format.encode(w, method=expected))
        assert (block_format.encode(w, method="nearest") != block_format.encode(w, method="search")).any()


@pytest.mark.parametrize("name", BUILT_IN)
def test_large_matrices_in_chunks_give_the_same_bytes(name, monkeypatch):
    from halfbyte.quant import arrays, floats, scaled

    w, block_format = weights(100, 70), get_format(name)
    blocks = block_format.encode(w)
    tiles, decoded = block_format.tile(blocks), block_format.decode(blocks, 70)

    def tiny_chunks(rows, columns):
        return arrays.row_chunks(rows, columns, weights=32 * 70)

    for module in (scaled, floats):
        monkeypatch.setattr(module, "row_chunks", tiny_chunks)
    assert len(tiny_chunks(100, 70)) == 4
    np.testing.assert_array_equal(block_format.encode(w), blocks)
    np.testing.assert_array_equal(block_format.decode(blocks, 70), decoded)
    np.testing.assert_array_equal(block_format.tile(blocks), tiles)
    np.testing.assert_array_equal(block_format.untile(tiles, 100, 70), blocks)
