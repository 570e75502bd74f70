"""Damaged and forged native files: every flipped bit is found, and what is wrong is named."""

import struct
import zlib

import numpy as np
import pytest

from halfbyte.formats import file_keys
from halfbyte.formats.errors import (
    ChecksumError,
    DuplicateError,
    FileFormatError,
    HeaderError,
    NotThisKindError,
    TensorError,
    TruncatedError,
    UnknownTypeError,
    UnsupportedVersionError,
)
from halfbyte.formats.gguf.values import ValueType, encode_entry, encode_value
from halfbyte.formats.hbf import structure
from halfbyte.formats.hbf.reader import NativeFile
from halfbyte.quant.errors import FormatError
from support import native_samples as samples

write = samples.write


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    path = tmp_path_factory.mktemp("native") / "a.hbf"
    write(path)
    return path


def test_every_flipped_bit_is_found(sample):
    """In the head, in each tensor and in the padding between: opening or verify says so, and names the tensor."""
    raw = bytearray(sample.read_bytes())
    with NativeFile(sample) as file:
        places = [(t.offset, t.offset + t.nbytes, name) for name, t in file.tensors.items()]
        data = file.data_offset
    rng = np.random.default_rng(1)
    copy = sample.with_name("flipped.hbf")
    spots = [0, 4, 8, 16, 24, 32, 40, 48, 51, 52, 63, data - 1, len(raw) - 1]
    spots += [*rng.integers(0, data, 40), *rng.integers(data, len(raw), 40)]
    spots += [rng.integers(a, b) for a, b, _ in places for _ in range(3)]
    for spot in map(int, spots):
        raw[spot] ^= 1 << int(rng.integers(8))
        copy.write_bytes(raw)
        with pytest.raises(FileFormatError) as caught, NativeFile(copy) as file:
            file.verify()
        inside = [name for a, b, name in places if a <= spot < b]
        if inside:
            assert type(caught.value) is ChecksumError and caught.value.where == inside[0] and inside[0] in str(caught.value)
        raw[:] = sample.read_bytes()


def test_all_broken_tensors_are_named(sample, tmp_path):
    raw = bytearray(sample.read_bytes())
    with NativeFile(sample) as file:
        for name in ("norm", "single"):
            raw[file.tensors[name].offset] ^= 1
    (tmp_path / "b.hbf").write_bytes(raw)
    seen = []
    with NativeFile(tmp_path / "b.hbf") as file:
        with pytest.raises(ChecksumError, match=r"norm.*single"):
            file.verify(progress=lambda done, total: seen.append((done, total)))
        file.verify(["experts"])
        total = sum(tensor.nbytes for tensor in file.tensors.values())
    assert seen[-1] == (total, total) and [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_file_that_is_cut_or_longer(sample, tmp_path):
    raw = sample.read_bytes()
    path = tmp_path / "c.hbf"
    for length in (1, 3, 4, 10, 63, 64, 65, 4096, len(raw) // 2, len(raw) - 1):
        path.write_bytes(raw[:length])
        with pytest.raises(TruncatedError, match=f"needs (64|{len(raw)}) bytes, has {length}"):
            NativeFile(path)
    path.write_bytes(raw + b"\0")
    with pytest.raises(HeaderError, match="1 bytes follow"):
        NativeFile(path)


def test_other_kinds_and_versions(sample, tmp_path):
    path = tmp_path / "c.hbf"
    raw = bytearray(sample.read_bytes())
    path.write_bytes(b"GGUF" + raw[4:])
    with pytest.raises(NotThisKindError):
        NativeFile(path)
    raw[4] = 2
    path.write_bytes(raw)
    with pytest.raises(UnsupportedVersionError, match=r"version 2; this program reads version 1"):
        NativeFile(path)


def forge(
    path, entries: dict | None = None, table: bytes | None = None, tensors: int = 1, data: bytes = bytes(4096), **header
) -> None:
    """A file whose checksum is right and whose content may not be."""
    own = {
        file_keys.FORMATS: (ValueType.STRING, ["q8_0", "f32"]),
        file_keys.METHODS: (ValueType.STRING, [""]),
        file_keys.SOURCES: (ValueType.STRING, ["f32"]),
        file_keys.BYTES: (ValueType.U64, [544] * tensors),
        file_keys.CHECKSUM: (ValueType.U32, [0] * tensors),
        file_keys.COSINE: (ValueType.F32, [1.0] * tensors),
        file_keys.NMSE: (ValueType.F32, [0.0] * tensors),
        file_keys.METHOD: (ValueType.U32, [0] * tensors),
        file_keys.SOURCE: (ValueType.U32, [0] * tensors),
    } | (entries or {})
    own = {key: value for key, value in own.items() if value is not None}
    body = b"".join(encode_entry(key, ValueType.ARRAY, encode_value(ValueType.ARRAY, v, item)) for key, (item, v) in own.items())
    body += row("t") if table is None else table
    head_bytes = header.get("head_bytes", 64 + len(body))
    data_at = header.get("data_offset", 4096)
    size = header.get("file_bytes", 4096 + len(data))
    counts = tensors, header.get("entries", len(own))
    raw = bytearray(structure.HEADER.pack(structure.MAGIC, 1, *counts, head_bytes, data_at, size, 0) + body)
    raw = raw.ljust(4096, b"\0") + data
    struct.pack_into("<I", raw, 48, structure.head_checksum(raw[:data_at]))
    path.write_bytes(raw)


def row(name: str, dimensions=(32, 16), kind: int = 0, offset: int = 0) -> bytes:
    return (
        struct.pack("<Q", len(name))
        + name.encode()
        + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)
    )


def test_a_forged_file_that_is_right_opens(tmp_path):
    forge(tmp_path / "f.hbf")
    with NativeFile(tmp_path / "f.hbf") as file:
        assert file.tensors["t"].float32().shape == (16, 32)


@pytest.mark.parametrize(
    "error, words, change",
    [
        (TensorError, "takes 544 bytes.* has 545", {"entries": {file_keys.BYTES: (ValueType.U64, [545])}}),
        (TensorError, "takes", {"table": row("t", (32, 1 << 50))}),
        (TensorError, "2\\^63", {"table": row("t", (1 << 40, 1 << 40))}),
        (TensorError, "dimension of 0", {"table": row("t", (32, 0))}),
        (TensorError, "multiple of 4096", {"table": row("t", offset=64)}),
        (TensorError, "one dimension and format q8_0", {"table": row("t", (32,))}),
        (TruncatedError, "needs", {"table": row("t", offset=4096)}),
        (TruncatedError, "needs", {"table": row("t", offset=(1 << 64) - 4096)}),
        (UnknownTypeError, "format number 2", {"table": row("t", kind=2)}),
        (TensorError, "overlaps", {"tensors": 2, "table": row("t") + row("u")}),
        (DuplicateError, "twice", {"tensors": 2, "table": row("t") + row("t", offset=4096)}),
        (HeaderError, "missing", {"entries": {file_keys.CHECKSUM: None}}),
        (HeaderError, "array of u32", {"entries": {file_keys.CHECKSUM: (ValueType.U64, [0])}}),
        (HeaderError, "2 items for 1 tensors", {"entries": {file_keys.COSINE: (ValueType.F32, [1, 1])}}),
        (HeaderError, "index 1 into 1", {"entries": {file_keys.METHOD: (ValueType.U32, [1])}}),
        (HeaderError, "cannot be the name", {"entries": {file_keys.FORMATS: (ValueType.STRING, ["\x1b[2J"])}}),
        (HeaderError, "array of u8", {"entries": {"halfbyte.packed.x": (ValueType.U32, [1])}}),
        (TruncatedError, "packed", {"entries": {"halfbyte.packed.x": (ValueType.U8, [1])}}),
        (UnknownTypeError, "value type", {"entries": {"halfbyte.packed.x": (ValueType.U8, list(struct.pack("<IQ", 77, 0)))}}),
        (TruncatedError, "packed", {"entries": {"halfbyte.packed.x": (ValueType.U8, list(struct.pack("<IQ", 8, 1 << 62)))}}),
        (TruncatedError, "packed", {"entries": {"halfbyte.packed.x": (ValueType.U8, list(struct.pack("<IQ", 4, 1 << 62)))}}),
        (
            HeaderError,
            "follow the packed",
            {"entries": {"halfbyte.packed.x": (ValueType.U8, list(struct.pack("<IQII", 4, 1, 0, 0)))}},
        ),
        (
            DuplicateError,
            "packed",
            {"entries": {f"halfbyte.packed.{file_keys.BYTES}": (ValueType.U8, list(struct.pack("<IQ", 4, 0)))}},
        ),
        (HeaderError, "impossible sizes", {"data_offset": 4095}),
        (HeaderError, "impossible sizes", {"data_offset": 1 << 40}),
        (HeaderError, "impossible sizes", {"head_bytes": 63}),
        (HeaderError, "impossible sizes", {"head_bytes": 5000}),
        (HeaderError, "head ends", {"head_bytes": 2000}),
        (TruncatedError, "needs", {"head_bytes": 300}),
        (TruncatedError, "metadata entries", {"entries_count": 1 << 60}),
    ],
)
def test_forged_files_are_refused_by_name(tmp_path, error, words, change):
    path = tmp_path / "f.hbf"
    if "entries_count" in change:
        forge(path)
        raw = bytearray(path.read_bytes())
        struct.pack_into("<Q", raw, 16, change["entries_count"])
        struct.pack_into("<I", raw, 48, structure.head_checksum(raw[:4096]))
        path.write_bytes(raw)
    else:
        forge(path, **change)
    with pytest.raises(error, match=words) as caught:
        NativeFile(path)
    assert type(caught.value) is error and str(caught.value).isprintable()


def test_packed_strings_that_do_not_fill_their_array(tmp_path):
    packed = encode_value(ValueType.ARRAY, ["a", "b"])
    for broken in (packed + b"x", packed[:-1]):
        forge(tmp_path / "f.hbf", entries={"halfbyte.packed.x": (ValueType.U8, list(broken))})
        with NativeFile(tmp_path / "f.hbf") as file, pytest.raises((HeaderError, TruncatedError)):
            file.metadata["x"]


def test_a_format_that_is_not_installed_can_be_listed_and_verified(tmp_path):
    forge(
        tmp_path / "f.hbf",
        entries={file_keys.FORMATS: (ValueType.STRING, ["theirs"]), file_keys.CHECKSUM: (ValueType.U32, [zlib.crc32(bytes(544))])},
    )
    with NativeFile(tmp_path / "f.hbf") as file:
        assert file.tensors["t"].format == "theirs" and file.formats == ["theirs"]
        file.verify()
        for read in (file.tensors["t"].float32, file.tensors["t"].blocks):
            with pytest.raises(FormatError, match="theirs"):
                read()
