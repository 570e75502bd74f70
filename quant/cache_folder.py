"""The user's cache folder: kernels, tables of tokenizers and the demo model are kept there from one run to the next.

Whatever lies in it can be made again, so a folder that cannot be written, or none at all, only costs time.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path | None:
    """HALFBYTE_CACHE, or the user's cache folder. None when it is set empty."""
    if "HALFBYTE_CACHE" in os.environ:
        return Path(os.environ["HALFBYTE_CACHE"]) if os.environ["HALFBYTE_CACHE"] else None
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home()))
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "halfbyte"


def keep_file(path: Path, data: bytes) -> None:
    """Writes a file of the cache aside, then renames it: readers see the old one or the whole new one.

    A folder that cannot be written only costs time. Nobody else may write the file, whatever the umask is: see `is_ours`.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o600), "wb") as file:
            file.write(data)
        os.replace(aside, path)
    except OSError:
        try:
            aside.unlink(missing_ok=True)
        except OSError:  # there is no such folder, and none can be made
            pass


def is_ours(status: os.stat_result) -> bool:
    """Whether a file of the cache is this user's, and nobody else may write it."""
    return not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & 0o022)
