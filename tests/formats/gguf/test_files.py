"""GGUF files read and written right. The oracle is the gguf package."""

import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from halfbyte.formats.dequantize import to_float32
from halfbyte.formats.errors import (
    UnknownTypeError,
)
from halfbyte.formats.gguf.reader import GGUFFile
from halfbyte.formats.gguf.values import ValueType, encode_value
from halfbyte.formats.gguf.writer import GGUFWriter
from halfbyte.formats.tensor_types import BY_NAME, TYPES
from support import gguf_bytes as by_hand

text, entry, tensor, build = by_hand.text, by_hand.entry, by_hand.tensor, by_hand.build
U32, STRING, ARRAY = by_hand.U32, by_hand.STRING, by_hand.ARRAY
MODELS = Path(os.environ.get("HALFBYTE_MODELS", Path.home() / ".cache" / "halfbyte-models"))


def sample_arrays(rng: np.random.Generator) -> dict[str, tuple[np.ndarray, str]]:
    matrix = rng.standard_normal((6, 256), dtype=np.float32)
    packed = {}
    for kind in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0"):
        packed[f"m.{kind}"] = gguf.quants.quantize(matrix, getattr(gguf.GGMLQuantizationType, kind.upper())), kind
    packed["m.f32"] = matrix, "f32"
    packed["m.f16"] = matrix.astype(np.float16), "f16"
    packed["v"] = np.arange(7, dtype=np.float32), "f32"
    packed["three"] = rng.standard_normal((2, 3, 5), dtype=np.float32), "f32"
    packed["i32"] = np.arange(5, dtype=np.int32), "i32"
    packed["f64"] = np.linspace(0, 1, 4), "f64"
    return packed


def test_reads_what_the_gguf_package_writes(tmp_path):
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -300)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -5)
    writer.add_float32("f32", 0.1)
    writer.add_uint64("u64", 1 << 63)
    writer.add_int64("i64", -(1 << 62))
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("text", "grüße 🦙")
    writer.add_array("tokens", ["a", "", "é", "x" * 300, "end"] * 40)
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("reals", [0.5, 1.5])
    arrays = sample_arrays(np.random.default_rng(1))
    for name, (array, kind) in arrays.items():
        raw = None if kind.startswith(("f", "i")) else getattr(gguf.GGMLQuantizationType, kind.upper())
        writer.add_tensor(name, array, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with GGUFFile(path) as file:
        found = file.metadata
        assert found["u8"] == 200 and found["i8"] == -3 and found["u16"] == 60000 and found["i16"] == -300
        assert found["u32"] == 4_000_000_000 and found["i32"] == -5 and found["u64"] == 1 << 63 and found["i64"] == -(1 << 62)
        assert found["f32"] == np.float32(0.1) and found["f64"] == 0.1 and found["yes"] is True and found["no"] is False
        assert found["text"] == "grüße 🦙" and found["general.architecture"] == "llama"
        assert found["tokens"] == ["a", "", "é", "x" * 300, "end"] * 40
        assert found["numbers"].tolist() == [1, -2, 3] and found["reals"].tolist() == [0.5, 1.5]
        assert (
            found.type("u16") is ValueType.U16 and found.item_type("tokens") is ValueType.STRING and found.length("tokens") == 200
        )
        assert "missing" not in found and found.get("missing", 3) == 3
        assert list(file.tensors) == list(arrays)
        for name, (array, kind) in arrays.items():
            got = file.tensors[name]
            assert got.type == kind
            assert got.raw().tobytes() == array.tobytes()
            expected = array.astype(np.float32)
            if not kind.startswith(("f", "i")):
                expected = gguf.quants.dequantize(array, getattr(gguf.GGMLQuantizationType, kind.upper()))
            np.testing.assert_array_equal(got.float32(), expected)
            assert got.shape == expected.shape and got.float32().dtype == np.float32
        rows = file.tensors["m.q4_1"]
        np.testing.assert_array_equal(rows.float32(slice(2, 5)), rows.float32()[2:5])
        np.testing.assert_array_equal(rows.float32(slice(None, None, -2)), rows.float32()[::-2])
        assert not rows.raw().flags.writeable
        kept = rows.raw()
    assert kept.tobytes() == arrays["m.q4_1"][0].tobytes(), "views outlive the file"
    assert found["text"] == "grüße 🦙"


def test_the_gguf_package_reads_what_we_write(tmp_path):
    path = tmp_path / "b.gguf"
    arrays = sample_arrays(np.random.default_rng(2))
    with GGUFWriter(path) as writer:
        writer.add("general.architecture", "qwen2")
        writer.add("count", 7)
        writer.add("negative", -7)
        writer.add("large", 1 << 40)
        writer.add("real", 1e-5)
        writer.add("flag", True)
        writer.add("names", ["a", "é", ""])
        writer.add("types", [1, 3, 2], item=ValueType.I32)
        writer.add("scores", np.array([0.5, -1], np.float32))
        writer.add("small", 3, ValueType.U8)
        for name, (array, kind) in arrays.items():
            shape = array.shape if kind.startswith(("f", "i")) else (6, 256)
            writer.declare(name, shape, kind)
        for name in reversed(arrays):
            array = arrays[name][0]
            writer.write(name, array if array.ndim == 1 else (row for row in array))
    reader = gguf.GGUFReader(path)
    value = {key: field.contents() for key, field in reader.fields.items()}
    assert value["general.architecture"] == "qwen2" and value["count"] == 7 and value["negative"] == -7
    assert value["large"] == 1 << 40 and value["real"] == np.float32(1e-5) and value["flag"] is True
    assert value["names"] == ["a", "é", ""] and value["types"] == [1, 3, 2] and value["scores"] == [0.5, -1]
    kinds = {key: [kind.name for kind in field.types] for key, field in reader.fields.items()}
    assert kinds["count"] == ["UINT32"] and kinds["negative"] == ["INT32"] and kinds["real"] == ["FLOAT32"]
    assert kinds["types"] == ["ARRAY", "INT32"] and kinds["small"] == ["UINT8"] and kinds["large"] == ["INT64"]
    assert [t.name for t in reader.tensors] == list(arrays)
    for got in reader.tensors:
        assert np.ascontiguousarray(got.data).tobytes() == arrays[got.name][0].tobytes()
        assert got.data_offset % 32 == 0
        assert got.tensor_type.name.lower() == arrays[got.name][1]


def test_metadata_is_copied_type_for_type(tmp_path):
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    first.write_bytes(
        build(
            [
                entry("a", 0, b"\x05"),
                entry("b", 5, struct.pack("<i", -1)),
                entry("general.alignment", U32, struct.pack("<I", 64)),
                entry("c", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + text("yé")),
                entry("d", 7, b"\1"),
            ]
        )
    )
    with GGUFFile(first) as source, GGUFWriter(second) as writer:
        writer.copy(source.metadata)
    with GGUFFile(first) as source, GGUFFile(second) as copy:
        assert list(copy.metadata) == ["a", "b", "c", "d"], "the alignment of another file is not copied"
        for key in copy.metadata:
            assert bytes(copy.metadata.raw(key)) == bytes(source.metadata.raw(key))
            assert copy.metadata.type(key) is source.metadata.type(key)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_versions(tmp_path, version):
    wide = version > 1
    count = "Q" if wide else "I"
    values = np.arange(12, dtype=np.float32)
    head = b"GGUF" + struct.pack(f"<I{count}{count}", version, 1, 2)
    head += text("k", wide) + struct.pack("<II", U32, 9)
    head += text("list", wide) + struct.pack(f"<II{count}", ARRAY, STRING, 2) + text("ab", wide) + text("c", wide)
    head += text("t", wide) + struct.pack(f"<I{count}{count}IQ", 2, 4, 3, 0, 0)
    path = tmp_path / "v.gguf"
    path.write_bytes(head + bytes(-len(head) % 32) + values.tobytes())
    with GGUFFile(path) as file:
        assert file.version == version
        assert dict(file.metadata) == {"k": 9, "list": ["ab", "c"]}
        np.testing.assert_array_equal(file.tensors["t"].float32(), values.reshape(3, 4))
        assert bytes(file.metadata.raw("list")) == encode_value(ValueType.ARRAY, ["ab", "c"])


def test_the_type_table_is_the_gguf_package_s():
    sizes = {kind.name.lower(): (int(kind), *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    for name, kind in BY_NAME.items():
        if name in sizes and name != "q8_1":  # of which the package counts two f32 where ggml has two f16
            assert (kind.number, kind.block, kind.nbytes) == sizes[name]
    assert sizes.keys() <= BY_NAME.keys() and len(TYPES) == len(BY_NAME)


@pytest.mark.parametrize("kind", sorted(set(BY_NAME) - {"f32", "i8", "i16", "i32", "i64", "f64", "q8_1", "q8_k", "q1_0"}))
def test_every_type_dequantizes_as_the_gguf_package_does(kind):
    size = BY_NAME[kind]
    rng = np.random.default_rng(len(kind))
    raw = rng.integers(0, 256, (5, 3 * size.nbytes), np.uint8)
    raw[0] = 0
    number = getattr(gguf.GGMLQuantizationType, kind.upper())
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, number)
    found = to_float32(raw, kind, "x.gguf", "t")
    assert found.dtype == np.float32
    # Bit for bit, also the sign of zero; a NaN from a random scale has no bits to agree on.
    both_nan = np.isnan(found) & np.isnan(expected)
    assert ((found.view(np.uint32) == expected.view(np.uint32)) | both_nan).all()
    assert to_float32(raw[:0], kind, "x.gguf", "t").shape == (0, 3 * size.block)


@pytest.mark.parametrize("kind", ["q8_1", "q8_k"])
def test_types_that_only_live_in_memory_are_refused(kind):
    with pytest.raises(UnknownTypeError, match=f"{kind}.*|x.gguf: t"):
        to_float32(np.zeros((1, BY_NAME[kind].nbytes), np.uint8), kind, "x.gguf", "t")


def test_opening_imports_nothing_heavy():
    code = (
        "import sys\nimport halfbyte.formats.gguf.reader, halfbyte.formats.hbf.reader\n"
        "print([m for m in ('gguf', 'numba', 'json', 'ml_dtypes', 'safetensors', 'shutil') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m-instruct.q4_1.gguf", "qwen2.5-coder-1.5b-instruct.q4_k_m.gguf"])
def test_real_files(name):
    path = MODELS / name
    if not path.exists():
        pytest.skip(f"{name} is not in {MODELS}")
    start = time.perf_counter()
    with GGUFFile(path) as file:
        assert time.perf_counter() - start < 1
        start = time.perf_counter()
        assert len(file.metadata["tokenizer.ggml.tokens"]) == file.tensors["token_embd.weight"].shape[0]
        assert len(file.metadata["tokenizer.ggml.merges"]) > 40_000
        assert time.perf_counter() - start < 2
        for kind in {tensor.type for tensor in file.tensors.values()}:
            tensor = min((t for t in file.tensors.values() if t.type == kind), key=lambda t: t.nbytes)
            expected = gguf.quants.dequantize(tensor.raw(), getattr(gguf.GGMLQuantizationType, kind.upper()))
            np.testing.assert_array_equal(tensor.float32().reshape(expected.shape), expected)
