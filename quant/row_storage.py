"""Scales that are small integers, times one number per row: fewer bits than f16 scales, for any multiple of 32 columns.

The row's number is a bf16: it has the range of float32, so rows of any magnitude are served, and its few digits cost nothing,
because scales and then codes are chosen after it has been rounded (upwards, so that the largest scale is not clipped).
"""

from __future__ import annotations

import math

import numpy as np

from .arrays import COLUMNS
from .bf16 import from_bf16
from .block import ROWS, Scales
from .scales import SMALLEST, Grid, Symmetric, column_sum, fit_scale, inverse_or_zero, peaks, power_of_two
from .storage import Readers, ScaleStorage

HEADER = 2
"""Bytes of a row's number."""
NEGLIGIBLE = np.float32(2.0**-6)
"""Scales below this, in units of the row's number, become 0; those above it, but below the half that rounds to 1, become 1."""


class RowScales(ScaleStorage):
    """scale = row's number · scale's code, a product that is exact in float32.

    columns: that share a scale, 32 or 16. bits: of a scale's code, 8, or 6 where 16 columns share a scale. `stored` are float32[rows],
    the rows' numbers, and int8[rows, groups of columns], the scales' codes.
    In blocks a scale's code is a signed byte, whatever bits it has in tiles.
    """

    header_bytes = HEADER
    encoder = "row_encode_kernel"
    rounding = "integers"

    def __init__(self, columns: int = COLUMNS, bits: int = 8):
        self.columns, self.bits = columns, bits
        self.block_bytes = COLUMNS // columns

    @property
    def top(self) -> int:
        """The largest code of a scale; the least is its negative."""
        return (1 << (self.bits - 1)) - 1

    @property
    def tile_bytes(self) -> int:
        return ROWS * self.block_bytes * self.bits // 8

    def largest(self, grid: Grid) -> float:
        """Of a row's number: a power of two, such that no weight (this times a scale's code times a level) overflows."""
        most = float(np.abs(grid.values).max())
        return 2.0 ** (128 - math.ceil(math.log2(self.top)) - math.ceil(math.log2(most)))

    # ---- the choice of scales ------------------------------------------------------------------------------------------

    def row_numbers(self, grid: Grid, scale: np.ndarray) -> np.ndarray:
        """float32[n, groups] scales that are wanted -> float32[n], the numbers of the rows: the largest of them at the top code.

        Rounded up to bf16; 0 where it would not be a normal number.
        """
        number = np.minimum(np.abs(scale).max(axis=1) / np.float32(self.top), np.float32(self.largest(grid)))
        bits = (number.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
        return np.where(number < SMALLEST, np.float32(0), bits.view(np.float32))

    def _nearest_scales(self, scale: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Wanted scales and numbers of their rows, float32[m] both -> whole float32[m]: the scales' codes."""
        scaled = scale * inverse_or_zero(row)
        whole = np.rint(scaled.clip(-self.top, self.top))
        little = (whole == 0) & (np.abs(scaled) >= NEGLIGIBLE)
        return np.where(little, np.copysign(np.float32(1), scaled), whole)

    def nearest(self, grid: Symmetric, x: np.ndarray) -> tuple[tuple[np.ndarray, ...], np.ndarray]:  # type: ignore[override]
        groups = x.shape[1] // self.columns
        each_scale = x.reshape(-1, self.columns)
        wanted = peaks(each_scale) / grid.values[0]
        row = self.row_numbers(grid, wanted.reshape(-1, groups))
        each = np.repeat(row, groups)
        scales = self._nearest_scales(wanted, each)
        codes = grid.codes(grid.round(each_scale * inverse_or_zero(each * scales)[:, None]))
        return (row, scales.astype(np.int8).reshape(-1, groups)), codes.reshape(x.shape)

    def search(self, grid: Symmetric, x: np.ndarray, importance: np.ndarray) -> tuple[tuple[np.ndarray, ...], np.ndarray]:  # type: ignore[override]
        """Of a scale's code, its neighbours are tried too."""
        shape, groups = x.shape, x.shape[1] // self.columns
        x = x.reshape(-1, self.columns)
        w = np.ascontiguousarray(np.tile(importance.reshape(-1, self.columns), (shape[0], 1)).T)
        peak = peaks(x)
        unit, inverse_unit = power_of_two(np.abs(peak))
        x = np.ascontiguousarray(x.T) * inverse_unit
        wanted = fit_scale(grid, x, w, peak * inverse_unit) * unit
        row = self.row_numbers(grid, wanted.reshape(-1, groups))
        each = np.repeat(row, groups)
        scales = self._nearest_scales(wanted, each)
        best, least, chosen = scales, None, None
        for step in (0, -1, 1):
            tried = (scales + np.float32(step)).clip(-self.top, self.top)
            with np.errstate(over="ignore", invalid="ignore"):
                scale = each * tried * inverse_unit
                levels = grid.round(x * inverse_or_zero(scale))
                rest = x - scale * levels
                error = column_sum(w * rest * rest)
            if least is None or chosen is None:
                least, chosen = error, levels
                continue
            better = error < least
            best, least, chosen = np.where(better, tried, best), np.where(better, error, least), np.where(better, levels, chosen)
        assert chosen is not None
        return (row, best.astype(np.int8).reshape(-1, groups)), grid.codes(chosen.T).reshape(shape)

    def empty(self, rows: int, blocks: int) -> tuple[np.ndarray, ...]:
        return np.zeros(rows, np.float32), np.zeros((rows, blocks * self.block_bytes), np.int8)

    def values(self, stored: tuple[np.ndarray, ...]) -> Scales:
        rows, codes = stored
        with np.errstate(invalid="ignore", over="ignore"):
            return Scales(rows[:, None] * codes.astype(np.float32), None, stored)

    # ---- bytes ---------------------------------------------------------------------------------------------------------

    def to_bytes(self, stored: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
        rows, codes = stored
        header = (np.ascontiguousarray(rows, np.float32).view(np.uint32) >> 16).astype("<u2").view(np.uint8).reshape(rows.size, HEADER)
        blocks = codes.shape[1] // self.block_bytes
        return header, np.ascontiguousarray(codes, np.int8).view(np.uint8).reshape(rows.size, blocks, self.block_bytes)

    def from_bytes(self, header: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, ...]:
        rows = from_bf16(np.ascontiguousarray(header).view("<u2").reshape(len(header)))
        return rows, np.ascontiguousarray(numbers).view(np.int8).reshape(len(header), numbers.shape[1] * self.block_bytes)

    def to_tile(self, numbers: np.ndarray) -> np.ndarray:
        """8 bits: 16 bytes of each scale. 6 bits, of two scales: 16 bytes with the low nibbles of code + 32, then for each scale a
        little-endian word of 32 bits with the two top bits of row r at bit 2r.
        """
        scales = numbers.transpose(0, 2, 3, 1)
        if self.bits == 8:
            return scales.reshape(*scales.shape[:2], self.tile_bytes)
        unsigned = scales + np.uint8(32)
        low = (unsigned[..., 0, :] & 15) | (unsigned[..., 1, :] << 4)
        words = ((unsigned >> 4 & 3).astype(np.uint32) << (2 * np.arange(ROWS, dtype=np.uint32))).sum(axis=-1, dtype=np.uint32)
        return np.concatenate([low, words.astype("<u4").view(np.uint8)], axis=-1)

    def from_tile(self, tiles: np.ndarray) -> np.ndarray:
        shape = (*tiles.shape[:2], self.block_bytes, ROWS)
        if self.bits == 8:
            return tiles.reshape(shape).transpose(0, 3, 1, 2)
        low = np.stack([tiles[..., :ROWS] & 15, tiles[..., :ROWS] >> 4], axis=-2)
        words = np.ascontiguousarray(tiles[..., ROWS:]).view("<u4")[..., None]
        top = (words >> (2 * np.arange(ROWS, dtype=np.uint32)) & 3).astype(np.uint8)
        return ((low | top << 4) - np.uint8(32)).transpose(0, 3, 1, 2)

    # ---- kernels and error feedback ------------------------------------------------------------------------------------

    def readers(self) -> Readers:
        from .jit.piece import inline
        from .jit.simd import I8, I16, I32, iota, like, load_tile, spread, to_f32, to_i32, to_u32

        half_bytes = 16 if self.columns == 16 else 0
        if self.bits == 8:

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

        return Readers(scale, None, row)

    def scratch_bytes(self, blocks: int) -> int:
        return 64 * blocks * self.block_bytes

    def steps(self, scales: Scales, unit: np.ndarray, inverse: np.ndarray) -> tuple[np.ndarray, float]:
        row = scales.stored[0] * inverse
        return np.stack([inverse_or_zero(row), row], axis=1), float(self.top)

    def moved(self, old: Scales, scale: np.ndarray, minimum: np.ndarray | None) -> Scales:
        row = old.stored[0]
        return Scales(scale, None, (row, np.rint(scale * inverse_or_zero(row)[:, None]).astype(np.int8)))


ROW_SCALES = RowScales()
