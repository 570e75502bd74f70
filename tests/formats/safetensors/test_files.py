"""safetensors files and folders: read and written right, refused by name when broken. Oracle: safetensors, ml_dtypes."""

import json
import math
import os
import struct
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.formats.dequantize import float8_table, to_float32
from halfbyte.formats.errors import (
    DuplicateError,
    FileFormatError,
    HeaderError,
    InputError,
    MissingTensorsError,
    NotThisKindError,
    OutputError,
    TensorError,
    TruncatedError,
    UnknownTypeError,
)
from halfbyte.formats.safetensors.reader import SafetensorsFile, SafetensorsFolder, read_index
from halfbyte.formats.safetensors.writer import SafetensorsWriter, ShardedWriter
from halfbyte.quant.bf16 import to_bf16

MODELS = Path(os.environ.get("HALFBYTE_MODELS", Path.home() / ".cache" / "halfbyte-models"))


def build(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def one(shape: object, offsets: object, dtype: object = "F32") -> dict:
    return {"t": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.fixture
def refuse(tmp_path):
    def check(raw: bytes, error: type[FileFormatError], *words: str) -> None:
        path = tmp_path / "bad.safetensors"
        path.write_bytes(raw)
        start = time.perf_counter()
        with pytest.raises(FileFormatError) as caught:
            SafetensorsFile(path)
        assert time.perf_counter() - start < 2
        assert type(caught.value) is error, caught.value
        message = str(caught.value)
        assert "bad.safetensors" in message and len(message) < 700 and message.isprintable()
        for word in words:
            assert word in message, message

    return check


# Right answers


def test_reads_what_the_safetensors_package_writes(tmp_path):
    rng = np.random.default_rng(1)
    arrays = {
        "f32": rng.standard_normal((3, 5), dtype=np.float32),
        "f16": rng.standard_normal((4, 3)).astype(np.float16),
        "f64": rng.standard_normal((2, 2)),
        "bool": np.array([True, False, True]),
        "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "hollow": np.zeros((3, 0), np.int16),
        "cube": rng.standard_normal((2, 3, 4), dtype=np.float32),
    }
    arrays |= {
        f"{sign}{bits}": np.arange(6).reshape(2, 3).astype(f"{sign}{bits // 8}") for sign in "iu" for bits in (8, 16, 32, 64)
    }
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file(arrays, path, metadata={"format": "pt", "é": "ü"})
    with SafetensorsFile(path) as file:
        assert file.metadata == {"format": "pt", "é": "ü"}
        assert file.tensors.keys() == arrays.keys()
        for name, array in arrays.items():
            tensor = file.tensors[name]
            assert tensor.shape == array.shape and tensor.nbytes == array.nbytes
            np.testing.assert_array_equal(tensor.array(), array)
            assert tensor.array().dtype == array.dtype and not tensor.array().flags.writeable
            np.testing.assert_array_equal(tensor.float32(), array.astype(np.float32))
            assert tensor.float32().shape == array.shape and tensor.float32().dtype == np.float32
            rows = array.reshape(math.prod(array.shape[:-1]), array.shape[-1] if array.ndim else 1).astype(np.float32)
            for piece in (slice(0, 2), slice(1, None), slice(None, None, -1), slice(9, 9)):
                np.testing.assert_array_equal(tensor.float32(piece), rows[piece])
        kept = file.tensors["cube"].array()
    np.testing.assert_array_equal(kept, arrays["cube"])


@pytest.mark.parametrize(
    "kind, dtype",
    [("f8_e4m3", ml_dtypes.float8_e4m3fn), ("f8_e5m2", ml_dtypes.float8_e5m2), ("f8_e8m0", ml_dtypes.float8_e8m0fnu)],
)
def test_fp8_values_are_ml_dtypes(kind, dtype):
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(float8_table(kind), codes.view(dtype).astype(np.float32))
    np.testing.assert_array_equal(to_float32(codes.reshape(16, 16), kind, "f", "t").reshape(-1), float8_table(kind))


def test_bf16_values_are_ml_dtypes():
    codes = np.arange(1 << 16, dtype="<u2")
    expected = codes.view(ml_dtypes.bfloat16).astype(np.float32)
    found = to_float32(codes.view(np.uint8).reshape(256, -1), "bf16", "f", "t").reshape(-1)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@given(st.lists(st.floats(width=32), min_size=1))
def test_rounding_to_bf16_is_ml_dtypes(values):
    values = np.array(values, np.float32)
    expected = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    found = to_bf16(values)
    both_nan = np.isnan(values) & ((found & 0x7FFF) > 0x7F80)
    assert ((found == expected) | both_nan).all()


def test_rounding_keeps_every_nan():
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32)
    assert np.isnan(to_float32(to_bf16(bits.view(np.float32)).view(np.uint8).reshape(1, -1), "bf16", "f", "t")).all()


def test_converting_to_float32_takes_one_array_and_little_more(tmp_path):
    import tracemalloc

    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({"w": np.ones((2048, 1024), np.float16)}, path)
    with SafetensorsFile(path) as file:
        file.tensors["w"].float32(slice(0, 1))
        tracemalloc.start()
        file.tensors["w"].float32(slice(0, 16))
        assert tracemalloc.get_traced_memory()[1] < 200_000
        tracemalloc.stop()


def test_the_safetensors_package_reads_what_we_write(tmp_path):
    path = tmp_path / "a.safetensors"
    rng = np.random.default_rng(3)
    values = rng.standard_normal((4, 6), dtype=np.float32)
    with SafetensorsWriter(path, metadata={"note": "x"}) as writer:
        for name, dtype in [("bytes", "u8"), ("half", "f16"), ("single", "f32"), ("double", "f64")]:
            writer.declare(name, values.shape, dtype)
        writer.declare("brain", values.shape, "bf16")
        writer.declare("scalar", (), "f32")
        writer.declare("empty", (0, 3), "f32")
        writer.write("single", (row for row in values))
        writer.write("half", values)
        writer.write("double", values)
        writer.write("brain", values)
        writer.write("bytes", np.arange(24, dtype=np.uint8))
        writer.write("scalar", np.float32(7))
        writer.write("empty", np.zeros((0, 3), np.float32))
    raw = safetensors.deserialize(path.read_bytes())
    found = {name: (entry["dtype"], entry["shape"], bytes(entry["data"])) for name, entry in raw}
    assert found["single"] == ("F32", [4, 6], values.tobytes())
    assert found["half"] == ("F16", [4, 6], values.astype(np.float16).tobytes())
    assert found["double"] == ("F64", [4, 6], values.astype(np.float64).tobytes())
    assert found["brain"] == ("BF16", [4, 6], values.astype(ml_dtypes.bfloat16).tobytes())
    assert found["scalar"] == ("F32", [], np.float32(7).tobytes()) and found["empty"] == ("F32", [0, 3], b"")
    with SafetensorsFile(path) as file:
        assert file.data_offset % 8 == 0 and file.metadata == {"note": "x"}
        assert all(tensor.offset % tensor.array().itemsize == 0 for tensor in file.tensors.values())


def test_a_writer_that_is_misused_leaves_no_file(tmp_path):
    path, values = tmp_path / "x.safetensors", np.zeros(4, np.float32)
    with pytest.raises(OutputError, match="not written: b"), SafetensorsWriter(path) as writer:
        writer.declare("a", (4,), "f32")
        writer.declare("b", (4,), "f32")
        writer.write("a", values)
    for wrong in (values[:3], [values, values]):
        with pytest.raises(OutputError, match="bytes were given"), SafetensorsWriter(path) as writer:
            writer.declare("a", (4,), "f32")
            writer.write("a", wrong)
    for name, dtype in [("", "f32"), ("__metadata__", "f32"), ("\ud800", "f32"), ("t", "q4_0")]:
        with pytest.raises(OutputError), SafetensorsWriter(path) as writer:
            writer.declare(name, (4,), dtype)
            writer.write(name, values)
    assert list(tmp_path.iterdir()) == []


# Broken files


def test_header_lengths(refuse):
    refuse(b"\1\2\3", TruncatedError, "needs 8 bytes, has 3")
    refuse(build({}, length=1000), TruncatedError, "needs 1008 bytes, has 10")
    refuse(build(b"{}" + b" " * 20, length=100_000_001), HeaderError, "100000001")
    refuse(build(b"{", length=(1 << 64) - 1), HeaderError, "at most")
    refuse(b"\x1b[2Jnot a tensor file, nor anything else", NotThisKindError, "not a safetensors file")
    refuse(build(b"", length=0), HeaderError, "JSON")


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"3",
        b'"x"',
        b"null",
        b"{",
        b"{}x",
        b"\xff\xff",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"a":NaN}',
        b"1" * 5000,
        b'{"t":1e400}',
    ],
)
def test_headers_that_are_no_object(refuse, header):
    refuse(build(header), HeaderError)


def test_a_header_that_would_fill_memory(refuse):
    refuse(build(b'{"a":[' + b"[]," * 5_000_000 + b"[]]}"), HeaderError, "values")


def test_duplicate_keys(refuse):
    entry = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    refuse(build(f'{{"t":{entry},"t":{entry}}}'.encode(), b"x"), DuplicateError, "t", "twice")
    refuse(build(b'{"t":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"), DuplicateError, "dtype")
    refuse(build(b'{"__metadata__":{},"__metadata__":{}}'), DuplicateError)


@pytest.mark.parametrize(
    "entry, error",
    [
        (one([2], [8, 0]), TensorError),
        (one([2], [-8, 0]), TensorError),
        (one([2], [0]), TensorError),
        (one([2], [0, 8, 16]), TensorError),
        (one([2], [0.0, 8.0]), TensorError),
        (one([2], ["0", "8"]), TensorError),
        (one([2], None), TensorError),
        (one([2], [0, True]), TensorError),
        (one([3], [0, 8]), TensorError),
        (one([-2], [0, 8]), TensorError),
        (one([2.0], [0, 8]), TensorError),
        (one(2, [0, 8]), TensorError),
        (one([1 << 63, 2], [0, 0]), TensorError),
        (one([1 << 62, 1 << 62], [0, 0]), TensorError),
        (one([1 << 62, 0], [0, 0]), TensorError),
        (one([1] * 9, [0, 4]), TensorError),
        (one([2], [0, 8], "F31"), UnknownTypeError),
        (one([2], [0, 8], 5), UnknownTypeError),
        (one([2], [0, 8], ["F32"]), UnknownTypeError),
        ({"t": {"dtype": "F32", "shape": [2]}}, HeaderError),
        ({"t": 5}, HeaderError),
        ({"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], "more": 1}}, HeaderError),
        ({"__metadata__": {"a": 1}}, HeaderError),
        ({"__metadata__": []}, HeaderError),
        ({"": one([2], [0, 8])["t"]}, HeaderError),
        ({"n" * 10_000: one([2], [0, 8])["t"]}, HeaderError),
    ],
)
def test_impossible_entries(refuse, entry, error):
    refuse(build(entry, bytes(8)), error)


def test_offsets_that_overlap_leave_gaps_or_end_early(refuse):
    def two(first: list[int], second: list[int]) -> dict:
        return {name: {"dtype": "U8", "shape": [b - a], "data_offsets": [a, b]} for name, (a, b) in (("a", first), ("b", second))}

    refuse(build(two([0, 4], [3, 8]), bytes(8)), TensorError, "b", "overlaps a")
    refuse(build(two([0, 4], [0, 4]), bytes(4)), TensorError, "overlaps")
    refuse(build(two([0, 4], [5, 8]), bytes(8)), TensorError, "b", "gap of 1 bytes")
    refuse(build(two([1, 4], [4, 8]), bytes(8)), TensorError, "a", "gap")
    raw = build(two([0, 4], [4, 8]), bytes(8))
    refuse(raw[:-1], TruncatedError, "b", f"truncated: needs {len(raw)} bytes, has {len(raw) - 1}")
    refuse(raw + b"x", HeaderError, "1 bytes follow")
    for length in range(len(raw)):
        refuse(raw[:length], TruncatedError, "needs")


# Folders


def shard(path: Path, **arrays: np.ndarray) -> None:
    safetensors.numpy.save_file(arrays, path)


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


ONE = np.ones(3, np.float32)


def test_a_sharded_folder(tmp_path):
    shard(tmp_path / "model-00001-of-00002.safetensors", a=ONE)
    shard(tmp_path / "model-00002-of-00002.safetensors", b=2 * ONE)
    shard(tmp_path / "consolidated.00.safetensors", other=ONE, a=ONE)
    write_index(tmp_path, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    with SafetensorsFolder(tmp_path) as folder:
        assert sorted(folder.tensors) == ["a", "b"] and len(folder.files) == 2
        np.testing.assert_array_equal(folder.tensors["b"].float32(), 2 * ONE)
        assert folder.tensors["b"].file.path.name == "model-00002-of-00002.safetensors"
        assert "consolidated.00.safetensors" in folder.notes[0]


def test_folders_without_an_index(tmp_path):
    shard(tmp_path / "consolidated.safetensors", c=ONE)
    with SafetensorsFolder(tmp_path) as folder:
        assert list(folder.tensors) == ["c"] and not folder.notes
    shard(tmp_path / "part-1.safetensors", a=ONE)
    shard(tmp_path / "part-2.safetensors", b=ONE)
    with SafetensorsFolder(tmp_path) as folder:
        assert sorted(folder.tensors) == ["a", "b"] and "consolidated.safetensors" in folder.notes[0]
    shard(tmp_path / "model.safetensors", m=ONE)
    with SafetensorsFolder(tmp_path) as folder:
        assert list(folder.tensors) == ["m"] and "part-1.safetensors" in folder.notes[0]
    with SafetensorsFolder(tmp_path / "part-1.safetensors") as folder:
        assert list(folder.tensors) == ["a"]
    shard(tmp_path / "part-2.safetensors", a=ONE)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(DuplicateError, match="part-1"):
        SafetensorsFolder(tmp_path)


def test_all_that_is_missing_is_named_at_once(tmp_path):
    shard(tmp_path / "s1.safetensors", a=ONE)
    write_index(tmp_path, {"a": "s1.safetensors", "b": "s2.safetensors", "c": "s3.safetensors"})
    with pytest.raises(MissingTensorsError, match=r"2 shards.*s2\.safetensors, s3\.safetensors") as caught:
        SafetensorsFolder(tmp_path)
    assert caught.value.names == ["s2.safetensors", "s3.safetensors"]
    shard(tmp_path / "s2.safetensors", a2=ONE)
    write_index(tmp_path, {"a": "s1.safetensors", "b": "s2.safetensors", "c": "s1.safetensors"})
    with pytest.raises(MissingTensorsError, match=r"2 tensors.*b \(in s2\.safetensors\), c \(in s1\.safetensors\)"):
        SafetensorsFolder(tmp_path)
    write_index(tmp_path, {"a": "s1.safetensors"})
    shard(tmp_path / "s1.safetensors", a=ONE, b=ONE)
    with pytest.raises(MissingTensorsError, match=r"does not name 1 tensors.*: b"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["../s.safetensors", "/etc/passwd", "a/../b", "..", ".", "", "C:evil", "a\\b", "a\0b", "a\nb", "x" * 300, 5, None, ["a"]],
)
def test_shard_names_that_lead_out_of_the_folder(tmp_path, name):
    write_index(tmp_path, {"a": name})
    with pytest.raises(HeaderError, match="not the name of a file"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("weight_map", [{}, [], None, "x"])
def test_an_index_without_a_map(tmp_path, weight_map):
    write_index(tmp_path, weight_map)
    with pytest.raises(HeaderError, match="weight_map"):
        read_index(tmp_path / "model.safetensors.index.json")


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(InputError, match=r"holds neither .* nor a \.safetensors"):
        SafetensorsFolder(tmp_path)
    with pytest.raises(InputError, match="no such file"):
        SafetensorsFolder(tmp_path / "missing")
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(InputError, match="folder"):
        SafetensorsFolder(tmp_path)


def test_shards_are_written_and_read_back(tmp_path):
    rng = np.random.default_rng(5)
    arrays = {f"w{n}": rng.standard_normal((10, n + 1), dtype=np.float32) for n in range(7)}
    with ShardedWriter(tmp_path, shard_bytes=500) as writer:
        for name, array in arrays.items():
            writer.declare(name, array.shape, "f32")
        for name, array in arrays.items():
            writer.write(name, array)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1 and all(path.name.endswith(f"-of-{len(shards):05}.safetensors") for path in shards)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in arrays.values())
    with SafetensorsFolder(tmp_path) as folder:
        assert not folder.notes and folder.tensors.keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(folder.tensors[name].float32(), array)


def test_one_shard_needs_no_index(tmp_path):
    with ShardedWriter(tmp_path) as writer:
        writer.declare("a", (3,), "bf16")
        writer.write("a", ONE)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    with pytest.raises(OutputError, match="not all"), ShardedWriter(tmp_path) as writer:
        writer.declare("a", (3,), "bf16")


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=9), st.lists(st.integers(0, 4), max_size=3), max_size=5
    )
)
def test_any_names_and_shapes_come_back(tmp_path_factory, shapes):
    path = tmp_path_factory.mktemp("s") / "a.safetensors"
    shapes.pop("__metadata__", None)
    arrays = {name: np.random.default_rng(1).standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    with SafetensorsWriter(path) as writer:
        for name, array in arrays.items():
            writer.declare(name, array.shape, "f32")
        for name, array in arrays.items():
            writer.write(name, array)
    with SafetensorsFile(path) as file:
        assert file.tensors.keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(file.tensors[name].float32(), array)
    theirs = safetensors.numpy.load(path.read_bytes())
    assert theirs.keys() == arrays.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "qwen2.5-coder-1.5b-instruct"])
def test_real_folders(name):
    if not (MODELS / name).is_dir():
        pytest.skip(f"{name} is not in {MODELS}")
    start = time.perf_counter()
    with SafetensorsFolder(MODELS / name) as folder:
        assert time.perf_counter() - start < 2
        norm = folder.tensors["model.norm.weight"].float32()
        assert norm.ndim == 1 and np.isfinite(norm).all() and 0 < np.abs(norm).mean() < 100
