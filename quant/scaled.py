"""Formats of integers that share an f16 scale, and perhaps an f16 minimum, per 32 columns.

What such formats have in common is here; a format's own file names its grid (scales.py) and its parts (layout.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from .block import ROWS, BlockFormat, Scales
from .errors import FormatError
from .layout import (
    COLUMNS,
    Part,
    check_blocks,
    check_codes,
    check_matrix,
    check_tiles,
    group_rows,
    join_block,
    join_tiles,
    pad_columns,
    row_chunks,
    split_block,
    split_tiles,
)
from .scales import Affine, Coded, Grid, Table, check_finite, check_importance

METHODS = ("nearest", "search")


def _scales(numbers: np.ndarray) -> Scales:
    """f16[rows, blocks, numbers] as Scales."""
    wide = numbers.astype(np.float32)
    return Scales(wide[..., 0], wide[..., 1] if numbers.shape[-1] == 2 else None, (numbers,))


class ScaledIntegers(BlockFormat):
    """value = scale · (code - bias), or scale · code + minimum if the grid is affine. All arithmetic in float32, as in ggml.

    Attributes of a subclass
    ------------------------
    grid        how scales and codes are chosen
    parts       what a block holds after its f16 numbers, in order
    tile_parts  the same parts in the order of a tile's planes, if that differs
    method      the default of `encode`
    """

    grid: ClassVar[Grid]
    parts: ClassVar[tuple[Part, ...]]
    tile_parts: ClassVar[tuple[Part, ...] | None] = None
    method: ClassVar[str] = "nearest"
    block_columns = COLUMNS

    @property
    def numbers(self) -> int:
        """f16 numbers per block: the scale, and the minimum if there is one."""
        return 2 if isinstance(self.grid, Affine) else 1

    @property
    def block_bytes(self) -> int:  # type: ignore[override]
        return 2 * self.numbers + sum(part.block_bytes for part in self.parts)

    def encode(self, weights: np.ndarray, importance: np.ndarray | None = None, method: str | None = None) -> np.ndarray:
        """See BlockFormat.encode. Raises NonFiniteError for NaN and infinity, FormatError for arguments that do not suit.

        Padding columns are zero weights like any other, and weigh as much as the last column.
        """
        weights = check_matrix(weights, self.name)
        out = np.empty(self.blocks_shape(*weights.shape), np.uint8)
        for chunk, coded in self._coded(weights, importance, method):
            out[chunk] = join_block(coded.numbers, coded.codes, self.parts).reshape(-1, *out.shape[1:])
        return out

    def _coded(self, weights: np.ndarray, importance: np.ndarray | None, method: str | None) -> Iterator[tuple[slice, Coded]]:
        """Runs of rows, and their blocks as numbers."""
        method = method or self.method
        if method not in METHODS:
            raise FormatError(f"{self.name}: unknown method {method!r}; known are {', '.join(METHODS)}")
        rows, columns = weights.shape
        importance = np.ones(columns, np.float32) if importance is None else check_importance(importance, columns, self.name)
        blocks = -(-columns // COLUMNS)
        weigh = np.pad(importance, (0, blocks * COLUMNS - columns), mode="edge" if columns else "constant")
        for chunk in row_chunks(rows, columns):
            check_finite(weights[chunk], self.name, chunk.start)
            x = pad_columns(weights[chunk]).reshape(-1, COLUMNS)
            if x.size == 0:
                continue
            if method == "nearest":
                yield chunk, self.grid.nearest(x)
            else:
                yield chunk, self.grid.search(x, np.tile(weigh.reshape(blocks, COLUMNS), (x.shape[0] // blocks, 1)))

    @property
    def levels(self) -> np.ndarray:
        """See BlockFormat.levels."""
        return self.grid.values

    def choose(self, weights: np.ndarray, importance: np.ndarray | None = None, method: str | None = None) -> Scales:
        """See BlockFormat.choose."""
        weights = check_matrix(weights, self.name)
        numbers = np.zeros((weights.shape[0], -(-weights.shape[1] // COLUMNS), self.numbers), np.float16)
        for chunk, coded in self._coded(weights, importance, method):
            numbers[chunk] = coded.numbers.reshape(-1, *numbers.shape[1:])
        return _scales(numbers)

    def pack(self, scales: Scales, codes: np.ndarray) -> np.ndarray:
        """See BlockFormat.pack."""
        (numbers,) = scales.stored
        rows, blocks, _ = numbers.shape
        check_codes(codes, (rows, blocks * COLUMNS), len(self.levels), self.name)
        out = np.empty(self.blocks_shape(rows, blocks * COLUMNS), np.uint8)
        for chunk in row_chunks(rows, blocks * COLUMNS):
            out[chunk] = join_block(numbers[chunk], codes[chunk].reshape(-1, blocks, COLUMNS), self.parts)
        return out

    def unpack(self, blocks: np.ndarray) -> tuple[Scales, np.ndarray]:
        """See BlockFormat.unpack."""
        check_blocks(blocks, self.block_bytes, self.name)
        numbers, codes = split_block(blocks, self.numbers, self.parts)
        return _scales(numbers), codes.reshape(blocks.shape[0], -1)

    def decode(self, blocks: np.ndarray, columns: int | None = None) -> np.ndarray:
        """See BlockFormat.decode."""
        check_blocks(blocks, self.block_bytes, self.name)
        rows, count, _ = blocks.shape
        columns = count * COLUMNS if columns is None else columns
        if -(-columns // COLUMNS) != count:
            raise FormatError(f"{self.name}: {count} blocks of {COLUMNS} do not make rows of {columns} columns")
        out = np.empty((rows, columns), np.float32)
        for chunk in row_chunks(rows, columns):
            numbers, codes = split_block(blocks[chunk], self.numbers, self.parts)
            with np.errstate(invalid="ignore"):  # a damaged file may hold a scale that is NaN or infinite
                values = numbers[..., :1].astype(np.float32) * self.levels[codes]
                if isinstance(self.grid, Affine):
                    values += numbers[..., 1:].astype(np.float32)
            out[chunk] = values.reshape(values.shape[0], count * COLUMNS)[:, :columns]
        return out

    def tile(self, blocks: np.ndarray) -> np.ndarray:
        """See BlockFormat.tile."""
        check_blocks(blocks, self.block_bytes, self.name)
        rows, count, _ = blocks.shape
        out = np.empty((-(-rows // ROWS), count, self.tile_bytes), np.uint8)
        for chunk in row_chunks(rows, count * COLUMNS):
            numbers, codes = split_block(group_rows(blocks[chunk]), self.numbers, self.parts)
            tiles = join_tiles(numbers, codes, self.tile_parts or self.parts)
            out[chunk.start // ROWS : chunk.start // ROWS + tiles.shape[0]] = tiles
        return out.reshape(-1)

    def untile(self, tiles: np.ndarray, rows: int, columns: int) -> np.ndarray:
        """See BlockFormat.untile."""
        count = -(-columns // COLUMNS)
        grouped = check_tiles(tiles, self.tiles_nbytes(rows, columns), self.name)
        grouped = grouped.reshape(-(-rows // ROWS), count, self.tile_bytes)
        out = np.empty((rows, count, self.block_bytes), np.uint8)
        for chunk in row_chunks(rows, columns):
            part = grouped[chunk.start // ROWS : -(-chunk.stop // ROWS)]
            numbers, codes = split_tiles(part, self.numbers, self.tile_parts or self.parts)
            blocks = join_block(numbers, codes, self.parts).reshape(part.shape[0] * ROWS, count, self.block_bytes)
            out[chunk] = blocks[: chunk.stop - chunk.start]
        return out

    def piece(self) -> Any:
        """See BlockFormat.piece."""
        from .jit.piece import scaled_piece

        parts = tuple(type(part).__name__ for part in self.tile_parts or self.parts)
        return scaled_piece(self.numbers, parts, self.grid.bias, self.grid.table if isinstance(self.grid, Table) else None)
