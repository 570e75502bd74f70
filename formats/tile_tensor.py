"""Matrices in tiles, the order in which kernels read them: one layout for .hbf files, for what waits on disk, and for what is run.

docs/file-format.md has it: matrices follow each other, each in whole groups of 16 rows of its own.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..quant.block import ROWS, BlockFormat, get_format
from .tensor import RowSlice, Tensor

_DECODE = 1 << 20  # weights that are decoded at once


def tiles_nbytes(form: BlockFormat, shape: Sequence[int]) -> int:
    """Bytes that a tensor of at least two dimensions takes in tiles."""
    return form.tiles_nbytes(int(shape[-2]), int(shape[-1]), math.prod(map(int, shape[:-2])))


class TileTensor(Tensor):
    """A matrix, or `matrices` of them, in tiles, wherever these lie. (A vector is plain float32 and has no tiles.)

    nbytes    of the tiles, or of a vector's float32
    recorded  what was measured when it was quantized, see Tensor.recorded
    """

    def __init__(self, name: str, shape: tuple[int, ...], format: str, nbytes: int, recorded: dict[str, Any] | None = None):
        self.name, self.shape, self.format, self.nbytes = name, shape, format, nbytes
        self._recorded = {} if recorded is None else recorded

    @property
    def recorded(self) -> dict[str, Any]:
        return self._recorded

    @abstractmethod
    def raw(self) -> np.ndarray:
        """uint8[nbytes]: the bytes as they lie."""

    @property
    def address(self) -> int:
        """Where the bytes are in memory, as long as what holds them is."""
        return int(self.raw().ctypes.data)

    @property
    def matrix_nbytes(self) -> int:
        """Bytes from one matrix to the next."""
        return self.nbytes // self.matrices if self.matrices else 0

    def matrix(self, number: int) -> TileTensor:
        """One of the matrices, a view of it under the name of the whole. Raises IndexError."""
        if not 0 <= number < self.matrices:
            raise IndexError(f"{self.name} has {self.matrices} matrices, no number {number}")
        start = number * self.matrix_nbytes
        return ArrayTiles(self.name, self.shape[-2:], self.format, self.raw()[start : start + self.matrix_nbytes], self.recorded)

    def tiles(self) -> np.ndarray | None:
        return None if self.vector else self.raw()

    def blocks(self, rows: RowSlice = None) -> np.ndarray | None:
        """uint8[blocks_shape], a new array; None for a vector. Raises FormatError if the format is not installed."""
        if self.vector:
            return None
        form = get_format(self.format)
        start, stop, step = (slice(None) if rows is None else rows).indices(self.rows)
        low, high = (start, stop) if step > 0 else (stop + 1, start + 1)
        parts = [self._part(form, *piece) for piece in self._pieces(low, high)]
        found = np.concatenate(parts) if len(parts) > 1 else parts[0] if parts else np.empty(form.blocks_shape(0, self.columns), np.uint8)
        return found if step == 1 else found[::step] if step > 0 else found[::-1][::-step]

    def float32(self, rows: RowSlice = None) -> np.ndarray:
        """A new array, see Tensor.float32. Raises FormatError if the format is not installed."""
        if self.vector:
            values = self.raw().view("<f4").astype(np.float32)
            return values.reshape(self.shape) if rows is None else values.reshape(1, -1)[rows]
        form = get_format(self.format)
        if rows is not None and rows.step not in (None, 1):
            found = self.blocks(rows)
            assert found is not None
            return form.decode(found, self.columns)
        start, stop, _ = (slice(None) if rows is None else rows).indices(self.rows)
        values, done = np.empty((max(stop - start, 0), self.columns), np.float32), 0
        for piece in self._pieces(start, stop):
            part = form.decode(self._part(form, *piece), self.columns)
            values[done : done + len(part)] = part
            done += len(part)
        return values.reshape(self.shape) if rows is None else values

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(matrix, first row in it, last row in it + 1) of a run of rows: of a moderate size, cut at groups of ROWS rows."""
        most = max(ROWS, _DECODE // max(self.columns, 1) // ROWS * ROWS)
        while start < stop:
            matrix, row = divmod(start, self.rows_each)
            end = min(self.rows_each, row + stop - start, row - row % ROWS + most)
            yield matrix, row, end
            start += end - row

    def _part(self, form: BlockFormat, matrix: int, start: int, stop: int) -> np.ndarray:
        """Blocks of some rows of one matrix."""
        group = form.tiles_nbytes(ROWS, self.columns)
        first, last = start // ROWS, -(-stop // ROWS)
        at = matrix * self.matrix_nbytes
        rows = min(self.rows_each, last * ROWS) - first * ROWS
        tiles = self.raw()[at + first * group : at + last * group]
        return form.untile(tiles, rows, self.columns)[start - first * ROWS : stop - first * ROWS]


class ArrayTiles(TileTensor):
    """Tiles in memory, uint8[nbytes]."""

    def __init__(self, name: str, shape: tuple[int, ...], format: str, tiles: np.ndarray, recorded: dict[str, Any] | None = None):
        super().__init__(name, shape, format, tiles.size, recorded)
        self._tiles = tiles

    def raw(self) -> np.ndarray:
        return self._tiles
