"""The native file: what is written comes back, damage is named, and docs/file-format.md is enough to read one."""

import math
import struct
import threading
import time
import zlib

import numpy as np
import pytest

from halfbyte.formats import native_layout as layout
from halfbyte.formats.atomic import OutputFile
from halfbyte.formats.errors import (
    ChecksumError,
    DuplicateError,
    FileFormatError,
    HeaderError,
    NotThisKindError,
    OutputError,
    TensorError,
    TruncatedError,
    UnknownTypeError,
    UnsupportedVersionError,
)
from halfbyte.formats.gguf_values import ValueType, encode_entry, encode_value
from halfbyte.formats.native import NativeFile, NativeWriter
from halfbyte.quant.block import format_names, get_format
from halfbyte.quant.errors import FormatError

TOKENS = ["<s>", "a", "", "é", "x" * 400] * 400
JSON = '{"version": "1.0", "text": "ünïcödé"}'


def matrices(seed: int = 0) -> dict[str, tuple[np.ndarray, str]]:
    """Matrices whose rows are no multiple of 16 and whose columns are none of 32, in every format of this package."""
    rng = np.random.default_rng(seed)
    found = {f"m.{name}": (rng.standard_normal((37, 70), dtype=np.float32), name) for name in format_names() if name != "f32"}
    found["single"] = rng.standard_normal((16, 32), dtype=np.float32), "f32"
    found["experts"] = rng.standard_normal((3, 20, 33), dtype=np.float32), "q8_0"
    found["row.experts"] = rng.standard_normal((2, 20, 33), dtype=np.float32), "nl4_16"
    return found


def encode(array: np.ndarray, name: str) -> np.ndarray:
    """Tiles of a matrix, or of several one after another."""
    format = get_format(name)
    return np.concatenate([format.tile(format.encode(m, method=None)) for m in array.reshape(-1, *array.shape[-2:])])


def decoded(array: np.ndarray, name: str) -> np.ndarray:
    format = get_format(name)
    each = [format.decode(format.encode(m, method=None), m.shape[-1]) for m in array.reshape(-1, *array.shape[-2:])]
    return np.stack(each).reshape(array.shape)


def write(path, arrays=None) -> None:
    arrays = matrices() if arrays is None else arrays
    with NativeWriter(path) as writer:
        writer.add("general.architecture", "llama")
        writer.add("llama.block_count", 30)
        writer.add("llama.rope.freq_base", 1e5)
        writer.add("tokenizer.ggml.tokens", TOKENS)
        writer.add("tokenizer.ggml.scores", np.linspace(0, 1, 50, dtype=np.float32))
        writer.add(layout.TOKENIZER, JSON)
        writer.declare("norm", (7,), "f32", source="bf16")
        for name, (array, kind) in arrays.items():
            writer.declare(name, array.shape, kind, source="bf16")
        for number, (name, (array, kind)) in enumerate(reversed(arrays.items())):
            writer.write(name, encode(array, kind), cosine=1 - number / 100, nmse=number / 50, method="search")
        writer.write("norm", np.arange(7, dtype=np.float32))
        writer.add("halfbyte.note", "known only at the end")


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    path = tmp_path_factory.mktemp("native") / "a.hbf"
    write(path)
    return path


def test_what_is_written_comes_back(sample):
    arrays = matrices()
    with NativeFile(sample) as file:
        assert file.version == 1 and file.size % 4096 == 0
        assert file.metadata["general.architecture"] == "llama" and file.metadata["llama.block_count"] == 30
        assert file.metadata["tokenizer.ggml.tokens"] == TOKENS and file.metadata[layout.TOKENIZER] == JSON
        assert file.metadata["halfbyte.note"] == "known only at the end"
        assert file.metadata["tokenizer.ggml.scores"].shape == (50,)
        assert "halfbyte.packed.tokenizer.ggml.tokens" not in file.metadata
        assert list(file.tensors) == ["norm", *arrays]
        norm = file.tensors["norm"]
        assert norm.vector and norm.tiles() is None and norm.blocks() is None and norm.format == "f32"
        assert norm.recorded == {"checksum": zlib.crc32(norm.raw()), "source": "bf16", "method": "", "cosine": None, "nmse": None}
        np.testing.assert_array_equal(norm.float32(), np.arange(7))
        for number, (name, (array, kind)) in enumerate(reversed(arrays.items())):
            tensor = file.tensors[name]
            assert tensor.shape == array.shape and tensor.format == kind and not tensor.vector and tensor.offset % 4096 == 0
            assert tensor.recorded["cosine"] == np.float32(1 - number / 100) and tensor.recorded["nmse"] == np.float32(
                number / 50
            )
            assert tensor.recorded["method"] == "search" and tensor.recorded["source"] == "bf16"
            tiles = tensor.tiles()
            assert tiles.dtype == np.uint8 and tiles.ndim == 1 and not tiles.flags.writeable
            assert tiles.__array_interface__["data"][0] == tensor.address, "tiles are the mapped file"
            np.testing.assert_array_equal(tiles, encode(array, kind))
            np.testing.assert_array_equal(tensor.float32(), decoded(array, kind))
        file.verify()
        file.populate()
        file.populate(file.tensors["experts"].offset, 10)
        file.release()
        kept = file.tensors["single"].tiles()
    np.testing.assert_array_equal(kept, encode(*arrays["single"]))


@pytest.mark.parametrize(
    "rows",
    [
        slice(0, 1),
        slice(3, 40),
        slice(16, 32),
        slice(15, 17),
        slice(None, None, 3),
        slice(30, 2, -4),
        slice(9, 9),
        slice(50, None),
    ],
)
@pytest.mark.parametrize("name", ["m.q4_0", "experts", "m.bf16"])
def test_slices_of_rows(sample, name, rows):
    with NativeFile(sample) as file:
        tensor = file.tensors[name]
        whole = tensor.float32().reshape(tensor.rows, tensor.columns)
        np.testing.assert_array_equal(tensor.float32(rows), whole[rows])
        np.testing.assert_array_equal(tensor.blocks(rows), tensor.blocks()[rows])
        assert get_format(tensor.format).decode(tensor.blocks(rows), tensor.columns).tobytes() == whole[rows].tobytes()


def test_large_matrices_are_decoded_piece_by_piece(tmp_path, monkeypatch):
    monkeypatch.setattr("halfbyte.formats.native_reader._DECODE", 1)
    write(tmp_path / "a.hbf")
    with NativeFile(tmp_path / "a.hbf") as file:
        for name, (array, kind) in matrices().items():
            np.testing.assert_array_equal(file.tensors[name].float32(), decoded(array, kind))
            rows = file.tensors[name].rows
            np.testing.assert_array_equal(
                file.tensors[name].blocks(slice(5, rows - 2)), file.tensors[name].blocks()[5 : rows - 2]
            )


# The page is enough to read a file


TILE_BYTES = {
    "q8_0": 544,
    "q6_0": 416,
    "q5_1": 384,
    "q5_0": 352,
    "q4_1": 320,
    "q4_0": 288,
    "iq4_nl": 288,
    "q6_r": 400,
    "q5_r": 336,
    "nl5": 336,
    "nl4_16": 280,
    "nl4": 272,
    "f32": 2048,
    "f16": 1024,
    "bf16": 1024,
}
PLANES = {"bytes": 8, "nibbles": 4, "fifth bits": 1, "pairs": 2}
INTEGERS = {  # minimum?, kinds of planes, bias
    "q8_0": (False, ["bytes"], 128),
    "q6_0": (False, ["nibbles", "pairs"], 32),
    "q5_1": (True, ["nibbles", "fifth bits"], 0),
    "q5_0": (False, ["nibbles", "fifth bits"], 16),
    "q4_1": (True, ["nibbles"], 0),
    "q4_0": (False, ["nibbles"], 8),
    "iq4_nl": (False, ["nibbles"], None),
}


ROW_SCALED = {  # columns and bits of a scale, kinds of planes, bias
    "q6_r": (32, 8, ["pairs", "nibbles"], 32),
    "q5_r": (32, 8, ["fifth bits", "nibbles"], 16),
    "nl5": (32, 8, ["fifth bits", "nibbles"], None),
    "nl4_16": (16, 6, ["nibbles"], None),
    "nl4": (32, 8, ["nibbles"], None),
}
LEVELS = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
LEVELS_5 = [
    *(-127, -112, -99, -87, -77, -68, -59, -51, -44, -37, -30, -24, -18, -12, -6, 0),
    *(5, 10, 15, 20, 26, 31, 37, 43, 50, 57, 65, 74, 84, 95, 108, 122),
]


def read_tile(kind: str, tile: bytes, row_numbers: bytes = b"") -> np.ndarray:
    """float32[16, 32]: the weights of one tile, from the page's section on formats."""
    out = np.zeros((16, 32), np.float32)
    for r, c in np.ndindex(16, 32):
        if kind in ("f32", "f16"):
            code, size = {"f32": ("<f", 4), "f16": ("<e", 2)}[kind]
            out[r, c] = struct.unpack_from(code, tile, size * (16 * c + r))[0]
        elif kind == "bf16":
            out[r, c] = struct.unpack("<f", b"\0\0" + tile[2 * (16 * c + r) :][:2])[0]
        else:
            v, b, code, has_minimum = c // 4, 4 * r + c % 4, 0, False
            if kind in ROW_SCALED:
                columns, bits, kinds, bias = ROW_SCALED[kind]
                scale, at = row_scale(tile, r, c // columns, bits), 16 * 32 // columns * bits // 8
                scale *= np.float32(struct.unpack("<f", b"\0\0" + row_numbers[2 * r : 2 * r + 2])[0])
            else:
                has_minimum, kinds, bias = INTEGERS[kind]
                scale, at = np.float32(struct.unpack_from("<e", tile, 2 * r)[0]), 64 if has_minimum else 32
            for plane in kinds:
                if plane == "bytes":
                    code |= tile[at + 64 * v + b]
                elif plane == "nibbles":
                    code |= tile[at + 64 * (v // 2) + b] >> 4 * (v % 2) & 15
                elif plane == "fifth bits":
                    code |= (tile[at + b] >> v & 1) << 4
                else:
                    code |= (tile[at + 64 * (v // 4) + b] >> 2 * (v % 4) & 3) << 4
                at += 64 * PLANES[plane]
            assert at == len(tile)
            out[r, c] = scale * np.float32((LEVELS_5 if kind == "nl5" else LEVELS)[code] if bias is None else code - bias)
            if has_minimum:
                out[r, c] += np.float32(struct.unpack_from("<e", tile, 32 + 2 * r)[0])
    return out


def row_scale(tile: bytes, r: int, part: int, bits: int) -> np.float32:
    """The code of a scale of row r."""
    if bits == 8:
        return np.float32(struct.unpack_from("<b", tile, 16 * part + r)[0])
    (top,) = struct.unpack_from("<I", tile, 16 + 4 * part)
    return np.float32((tile[r] >> 4 * part & 15) + 16 * (top >> 2 * r & 3) - 32)


def independent_reader(raw: bytes) -> tuple[dict, dict]:
    """Metadata and tensors (name -> float32), written from docs/file-format.md alone."""
    magic, version, tensor_count, entry_count, head_bytes, data_at, file_bytes, crc = struct.unpack_from("<4sIQQQQQI", raw)
    assert magic == b"HBF\x1a" and version == 1 and file_bytes == len(raw) and data_at % 4096 == 0
    assert zlib.crc32(raw[:48] + bytes(4) + raw[52:data_at]) == crc
    at = 64
    numbers = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

    def number(code: str):
        nonlocal at
        at += struct.calcsize(code)
        return struct.unpack_from("<" + code, raw, at - struct.calcsize(code))[0]

    def string() -> str:
        nonlocal at
        length = number("Q")
        at += length
        return raw[at - length : at].decode()

    def value(kind: int):
        if kind == 8:
            return string()
        if kind == 9:
            item, count = number("I"), number("Q")
            return [value(item) for _ in range(count)]
        return number(numbers[kind])

    metadata = {}
    for _ in range(entry_count):
        key = string()
        metadata[key] = value(number("I"))
    rows = []
    for _ in range(tensor_count):
        name = string()
        shape = [number("Q") for _ in range(number("I"))][::-1]
        rows.append((name, shape, metadata["halfbyte.formats"][number("I")], data_at + number("Q")))
    assert at == head_bytes and not any(raw[at:data_at])
    for key in [key for key in metadata if key.startswith("halfbyte.packed.")]:
        raw, at, kept = bytes(metadata.pop(key)), 0, raw
        metadata[key.removeprefix("halfbyte.packed.")] = value(9)
        raw = kept
    tensors = {}
    for (name, shape, kind, start), nbytes, crc in zip(
        rows, metadata["halfbyte.tensor.bytes"], metadata["halfbyte.tensor.checksum"], strict=True
    ):
        data = raw[start : start + nbytes]
        assert zlib.crc32(data) == crc and start % 4096 == 0
        if len(shape) == 1:
            tensors[name] = np.frombuffer(data, "<f4")
            continue
        many, (height, width) = math.prod(shape[:-2]), shape[-2:]
        out = np.zeros((many, -(-height // 16) * 16, -(-width // 32) * 32), np.float32)
        tile_bytes, header = TILE_BYTES[kind], 32 if kind in ROW_SCALED else 0
        blocks = out.shape[2] // 32
        group_bytes = header + blocks * tile_bytes
        assert nbytes == many * out.shape[1] // 16 * group_bytes
        for number_of_tile in range(many * out.shape[1] // 16 * blocks):
            group, block = divmod(number_of_tile, blocks)
            first = group * group_bytes
            matrix, group = divmod(group, out.shape[1] // 16)
            tile = data[first + header + block * tile_bytes :][:tile_bytes]
            values = read_tile(kind, tile, data[first : first + header])
            out[matrix, 16 * group : 16 * group + 16, 32 * block : 32 * block + 32] = values
        tensors[name] = out[:, :height, :width].reshape(shape)
    return metadata, tensors


def test_the_page_is_enough_to_read_a_file(sample):
    metadata, tensors = independent_reader(sample.read_bytes())
    with NativeFile(sample) as file:
        assert sorted(metadata) == sorted(file.metadata)
        for key, value in metadata.items():
            mine = file.metadata[key]
            assert np.array_equal(mine, value, equal_nan=True) if isinstance(mine, np.ndarray) else mine == value
        assert list(tensors) == list(file.tensors)
        for name, values in tensors.items():
            np.testing.assert_array_equal(values, file.tensors[name].float32())


def test_golden_bytes(tmp_path):
    """The layout of version 1 to the byte: files that were written must be read for ever."""
    path = tmp_path / "g.hbf"
    weights = np.arange(-256, 256, dtype=np.float32).reshape(16, 32)
    with NativeWriter(path) as writer:
        writer.add("general.architecture", "llama")
        writer.declare("w", (16, 32), "q8_0", source="f32")
        writer.declare("n", (2,), "f32", source="f32")
        writer.write(
            "w",
            get_format("q8_0").tile(get_format("q8_0").encode(weights, method="nearest")),
            cosine=1.0,
            nmse=0.25,
            method="nearest",
        )
        writer.write("n", np.array([1, 2], np.float32))
    raw = path.read_bytes()
    assert len(raw) == 20480 + 2 * 4096
    assert raw[:4] == b"HBF\x1a"
    assert struct.unpack_from("<IQQQQQ", raw, 4) == (1, 2, 10, struct.unpack_from("<Q", raw, 24)[0], 20480, len(raw))
    assert raw[64:103] == b"\x14\0\0\0\0\0\0\0general.architecture\x08\0\0\0\x05\0\0\0\0\0\0"
    table = (
        b"\1\0\0\0\0\0\0\0w\2\0\0\0"
        + struct.pack("<QQIQ", 32, 16, 0, 0)
        + b"\1\0\0\0\0\0\0\0n\1\0\0\0"
        + struct.pack("<QIQ", 2, 1, 4096)
    )
    head_bytes = struct.unpack_from("<Q", raw, 24)[0]
    assert raw[head_bytes - len(table) : head_bytes] == table and not any(raw[head_bytes:20480])
    assert zlib.crc32(raw[20480 : 20480 + 544]) == 0x569B1F3A
    assert raw[24576:24584] == struct.pack("<ff", 1, 2) and not any(raw[24584:]) and not any(raw[20480 + 544 : 24576])


# Damage


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
        layout.FORMATS: (ValueType.STRING, ["q8_0", "f32"]),
        layout.METHODS: (ValueType.STRING, [""]),
        layout.SOURCES: (ValueType.STRING, ["f32"]),
        layout.BYTES: (ValueType.U64, [544] * tensors),
        layout.CHECKSUM: (ValueType.U32, [0] * tensors),
        layout.COSINE: (ValueType.F32, [1.0] * tensors),
        layout.NMSE: (ValueType.F32, [0.0] * tensors),
        layout.METHOD: (ValueType.U32, [0] * tensors),
        layout.SOURCE: (ValueType.U32, [0] * tensors),
    } | (entries or {})
    own = {key: value for key, value in own.items() if value is not None}
    body = b"".join(encode_entry(key, ValueType.ARRAY, encode_value(ValueType.ARRAY, v, item)) for key, (item, v) in own.items())
    body += row("t") if table is None else table
    head_bytes = header.get("head_bytes", 64 + len(body))
    data_at = header.get("data_offset", 4096)
    size = header.get("file_bytes", 4096 + len(data))
    counts = tensors, header.get("entries", len(own))
    raw = bytearray(layout.HEADER.pack(layout.MAGIC, 1, *counts, head_bytes, data_at, size, 0) + body)
    raw = raw.ljust(4096, b"\0") + data
    struct.pack_into("<I", raw, 48, layout.head_checksum(raw[:data_at]))
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
        (TensorError, "takes 544 bytes.* has 545", {"entries": {layout.BYTES: (ValueType.U64, [545])}}),
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
        (HeaderError, "missing", {"entries": {layout.CHECKSUM: None}}),
        (HeaderError, "array of u32", {"entries": {layout.CHECKSUM: (ValueType.U64, [0])}}),
        (HeaderError, "2 items for 1 tensors", {"entries": {layout.COSINE: (ValueType.F32, [1, 1])}}),
        (HeaderError, "index 1 into 1", {"entries": {layout.METHOD: (ValueType.U32, [1])}}),
        (HeaderError, "cannot be the name", {"entries": {layout.FORMATS: (ValueType.STRING, ["\x1b[2J"])}}),
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
            {"entries": {f"halfbyte.packed.{layout.BYTES}": (ValueType.U8, list(struct.pack("<IQ", 4, 0)))}},
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
        struct.pack_into("<I", raw, 48, layout.head_checksum(raw[:4096]))
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
        entries={layout.FORMATS: (ValueType.STRING, ["theirs"]), layout.CHECKSUM: (ValueType.U32, [zlib.crc32(bytes(544))])},
    )
    with NativeFile(tmp_path / "f.hbf") as file:
        assert file.tensors["t"].format == "theirs" and file.formats == ["theirs"]
        file.verify()
        for read in (file.tensors["t"].float32, file.tensors["t"].blocks):
            with pytest.raises(FormatError, match="theirs"):
                read()


# Writing


def test_tensors_may_be_written_from_threads(tmp_path):
    arrays = matrices(3)
    with NativeWriter(tmp_path / "t.hbf") as writer:
        for name, (array, kind) in arrays.items():
            writer.declare(name, array.shape, kind)
        threads = [threading.Thread(target=writer.write, args=(n, encode(a, k))) for n, (a, k) in arrays.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with NativeFile(tmp_path / "t.hbf") as file:
        file.verify()
        for name, (array, kind) in arrays.items():
            np.testing.assert_array_equal(file.tensors[name].float32(), decoded(array, kind))


def test_metadata_goes_from_file_to_file(sample, tmp_path):
    with NativeFile(sample) as source, NativeWriter(tmp_path / "c.hbf") as writer:
        writer.copy(source.metadata)
    with NativeFile(sample) as source, NativeFile(tmp_path / "c.hbf") as copy:
        own = layout.OWN
        assert {k for k in source.metadata if k not in own} == {k for k in copy.metadata if k not in own}
        assert (
            copy.metadata["tokenizer.ggml.tokens"] == TOKENS
            and copy.metadata["halfbyte.note"] == source.metadata["halfbyte.note"]
        )
        assert copy.tensors == {}
        copy.verify()


def test_a_writer_that_is_misused_leaves_no_file(tmp_path):
    path = tmp_path / "x.hbf"
    for name, shape, kind, error in [
        ("t", (4,), "q8_0", OutputError),
        ("t", (4, 0), "q8_0", OutputError),
        ("t", (4, 4), "none", FormatError),
        ("", (4,), "f32", OutputError),
    ]:
        with pytest.raises(error), NativeWriter(path) as writer:
            writer.declare(name, shape, kind)
    for key in (layout.FORMATS, layout.CHECKSUM, "halfbyte.packed.x"):
        with pytest.raises(OutputError, match="makes itself"), NativeWriter(path) as writer:
            writer.add(key, ["x"])
    with pytest.raises(OutputError, match="metadata too many"), NativeWriter(path) as writer:
        writer.declare("v", (2,), "f32")
        writer.write("v", np.zeros(2, np.float32))
        writer.add("late", "x" * 40_000)
    with pytest.raises(OutputError, match="not written"), NativeWriter(path) as writer:
        writer.declare("v", (2,), "f32")
    with pytest.raises(OutputError, match="bytes were given"), NativeWriter(path) as writer:
        writer.declare("m", (4, 4), "q8_0")
        writer.write("m", np.zeros(10, np.uint8))
    assert list(tmp_path.iterdir()) == []


def test_opening_a_large_file_is_quick(tmp_path, monkeypatch):
    """A file of a gigabyte (a sparse one) with a large vocabulary: opening reads neither tensors nor strings."""
    monkeypatch.setattr(OutputFile, "reserve", lambda self, size: None)
    path = tmp_path / "big.hbf"
    shape, piece = (32768, 4096), np.zeros(1 << 20, np.uint8)
    nbytes = get_format("q8_0").tiles_nbytes(*shape)
    with NativeWriter(path) as writer:
        writer.add("tokenizer.ggml.tokens", [f"token{n}" for n in range(150_000)])
        writer.add(layout.TOKENIZER, "x" * 8_000_000)
        for number in range(7):
            writer.declare(f"t{number}", shape, "q8_0")
        writer._begin()
        for tensor in writer._tensors.values():  # the bytes of a fresh file are zeros: nothing needs to be written
            tensor.written = True
            writer._records[tensor.name] = {"checksum": 0}
        end = writer._data_offset + writer._data_bytes
        writer._output.write_at(end - len(piece), piece)
    assert path.stat().st_size > 1_000_000_000 and nbytes % 4096 == 0
    times = []
    for _ in range(5):
        start = time.perf_counter()
        with NativeFile(path):
            times.append(time.perf_counter() - start)
    path.unlink()
    assert min(times) < 0.05
