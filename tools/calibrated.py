"""qconvert by what matrices read: which text or statistics, and a bar with the time left."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from .console import UsageError

if TYPE_CHECKING:
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
    from .stages import stages

    if source is not None and source != "-" and _holds_statistics(source):
        from ..formats.statistics import fingerprint, open_statistics
        from .display import note

        if tokens is not None:
            raise UsageError(f"--tokens: {source} holds statistics, not a text")
        with open_statistics(source) as statistics, stages(name=target.name) as progress:
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
    from .text_file import read_text, text_name

    wanted = tokens or TOKENS
    text = built_in_text() if source is None else read_text(source, wanted)
    texts, notes = calibration_tokens(checkpoint, text, wanted)
    about = {
        "text": text_name(source),
        "text_sha256": hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(),
        "tokens_sha256": hashlib.sha256(texts.astype("<i8").tobytes()).hexdigest(),
        "tokens": str(texts.size),
        "chunk": str(texts.shape[1]),
    }
    with stages(name=target.name) as progress:
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
