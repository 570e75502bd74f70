"""docs/file-format.md is enough to read a native file: a reader of its own, and golden bytes."""

import math
import struct
import zlib

import numpy as np
import pytest

from halfbyte.formats.hbf.reader import NativeFile
from halfbyte.formats.hbf.writer import NativeWriter
from halfbyte.quant.block import get_format
from support import native_samples as samples

write = samples.write


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    path = tmp_path_factory.mktemp("native") / "a.hbf"
    write(path)
    return path


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
    "mxfp4": 272,
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
LEVELS_4 = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]
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
            elif kind == "mxfp4":
                kinds, bias, scale, at = ["nibbles"], None, np.float32(2.0 ** (tile[r] - 128)), 16
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
            out[r, c] = scale * np.float32({"nl5": LEVELS_5, "mxfp4": LEVELS_4}.get(kind, LEVELS)[code] if bias is None else code - bias)
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
