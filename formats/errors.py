"""Errors of the readers and writers, and the one place where text from a file is made fit for an error message.

Every refusal is one of the classes below, all of them HalfbyteError. The text is one line: what is wrong, in which file, at
which key, tensor or offset. Values that come from a file go through `printable`, so that a hostile file can neither move the
cursor of a terminal nor fill it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from ..quant.errors import HalfbyteError

NAME_LIMIT = 120
PATH_LIMIT = 300


def printable(text: Any, limit: int = 200) -> str:
    """`str(text)` without control characters, on one line, at most `limit` characters and an ellipsis.

    Characters that a terminal may act upon (control, format and direction marks, lone surrogates, line ends) are
    written as escapes, as repr() writes them.
    """
    if isinstance(text, (bytes, bytearray, memoryview)):
        text = bytes(text[: 4 * limit]).decode("utf-8", "backslashreplace")
    text = str(text)
    cut = len(text) > limit
    clean = "".join(c if c.isprintable() else _escape(c) for c in text[:limit])
    if len(clean) > limit:
        cut, clean = True, clean[:limit]
    return clean + "…" if cut else clean


def _escape(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def some(names: Iterable[Any], limit: int = 8) -> str:
    """A list of names for an error: the first `limit`, and how many more there are."""
    names = list(names)
    shown = ", ".join(printable(name, NAME_LIMIT) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


class FileFormatError(HalfbyteError):
    """A file does not hold what its kind promises.

    Attributes
    ----------
    path    str, the file (or folder)
    where   str, the key or tensor, "" if the whole file is meant
    offset  int, bytes from the start of the file, or None
    """

    def __init__(self, path: str | os.PathLike[str], problem: str, *, where: str = "", offset: int | None = None):
        self.path, self.where, self.offset = os.fspath(path), where, offset
        place = printable(self.path, PATH_LIMIT)
        if where:
            place += f": {printable(where, NAME_LIMIT)}"
        if offset is not None:
            place += f" (at byte {offset})"
        super().__init__(f"{place}: {problem}")


class InputError(FileFormatError):
    """An input cannot be opened: it is missing, not readable, or neither a file nor a folder of the right kind."""


class TruncatedError(FileFormatError):
    """A file ends before what it announces. Attributes: needs, has (bytes)."""

    def __init__(self, path: str | os.PathLike[str], needs: int, has: int, *, where: str = "", offset: int | None = None):
        self.needs, self.has = needs, has
        super().__init__(path, f"truncated: needs {needs} bytes, has {has}", where=where, offset=offset)


class NotThisKindError(FileFormatError):
    """The first bytes of a file are not those of the kind that was expected."""


class UnsupportedVersionError(FileFormatError):
    """The file is of a version, or of a byte order, that this reader does not know."""


class HeaderError(FileFormatError):
    """A header, a metadata entry or an index is not well formed."""


class DuplicateError(FileFormatError):
    """A key or a tensor name appears twice."""


class UnknownTypeError(FileFormatError):
    """A value type, tensor type or block format that this reader does not know."""


class TensorError(FileFormatError):
    """A tensor's name, shape, offset or size is impossible."""


class MissingTensorsError(FileFormatError):
    """Tensors or shards that an index promises are not there. Attribute: names (all of them)."""

    def __init__(self, path: str | os.PathLike[str], problem: str, names: Iterable[str]):
        self.names = list(names)
        super().__init__(path, f"{problem}: {some(self.names, 20)}")


class ChecksumError(FileFormatError):
    """Bytes are not those that were written. `where` names the tensor, or "header"."""


class OutputError(HalfbyteError):
    """An output cannot be written: the disk is full, the folder missing, the output is an input, …

    Attributes: path (str), needed (bytes, or None when it was not known).
    """

    def __init__(self, path: str | os.PathLike[str], problem: str, *, needed: int | None = None):
        self.path, self.needed = os.fspath(path), needed
        super().__init__(f"{printable(self.path, PATH_LIMIT)}: {problem}")
