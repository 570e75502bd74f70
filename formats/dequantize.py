"""Bytes of a stored tensor -> float32, for every element and block type that files bring.

Plain types are converted here. Block types that Halfbyte has as a BlockFormat are decoded by it; the super-block types q4_k, q5_k
and q6_k by the functions below, which equal the gguf package bit for bit; all other types by the gguf package, which is imported
only then. Source of the block layouts: ggml-common.h of the ggml project.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..quant.bf16 import from_bf16
from ..quant.errors import FormatError
from .errors import UnknownTypeError

_CHUNK = 1 << 22  # weights that are dequantized at a time: keeps temporaries in the tens of megabytes

PLAIN: dict[str, np.dtype[Any]] = {
    "f64": np.dtype("<f8"), "f32": np.dtype("<f4"), "f16": np.dtype("<f2"),
    "i8": np.dtype("i1"), "i16": np.dtype("<i2"), "i32": np.dtype("<i4"), "i64": np.dtype("<i8"),
    "u8": np.dtype("u1"), "u16": np.dtype("<u2"), "u32": np.dtype("<u4"), "u64": np.dtype("<u8"), "bool": np.dtype("?"),
}  # fmt: skip
"""Element types that NumPy has."""


def to_float32(raw: np.ndarray, kind: str, path: Any, where: str) -> np.ndarray:
    """uint8[rows, bytes per row] of type `kind` -> float32[rows, columns], a new array.

    path and where name the file and the tensor in errors. Raises UnknownTypeError if nothing here can read the type.
    """
    if kind == "bool":
        return (raw != 0).astype(np.float32)
    if kind in PLAIN:
        with np.errstate(all="ignore"):  # an f64 beyond f32 becomes infinity, which its reader will report
            return raw.view(PLAIN[kind]).astype(np.float32)
    if kind in ("bf16", "f8_e4m3", "f8_e5m2", "f8_e8m0"):
        return from_bf16(raw.view("<u2")) if kind == "bf16" else float8_table(kind)[raw]
    decode, width, block = _decoder(kind, path, where)
    rows, nbytes = raw.shape
    columns = nbytes // width * block
    if rows == 0 or columns == 0:
        return np.empty((rows, columns), np.float32)
    values = np.empty((rows, columns), np.float32)
    step = max(1, _CHUNK // columns)
    with np.errstate(all="ignore"):  # scales of a damaged file may be anything
        for start in range(0, rows, step):
            part = raw[start : start + step]
            values[start : start + step] = decode(part.reshape(-1, width)).reshape(len(part), columns)
    return values


_float8: dict[str, np.ndarray] = {}


def float8_table(kind: str) -> np.ndarray:
    """float32[256]: the value of each byte of an 8-bit float.

    "f8_e4m3" is OCP's (no infinity, 0x7f and 0xff are NaN), "f8_e5m2" has infinities, "f8_e8m0" is a power of two.
    """
    if kind not in _float8:
        code = np.arange(256)
        if kind == "f8_e8m0":
            table = np.where(code == 255, np.nan, np.exp2(code - 127.0))
        else:
            bits, bias = (3, 7) if kind == "f8_e4m3" else (2, 15)
            exponent, fraction = (code & 0x7F) >> bits, (code & ((1 << bits) - 1)) / (1 << bits)
            table = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * np.exp2(exponent - float(bias)))
            if kind == "f8_e4m3":
                table[(code & 0x7F) == 0x7F] = np.nan
            else:
                table = np.where(exponent == 31, np.where(fraction == 0, np.inf, np.nan), table)
            table = np.where(code & 0x80, -table, table)
        _float8[kind] = table.astype(np.float32)
        _float8[kind].setflags(write=False)
    return _float8[kind]


def _decoder(kind: str, path: Any, where: str) -> tuple[Callable[[np.ndarray], np.ndarray], int, int]:
    """A function uint8[blocks, block bytes] -> float32[blocks, block], the bytes per block and the weights per block."""
    from .tensor_types import BY_NAME

    if kind not in BY_NAME:
        raise UnknownTypeError(path, f"no way to read tensors of type {kind}", where=where)
    kept = BY_NAME[kind]
    own = {"q4_k": dequantize_q4_k, "q5_k": dequantize_q5_k, "q6_k": dequantize_q6_k}
    if kind in own:
        return own[kind], kept.nbytes, kept.block
    from ..quant.block import get_format

    try:
        found = get_format(kind)
    except FormatError:
        found = None
    if found is not None and found.gguf_type is not None and found.gguf_type.lower() == kind and not found.header_bytes:
        return (lambda blocks: found.decode(blocks.reshape(1, -1, kept.nbytes))), kept.nbytes, kept.block
    import gguf

    number = getattr(gguf.GGMLQuantizationType, kind.upper(), None)
    try:
        if number is None:
            raise NotImplementedError
        gguf.quants.dequantize(np.zeros((1, kept.nbytes), np.uint8), number)
    except (NotImplementedError, KeyError):
        raise UnknownTypeError(path, f"no way to read tensors of type {kind}", where=where) from None
    return (lambda blocks: gguf.quants.dequantize(blocks, number)), kept.nbytes, kept.block


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """float32[blocks, 1]: the f16 at byte `at` of each block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def six_bit_pairs(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """uint8[..., 12] -> eight 6-bit scales and eight 6-bit minima of q4_k and q5_k, uint8[..., 8] each.

    Bytes 0–3 and 4–7 hold scales and minima 0–3 in their lower six bits; their upper two bits are the upper bits of numbers 4–7,
    whose lower four bits are the nibbles of bytes 8–11 (low: scale, high: minimum).
    """
    first, second, rest = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate((first & 63, (rest & 15) | (first >> 6 << 4)), axis=-1)
    minima = np.concatenate((second & 63, (rest >> 4) | (second >> 6 << 4)), axis=-1)
    return scales, minima


def _scaled_with_minimum(blocks: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """uint8[blocks, 8, 32] × scale - minimum, by the header of q4_k and q5_k: f16 scale, f16 minimum, 12 bytes of 6-bit pairs."""
    scales, minima = six_bit_pairs(blocks[:, 4:16])
    scale = _halves(blocks, 0) * scales.astype(np.float32)
    minimum = _halves(blocks, 2) * minima.astype(np.float32)
    values = codes.astype(np.float32)
    values *= scale[:, :, None]
    values -= minimum[:, :, None]
    return values.reshape(len(blocks), 256)


def dequantize_q4_k(blocks: np.ndarray) -> np.ndarray:
    """uint8[n, 144] -> float32[n, 256]. 32 bytes of nibbles hold 32 weights in the low and the next 32 in the high halves."""
    nibbles = blocks[:, 16:144].reshape(-1, 4, 32)
    codes = np.empty((len(blocks), 4, 2, 32), np.uint8)
    np.bitwise_and(nibbles, 15, out=codes[:, :, 0])
    np.right_shift(nibbles, 4, out=codes[:, :, 1])
    return _scaled_with_minimum(blocks, codes.reshape(-1, 8, 32))


def dequantize_q5_k(blocks: np.ndarray) -> np.ndarray:
    """uint8[n, 176] -> float32[n, 256]. As q4_k, with the fifth bits in 32 bytes: bit g of byte i belongs to weight 32·g + i."""
    high = blocks[:, 16:48]
    nibbles = blocks[:, 48:176].reshape(-1, 4, 32)
    codes = np.empty((len(blocks), 8, 32), np.uint8)
    np.bitwise_and(nibbles, 15, out=codes[:, 0::2])
    np.right_shift(nibbles, 4, out=codes[:, 1::2])
    for group in range(8):
        codes[:, group] |= (high >> group & 1) << 4
    return _scaled_with_minimum(blocks, codes)


def dequantize_q6_k(blocks: np.ndarray) -> np.ndarray:
    """uint8[n, 210] -> float32[n, 256].

    Two halves of 128 weights. In each, 64 bytes hold the lower nibbles (low halves weights 0–63, high halves 64–127) and 32 bytes
    the upper two bits, four weights 32 apart to a byte. Sixteen signed 8-bit scales, one per 16 weights, and one f16.
    """
    low = blocks[:, 0:128].reshape(-1, 2, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    codes = np.empty((len(blocks), 2, 4, 32), np.uint8)
    np.bitwise_and(low, 15, out=codes[:, :, 0:2])
    np.right_shift(low, 4, out=codes[:, :, 2:4])
    for quarter in range(4):
        codes[:, :, quarter] |= (high >> 2 * quarter & 3) << 4
    scales = _halves(blocks, 208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    values = codes.reshape(-1, 16, 16).astype(np.float32)
    values -= np.float32(32)
    values *= scales[:, :, None]
    return values.reshape(len(blocks), 256)
