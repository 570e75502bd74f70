"""qconvert by what matrices read and what each of them is worth: which text or statistics, how long it will take, a bar on the way."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..terminal.console import UsageError

if TYPE_CHECKING:
    import numpy as np

    from ...engine.convert.mix import Goal, MixResult
    from ...formats.checkpoint import Checkpoint
    from ...formats.conversion.convert import ConversionResult
    from ...formats.conversion.recipe import Recipe

_SHORT = 20.0
"""Seconds that need no announcement."""


@dataclass(frozen=True)
class Text:
    """Which text a model is run on. source: a file, "-" for stdin, None for the built-in text; tokens: in all, or None for the default;
    blend: share of the built-in text among them, None for the default where the source is another.
    """

    source: str | None = None
    tokens: int | None = None
    blend: float | None = None

    def read(self, checkpoint: Checkpoint) -> tuple[np.ndarray, list[str], dict[str, str]]:
        """(int64[chunks, chunk] ids, what to tell the user, what the file is to say about the text).

        Raises UsageError for a share of the built-in text in itself, InputError, and as engine.calibration_text.
        """
        from ...engine.convert.calibration_text import BLEND, TOKENS, blended_tokens, built_in_text, calibration_tokens
        from ..terminal.text_file import read_text, text_name

        if self.source is None and self.blend is not None:
            raise UsageError("--blend: the text is the built-in one already; give yours with --calibrate")
        wanted = self.tokens or TOKENS
        share = 0.0 if self.source is None else BLEND if self.blend is None else self.blend
        text = built_in_text() if self.source is None else read_text(self.source, wanted)
        if share > 0:
            texts, notes = blended_tokens(checkpoint, text, wanted, share)
        else:
            texts, notes = calibration_tokens(checkpoint, text, wanted)
        about = {
            "text": text_name(self.source),
            "text_sha256": hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(),
            "tokens_sha256": hashlib.sha256(texts.astype("<i8").tobytes()).hexdigest(),
            "tokens": str(texts.size),
            "chunk": str(texts.shape[1]),
        }
        return texts, notes, about | ({"blend": f"{share:g}"} if share else {})


def convert_by_inputs(
    checkpoint: Checkpoint,
    target: Path,
    recipe: Recipe,
    text: Text,
    threads: int | None,
    allow_nonfinite: bool,
) -> ConversionResult:
    """Converts to a .hbf file by a text or a file of statistics.

    Raises HalfbyteError of many kinds, see engine.convert_feedback; UsageError for --tokens and --blend with statistics.
    """
    from ...engine.convert.feedback import convert_with_statistics, convert_with_text, estimated_multiplications
    from ..terminal.stages import stages

    if text.source is not None and holds_statistics(text.source):
        from ...formats.conversion.open_statistics import open_statistics
        from ...formats.conversion.statistics import fingerprint
        from ..terminal.display import note

        source = text.source
        for option, value in (("--tokens", text.tokens), ("--blend", text.blend)):
            if value is not None:
                raise UsageError(f"{option}: {source} holds statistics, not a text")
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
    texts, notes, about = text.read(checkpoint)
    _announce(estimated_multiplications(checkpoint, recipe, texts), threads)
    with stages(name=target.name) as progress:
        result = convert_with_text(
            checkpoint, target, recipe, texts, provenance=about, threads=threads, allow_nonfinite=allow_nonfinite, progress=progress
        )
    result.notes = [*notes, *result.notes]
    return result


def convert_mixed(
    checkpoint: Checkpoint, target: Path, recipe: Recipe, goal: Goal, text: Text, threads: int | None, allow_nonfinite: bool
) -> MixResult:
    """Converts to a .hbf file that meets a goal. A divergence is measured on the text of reports. Raises as engine.convert_mix."""
    from ...engine.convert.candidates import estimated_multiplications
    from ...engine.convert.mix import candidate_formats, convert_to_goal
    from ..terminal.stages import stages

    texts, notes, about = text.read(checkpoint)
    ids, chunk = None, 512
    if goal.kl is not None:
        from ...engine.measure.built_in_text import BUILT_IN_TEXT, TOKENS
        from ...engine.measure.evaluation_text import evaluation_tokens
        from ..terminal.text_file import read_text

        chunk = min(chunk, checkpoint.model.context)
        ids, _ = evaluation_tokens(checkpoint, checkpoint, read_text(str(BUILT_IN_TEXT), TOKENS), TOKENS, chunk)
    _announce(estimated_multiplications(checkpoint, candidate_formats(checkpoint, recipe, goal), texts), threads)
    with stages(name=target.name) as progress:
        result = convert_to_goal(
            checkpoint,
            target,
            recipe,
            goal,
            texts,
            ids=ids,
            chunk=chunk,
            provenance=about,
            threads=threads,
            allow_nonfinite=allow_nonfinite,
            progress=progress,
        )
    result.conversion.notes = [*notes, *result.notes, *result.conversion.notes]
    return result


@contextmanager
def waiting_file(target: Path) -> Iterator[Path]:
    """A path beside the target for a .hbf file that is written on the way to another kind; gone when the block ends."""
    from ...formats.atomic import waiting_folder

    with waiting_folder(target) as folder:
        yield folder / f"{target.name[:60]}.hbf"


def _announce(multiplications: float, threads: int | None) -> None:
    """Says how long it will take, if that is long."""
    from ...engine.convert.time_estimate import expected_seconds
    from ...quant.processors import physical_cores
    from ..terminal.display import note

    count = threads or physical_cores()
    seconds = expected_seconds(multiplications, count)
    if seconds > _SHORT:
        on = "one thread" if count == 1 else f"{count} threads"
        note(f"the model is run on a text to see what its matrices read: about {duration(seconds)} on {on}; --fast takes seconds")


def duration(seconds: float) -> str:
    """ "40 s", "3 min", "2 h 10 min": as exact as a guess can be."""
    if seconds < 90:
        return f"{max(round(seconds, -1), 10):.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60 // 10 * 10} min"


def holds_statistics(path: str) -> bool:
    """True for a .safetensors file, and for llama.cpp's imatrix files, which are GGUF or end in .dat."""
    from ...formats.file_kinds import HEAD_BYTES, kind_of_bytes

    try:
        if path == "-" or not os.path.isfile(path):  # what can be read only once is a text
            return False
        with open(path, "rb") as file:
            head = file.read(HEAD_BYTES)
    except (OSError, ValueError):
        return False
    return kind_of_bytes(head) in ("gguf", "safetensors") or path.endswith(".dat")
