"""What the tools show besides errors: tables, JSON, progress bars, notes. rich is imported only when a bar is drawn."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from .console import safe_text


def one_line(text: object) -> str:
    """Text from a file on one line, safe for a terminal."""
    return safe_text(str(text)).replace("\n", "\\n").replace("\t", "\\t")


def print_json(value: Any) -> None:
    """One JSON value on stdout. Numbers that JSON does not have become null."""
    text = json.dumps(plain(value), ensure_ascii=False, indent=2)
    if not text.replace("\n", "").isprintable():  # nothing that a terminal would obey: such characters stand in texts, as escapes
        text = "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
    print(_fit(text, sys.stdout))


def plain(value: Any) -> Any:
    """A value as JSON can hold it: NumPy's numbers and arrays as Python's, numbers that are not finite as null."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return value


def note(text: str) -> None:
    """A remark for the user, on stderr."""
    print(f"note: {one_line(text)}", file=sys.stderr)


def size_text(nbytes: float) -> str:
    """Bytes for people, "91.7 MB": powers of ten, as disks and download pages count."""
    if nbytes < 1000:
        return f"{nbytes:.0f} bytes"
    for unit in ("kB", "MB", "GB"):
        nbytes /= 1000
        if nbytes < 999.95 or unit == "GB":
            break
    return f"{nbytes:.1f} {unit}"


def table(headings: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[int] = (), file: TextIO | None = None) -> None:
    """A plain table: columns as wide as what stands in them, so that it can be read, piped and searched.

    right: numbers of the columns that are set flush right.
    """
    cells = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(len(heading), *(len(row[i]) for row in cells), 1) for i, heading in enumerate(headings)]
    out = file or sys.stdout
    for row in [list(headings), ["─" * width for width in widths], *cells]:
        line = "  ".join(cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        print(_fit(line.rstrip(), out), file=out)


def _fit(text: str, out: TextIO) -> str:
    """The text with what the stream's encoding does not have replaced."""
    encoding = getattr(out, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


class Progress:
    """How far a piece of work is: what `progress` yields. May be advanced from any thread."""

    def __init__(self, bar: Any = None, task: Any = None) -> None:
        self._bar, self._task = bar, task
        self._pending, self._shown = 0, 0.0
        self._lock = threading.Lock()

    def advance(self, amount: int) -> None:
        """So much more is done. Cheap: the bar hears of it a few times a second."""
        if self._bar is None:
            return
        with self._lock:
            self._pending += amount
            now = time.monotonic()
            if now - self._shown > 0.05:
                self._bar.advance(self._task, self._pending)
                self._pending, self._shown = 0, now

    def finish(self) -> None:
        """Shows what is still to be shown."""
        if self._bar is not None:
            self._bar.advance(self._task, self._pending)


@contextmanager
def progress(what: str, total: int) -> Iterator[Progress]:
    """A bar with rate and time left on stderr, if that is a terminal; nothing otherwise. total: bytes."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield Progress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        shown = Progress(bar, bar.add_task(one_line(what), total=total))
        yield shown
        shown.finish()
