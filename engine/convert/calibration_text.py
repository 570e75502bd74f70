"""The text that a model is calibrated on: the built-in one, and which of its tokens are run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...formats.checkpoint import Checkpoint
from ...formats.errors import printable
from ..measure.evaluation_text import encode_beginning
from ..text.tokenizer import Tokenizer
from .calibration import CHUNK, SMALLEST_CHUNK, CalibrationError

TOKENS = 48 * CHUNK
"""Tokens that are run if nobody says otherwise. Gram matrices of more hardly differ."""

BLEND = 0.2
"""Share of the built-in text that is mixed into a text of the user's."""

_BUILT_IN = Path(__file__).with_name("data") / "calibration.txt"


def built_in_text() -> str:
    """Passages by Lewis Carroll, Shakespeare and Milton, entries of the Jargon File, code and documentation of this package, questions
    and answers: 118 kB in alternation, so that any beginning of it is a mixture. It shares no passage with the text of reports.
    """
    return _BUILT_IN.read_text("utf-8")


def calibration_tokens(checkpoint: Checkpoint, text: str, tokens: int = TOKENS, chunk: int | None = None) -> tuple[np.ndarray, list[str]]:
    """(int64[chunks, chunk] ids of the first whole chunks of a text, at least `tokens` tokens if there are; what to tell the user).

    chunk: tokens of a context (None: 512, or the model's context if that is smaller). As llama-imatrix does it: special tokens in the
    text are text; where the model wants a beginning-of-text token, one goes before the text, and one takes the place of the first token
    of every chunk.
    Raises CalibrationError for a text shorter than a chunk and a model that has no tokenizer, TokenizerError for a broken one.
    """
    name = printable(checkpoint.path.name, 120)
    if checkpoint.architecture is None or not checkpoint.tokenizer:
        raise CalibrationError(f"{name} has no tokenizer, so no text can be run")
    if chunk is None:
        chunk = min(CHUNK, checkpoint.model.context)
    if chunk < SMALLEST_CHUNK:
        raise CalibrationError(f"a chunk must have at least {SMALLEST_CHUNK} tokens, not {chunk}")
    tokenizer = Tokenizer.from_files(checkpoint.tokenizer)
    wanted = -(-max(tokens, 1) // chunk) * chunk
    ids = encode_beginning(tokenizer, text, wanted)
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    if bos is not None and ids[:1] != [bos]:
        ids.insert(0, bos)
    if len(ids) < chunk:
        raise CalibrationError(f"the text has {len(ids)} tokens, which is less than one chunk of {chunk}: give a longer text")
    notes = []
    if len(ids) < wanted:
        notes.append(f"the text has {len(ids)} tokens; its {len(ids) // chunk} whole chunks of {chunk} are used")
    texts = np.array(ids[: min(wanted, len(ids) // chunk * chunk)], np.int64).reshape(-1, chunk)
    if bos is not None:
        texts[:, 0] = bos
    return texts, notes


def blended_tokens(
    checkpoint: Checkpoint, text: str, tokens: int = TOKENS, share: float = BLEND, chunk: int | None = None
) -> tuple[np.ndarray, list[str]]:
    """The same, but that a share of the chunks, evenly spaced, is of the built-in text.

    Error feedback lets the outputs be right on what it has seen at the cost of what it has not. A little of many other kinds of text
    keeps those right, too, and costs next to nothing on the user's own.
    """
    own = max(1, round(tokens * (1 - share)))
    texts, notes = calibration_tokens(checkpoint, text, own, chunk)
    mixed = round(len(texts) * share / (1 - share)) if share > 0 else 0
    if mixed == 0:
        return texts, notes
    others, _ = calibration_tokens(checkpoint, built_in_text(), mixed * texts.shape[1], texts.shape[1])
    at = ((np.arange(len(others)) + 0.5) * len(texts) / len(others)).astype(int)
    return np.insert(texts, at, others, axis=0), notes
