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
from .simd import load_tile, to_f32

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
