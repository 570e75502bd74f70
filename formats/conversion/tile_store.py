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

from ..errors import OutputError
from ..tensor import RowSlice
from ..tile_tensor import TileTensor


class _StoredTensor(TileTensor):
    """Tiles in the store. They are mapped while they are used: a mapping holds an open file, of which a process has some hundreds."""

    def __init__(self, file: IO[bytes], start: int, nbytes: int, name: str, shape: tuple[int, ...], format: str, recorded: dict[str, Any]):
        super().__init__(name, shape, format, nbytes, recorded)
        self._file, self._start = file, start
        self._mapped: np.ndarray | None = None

    def raw(self) -> np.ndarray:
        if self._mapped is None:
            mapping = mmap.mmap(self._file.fileno(), max(self.nbytes, 1), access=mmap.ACCESS_READ, offset=self._start)
            self._mapped = np.frombuffer(mapping, np.uint8, self.nbytes)
        return self._mapped

    def release(self, rows: RowSlice = None) -> None:
        if rows is None:  # what has been handed out stays mapped
            self._mapped = None


class TileStore:
    """A context manager. The file lies in `folder`, which needs room for everything that is put in."""

    def __init__(self, folder: str | os.PathLike[str]):
        self._folder = Path(folder)
        try:
            self._file = tempfile.TemporaryFile(dir=folder, prefix=".halfbyte-")  # noqa: SIM115 - closed by close
        except OSError as error:
            raise OutputError(self._folder, f"cannot hold a temporary file: {error.strerror}") from None
        self._end = 0

    def put(self, name: str, shape: tuple[int, ...], format: str, pieces: Iterable[np.ndarray], recorded: dict[str, Any]) -> TileTensor:
        """Stores tiles, uint8 pieces that follow each other. `recorded` may be filled while the pieces are made.

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
