"""A file that is read where it lies: opened once, mapped, never copied."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import sys
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, TypeVar

import numpy as np

from .errors import InputError, TruncatedError

_Self = TypeVar("_Self", bound="MappedFile")
_MADV_POPULATE_READ = 22  # Linux 5.14; Python's mmap module has no name for it before 3.13


class MappedFile:
    """Base of the readers: a read-only mapping of one regular file. A context manager.

    Attributes
    ----------
    path   Path
    size   bytes of the file when it was opened; nothing beyond it is ever touched
    bytes  uint8[size], read-only, zero-copy: views of it keep the mapping alive after `close`
    """

    def __init__(self, path: str | os.PathLike[str], smallest: int = 1):
        """Raises InputError, or TruncatedError for a file of fewer than `smallest` bytes."""
        self.path = Path(path)
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        # Without O_NONBLOCK, opening a named pipe would wait for a writer that may never come.
        flags |= getattr(os, "O_NONBLOCK", 0)
        try:
            descriptor = os.open(self.path, flags)
        except OSError as error:
            raise InputError(path, why_not_opened(error, self.path)) from None
        except ValueError:  # a NUL in the name
            raise InputError(path, "cannot be opened: not a file name") from None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
                raise InputError(path, f"is {kind}; a file is needed here")
            self.size = status.st_size
            if self.size < max(smallest, 1):
                raise TruncatedError(path, max(smallest, 1), self.size)
            try:
                self._map: mmap.mmap | None = mmap.mmap(descriptor, self.size, access=mmap.ACCESS_READ)
            except (OSError, ValueError, OverflowError) as error:
                raise InputError(path, f"cannot be mapped into memory: {error}") from None
        finally:
            os.close(descriptor)
        self.bytes = np.frombuffer(self._map, np.uint8)

    @property
    def address(self) -> int:
        """Where the mapping begins in memory. Valid until the file is closed and all views of it are gone."""
        return int(self.bytes.__array_interface__["data"][0])

    @property
    def map(self) -> mmap.mmap:
        """The mapping itself."""
        if self._map is None:
            raise InputError(self.path, "is closed")
        return self._map

    def populate(self, offset: int = 0, nbytes: int | None = None) -> None:
        """Asks the kernel to have these bytes mapped before they are used, without a fault per page.

        MADV_POPULATE_READ where there is one (Linux 5.14), which returns when the pages are in; else MADV_WILLNEED, which
        only starts the reading. Never an error: it is advice.
        """
        if not self._populate(offset, nbytes):
            self._advise(getattr(mmap, "MADV_WILLNEED", None), offset, nbytes)

    def _populate(self, offset: int, nbytes: int | None) -> bool:
        """MADV_POPULATE_READ through ctypes, which lets other threads run: mmap.madvise would hold them up until the disk has answered."""
        if sys.platform != "linux" or self._map is None:
            return False
        import ctypes

        end = self.size if nbytes is None else min(self.size, offset + nbytes)
        start = offset - offset % mmap.PAGESIZE
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        return end <= start or madvise(self.address + start, end - start, _MADV_POPULATE_READ) == 0

    def release(self, offset: int = 0, nbytes: int | None = None) -> None:
        """Tells the kernel that these pages will not be needed soon, so that a streaming reader's memory stays small."""
        self._advise(getattr(mmap, "MADV_DONTNEED", None), offset, nbytes)

    def _advise(self, advice: int | None, offset: int, nbytes: int | None) -> bool:
        if self._map is None or advice is None or not hasattr(self._map, "madvise"):
            return False
        end = self.size if nbytes is None else min(self.size, offset + nbytes)
        start = offset - offset % mmap.PAGESIZE
        if end <= start:
            return True
        try:
            self._map.madvise(advice, start, end - start)
        except (OSError, ValueError):
            return False
        return True

    def close(self) -> None:
        """Gives up the mapping. Arrays that were handed out stay valid; the memory goes when the last of them does."""
        if self._map is not None:
            mapping, self._map = self._map, None
            self.bytes = np.empty(0, np.uint8)
            try:
                mapping.close()
            except BufferError:
                pass  # views are alive: the mapping is closed by the last one's end

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_stream(path: str | os.PathLike[str]) -> BinaryIO:
    """A file of any kind, pipes included, to be read once from its beginning. A named pipe that nobody writes to is empty: not waited for.

    Raises OSError and ValueError, as `open` does.
    """
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, flags)
    try:
        if hasattr(os, "O_NONBLOCK"):
            os.set_blocking(descriptor, True)  # who does write is waited for
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def why_not_opened(error: OSError, path: Path) -> str:
    """An OSError of opening a file, in words."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return "no such file"
    if error.errno == errno.EISDIR or path.is_dir():  # Windows says EACCES for a folder
        return "is a folder; a file is needed here"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "not readable: permission denied"
    return f"cannot be opened: {error.strerror or error}"
