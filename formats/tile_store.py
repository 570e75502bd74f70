"""Quantized matrices that wait on disk: tiles in a temporary file without a name, which is gone when the process is."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ..quant.block import ROWS, get_format
from .errors import OutputError
from .tensor import RowSlice, Tensor

_DECODE = 1 << 20  # weights that are decoded at once


class TilesTensor(Tensor):
    """A matrix in tiles, uint8[tiles_nbytes].

    recorded: what was measured when it was quantized, see Tensor.recorded.
    """

    def __init__(self, name: str, shape: tuple[int, ...], format: str, tiles: np.ndarray, recorded: dict[str, Any] | None = None):
        self.name, self.shape, self.format, self.nbytes = name, shape, format, tiles.size
        self._tiles, self._recorded = tiles, recorded or {}

    @property
    def recorded(self) -> dict[str, Any]:
        return self._recorded

    def tiles(self) -> np.ndarray:
        return self._tiles

    def blocks(self, rows: RowSlice = None) -> np.ndarray:
        form = get_format(self.format)
        start, stop, _ = (slice(None) if rows is None else rows).indices(self.rows)
        group, first = form.tiles_nbytes(ROWS, self.columns), start // ROWS
        part = self._tiles[first * group : -(-stop // ROWS) * group]
        count = min(self.rows, -(-stop // ROWS) * ROWS) - first * ROWS
        return form.untile(part, count, self.columns)[start - first * ROWS : stop - first * ROWS]

    def float32(self, rows: RowSlice = None) -> np.ndarray:
        form = get_format(self.format)
        start, stop, _ = (slice(None) if rows is None else rows).indices(self.rows)
        values = np.empty((max(stop - start, 0), self.columns), np.float32)
        step = max(ROWS, _DECODE // self.columns // ROWS * ROWS)
        for at in range(start, stop, step):
            end = min(at + step, stop)
            values[at - start : end - start] = form.decode(self.blocks(slice(at, end)), self.columns)
        return values.reshape(self.shape) if rows is None else values


class _StoredTensor(TilesTensor):
    """Tiles that are mapped from the store."""

    def __init__(self, mapping: mmap.mmap, name: str, shape: tuple[int, ...], format: str, nbytes: int, recorded: dict[str, Any]):
        super().__init__(name, shape, format, np.frombuffer(mapping, np.uint8, nbytes), recorded)
        self._mapping = mapping

    def release(self, rows: RowSlice = None) -> None:
        if rows is None and hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)  # read-only pages of a file: they come back when they are read again


class TileStore:
    """A context manager. The file lies in `folder`, which needs room for everything that is put in."""

    def __init__(self, folder: str | os.PathLike[str]):
        self._folder = Path(folder)
        try:
            self._file = tempfile.TemporaryFile(dir=folder, prefix=".halfbyte-")  # noqa: SIM115 - closed by close
        except OSError as error:
            raise OutputError(self._folder, f"cannot hold a temporary file: {error.strerror}") from None
        self._end = 0

    def put(self, name: str, shape: tuple[int, ...], format: str, pieces: Iterable[np.ndarray], recorded: dict[str, Any]) -> TilesTensor:
        """Stores a matrix, uint8 pieces that follow each other. `recorded` may be filled while the pieces are made.

        The tensor is valid as long as it is held. Raises OutputError if the disk is full, and what making the pieces raises.
        """
        start, nbytes = self._end, 0
        try:
            self._file.seek(start)
            for piece in pieces:
                nbytes += self._file.write(np.ascontiguousarray(piece).data)
            self._file.flush()
            self._end = -(-(start + nbytes) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            self._file.truncate(self._end)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise OutputError(
                    self._folder, f"is full: the candidates of {name} need {start + nbytes} bytes of temporary space there; free some"
                ) from None
            raise OutputError(self._folder, f"cannot be written to: {error.strerror}") from None
        mapping = mmap.mmap(self._file.fileno(), max(nbytes, 1), access=mmap.ACCESS_READ, offset=start)
        return _StoredTensor(mapping, name, shape, format, nbytes, recorded)

    def close(self) -> None:
        """The file is gone when no tensor of it is held any more."""
        with suppress(OSError):  # what a full disk has kept in the buffer is not missed
            self._file.close()

    def __enter__(self) -> TileStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
