"""The compiled encoders give the reference's bytes, from all sources, in both byte orders, on any number of threads."""

import os
import platform
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from halfbyte.quant import FormatError, NonFiniteError, get_format
from halfbyte.quant.encoders import encode, has_kernel, tile
from halfbyte.quant.measures import tensor_errors

INTEGER = ("q8_0", "q6_0", "q6_r", "q5_1", "q5_0", "q5_r", "nl5", "q4_1", "q4_0", "iq4_nl", "nl4_16", "mxfp4", "nl4")
SOURCES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


def weights(rows: int = 53, columns: int = 160) -> np.ndarray:
    """Rows of all magnitudes, and blocks that break careless encoders."""
    rng = np.random.default_rng(9)
    w = (rng.standard_normal((rows, columns)) * 10.0 ** rng.integers(-9, 4, (rows, 1))).astype(np.float32)
    w[3], w[4, :32], w[5, 40] = 0, 0.3, 1000
    w[6], w[7] = np.linspace(-1, 1, columns) * 6e4, -0.0
    w[8, ::2], w[9] = 0, np.abs(w[9])
    w[10, :32] = np.round(w[10, :32] / np.abs(w[10, :32]).max() * 8)
    return w


def extreme() -> np.ndarray:
    w = weights()
    w[16] *= np.float32(1e30)
    w[17] = np.linspace(-1, 1, 160) * 3e38
    w[18] = np.linspace(-1, 1, 160) * 1e-40
    w[19] = 1e30 + np.linspace(0, 1, 160)
    w[20] = 1e-45
    return w


def importance(columns: int = 160) -> np.ndarray:
    rng = np.random.default_rng(4)
    return (rng.random(columns) ** 4 * (rng.random(columns) < 0.9)).astype(np.float32)


CASES = [(name, "search", "f32", "tiles") for name in INTEGER] + [("q4_0", "search", "f16", "blocks"), ("nl4", "search", "f16", "blocks")]
CASES += [(name, "nearest", "bf16", "blocks") for name in INTEGER if name not in ("q6_r", "nl4")]


@pytest.mark.parametrize(("name", "method", "source", "order"), CASES)
def test_compiled_equals_reference_bit_for_bit(name, method, source, order):
    block_format = get_format(name)
    for w in (weights(), extreme() if source != "f16" else weights() * np.float32(0.01)):
        w = w.astype(SOURCES[source])
        data, errors = encode(block_format, w, order, importance=importance(), method=method, threads=1)
        blocks = block_format.encode(w.astype(np.float32), importance(), method)
        np.testing.assert_array_equal(data, block_format.tile(blocks) if order == "tiles" else blocks)
        again, same = encode(block_format, w, order, importance=importance(), method=method, threads=3)
        np.testing.assert_array_equal(again, data)
        assert same == errors


@pytest.mark.parametrize("name", INTEGER)
def test_compiled_tiles_are_the_reference_tiles(name):
    block_format = get_format(name)
    for rows, count in ((16, 1), (53, 5), (160, 3), (7, 2)):
        data = np.random.default_rng(rows).integers(0, 256, block_format.tiles_nbytes(rows, 32 * count), dtype=np.uint8)
        blocks = block_format.untile(data, rows, 32 * count)
        np.testing.assert_array_equal(tile(block_format, blocks, threads=2), block_format.tile(blocks))
        np.testing.assert_array_equal(tile(block_format, blocks[::-1], threads=1), block_format.tile(blocks[::-1]))


@pytest.mark.parametrize("name", ["q8_0", "q4_1", "q4_0"])
@pytest.mark.parametrize(("rows", "columns"), [(48, 160), (50, 71), (16, 32), (15, 96), (1, 1), (33, 31)])
def test_errors_are_those_of_the_decoded_tensor(name, rows, columns):
    rng = np.random.default_rng(rows)
    w = rng.standard_normal((rows, columns)).astype(np.float32)
    w[rows // 2, columns // 2] = 7.3
    block_format = get_format(name)
    data, errors = encode(block_format, w, method="search")
    blocks = block_format.encode(w, method="search")
    np.testing.assert_array_equal(data, block_format.tile(blocks))
    expected = tensor_errors(w, block_format.decode(blocks, columns))
    assert 1 - errors.cosine == pytest.approx(1 - expected.cosine, rel=1e-4)
    assert errors.nmse == pytest.approx(expected.nmse, rel=1e-5)
    assert errors.max_error == pytest.approx(expected.max_error, rel=1e-6)
    assert errors.worst_block == expected.worst_block
    assert errors.worst_block_error == pytest.approx(expected.worst_block_error, rel=1e-5)


def test_errors_of_weights_whose_squares_float32_cannot_hold():
    for magnitude in (1e-25, 1e25):
        w = (np.random.default_rng(1).standard_normal((32, 64)) * magnitude).astype(np.float32)
        errors = encode(get_format("q8_0"), w, method="search").errors
        expected = tensor_errors(w, get_format("q8_0").decode(get_format("q8_0").encode(w, method="search")))
        assert errors == expected


@pytest.mark.parametrize("row", [3, 40, 49])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_nonfinite_weights_are_named(row, value):
    w = weights(50, 96)
    w[row, 70] = value
    with pytest.raises(NonFiniteError, match=rf"blk\.7\.ffn_up\.weight \[row {row}, column 70\] is {value}"):
        encode(get_format("q8_0"), w, method="search", name="blk.7.ffn_up.weight")
    with pytest.raises(NonFiniteError, match=rf"norm \[row {row}, column 70\]"):
        encode(get_format("f16"), w, name="norm")


def test_sources_of_other_kinds_and_layouts():
    block_format, w = get_format("q8_0"), weights(32, 96)
    blocks = block_format.encode(w, method="search")
    for same in (w.astype(np.float64), np.asfortranarray(w), np.repeat(w, 2, axis=1)[:, ::2], w[::-1][::-1], w.astype(">f4")):
        np.testing.assert_array_equal(encode(block_format, same, method="search").data, block_format.tile(blocks))
    wide = np.zeros((32, 128), np.float32)
    wide[:, 16:112] = w  # rows that do not follow each other directly
    np.testing.assert_array_equal(encode(block_format, wide[:, 16:112], method="search").data, block_format.tile(blocks))
    w.flags.writeable = False
    np.testing.assert_array_equal(encode(block_format, w, method="search").data, block_format.tile(blocks))
    bits = (w.view(np.uint32) >> 16).astype(np.uint16)
    rounded = (bits.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(encode(block_format, bits, "blocks", method="nearest").data, block_format.encode(rounded))


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_float_formats_take_the_same_way(name):
    block_format, w = get_format(name), weights(50, 71)
    assert not has_kernel(block_format)
    data, errors = encode(block_format, w)
    blocks = block_format.encode(w)
    np.testing.assert_array_equal(data, block_format.tile(blocks))
    np.testing.assert_array_equal(encode(block_format, w, "blocks").data, blocks)
    assert errors == tensor_errors(w, block_format.decode(blocks, 71))


def test_arguments_are_checked():
    q4_0, w = get_format("q4_0"), weights(32, 64)
    with pytest.raises(FormatError, match="known are tiles, blocks"):
        encode(q4_0, w, "rows")
    with pytest.raises(FormatError, match="known are nearest, search"):
        encode(q4_0, w, method="best")
    with pytest.raises(FormatError, match="64"):
        encode(q4_0, w, importance=np.ones(63))
    with pytest.raises(FormatError, match="my tensor"):
        encode(q4_0, np.zeros((2, 32), np.int32), name="my tensor")
    with pytest.raises(FormatError, match="q4_0"):
        tile(q4_0, np.zeros((2, 3, 17), np.uint8))


def test_empty_matrices():
    for shape in ((0, 64), (20, 0)):
        for name in ("q4_0", "f16"):
            data, errors = encode(get_format(name), np.zeros(shape, np.float32))
            assert data.size == 0 and errors.nmse == 0


CHILD = """
import numpy as np
from halfbyte.quant import get_format
from halfbyte.quant.encoders import encode
from halfbyte.quant.jit import target
rng = np.random.default_rng(0)
w = (rng.standard_normal((32, 96)) * 10.0 ** rng.integers(-9, 6, (32, 1))).astype(np.float32)
for name in ("q4_1", "nl4_16"):
    f = get_format(name)
    assert (encode(f, w, method="search", threads=1).data == f.tile(f.encode(w, method="search"))).all(), name
print(target.current().dot, target.current().has_f16)
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the test names an x86 processor")
def test_a_plain_processor_gives_the_same_bytes(tmp_path):
    """Without AVX, FMA or f16 instructions: conversions to and from f16 are then our own arithmetic."""
    env = os.environ | {"NUMBA_CPU_NAME": "nehalem", "HALFBYTE_CACHE": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, env=env, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["portable", "False"]


def test_a_tensor_encoded_in_runs_of_rows_is_measured_as_one():
    from halfbyte.quant.measures import TensorMeter

    block_format, w = get_format("q8_0"), np.random.default_rng(3).standard_normal((90, 71)).astype(np.float32)
    w[77, 40] = 9
    whole, errors = encode(block_format, w, "blocks", method="nearest")
    meter, runs = TensorMeter(), []
    for rows in (slice(0, 32), slice(32, 80), slice(80, 90)):  # compiled, compiled, reference
        data, so_far = encode(block_format, w[rows], "blocks", method="nearest", meter=meter)
        runs.append(data)
    np.testing.assert_array_equal(np.concatenate(runs), whole)
    assert so_far.worst_block == errors.worst_block == (77, 1)
    assert so_far.nmse == pytest.approx(errors.nmse, rel=1e-6)
    assert 1 - so_far.cosine == pytest.approx(1 - errors.cosine, rel=1e-4)
