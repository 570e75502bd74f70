"""Reading JSON that someone else wrote: config.json, indexes, tokenizer settings."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .errors import HeaderError, InputError, printable
from .mapped import why_not_opened

LARGEST = 1 << 28
"""Bytes of the largest file that is parsed; the largest real ones, tokenizer.json of big vocabularies, have about 40 MB."""

DEEPEST = 100
"""Most levels of lists and objects in one another. Real files have about five; far more would break whoever walks them."""


def is_there(path: Path) -> bool:
    """True for anything of that name, also a broken link or a folder: what is there and cannot be read is an error, not absent."""
    return os.path.lexists(path)


def read_bytes(path: str | os.PathLike[str], largest: int = LARGEST) -> bytes:
    """A whole small file. Raises InputError if it cannot be read or is larger than `largest` bytes."""
    target = Path(path)
    try:
        if not target.is_file():
            broken = "is a link to a file that is not there" if target.is_symlink() else "no such file"
            raise InputError(target, "is not a file" if target.exists() else broken)
        if target.stat().st_size > largest:
            raise InputError(target, f"has {target.stat().st_size} bytes; at most {largest} are read of such a file")
        return target.read_bytes()
    except OSError as error:
        raise InputError(target, why_not_opened(error, target)) from None


def read_object(path: str | os.PathLike[str], largest: int = LARGEST) -> dict[str, Any]:
    """A JSON object. Raises InputError, or HeaderError for anything that is not one."""
    raw = read_bytes(path, largest)
    try:
        value = json.loads(raw)
    except json.JSONDecodeError as error:
        raise HeaderError(path, f"is not JSON: {error.msg} in line {error.lineno}, column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, a number of too many digits, nested too deeply
        raise HeaderError(path, f"is not readable as JSON: {printable(error, 80)}") from None
    if not isinstance(value, dict):
        raise HeaderError(path, f"must hold a JSON object, holds {type(value).__name__}")
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        values = (inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer))
        level = [inner for inner in values if isinstance(inner, (dict, list))]
        if not level:
            return value
    raise HeaderError(path, f"lists and objects are nested deeper than {DEEPEST} levels")
