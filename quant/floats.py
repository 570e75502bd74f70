"""Formats without integers: f32, f16 and bf16 values, 32 columns to a block, 32 vectors of 16 rows to a tile.

Tiles exist so that the same kernels' loops run over these formats too: vector k of a tile is column k of 16 rows.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np

from .arrays import COLUMNS, check_blocks, check_matrix, check_tiles, group_rows, pad_columns, row_chunks
from .block import ROWS, BlockFormat
from .errors import FormatError


class Floats(BlockFormat):
    """Values as they are, in words of 2 or 4 bytes, little-endian. Subclasses say how a float32 becomes a word and back.

    NaN and infinity stay what they are. A finite weight that the narrower type cannot hold becomes its largest finite number.
    """

    word: ClassVar[str]
    integers = False
    block_columns = COLUMNS

    @property
    def bits(self) -> int:
        """See BlockFormat.bits."""
        return 8 * np.dtype(self.word).itemsize

    @property
    def block_bytes(self) -> int:  # type: ignore[override]
        return COLUMNS * np.dtype(self.word).itemsize

    @abstractmethod
    def to_words(self, values: np.ndarray) -> np.ndarray:
        """float32[...] -> words[...]."""

    @abstractmethod
    def from_words(self, words: np.ndarray) -> np.ndarray:
        """words[...] -> float32[...]."""

    def encode(self, weights: np.ndarray, importance: np.ndarray | None = None, method: str | None = None) -> np.ndarray:
        """See BlockFormat.encode. There is nothing to choose: `importance` and `method` change nothing."""
        weights = check_matrix(weights, self.name)
        rows, columns = weights.shape
        out = np.empty((rows, -(-columns // COLUMNS), self.block_bytes), np.uint8)
        for chunk in row_chunks(rows, columns):
            words = np.ascontiguousarray(self.to_words(pad_columns(weights[chunk])), self.word)
            out[chunk] = words.view(np.uint8).reshape(words.shape[0], out.shape[1], self.block_bytes)
        return out

    def decode(self, blocks: np.ndarray, columns: int | None = None) -> np.ndarray:
        """See BlockFormat.decode."""
        check_blocks(blocks, self.block_bytes, self.name)
        rows, count, _ = blocks.shape
        columns = count * COLUMNS if columns is None else columns
        if -(-columns // COLUMNS) != count:
            raise FormatError(f"{self.name}: {count} blocks of {COLUMNS} do not make rows of {columns} columns")
        words = np.ascontiguousarray(blocks).view(self.word).reshape(rows, count * COLUMNS)
        return self.from_words(words[:, :columns])

    def tile(self, blocks: np.ndarray) -> np.ndarray:
        """See BlockFormat.tile."""
        check_blocks(blocks, self.block_bytes, self.name)
        words = np.ascontiguousarray(group_rows(blocks)).view(self.word)
        return np.ascontiguousarray(words.transpose(0, 2, 3, 1)).view(np.uint8).reshape(-1)

    def untile(self, tiles: np.ndarray, rows: int, columns: int) -> np.ndarray:
        """See BlockFormat.untile."""
        count = -(-columns // COLUMNS)
        flat = check_tiles(tiles, self.tiles_nbytes(rows, columns), self.name)
        words = np.ascontiguousarray(flat).view(self.word).reshape(-(-rows // ROWS), count, COLUMNS, ROWS)
        blocks = np.ascontiguousarray(words.transpose(0, 3, 1, 2)).view(np.uint8)
        return blocks.reshape(words.shape[0] * ROWS, count, self.block_bytes)[:rows]

    def piece(self) -> Any:
        """See BlockFormat.piece."""
        from .jit.piece import float_piece

        return float_piece(self.name)
