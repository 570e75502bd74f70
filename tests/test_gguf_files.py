"""GGUF files: read and written right, and refused by name when they are broken. The oracle is the gguf package."""

import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.formats import strings
from halfbyte.formats.dequantize import to_float32
from halfbyte.formats.errors import (
    DuplicateError,
    FileFormatError,
    HeaderError,
    InputError,
    NotThisKindError,
    OutputError,
    TensorError,
    TruncatedError,
    UnknownTypeError,
    UnsupportedVersionError,
    printable,
)
from halfbyte.formats.gguf_reader import GGUFFile
from halfbyte.formats.gguf_types import BY_NAME, TYPES
from halfbyte.formats.gguf_values import Cursor, TypedValues, ValueType, encode_entry, encode_value, infer_type
from halfbyte.formats.gguf_writer import GGUFWriter
from halfbyte.formats.strings import find_strings

MODELS = Path(os.environ.get("HALFBYTE_MODELS", Path.home() / ".cache" / "halfbyte-models"))
U32, STRING, ARRAY = 4, 8, 9


def text(value: str | bytes, wide: bool = True) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q" if wide else "<I", len(raw)) + raw


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str | bytes, dimensions: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)


def build(
    entries: list[bytes] = (),
    tensors: list[bytes] = (),
    data: bytes = b"",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A GGUF file by hand."""
    tensor_count, entry_count = counts or (len(tensors), len(entries))
    head = b"GGUF" + struct.pack("<IQQ", version, tensor_count, entry_count) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) * bool(tensors) + data


@pytest.fixture
def refuse(tmp_path):
    """A function that opens bytes as a GGUF file and sees it refused as `error`, with `words` in the text, in little time."""

    def check(raw: bytes, error: type[FileFormatError], *words: str) -> FileFormatError:
        path = tmp_path / "bad.gguf"
        path.write_bytes(raw)
        start = time.perf_counter()
        with pytest.raises(FileFormatError) as caught:
            GGUFFile(path)
        assert time.perf_counter() - start < 2
        assert type(caught.value) is error, caught.value
        message = str(caught.value)
        assert "bad.gguf" in message and len(message) < 700 and message.isprintable(), message
        for word in words:
            assert word in message, message
        return caught.value

    return check


# Right answers


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


# Broken files, each named. CASES: counts that no file can hold


HUGE = struct.pack("<Q", 1 << 63)


def test_an_array_of_two_to_the_63(refuse):
    raw = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<II", ARRAY, U32)
    refuse(raw + HUGE, TruncatedError, "k", f"needs {len(raw) + 8 + 4 * (1 << 63)} bytes, has {len(raw) + 8}")
    refuse(raw[:-4] + struct.pack("<I", STRING) + HUGE, TruncatedError, "k", "needs")
    refuse(raw[:-4] + struct.pack("<I", 0) + struct.pack("<Q", 2) + b"x", TruncatedError, "k")


def test_counts_beyond_the_file(refuse):
    refuse(build(counts=(0, 1 << 63)), TruncatedError, "metadata entries")
    refuse(build(counts=(1 << 63, 0)), TruncatedError, "tensors")
    refuse(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + HUGE, TruncatedError, "needs")
    refuse(build([entry("k", STRING, HUGE)]), TruncatedError, "k", "needs")
    refuse(build([entry("k", STRING, HUGE)], counts=(0, 1))[:43], TruncatedError)
    refuse(build([entry("k", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + HUGE)]), TruncatedError, "k")
    refuse(build([], [text("t") + struct.pack("<I", 1 << 31) + bytes(24)]), TensorError, "2147483648 dimensions")


def test_counts_that_the_file_could_hold_but_nobody_would(refuse, monkeypatch):
    refuse(build(counts=(0, 100_000), data=bytes(3_000_000)), HeaderError, "at most")
    refuse(build(counts=(200_000, 0), data=bytes(6_000_000)), HeaderError, "at most")
    monkeypatch.setattr(strings, "MAX_STRINGS", 1000)
    refuse(build([entry("k", ARRAY, struct.pack("<IQ", STRING, 1001) + bytes(9000))]), HeaderError, "1001 strings")


def test_nested_arrays(refuse):
    refuse(build([entry("k", ARRAY, struct.pack("<IQIQ", ARRAY, 1, U32, 0))]), UnknownTypeError, "k", "array of arrays")


def test_unknown_types(refuse):
    refuse(build([entry("k", 13, bytes(8))]), UnknownTypeError, "k", "value type 13", "at byte")
    refuse(build([entry("k", ARRAY, struct.pack("<IQ", 99, 0))]), UnknownTypeError, "k", "value type 99")
    refuse(build([], [tensor("t", [4], kind=999)], bytes(64)), UnknownTypeError, "t", "tensor type 999")
    refuse(build([], [tensor("t", [4], kind=31)], bytes(64)), UnknownTypeError, "q4_0_4_4")


def test_names(refuse):
    refuse(build([entry("k", 0, b"1"), entry("k", 0, b"2")]), DuplicateError, "k", "twice")
    refuse(build([], [tensor("t", [1]), tensor("t", [1], offset=32)], bytes(64)), DuplicateError, "t", "twice")
    refuse(build([entry("", 0, b"11")]), HeaderError, "empty")
    refuse(build([], [tensor("", [1])], bytes(32)), HeaderError, "empty")
    refuse(build([entry("k" * 10_000, 0, b"1")]), HeaderError, "10000 bytes long")
    refuse(build([], [tensor("t" * 10_000, [1])], bytes(32)), HeaderError, "10000 bytes long")
    refuse(build([entry(b"\xff\xfe", 0, b"1")]), HeaderError, "UTF-8")


def test_text_that_is_not_utf8_is_refused_when_it_is_asked_for(tmp_path):
    path = tmp_path / "t.gguf"
    listed = struct.pack("<IQ", STRING, 3) + text("ok") + text(b"\xc3") + text("fine")
    path.write_bytes(build([entry("one", STRING, text(b"a\xffb")), entry("list", ARRAY, listed), entry("n", 0, b"\7")]))
    with GGUFFile(path) as file:
        assert file.metadata["n"] == 7
        with pytest.raises(HeaderError, match=r"one.*not UTF-8"):
            file.metadata["one"]
        with pytest.raises(HeaderError, match=r"list\[1\].*not UTF-8"):
            file.metadata["list"]


def test_control_characters_never_reach_a_message(refuse):
    refuse(build([entry("\x1b[2J\r\nkey\u202e", 99, b"")]), UnknownTypeError, r"\x1b[2J\x0d\x0akey\u202e")
    assert printable("a\x00b\ud800\n", 50) == "a\\x00b\\ud800\\x0a"
    assert printable("x" * 1000, 10) == "x" * 10 + "…"
    assert len(printable("\x1b" * 1000, 100)) == 101
    assert printable(b"\xffok") == "\\xffok"


def test_versions_and_byte_orders_that_are_refused(refuse):
    refuse(build(version=0), UnsupportedVersionError, "version 0")
    refuse(build(version=4), UnsupportedVersionError, "version 4")
    refuse(b"GGUF" + struct.pack(">IQQ", 3, 0, 0), UnsupportedVersionError, "big-endian")
    refuse(b"FUGG" + struct.pack(">IQQ", 3, 0, 0), UnsupportedVersionError, "big-endian")
    refuse(b"GGML" + bytes(40), NotThisKindError, "not a GGUF file")
    refuse(b"\x1b[2J" + bytes(40), NotThisKindError)


@pytest.mark.parametrize("value", [0, 3, 1 << 31, 4, 48])
def test_impossible_alignments(refuse, value):
    raw = build([entry("general.alignment", U32, struct.pack("<I", value))], [tensor("t", [4])], bytes(64))
    refuse(raw, HeaderError, "general.alignment", str(value))


def test_alignments_of_the_wrong_type(refuse):
    for kind, value in [
        (5, struct.pack("<i", -8)),
        (5, struct.pack("<i", 32)),
        (10, struct.pack("<Q", 32)),
        (STRING, text("32")),
    ]:
        refuse(build([entry("general.alignment", kind, value)], [tensor("t", [4])], bytes(64)), HeaderError, "must be a u32")
    refuse(build([entry("general.alignment", ARRAY, struct.pack("<IQI", U32, 1, 32))]), HeaderError, "must be a u32, is array")


def test_another_alignment_is_followed(tmp_path):
    path = tmp_path / "a.gguf"
    values = np.arange(4, dtype=np.float32)
    with GGUFWriter(path, alignment=128) as writer:
        writer.declare("a", (4,), "f32")
        writer.declare("b", (4,), "f32")
        writer.write("a", values)
        writer.write("b", values + 1)
    with GGUFFile(path) as file:
        assert file.alignment == 128 and file.data_offset % 128 == 0 and file.tensors["b"].offset == file.data_offset + 128
        np.testing.assert_array_equal(file.tensors["b"].float32(), values + 1)
    assert [t.data.tolist() for t in gguf.GGUFReader(path).tensors] == [[0, 1, 2, 3], [1, 2, 3, 4]]


def test_impossible_shapes(refuse):
    refuse(build([], [tensor("t", [0])], bytes(32)), TensorError, "t", "dimension of 0")
    refuse(build([], [tensor("t", [32, 0], kind=2)], bytes(32)), TensorError, "dimension of 0")
    refuse(build([], [tensor("t", [1 << 32, 1 << 32])], bytes(32)), TensorError, "2^63")
    refuse(build([], [tensor("t", [1 << 33, 1 << 33, 1 << 33, 1 << 33])], bytes(32)), TensorError, "2^63")
    refuse(build([], [tensor("t", [1 << 62])], bytes(32)), TruncatedError, "t", f"needs {64 + (1 << 64)} bytes, has 96")
    refuse(build([], [tensor("t", [1] * 5)], bytes(32)), TensorError, "5 dimensions")
    refuse(build([], [tensor("t", [33, 2], kind=2)], bytes(64)), TensorError, "33", "q4_0")
    refuse(build([], [tensor("t", [128, 2], kind=12)], bytes(512)), TensorError, "128", "q4_k")


def test_a_file_that_is_cut(refuse):
    whole = build([entry("k", STRING, text("v"))], [tensor("a", [8]), tensor("b", [8], offset=32)], bytes(64))
    refuse(whole[:-1], TruncatedError, "b", f"truncated: needs {len(whole)} bytes, has {len(whole) - 1}")
    for length in range(len(whole)):
        refuse(whole[:length], TruncatedError, "needs")


def test_offsets(refuse):
    refuse(build([], [tensor("t", [4], offset=4)], bytes(64)), TensorError, "offset 4", "alignment 32")
    refuse(build([], [tensor("a", [16]), tensor("b", [8], offset=32)], bytes(96)), TensorError, "b", "overlaps tensor a")
    refuse(build([], [tensor("a", [8]), tensor("b", [8])], bytes(96)), TensorError, "overlaps")
    refuse(build([], [tensor("t", [4], offset=1 << 20)], bytes(64)), TruncatedError, "t", "needs")
    refuse(build([], [tensor("t", [4], offset=(1 << 64) - 32)], bytes(64)), TruncatedError, "t", "needs")


def test_what_is_no_file(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        GGUFFile(tmp_path / "missing.gguf")
    with pytest.raises(InputError, match="folder"):
        GGUFFile(tmp_path)
    with pytest.raises(InputError, match="not a file name"):
        GGUFFile("a\0b")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(TruncatedError, match="has 0"):
        GGUFFile(tmp_path / "empty.gguf")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(InputError, match="not a regular file"):
        GGUFFile(tmp_path / "pipe.gguf")


# String arrays


def reference_walk(data: bytes, start: int, count: int) -> list[int]:
    places = [start]
    for _ in range(count):
        at = places[-1]
        places.append(at + 8 + int.from_bytes(data[at : at + 8], "little"))
    return places


ODD_STRINGS = st.one_of(
    st.binary(max_size=12),
    st.binary(min_size=250, max_size=300),
    st.builds(bytes, st.integers(0, 40)),
    st.sampled_from([b"", b"\1" + bytes(7), b"abc\5" + bytes(7) + b"hello", bytes(7), b"\0\0\0\0\0\0\0\x01"]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(ODD_STRINGS, max_size=60), st.integers(1, 3), st.binary(max_size=9), st.sampled_from([64, 200, 1 << 20]))
def test_walking_is_exact_for_any_bytes(items, repeat, lead, window):
    items = items * repeat
    data = lead + b"".join(map(text, items)) + b"tail"
    kept, strings._WINDOW = strings._WINDOW, window
    try:
        found = find_strings("f", np.frombuffer(data, np.uint8), len(lead), len(items), True, "k")
    finally:
        strings._WINDOW = kept
    assert found.tolist() == reference_walk(data, len(lead), len(items))


@settings(max_examples=200, deadline=None)
@given(st.lists(ODD_STRINGS, min_size=1, max_size=30), st.data())
def test_walking_out_of_the_data_is_an_error(items, draw):
    data = b"".join(map(text, items))
    cut = draw.draw(st.integers(0, len(data) - 1))
    with pytest.raises(TruncatedError):
        find_strings("f", np.frombuffer(data[:cut], np.uint8), 0, len(items), True, "k")


def test_a_hostile_array_of_strings_takes_bounded_time():
    # Runs just long enough to look promising, then a break, again and again.
    piece = text("ab") * 70 + text("") + text("x" * 300)
    data = np.frombuffer(piece * 8000, np.uint8)
    start = time.perf_counter()
    found = find_strings("f", data, 0, 72 * 8000, True, "k")
    assert found[-1] == len(data)
    assert time.perf_counter() - start < 3


def test_a_large_vocabulary_opens_and_decodes_fast(tmp_path):
    tokens = [f"Ġtoken{n}" for n in range(150_000)]
    path = tmp_path / "v.gguf"
    with GGUFWriter(path) as writer:
        writer.add("tokenizer.ggml.tokens", tokens)
        writer.add("tokenizer.ggml.merges", [f"a{n} b{n}" for n in range(150_000)])
    opened, decoded = [], []
    for _ in range(3):
        start = time.perf_counter()
        with GGUFFile(path) as file:
            opened.append(time.perf_counter() - start)
            start = time.perf_counter()
            found = file.metadata["tokenizer.ggml.tokens"]
            decoded.append(time.perf_counter() - start)
            assert found is file.metadata["tokenizer.ggml.tokens"]
    assert found == tokens
    # Bounds against doing it element by element in Python, which takes seconds; a busy machine stays far below them.
    assert min(opened) < 0.3 and min(decoded) < 1.0


# Encoding values


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
        st.one_of(
            st.booleans(),
            st.integers(-(1 << 63), (1 << 64) - 1),
            st.floats(width=32, allow_nan=False),
            st.text(st.characters(codec="utf-8")),
            st.lists(st.text(st.characters(codec="utf-8"), max_size=9)),
            st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=1),
            st.lists(st.booleans(), min_size=1),
            st.lists(st.floats(width=32, allow_nan=False), min_size=1),
        ),
        max_size=8,
    )
)
def test_values_come_back(values):
    raw = b"".join(encode_entry(key, infer_type(v)[0], encode_value(infer_type(v)[0], v)) for key, v in values.items())
    parsed = TypedValues(Cursor("f", np.frombuffer(raw, np.uint8)), len(values))
    assert list(parsed) == list(values)
    for key, value in values.items():
        found = parsed[key]
        assert (found.tolist() if isinstance(found, np.ndarray) else found) == value
        assert isinstance(found, np.ndarray) or type(found) is type(value)


def test_values_that_do_not_fit_are_refused(tmp_path):
    for value, kind in [
        (300, ValueType.U8),
        (-1, ValueType.U32),
        (1.5, ValueType.I32),
        ("x", ValueType.F32),
        (3, ValueType.STRING),
    ]:
        with pytest.raises(OutputError, match="key k"), GGUFWriter(tmp_path / "x.gguf") as writer:
            writer.add("k", value, kind)
    for value in (object(), [1, "a"], {"a": 1}, "\ud800", np.array(["a"]), 1 << 70):
        with pytest.raises(OutputError, match="key k"), GGUFWriter(tmp_path / "x.gguf") as writer:
            writer.add("k", value)
    assert list(tmp_path.iterdir()) == []


def test_tensors_that_gguf_cannot_hold_are_refused(tmp_path):
    for name, shape, kind in [
        ("t" * 64, (4,), "f32"),
        ("", (4,), "f32"),
        ("t", (0,), "f32"),
        ("t", (1,) * 5, "f32"),
        ("t", (33,), "q4_0"),
        ("t", (4,), "q6_0"),
    ]:
        with pytest.raises(OutputError), GGUFWriter(tmp_path / "x.gguf") as writer:
            writer.declare(name, shape, kind)
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_is_misused_leaves_no_file(tmp_path):
    path = tmp_path / "x.gguf"
    values = np.zeros(4, np.float32)
    with pytest.raises(OutputError, match="not written: b"), GGUFWriter(path) as writer:
        writer.declare("a", (4,), "f32")
        writer.declare("b", (4,), "f32")
        writer.write("a", values)
    with pytest.raises(OutputError, match="written twice"), GGUFWriter(path) as writer:
        writer.declare("a", (4,), "f32")
        writer.write("a", values)
        writer.write("a", values)
    for wrong in (values[:3], np.zeros(5, np.float32), [values, values]):
        with pytest.raises(OutputError, match="bytes were given"), GGUFWriter(path) as writer:
            writer.declare("a", (4,), "f32")
            writer.write("a", wrong)
    with pytest.raises(OutputError, match="after the first tensor"), GGUFWriter(path) as writer:
        writer.declare("a", (4,), "f32")
        writer.write("a", values)
        writer.add("late", 1)
    with pytest.raises(OutputError, match="declared twice"), GGUFWriter(path) as writer:
        writer.declare("a", (4,), "f32")
        writer.declare("a", (4,), "f32")
    assert list(tmp_path.iterdir()) == []


def test_opening_imports_nothing_heavy():
    code = (
        "import sys\nfrom halfbyte.formats import gguf_reader, native_reader\n"
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
