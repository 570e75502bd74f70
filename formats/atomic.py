"""Outputs that are there whole or not at all.

A file is written under a temporary name in its own folder, brought to the disk, and renamed over the target. On any error, on
Ctrl-C and on SIGTERM the temporary file goes. A process that is killed outright leaves one named `.NAME.XXXXXXXX.halfbyte-tmp`;
it holds a lock as long as its owner lives, so the next run for the same target sees that the owner is gone and removes it.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import signal
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from .errors import OutputError

try:
    import fcntl
except ImportError:  # Windows: a file that is open there cannot be removed, which serves as the lock
    fcntl = None  # type: ignore[assignment]

SUFFIX = ".halfbyte-tmp"
_NO_SPACE = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
_CHUNK = 1 << 26

PathLike = str | os.PathLike[str]


class OutputFile:
    """A file that is being written: what `atomic_file` yields. Every failure is an OutputError that says how much was needed.

    Attributes: path (the target), size (bytes announced, or None).
    """

    def __init__(self, path: Path, descriptor: int):
        self.path, self._descriptor = path, descriptor
        self.size: int | None = None
        self._position = self._end = 0
        self._lock = threading.Lock()

    def reserve(self, size: int) -> None:
        """Takes `size` bytes of the disk now, so that a full disk is found before the work is done, not after."""
        self.size = size
        try:
            if hasattr(os, "posix_fallocate") and size > 0:
                os.posix_fallocate(self._descriptor, 0, size)
            elif shutil.disk_usage(self.path.parent).free < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise self._failure(error) from None
            # A file system that cannot reserve (EOPNOTSUPP, EINVAL): writing will tell.

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Writes all of `data` at the position and moves on. Returns its bytes."""
        written = self.write_at(self._position, data)
        self._position += written
        return written

    def write_at(self, position: int, data: bytes | bytearray | memoryview) -> int:
        """Writes all of `data` at a position, from any thread. Returns its bytes."""
        view = memoryview(data)
        if not view.nbytes:
            return 0
        view, done = view.cast("B"), 0
        if self._descriptor < 0:
            raise OutputError(self.path, "is closed")
        try:
            while done < len(view):
                done += _write_at(self._descriptor, view[done : done + _CHUNK], position + done)
        except OSError as error:
            raise self._failure(error, position + len(view)) from None
        with self._lock:
            self._end = max(self._end, position + len(view))
        return len(view)

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        """Gives up the file. Threads that write must have ended."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def finish(self) -> None:
        """Cuts what was reserved and not written, and brings everything to the disk."""
        try:
            os.ftruncate(self._descriptor, self._end)
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._failure(error) from None

    def _failure(self, error: OSError, reached: int = 0) -> OutputError:
        needed = max(self.size or 0, reached)
        if error.errno not in _NO_SPACE:
            return OutputError(self.path, f"cannot be written: {error.strerror or error}", needed=needed)
        try:
            free = f", {shutil.disk_usage(self.path.parent).free} are free"
        except OSError:
            free = ""
        reason = "the disk is full" if error.errno != errno.EFBIG else "the file would be larger than allowed"
        more = "" if self.size else "at least "
        problem = f"{reason}: needs {more}{needed} bytes{free}; make room or choose another place"
        return OutputError(self.path, problem, needed=needed)


if hasattr(os, "pwrite"):
    _write_at = os.pwrite
else:
    _lock = threading.Lock()

    def _write_at(descriptor: int, data: memoryview, position: int) -> int:  # type: ignore[misc]
        with _lock:
            os.lseek(descriptor, position, os.SEEK_SET)
            return os.write(descriptor, data)


@contextmanager
def atomic_file(path: PathLike, *, size: int | None = None, inputs: Iterable[PathLike] = ()) -> Iterator[OutputFile]:
    """A file that appears at `path`, whole, when the block ends without an error; an existing one is replaced only then.

    size: bytes that will be needed, if known. inputs: files (or folders) that are being read; an output that is one of them is
    refused. Raises OutputError.
    """
    target = _target(path, inputs)
    if target.is_dir():
        raise OutputError(path, "is a folder; a file is to be written")
    if target.exists() and not target.is_file():
        raise OutputError(path, "is not a regular file")
    _remove_leftovers(target)
    made: list[Path] = []  # filled before a file is there, so that no interrupt can come between a file and its removal
    output: OutputFile | None = None
    try:
        with _sigterm_raises():
            descriptor, temporary = _create(target, made)
            output = OutputFile(target, descriptor)
            if size:
                output.reserve(size)
            yield output
            output.finish()
            if fcntl is None:
                output.close()  # Windows renames no open file; elsewhere the lock is to last until the end
            _rename(temporary, target)
    except BaseException:
        if fcntl is None and output is not None:
            output.close()
        for temporary in made:
            _remove(temporary)
        raise
    finally:
        if output is not None:
            output.close()


@contextmanager
def atomic_folder(path: PathLike, *, inputs: Iterable[PathLike] = ()) -> Iterator[Path]:
    """A folder that appears at `path` with all its files when the block ends without an error. Yields the folder to write into.

    A folder that is there already and not empty is refused. Raises OutputError.
    """
    target = _target(path, inputs)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise OutputError(path, "is a folder that is not empty" if target.is_dir() else "is a file; a folder is to be written")
    try:
        with waiting_folder(target) as temporary:
            yield temporary
            for file in temporary.rglob("*"):
                _sync(file)
            _sync(temporary)
            if target.exists() and os.name == "nt":
                target.rmdir()
            _rename(temporary, target)
    except OSError as error:
        raise OutputError(path, f"cannot be written: {error.strerror or error}") from None


@contextmanager
def waiting_folder(path: PathLike) -> Iterator[Path]:
    """A folder beside `path` for what is made on the way to it, which goes when the block ends; that of a process that was killed outright
    goes at the next run for the same target. Raises OutputError.
    """
    target = _target(path, ())
    _remove_leftovers(target)
    temporary, lock = _temporary(target), None
    try:
        with _sigterm_raises():
            try:
                temporary.mkdir()
            except OSError as error:
                raise OutputError(path, f"cannot be made: {error.strerror or error}") from None
            lock = _lock_folder(temporary)
            yield temporary
    finally:
        _remove(temporary)
        if lock is not None:
            os.close(lock)


def check_output(path: PathLike, *, inputs: Iterable[PathLike] = ()) -> None:
    """Raises OutputError for an output whose folder is not there, or that is one of the inputs."""
    _target(path, inputs)


def _target(path: PathLike, inputs: Iterable[PathLike]) -> Path:
    try:
        target = Path(os.path.realpath(path))  # a link's target is replaced, not the link
        if not target.name:
            raise OutputError(path, "is not a file name")
        if not target.parent.is_dir():
            raise OutputError(path, f"there is no folder {target.parent} to write into")
        try:
            target.lstat()  # a name that is too long is found here, not when the work is done
        except FileNotFoundError:
            pass
        for source in inputs:
            if target.exists() and os.path.exists(source) and os.path.samefile(source, target):
                raise OutputError(path, "is also the input; choose another output")
    except OSError as error:
        raise OutputError(path, f"cannot be written: {error.strerror or error}") from None
    except ValueError:
        raise OutputError(path, "is not a file name") from None
    return target


def _temporary(target: Path) -> Path:
    name = target.name
    while len(os.fsencode(name)) > 200:  # a name may have 255 bytes
        name = name[: len(name) - 8]
    return target.with_name(f".{name}.{secrets.token_hex(4)}{SUFFIX}")


def _create(target: Path, made: list[Path]) -> tuple[int, Path]:
    """A new temporary file, locked, and its name, which is also put into `made`."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    while True:
        temporary = _temporary(target)
        made.append(temporary)
        try:
            descriptor = os.open(temporary, flags, 0o666)
        except FileExistsError:
            made.pop()
            continue
        except OSError as error:
            raise OutputError(target, f"cannot be made: {error.strerror or error}") from None
        if fcntl is None:
            return descriptor, temporary
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                if target.exists():
                    os.fchmod(descriptor, stat.S_IMODE(target.stat().st_mode))
                return descriptor, temporary
        except BlockingIOError:  # another run took it for a leftover in the instant before the lock
            pass
        except OSError:  # a file system without locks
            return descriptor, temporary
        os.close(descriptor)


def _lock_folder(folder: Path) -> int | None:
    if fcntl is None:
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        pass
    return descriptor


def _remove_leftovers(target: Path) -> None:
    """Removes what killed runs left behind for this target."""
    prefix = f".{target.name[:100]}"
    try:
        names = [n for n in os.listdir(target.parent) if n.startswith(prefix) and n.endswith(SUFFIX)]
    except OSError:
        return
    for name in names:
        leftover = target.with_name(name)
        middle = name[len(".") : -len(SUFFIX)]
        stem, _, token = middle.rpartition(".")
        if len(token) != 8 or not (stem == target.name or _temporary(target).name.startswith(f".{stem}.")):
            continue
        if fcntl is None:
            _remove(leftover)
            continue
        try:
            descriptor = os.open(leftover, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(leftover)
        except OSError:
            pass  # its owner lives
        finally:
            os.close(descriptor)


def _remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    except OSError:
        pass


def _rename(temporary: Path, target: Path) -> None:
    try:
        os.replace(temporary, target)
    except OSError as error:
        raise OutputError(target, f"cannot be put in place: {error.strerror or error}") from None
    _sync(target.parent)


def _sync(path: Path) -> None:
    """fsync by name; for folders where the system allows it, so that a rename survives a power cut."""
    if os.name == "nt":
        return
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise
    finally:
        os.close(descriptor)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """While this lasts, SIGTERM ends the program as an exception would, so that `finally` blocks run. Only in the main thread,
    and only if nobody else handles the signal."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
