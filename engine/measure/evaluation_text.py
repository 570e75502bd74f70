"""The text that a report is made on: which tokens of it are run, and whether two checkpoints read it alike."""

from __future__ import annotations

import numpy as np

from ...formats.checkpoint import Checkpoint
from ...formats.errors import printable
from ..text.tokenizer import Tokenizer
from .compare import ReportError
from .report import SMALLEST_CHUNK

_CHARACTERS = 8  # of text per token, at first; prose has 4


def evaluation_tokens(model: Checkpoint, reference: Checkpoint, text: str, tokens: int, chunk: int) -> tuple[np.ndarray, list[str]]:
    """(int64[chunks * chunk] ids of the first whole chunks of a text, at least `tokens` of them if there are; what to tell the user).

    As llama-perplexity does it: special tokens in the text are text; where the model wants a beginning-of-text token, one goes before the
    text, and one takes the place of the first token of every chunk.
    Raises ReportError for a text shorter than a chunk and for tokenizers that differ.
    """
    if chunk < SMALLEST_CHUNK:
        raise ReportError(f"a chunk must have at least {SMALLEST_CHUNK} tokens, not {chunk}")
    notes: list[str] = []
    tokenizers = [Tokenizer.from_files(c.tokenizer) if c.tokenizer else None for c in (model, reference)]
    ours, theirs = tokenizers
    tokenizer = ours or theirs
    if tokenizer is None:
        raise ReportError(f"neither {_name(model)} nor {_name(reference)} has a tokenizer, so no text can be run")
    for checkpoint, own in zip((model, reference), tokenizers, strict=True):
        if own is None:
            notes.append(f"{_name(checkpoint)} has no tokenizer; the other's is used")
    wanted = -(-max(tokens, 1) // chunk) * chunk
    ids = encode_beginning(tokenizer, text, wanted)
    if ours is not None and theirs is not None:
        _check_same(model, reference, ids, encode_beginning(theirs, text, wanted))
        if ours.add_bos != theirs.add_bos:
            with_bos = model if ours.add_bos else reference
            used = "it is" if ours.add_bos else "none is"
            notes.append(f"only {_name(with_bos)} wants a beginning-of-text token; {used} used, as {_name(model)} says")
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    if bos is not None and ids[:1] != [bos]:
        ids.insert(0, bos)
    if len(ids) < chunk:
        raise ReportError(
            f"the text has {len(ids)} tokens, which is less than one chunk of {chunk}: "
            "give a longer text, or a smaller --chunk (figures then differ)"
        )
    if len(ids) < wanted:
        notes.append(f"the text has {len(ids)} tokens; its {len(ids) // chunk} whole chunks of {chunk} are used")
    found = np.array(ids[: min(wanted, len(ids) // chunk * chunk)], np.int64)
    if bos is not None:
        found[::chunk] = bos
    return found, notes


def encode_beginning(tokenizer: Tokenizer, text: str, tokens: int) -> list[int]:
    """Ids of the text, or of enough of its beginning: a little more than asked, so that where it is cut makes no difference."""
    characters = _CHARACTERS * tokens + 4096
    while True:
        ids = tokenizer.encode(text[:characters])
        if characters >= len(text) or len(ids) >= tokens + 256:
            return ids
        characters *= 2


def _check_same(model: Checkpoint, reference: Checkpoint, ours: list[int], theirs: list[int]) -> None:
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if same is None and len(ours) == len(theirs):
        return
    at = min(len(ours), len(theirs)) if same is None else same
    a, b = (ids[at] if at < len(ids) else "nothing" for ids in (ours, theirs))
    raise ReportError(
        f"the tokenizers of {_name(model)} and {_name(reference)} differ: token {at} of the text is {a} with the one and {b} with the other"
    )


def _name(checkpoint: Checkpoint) -> str:
    return printable(checkpoint.path.name, 120)
