"""Broken GGUF files: each refused by name, in little time and memory (CASES: counts that no file can hold)."""

import os
import struct
import time

import gguf
import numpy as np
import pytest

from halfbyte.formats.errors import (
    DuplicateError,
    FileFormatError,
    HeaderError,
    InputError,
    NotThisKindError,
    TensorError,
    TruncatedError,
    UnknownTypeError,
    UnsupportedVersionError,
    printable,
)
from halfbyte.formats.gguf import string_array as strings
from halfbyte.formats.gguf.reader import GGUFFile
from halfbyte.formats.gguf.writer import GGUFWriter
from support import gguf_bytes as by_hand

text, entry, tensor, build = by_hand.text, by_hand.entry, by_hand.tensor, by_hand.build
U32, STRING, ARRAY = by_hand.U32, by_hand.STRING, by_hand.ARRAY


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
