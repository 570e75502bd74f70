"""How a format stores its scales: an object that a format has, as it has a grid (scales.py) and parts (parts.py).

It says how scales are chosen and rounded, how they lie in rows, blocks and tiles, how kernels read them, and how methods that move
scales (error feedback) may do so. Here are what all of them do, and scales of f16; row_storage.py has integers times a number per row,
e8m0.py powers of two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from .arrays import COLUMNS
from .block import ROWS, Scales
from .errors import FormatError
from .scales import Grid, finite_f16


class Readers(NamedTuple):
    """Of a kernel piece (jit/piece.py): `scale`, and `minimum` and `row` or None."""

    scale: Callable[..., Any]
    minimum: Callable[..., Any] | None = None
    row: Callable[..., Any] | None = None


class Writers(NamedTuple):
    """What the compiled encoder (encode_kernel.py) does with scales of 16 rows, as functions for Numba.

    nearest(x, levels) -> (scale, minimum) and search(x, weights, candidates, count, levels, scratch) -> the same: see grid_kernels.py
    to_tile(scale, minimum, out)                     stored at the beginning of a tile
    to_rows(scale, minimum, scratch, out, row_bytes)  stored at the beginning of the blocks of 16 rows; 128 bytes of scratch
    gather(source, row_bytes, out)                   from the beginnings of the blocks of 16 rows to that of a tile
    """

    nearest: Callable[..., Any]
    search: Callable[..., Any]
    to_tile: Callable[..., Any]
    to_rows: Callable[..., Any]
    gather: Callable[..., Any]


class ScaleStorage(ABC):
    """Scales of one kind. In `Scales.stored` a storage keeps its own arrays, one entry per row each; nobody else looks into them.

    Attributes
    ----------
    columns       that share a scale: 16 or 32
    numbers       per group of columns: 1 for a scale, 2 with a minimum
    header_bytes  of a row, before its blocks
    block_bytes   of the scales of a block of 32 columns
    tile_bytes    of the scales of a tile: 16 rows of a block
    encoder       the module of the kernel that encodes formats with such scales, or None: NumPy does
    rounding      how error feedback rounds a scale that it has moved (feedback_kernel.py): "f16", "integers" of a row's number,
                  or "fixed": it does not move scales
    any_scale     True if each scale is stored by itself with at least the digits of f16: see `rounded`
    """

    columns: int = COLUMNS
    numbers: int = 1
    header_bytes: ClassVar[int] = 0
    block_bytes: int
    encoder: ClassVar[str | None] = None
    rounding: ClassVar[str] = "fixed"
    any_scale: ClassVar[bool] = False

    @property
    def tile_bytes(self) -> int:
        return ROWS * self.block_bytes

    # ---- numbers -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def nearest(self, grid: Grid, x: np.ndarray) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        """float32[rows, padded columns] -> (what is stored, uint8 codes): scales by the largest weights, codes that come nearest."""

    @abstractmethod
    def search(self, grid: Grid, x: np.ndarray, importance: np.ndarray) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        """The same with the least weighted squared error found. importance: float32[padded columns]."""

    @abstractmethod
    def empty(self, rows: int, blocks: int) -> tuple[np.ndarray, ...]:
        """What is stored of zeros: `stored` of that many rows."""

    @abstractmethod
    def values(self, stored: tuple[np.ndarray, ...]) -> Scales:
        """What is stored -> what weights are multiplied with."""

    def rounded(self, scale: np.ndarray, minimum: np.ndarray | None) -> Scales:
        """float32[rows, groups] -> the nearest that can be stored, within 2^-11 of them if they are in range.

        Raises FormatError unless `any_scale` is true, and for a minimum where none is stored or none where one is.
        """
        raise FormatError(f"{type(self).__name__} cannot take any scales: choose them")

    # ---- bytes ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def to_bytes(self, stored: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
        """-> uint8[rows, header_bytes], uint8[rows, blocks, block_bytes]."""

    @abstractmethod
    def from_bytes(self, header: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, ...]:
        """The inverse of `to_bytes`."""

    @abstractmethod
    def to_tile(self, numbers: np.ndarray) -> np.ndarray:
        """uint8[groups, 16, blocks, block_bytes] -> uint8[groups, blocks, tile_bytes]."""

    @abstractmethod
    def from_tile(self, tiles: np.ndarray) -> np.ndarray:
        """The inverse of `to_tile`."""

    # ---- kernels -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def readers(self) -> Readers:
        """How the matrix kernels read scales. Imports numba."""

    def writers(self, grid: Grid) -> Writers:
        """For the kernel `encoder`, if that is encode_kernel. Imports numba."""
        raise FormatError(f"{type(self).__name__}: no compiled encoder writes such scales")

    def scratch_bytes(self, blocks: int) -> int:
        """Scratch memory that the kernel `encoder` needs for the scales of a group of 16 rows."""
        return 0

    # ---- error feedback ------------------------------------------------------------------------------------------------

    def steps(self, scales: Scales, unit: np.ndarray, inverse: np.ndarray) -> tuple[np.ndarray, float]:
        """(float32[rows, 2]: factors to what is stored and back, for scales that were multiplied with `inverse`; largest integer).

        unit, inverse: float32[rows], a power of two near the weights of each row and one over it. See `rounding`.
        """
        return np.zeros((unit.size, 2), np.float32), 0.0

    def moved(self, old: Scales, scale: np.ndarray, minimum: np.ndarray | None) -> Scales:
        """`old` with other numbers, which were rounded to ones that can be stored."""
        return old


class F16Scales(ScaleStorage):
    """An f16 for 32 columns; with `minimum`, a second one that is added. Blocks begin with them, tiles with 16 of each."""

    encoder = "encode_kernel"
    rounding = "f16"
    any_scale = True

    def __init__(self, minimum: bool = False):
        self.numbers = 2 if minimum else 1
        self.block_bytes = 2 * self.numbers

    def nearest(self, grid: Grid, x: np.ndarray) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        found = grid.nearest(x.reshape(-1, COLUMNS))
        return (found.numbers.reshape(x.shape[0], -1, self.numbers),), found.codes.reshape(x.shape)

    def search(self, grid: Grid, x: np.ndarray, importance: np.ndarray) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        found = grid.search(x.reshape(-1, COLUMNS), np.tile(importance.reshape(-1, COLUMNS), (x.shape[0], 1)))
        return (found.numbers.reshape(x.shape[0], -1, self.numbers),), found.codes.reshape(x.shape)

    def empty(self, rows: int, blocks: int) -> tuple[np.ndarray, ...]:
        return (np.zeros((rows, blocks, self.numbers), np.float16),)

    def values(self, stored: tuple[np.ndarray, ...]) -> Scales:
        wide = stored[0].astype(np.float32)
        return Scales(wide[..., 0], wide[..., 1] if self.numbers == 2 else None, stored)

    def rounded(self, scale: np.ndarray, minimum: np.ndarray | None) -> Scales:
        if (minimum is None) != (self.numbers == 1):
            raise FormatError(f"these scales have {'a' if self.numbers == 2 else 'no'} minimum")
        numbers = np.stack([scale] if minimum is None else [scale, minimum], axis=-1)
        return self.values((finite_f16(numbers).astype(np.float16),))

    def to_bytes(self, stored: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
        return np.empty((stored[0].shape[0], 0), np.uint8), np.ascontiguousarray(stored[0], "<f2").view(np.uint8)

    def from_bytes(self, header: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, ...]:
        return (np.ascontiguousarray(numbers).view("<f2"),)

    def to_tile(self, numbers: np.ndarray) -> np.ndarray:
        words = np.ascontiguousarray(numbers).view("<u2")
        return np.ascontiguousarray(words.transpose(0, 2, 3, 1)).view(np.uint8).reshape(words.shape[0], words.shape[2], self.tile_bytes)

    def from_tile(self, tiles: np.ndarray) -> np.ndarray:
        words = np.ascontiguousarray(tiles).view("<u2").reshape(*tiles.shape[:2], self.numbers, ROWS)
        return np.ascontiguousarray(words.transpose(0, 3, 1, 2)).view(np.uint8)

    def readers(self) -> Readers:
        from .jit.piece import inline
        from .jit.simd import F16, like, load_tile, to_f32

        @inline
        def scale(shape, address, stride, half):
            return to_f32(load_tile(like(shape, F16), address, stride))

        @inline
        def minimum(shape, address, stride, half):
            return to_f32(load_tile(like(shape, F16), address + 32, stride))

        return Readers(scale, minimum if self.numbers == 2 else None)

    def writers(self, grid: Grid) -> Writers:
        from .grid_kernels import nearest_of, search_of
        from .jit.memory import load_u16, store_i16
        from .jit.piece import inline
        from .jit.simd import store, to_f16

        numbers, affine = self.numbers, self.numbers == 2

        @inline
        def to_tile(scale, low, out):
            store(out, to_f16(scale))
            if affine:
                store(out + 32, to_f16(low))

        @inline
        def to_rows(scale, low, scratch, out, row_bytes):
            store(scratch, to_f16(scale))
            store(scratch + 32, to_f16(low))
            for r in range(16):
                for i in range(numbers):
                    store_i16(out + r * row_bytes + 2 * i, load_u16(scratch + 32 * i + 2 * r))

        @inline
        def gather(source, row_bytes, out):
            for r in range(16):
                for i in range(numbers):
                    store_i16(out + 32 * i + 2 * r, load_u16(source + r * row_bytes + 2 * i))

        return Writers(nearest_of(grid), search_of(grid), to_tile, to_rows, gather)

    def steps(self, scales: Scales, unit: np.ndarray, inverse: np.ndarray) -> tuple[np.ndarray, float]:
        return np.stack([unit, inverse], axis=1), 0.0

    def moved(self, old: Scales, scale: np.ndarray, minimum: np.ndarray | None) -> Scales:
        numbers = np.stack([scale] if minimum is None else [scale, minimum], axis=-1).astype(np.float16)
        return Scales(scale, minimum, (numbers,))


F16 = F16Scales()
F16_WITH_MINIMUM = F16Scales(minimum=True)
