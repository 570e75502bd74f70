"""The text that a command line names: a file, stdin, or enough of its beginning."""

from __future__ import annotations

import sys
from pathlib import Path


def read_text(name: str, tokens: int) -> str:
    """The text in a file ("-": stdin), or enough of its beginning for so many tokens.

    Raises InputError for a file that cannot be read or is not UTF-8.
    """
    from ...formats.errors import InputError
    from ...formats.mapped import open_stream, why_not_opened

    if name == "-" and sys.stdin is None:
        raise InputError("stdin", "is closed")
    most = max(1 << 20, 64 * tokens)
    path = Path(name)
    try:
        if name == "-":
            data = sys.stdin.buffer.read(most + 1)
        else:
            with open_stream(path) as file:
                data = file.read(most + 1)
    except OSError as error:
        raise InputError(path, why_not_opened(error, path)) from None
    except ValueError:
        raise InputError(name, "cannot be opened: not a file name") from None
    cut = len(data) > most
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if cut and error.start >= most - 4:  # only the last character, which the cut went through
            return data[: error.start].decode("utf-8-sig")
        raise InputError(path, "is not UTF-8 text; convert it first", offset=error.start) from None


def text_name(name: str | None) -> str:
    """What a record calls the text: "built-in" for None, "stdin", or the file's name without its folder."""
    return "built-in" if name is None else "stdin" if name == "-" else Path(name).name
