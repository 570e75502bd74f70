"""Formats whose scales are small integers, times one number per row: fewer bits than f16 scales, for any multiple of 32 columns.

What such formats have in common is here; a format's own file names its grid (scales.py), its parts (layout.py), and how many
columns share a scale of how many bits.

The row's number is a bf16: it has the range of float32, so rows of any magnitude are served, and its few digits cost nothing,
because scales and then codes are chosen after it has been rounded (upwards, so that the largest scale is not clipped).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from .block import ROWS, BlockFormat, Scales
from .errors import FormatError
from .layout import (
    COLUMNS,
    VECTOR_BYTES,
    Part,
    check_codes,
    check_matrix,
    check_tiles,
    from_vectors,
    group_rows,
    pad_columns,
    row_chunks,
    to_vectors,
)
from .scaled import METHODS
from .scales import SMALLEST, SignedMax, Table, check_finite, check_importance, column_sum, fit_scale, inverse_or_zero, peaks, power_of_two

HEADER = 2
"""Bytes of a row's number."""
NEGLIGIBLE = np.float32(2.0**-6)
"""Scales below this, in units of the row's number, become 0; those above it, but below the half that rounds to 1, become 1."""


class RowScaledIntegers(BlockFormat):
    """value = (row's number · scale's code) · level of the weight's code. The first product is exact in float32.

    Attributes of a subclass
    ------------------------
    grid           the levels, and how a scale is chosen
    parts          what a block holds after its scales' codes, in order; a tile's planes come in this order too. Those of which a
                   kernel needs one for several others come first: it then reads memory in order, which can double its speed
    scale_columns  32 or 16
    scale_bits     of a scale's code: 8, or 6 where 16 columns share a scale
    method         the default of `encode`
    """

    grid: ClassVar[SignedMax | Table]
    parts: ClassVar[tuple[Part, ...]]
    scale_bits: ClassVar[int] = 8
    method: ClassVar[str] = "search"
    block_columns = COLUMNS
    header_bytes = HEADER

    @property
    def block_scales(self) -> int:
        """Scales of a block."""
        return COLUMNS // self.scale_columns

    @property
    def top(self) -> int:
        """The largest code of a scale; the least is its negative."""
        return (1 << (self.scale_bits - 1)) - 1

    @property
    def largest(self) -> float:
        """Of a row's number: a power of two, such that no weight (this times a scale's code times a level) overflows."""
        most = float(np.abs(self.levels).max())
        return 2.0 ** (128 - math.ceil(math.log2(self.top)) - math.ceil(math.log2(most)))

    @property
    def block_bytes(self) -> int:  # type: ignore[override]
        """In blocks a scale's code is a signed byte, whatever bits it has in tiles."""
        return self.block_scales + sum(part.block_bytes for part in self.parts)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales' codes of a tile."""
        return ROWS * self.block_scales * self.scale_bits // 8

    @property
    def tile_bytes(self) -> int:
        return self.scale_bytes + VECTOR_BYTES * sum(part.planes for part in self.parts)

    @property
    def levels(self) -> np.ndarray:
        """See BlockFormat.levels."""
        return self.grid.values

    def encode(self, weights: np.ndarray, importance: np.ndarray | None = None, method: str | None = None) -> np.ndarray:
        """See BlockFormat.encode. Raises NonFiniteError for NaN and infinity, FormatError for arguments that do not suit.

        Padding columns are zero weights like any other, and weigh as much as the last column.
        """
        weights = check_matrix(weights, self.name)
        out = np.empty(self.blocks_shape(*weights.shape), np.uint8)
        for chunk, rows, scales, codes in self._coded(weights, importance, method):
            out[chunk] = self._join(rows, scales, codes)
        return out

    def choose(self, weights: np.ndarray, importance: np.ndarray | None = None, method: str | None = None) -> Scales:
        """See BlockFormat.choose."""
        weights = check_matrix(weights, self.name)
        padded = -(-weights.shape[1] // COLUMNS) * COLUMNS
        rows, scales = np.zeros(weights.shape[0], np.float32), np.zeros((weights.shape[0], padded // self.scale_columns), np.int8)
        for chunk, number, codes, _ in self._coded(weights, importance, method):
            rows[chunk], scales[chunk] = number, codes
        return _scales(rows, scales)

    def pack(self, scales: Scales, codes: np.ndarray) -> np.ndarray:
        """See BlockFormat.pack."""
        rows, numbers = scales.stored
        check_codes(codes, (rows.size, numbers.shape[1] * self.scale_columns), len(self.levels), self.name)
        return self._join(rows, numbers, codes)

    def unpack(self, blocks: np.ndarray) -> tuple[Scales, np.ndarray]:
        """See BlockFormat.unpack."""
        rows, scales, codes = self._split(blocks)
        return _scales(rows, scales), codes

    def decode(self, blocks: np.ndarray, columns: int | None = None) -> np.ndarray:
        """See BlockFormat.decode."""
        padded = self._count(blocks) * COLUMNS
        columns = padded if columns is None else columns
        if -(-columns // COLUMNS) * COLUMNS != padded:
            raise FormatError(f"{self.name}: {padded // COLUMNS} blocks of {COLUMNS} do not make rows of {columns} columns")
        out = np.empty((blocks.shape[0], columns), np.float32)
        for chunk in row_chunks(blocks.shape[0], padded):
            rows, scales, codes = self._split(blocks[chunk])
            with np.errstate(invalid="ignore", over="ignore"):  # a damaged file may hold a number that is NaN or infinite
                scale = rows[:, None] * scales
                values = self.levels[codes].reshape(*scale.shape, self.scale_columns) * scale[..., None]
            out[chunk] = values.reshape(codes.shape)[:, :columns]
        return out

    def tile(self, blocks: np.ndarray) -> np.ndarray:
        """See BlockFormat.tile."""
        count = self._count(blocks)
        groups = -(-blocks.shape[0] // ROWS)
        out = np.empty((groups, ROWS * HEADER + count * self.tile_bytes), np.uint8)
        for chunk in row_chunks(blocks.shape[0], count * COLUMNS):
            part = group_rows(blocks[chunk])
            run = slice(chunk.start // ROWS, chunk.start // ROWS + part.shape[0])
            out[run, : ROWS * HEADER] = part[..., :HEADER].reshape(-1, ROWS * HEADER)
            inner = part[..., HEADER:].reshape(*part.shape[:2], count, self.block_bytes)
            vectors = to_vectors(self._block_codes(inner[..., self.block_scales :]))
            planes = [p.to_planes(vectors).reshape(part.shape[0], count, p.planes * VECTOR_BYTES) for p in self.parts]
            scales = self._tile_scales(inner[..., : self.block_scales].transpose(0, 2, 3, 1))
            out[run, ROWS * HEADER :] = np.concatenate([scales, *planes], axis=-1).reshape(part.shape[0], -1)
        return out.reshape(-1)

    def untile(self, tiles: np.ndarray, rows: int, columns: int) -> np.ndarray:
        """See BlockFormat.untile."""
        count, groups = -(-columns // COLUMNS), -(-rows // ROWS)
        grouped = check_tiles(tiles, self.tiles_nbytes(rows, columns), self.name).reshape(groups, -1 if groups else 0)
        out = np.empty(self.blocks_shape(rows, columns), np.uint8)
        for chunk in row_chunks(rows, columns):
            part = grouped[chunk.start // ROWS : -(-chunk.stop // ROWS)]
            inner = part[:, ROWS * HEADER :].reshape(part.shape[0], count, self.tile_bytes)
            vectors, at = np.zeros((part.shape[0], count, 8, VECTOR_BYTES), np.uint8), self.scale_bytes
            for p in self.parts:
                size = p.planes * VECTOR_BYTES
                vectors |= p.from_planes(inner[..., at : at + size].reshape(part.shape[0], count, p.planes, VECTOR_BYTES))
                at += size
            codes = from_vectors(vectors)
            scales = self._row_scales(inner[..., : self.scale_bytes]).transpose(0, 3, 1, 2)
            blocks = np.concatenate([scales, *(p.to_block(codes) for p in self.parts)], axis=-1)
            blocks = blocks.reshape(part.shape[0] * ROWS, count * self.block_bytes)
            header = part[:, : ROWS * HEADER].reshape(-1, HEADER)
            out[chunk] = np.concatenate([header, blocks], axis=1)[: chunk.stop - chunk.start]
        return out

    def piece(self) -> Any:
        """See BlockFormat.piece."""
        from .jit.piece import row_scaled_piece

        table = self.grid.table if isinstance(self.grid, Table) else None
        names = tuple(type(part).__name__ for part in self.parts)
        return row_scaled_piece(names, self.grid.bias, table, self.scale_columns, self.scale_bits)

    # ---- the choice of scales ------------------------------------------------------------------------------------------

    def _coded(
        self, weights: np.ndarray, importance: np.ndarray | None, method: str | None
    ) -> Iterator[tuple[slice, np.ndarray, np.ndarray, np.ndarray]]:
        """Runs of rows, their numbers float32[n], scales int8[n, groups of columns], codes uint8[n, padded columns]."""
        method = method or self.method
        if method not in METHODS:
            raise FormatError(f"{self.name}: unknown method {method!r}; known are {', '.join(METHODS)}")
        rows, columns = weights.shape
        weigh = np.ones(columns, np.float32) if importance is None else check_importance(importance, columns, self.name)
        weigh = np.pad(weigh, (0, -columns % COLUMNS), mode="edge" if columns else "constant").reshape(-1, self.scale_columns)
        for chunk in row_chunks(rows, columns):
            check_finite(weights[chunk], self.name, chunk.start)
            x = pad_columns(weights[chunk])
            groups = x.shape[1] // self.scale_columns
            if x.size == 0:
                yield chunk, np.zeros(x.shape[0], np.float32), np.zeros((x.shape[0], groups), np.int8), np.zeros(x.shape, np.uint8)
                continue
            x = x.reshape(-1, self.scale_columns)
            row, scales, levels = self._nearest(x, groups) if method == "nearest" else self._search(x, weigh)
            codes = self.grid.codes(levels).reshape(-1, groups * self.scale_columns)
            yield chunk, row, scales.astype(np.int8).reshape(-1, groups), codes

    def row_numbers(self, scale: np.ndarray) -> np.ndarray:
        """float32[n, groups] scales that are wanted -> float32[n], the numbers of the rows: the largest of them at the top code.

        Rounded up to bf16; 0 where it would not be a normal number.
        """
        number = np.minimum(np.abs(scale).max(axis=1) / np.float32(self.top), np.float32(self.largest))
        bits = (number.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
        return np.where(number < SMALLEST, np.float32(0), bits.view(np.float32))

    def _nearest_scales(self, scale: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Wanted scales and numbers of their rows, float32[m] both -> whole float32[m]: the scales' codes."""
        scaled = scale * inverse_or_zero(row)
        whole = np.rint(scaled.clip(-self.top, self.top))
        little = (whole == 0) & (np.abs(scaled) >= NEGLIGIBLE)
        return np.where(little, np.copysign(np.float32(1), scaled), whole)

    def _nearest(self, x: np.ndarray, groups: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """float32[m, scale_columns] -> numbers of rows, scales' codes, levels."""
        wanted = peaks(x) / self.grid.values[0]
        row = self.row_numbers(wanted.reshape(-1, groups))
        each = np.repeat(row, groups)
        scales = self._nearest_scales(wanted, each)
        return row, scales, self.grid.round(x * inverse_or_zero(each * scales)[:, None])

    def _search(self, x: np.ndarray, weigh: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As `_nearest`; weigh: float32[groups, scale_columns]. Of a scale's code, its neighbours are tried too."""
        groups = weigh.shape[0]
        w = np.ascontiguousarray(np.tile(weigh, (x.shape[0] // groups, 1)).T)
        peak = peaks(x)
        unit, inverse_unit = power_of_two(np.abs(peak))
        x = np.ascontiguousarray(x.T) * inverse_unit
        wanted = fit_scale(self.grid, x, w, peak * inverse_unit) * unit
        row = self.row_numbers(wanted.reshape(-1, groups))
        each = np.repeat(row, groups)
        scales = self._nearest_scales(wanted, each)
        best, least, chosen = scales, None, None
        for step in (0, -1, 1):
            tried = (scales + np.float32(step)).clip(-self.top, self.top)
            with np.errstate(over="ignore", invalid="ignore"):
                scale = each * tried * inverse_unit
                levels = self.grid.round(x * inverse_or_zero(scale))
                rest = x - scale * levels
                error = column_sum(w * rest * rest)
            if least is None or chosen is None:
                least, chosen = error, levels
                continue
            better = error < least
            best, least, chosen = np.where(better, tried, best), np.where(better, error, least), np.where(better, levels, chosen)
        assert chosen is not None
        return row, best, chosen.T

    # ---- bytes ---------------------------------------------------------------------------------------------------------

    def _count(self, blocks: np.ndarray) -> int:
        """Blocks of a row. Raises FormatError unless `blocks` is uint8[rows, bytes of a row]."""
        sound = blocks.dtype == np.uint8 and blocks.ndim == 2 and blocks.shape[1] % self.block_bytes == HEADER % self.block_bytes
        if not sound or blocks.shape[1] < HEADER:
            wanted = f"uint8[rows, {HEADER} + {self.block_bytes} per block]"
            raise FormatError(f"{self.name}: blocks must be {wanted}, not {blocks.dtype}{list(blocks.shape)}")
        return (blocks.shape[1] - HEADER) // self.block_bytes

    def _join(self, rows: np.ndarray, scales: np.ndarray, codes: np.ndarray) -> np.ndarray:
        n, count = codes.shape[0], codes.shape[1] // COLUMNS
        header = (np.ascontiguousarray(rows, np.float32).view(np.uint32) >> 16).astype("<u2").view(np.uint8).reshape(n, HEADER)
        split = codes.reshape(n, count, COLUMNS)
        numbers = np.ascontiguousarray(scales, np.int8).view(np.uint8).reshape(n, count, self.block_scales)
        blocks = np.concatenate([numbers, *(part.to_block(split) for part in self.parts)], axis=-1)
        return np.concatenate([header, blocks.reshape(n, count * self.block_bytes)], axis=1)

    def _split(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        n, count = blocks.shape[0], self._count(blocks)
        rows = np.ascontiguousarray(blocks[:, :HEADER]).view("<u2").reshape(n).astype(np.uint32) << 16
        inner = blocks[:, HEADER:].reshape(n, count, self.block_bytes)
        scales = np.ascontiguousarray(inner[..., : self.block_scales]).view(np.int8).reshape(n, count * self.block_scales)
        return rows.view(np.float32), scales, self._block_codes(inner[..., self.block_scales :]).reshape(n, count * COLUMNS)

    def _block_codes(self, inner: np.ndarray) -> np.ndarray:
        """uint8[..., bytes of the parts] -> uint8[..., 32]."""
        codes, at = np.zeros((*inner.shape[:-1], COLUMNS), np.uint8), 0
        for part in self.parts:
            codes |= part.from_block(inner[..., at : at + part.block_bytes])
            at += part.block_bytes
        return codes

    def _tile_scales(self, scales: np.ndarray) -> np.ndarray:
        """uint8[groups, blocks, block_scales, 16] signed bytes -> uint8[groups, blocks, scale_bytes].

        Bytes: 16 of each scale. 6 bits, of two scales: 16 bytes with the low nibbles of code + 32, then for each scale a
        little-endian word of 32 bits with the two top bits of row r at bit 2r.
        """
        if self.scale_bits == 8:
            return scales.reshape(*scales.shape[:2], self.scale_bytes)
        unsigned = scales + np.uint8(32)
        low = (unsigned[..., 0, :] & 15) | (unsigned[..., 1, :] << 4)
        words = ((unsigned >> 4 & 3).astype(np.uint32) << (2 * np.arange(ROWS, dtype=np.uint32))).sum(axis=-1, dtype=np.uint32)
        return np.concatenate([low, words.astype("<u4").view(np.uint8)], axis=-1)

    def _row_scales(self, packed: np.ndarray) -> np.ndarray:
        """The inverse of `_tile_scales`."""
        shape = (*packed.shape[:2], self.block_scales, ROWS)
        if self.scale_bits == 8:
            return packed.reshape(shape)
        low = np.stack([packed[..., :ROWS] & 15, packed[..., :ROWS] >> 4], axis=-2)
        words = np.ascontiguousarray(packed[..., ROWS:]).view("<u4")[..., None]
        top = (words >> (2 * np.arange(ROWS, dtype=np.uint32)) & 3).astype(np.uint8)
        return (low | top << 4) - np.uint8(32)


def _scales(rows: np.ndarray, scales: np.ndarray) -> Scales:
    with np.errstate(invalid="ignore", over="ignore"):
        return Scales(rows[:, None] * scales.astype(np.float32), None, (rows, scales))
