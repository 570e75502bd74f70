"""qconvert by what matrices read: which text or statistics, and a bar with the time left."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .console import UsageError

if TYPE_CHECKING:
    from ..engine.convert_feedback import Progress
    from ..formats.checkpoint import Checkpoint
    from ..formats.convert import ConversionResult
    from ..formats.recipe import Recipe


def convert_calibrated(
    checkpoint: Checkpoint,
    target: Path,
    recipe: Recipe,
    source: str | None,
    tokens: int | None,
    threads: int | None,
    allow_nonfinite: bool,
) -> ConversionResult:
    """Converts to a .hbf file by a text or a file of statistics; source None is the built-in text, "-" stdin.

    Raises HalfbyteError of many kinds, see engine.convert_feedback; UsageError for --tokens with statistics.
    """
    from ..engine.convert_feedback import convert_with_statistics, convert_with_text

    if source is not None and source != "-" and _holds_statistics(source):
        from ..formats.statistics import fingerprint, open_statistics
        from .display import note

        if tokens is not None:
            raise UsageError(f"--tokens: {source} holds statistics, not a text")
        with open_statistics(source) as statistics, _progress(target.name) as progress:
            made_from = statistics.metadata.get("model_fingerprint")
            if made_from is not None and made_from != fingerprint(checkpoint):
                note(f"{source} was made with other weights than these; that is all right if they are those of the same model")
            about = {"statistics": Path(source).name, "kind": statistics.kind}
            about |= {key: value for key, value in statistics.metadata.items() if key in ("text", "tokens", "chunk", "tokens_sha256")}
            return convert_with_statistics(
                checkpoint,
                target,
                recipe,
                statistics,
                provenance=about,
                threads=threads,
                allow_nonfinite=allow_nonfinite,
                progress=progress,
            )
    from ..engine.calibration_text import TOKENS, built_in_text, calibration_tokens
    from .qreport import read_text

    wanted = tokens or TOKENS
    text = built_in_text() if source is None else read_text(source, wanted)
    texts, notes = calibration_tokens(checkpoint, text, wanted)
    about = {
        "text": "built-in" if source is None else "stdin" if source == "-" else Path(source).name,
        "text_sha256": hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(),
        "tokens_sha256": hashlib.sha256(texts.astype("<i8").tobytes()).hexdigest(),
        "tokens": str(texts.size),
        "chunk": str(texts.shape[1]),
    }
    with _progress(target.name) as progress:
        result = convert_with_text(
            checkpoint, target, recipe, texts, provenance=about, threads=threads, allow_nonfinite=allow_nonfinite, progress=progress
        )
    result.notes = [*notes, *result.notes]
    return result


def _holds_statistics(path: str) -> bool:
    """True for a .safetensors file, and for llama.cpp's imatrix files, which are GGUF or end in .dat."""
    try:
        if not os.path.isfile(path):  # what can be read only once is a text
            return False
        with open(path, "rb") as file:
            head = file.read(9)
    except (OSError, ValueError):
        return False
    return head[:4] == b"GGUF" or (head[8:9] == b"{" and 0 in head[:8]) or path.endswith(".dat")


@contextmanager
def _progress(what: str) -> Iterator[Progress]:
    """A bar with the time left on stderr, if that is a terminal."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from .display import one_line

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, speed_estimate_period=120) as bar:
        task, now, shown = bar.add_task("kernels", total=1), "", 0.0

        def progress(stage: str, done: float, total: float) -> None:
            nonlocal now, shown
            if stage != now:
                now = stage
                bar.reset(task, description="kernels" if stage == "kernels" else one_line(what), total=total)
            if time.monotonic() - shown > 0.05 or done >= total:
                shown = time.monotonic()
                bar.update(task, completed=done, total=total)

        yield progress
