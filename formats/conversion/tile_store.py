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
from typing import IO, Any

import numpy as np

from ...quant.block import ROWS, get_format
from ..errors import OutputError
from ..tensor import RowSlice, Tensor

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
        part = self.tiles()[first * group : -(-stop // ROWS) * group]
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
    """Tiles in the store. They are mapped while they are used: a mapping holds an open file, of which a process has some hundreds."""

    def __init__(self, file: IO[bytes], start: int, nbytes: int, name: str, shape: tuple[int, ...], format: str, recorded: dict[str, Any]):
        super().__init__(name, shape, format, np.empty(0, np.uint8), recorded)
        self._file, self._start, self.nbytes = file, start, nbytes
        self._mapped = False

    def tiles(self) -> np.ndarray:
        if not self._mapped:
            mapping = mmap.mmap(self._file.fileno(), max(self.nbytes, 1), access=mmap.ACCESS_READ, offset=self._start)
            self._tiles, self._mapped = np.frombuffer(mapping, np.uint8, self.nbytes), True
        return self._tiles

    def release(self, rows: RowSlice = None) -> None:
        if rows is None:  # what has been handed out stays mapped
            self._tiles, self._mapped = np.empty(0, np.uint8), False


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

        The tensor can be read as long as the store is open; what it has given stays valid. Raises OutputError if the disk is full, and
        what making the pieces raises.
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
        return _StoredTensor(self._file, start, nbytes, name, shape, format, recorded)

    def close(self) -> None:
        """The file is gone when nothing that was read from it is held any more."""
        with suppress(OSError):  # what a full disk has kept in the buffer is not missed
            self._file.close()

    def __enter__(self) -> TileStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
