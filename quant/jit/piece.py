"""What a block format tells the matrix kernels: how a tile becomes integers and scales (or values) in registers.

A piece is a few small functions over SIMD values. They work on several tiles at once: `shape` is a tile type such as tile(I32, G,
1), and register g is read `stride` bytes after register g - 1, where the next group of 16 rows has the same columns. One
generator makes every GEMV and GEMM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import njit

from .pipeline import KernelCompiler
from .simd import F16, I8, I16, I32, iota, like, load_tile, lookup, spread, to_f32, to_i32, to_u32

inline: Any = njit(  # type: ignore[call-overload]
    forceinline=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, pipeline_class=KernelCompiler
)
"""Decorator: a function that LLVM always inlines, so tiles pass through it in registers and literals stay constants."""

TILE_COLUMNS = 32


@dataclass(frozen=True)
class IntegerPiece:
    """weight = (code - bias) * scale, or code * scale + minimum; either times the row's number if rows have headers.

    codes(shape, address, stride, j) -> two tiles of i32 lanes holding the unsigned codes of columns 8j..8j+3 and 8j+4..8j+7;
        where levels are uneven, the level plus the bias, which makes it unsigned, in place of the code
    scale(shape, address, stride, half) -> f32 scales; `half` is 0 or 1 and matters only if a scale is shared by 16 columns
    minimum: the same for the minimum, or None
    row(shape, address, stride) -> f32 numbers of rows, for formats with headers, or None: the kernels multiply by it once,
        after all columns. Here `address` is that of the group of 16 rows.
    `address` is that of the tile. `shape` is a tile type of any vector: like(shape, F16) is the one that a piece loads.
    wide: codes use the whole byte, so the dot product must not assume 7 bits
    """

    tile_bytes: int
    bias: int
    scale_columns: int
    wide: bool
    codes: Callable[..., Any]
    scale: Callable[..., Any]
    minimum: Callable[..., Any] | None = None
    header_bytes: int = 0
    row: Callable[..., Any] | None = None


@dataclass(frozen=True)
class FloatPiece:
    """values(shape, address, stride, k) -> f32 weights of column k (0..31) of the tile, 16 rows."""

    tile_bytes: int
    element: str  # of the vectors that are loaded: "f32", "f16", or "i16" for bf16
    values: Callable[..., Any]
    header_bytes: int = 0


def scaled_piece(numbers: int, parts: tuple[str, ...], bias: int, table: tuple[int, ...] | None = None) -> IntegerPiece:
    """The piece of a format whose tile is `numbers` times 16 f16 (scale, then minimum) and then planes (quant/layout.py).

    parts: names of layout parts in the tile's order: "Bytes", "Nibbles", "FifthBits", "TopPairs".
    table: the levels of the codes, 16 or 32, if they are uneven.
    """
    codes, end = _codes(32 * numbers, parts, table, bias)

    @inline
    def scale(shape, address, stride, half):
        return to_f32(load_tile(like(shape, F16), address, stride))

    @inline
    def minimum(shape, address, stride, half):
        return to_f32(load_tile(like(shape, F16), address + 32, stride))

    wide = table is not None or "Bytes" in parts
    return IntegerPiece(end, bias, TILE_COLUMNS, wide, codes, scale, minimum if numbers == 2 else None)


def row_scaled_piece(parts: tuple[str, ...], bias: int, table: tuple[int, ...] | None, scale_columns: int, scale_bits: int) -> IntegerPiece:
    """The piece of a format whose scales are small integers times a bf16 per row (quant/row_scaled.py). Arguments as there."""
    scale_bytes = 16 * (TILE_COLUMNS // scale_columns) * scale_bits // 8
    codes, end = _codes(scale_bytes, parts, table, bias)
    half_bytes = 16 if scale_columns == 16 else 0

    if scale_bits == 8:

        @inline
        def scale(shape, address, stride, half):
            return to_f32(to_i32(load_tile(like(shape, I8), address + half_bytes * half, stride)))

    else:

        @inline
        def scale(shape, address, stride, half):
            low = (to_u32(load_tile(like(shape, I8), address, stride)) >> (4 * half)) & 15
            top = (spread(like(shape, I32), address + 16 + 4 * half, stride) >> (iota(0) * 2)) & 3
            return to_f32((low | (top << 4)) - 32)

    @inline
    def row(shape, address, stride):
        return to_f32(load_tile(like(shape, I16), address, stride))

    wide = table is not None or "Bytes" in parts
    return IntegerPiece(end, bias, scale_columns, wide, codes, scale, None, 2, row)


def _codes(at: int, parts: tuple[str, ...], table: tuple[int, ...] | None, bias: int) -> tuple[Callable[..., Any], int]:
    """The `codes` of a piece whose planes begin at byte `at` of a tile, and the end of the planes."""
    plane_counts = {"Bytes": 8, "Nibbles": 4, "FifthBits": 1, "TopPairs": 2}
    readers = []
    for part in parts:
        readers.append(_READERS[part](at))
        at += 64 * plane_counts[part]
    if len(readers) == 1:
        codes = readers[0]
    else:
        first, second = readers

        @inline
        def codes(shape, address, stride, j):
            low, high = first(shape, address, stride, j)
            low_top, high_top = second(shape, address, stride, j)
            return low | low_top, high | high_top

    if table is None:
        return codes, at
    level = lookup(tuple(entry + bias for entry in table))

    @inline
    def levels(shape, address, stride, j):
        low, high = codes(shape, address, stride, j)
        return level(low), level(high)

    return levels, at


def _bytes(offset: int) -> Callable[..., Any]:
    @inline
    def codes(shape, address, stride, j):
        at = address + offset + 128 * j
        return load_tile(shape, at, stride), load_tile(shape, at + 64, stride)

    return codes


def _nibbles(offset: int) -> Callable[..., Any]:
    @inline
    def codes(shape, address, stride, j):
        both = load_tile(shape, address + offset + 64 * j, stride)
        return both & 0x0F0F0F0F, (both >> 4) & 0x0F0F0F0F

    return codes


def _fifth_bits(offset: int) -> Callable[..., Any]:
    @inline
    def codes(shape, address, stride, j):
        bits = load_tile(shape, address + offset, stride)
        return ((bits >> (2 * j)) & 0x01010101) << 4, ((bits >> (2 * j + 1)) & 0x01010101) << 4

    return codes


def _top_pairs(offset: int) -> Callable[..., Any]:
    @inline
    def codes(shape, address, stride, j):
        pairs = load_tile(shape, address + offset + 64 * (j // 2), stride) >> (4 * (j & 1))
        return (pairs & 0x03030303) << 4, ((pairs >> 2) & 0x03030303) << 4

    return codes


_READERS = {"Bytes": _bytes, "Nibbles": _nibbles, "FifthBits": _fifth_bits, "TopPairs": _top_pairs}


def float_piece(word: str) -> FloatPiece:
    """The piece of f32, f16 or bf16: a tile is 32 vectors of 16 rows, one per column."""
    element, size = {"f32": ("f32", 4), "f16": ("f16", 2), "bf16": ("i16", 2)}[word]
    vector_bytes = 16 * size

    if word == "f32":

        @inline
        def values(shape, address, stride, k):
            return load_tile(shape, address + vector_bytes * k, stride)

    else:

        @inline
        def values(shape, address, stride, k):
            return to_f32(load_tile(shape, address + vector_bytes * k, stride))

    return FloatPiece(TILE_COLUMNS * vector_bytes, element, values)
