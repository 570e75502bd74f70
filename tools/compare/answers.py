"""Answers of a model to prompts, and how far a model agrees with the answers of another.

Models are run one after the other, so that only one has its weights in memory. What the others need of the first is its token ids, and
its logits at every token of its answers; these lie in a temporary file, as llama-perplexity keeps them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...engine.engine import Engine, Work
from ...engine.generate.generation import GenerationState, Memory, run
from ...engine.generate.sampler import SamplingParams
from ...engine.measure.token_errors import kl_divergence
from ..terminal.display import size_text
from .models import CompareError

RUN = 32
"""Tokens of an answer whose logits are in memory at once."""

_VALUES = 1 << 20  # numbers that the sums of a divergence are made over at a time, in float64


@dataclass
class Agreement:
    """How a model judges the answer of another, token by token, given the prompt and that answer so far.

    same  bool[n]: whether the token is the model's likeliest, too
    kl    float64[n]: KL divergence from the other's prediction, nats
    """

    same: np.ndarray
    kl: np.ndarray


@dataclass
class Answer:
    """What a model said to a prompt, and how long that took.

    ids            tokens of the answer; `end` is the one that ended it, None if it was cut off
    ends           for each token, how many characters of the text there were once it was said
    first_token_s  seconds until the first token; decode_s: seconds for all that came after it
    row            where the logits of its tokens begin in the LogitFile
    agreement      with the answer of the first model, where it was measured
    """

    prompt_tokens: int
    ids: list[int] = field(default_factory=list)
    end: int | None = None
    text: str = ""
    ends: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    first_token_s: float = 0.0
    decode_s: float = 0.0
    row: int = 0
    agreement: Agreement | None = None

    @property
    def chosen(self) -> list[int]:
        """Every token that the model chose: those of the answer, and the one that ended it."""
        return self.ids if self.end is None else [*self.ids, self.end]

    @property
    def decoded(self) -> int:
        """Tokens that `decode_s` was spent on: all that were chosen but the first."""
        return max(0, len(self.chosen) - 1)


class LogitFile:
    """Rows of logits, float32[vocabulary], in a temporary file that goes when it is closed. A context manager."""

    def __init__(self, vocabulary: int):
        self._width = 4 * vocabulary
        self.rows = 0
        with _keeping(self._width):
            self._file = tempfile.TemporaryFile(prefix="halfbyte-logits-")  # noqa: SIM115  (closed by close)

    def append(self, logits: np.ndarray) -> None:
        """float32[vocabulary]: one more row. Raises CompareError if the disk is full."""
        with _keeping((self.rows + 1) * self._width):
            self._file.seek(self.rows * self._width)
            self._file.write(np.ascontiguousarray(logits, np.float32).tobytes())
            self._file.flush()
        self.rows += 1

    def read(self, first: int, count: int) -> np.ndarray:
        """float32[count, vocabulary]."""
        self._file.seek(first * self._width)
        return np.frombuffer(self._file.read(count * self._width), np.float32).reshape(count, -1)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> LogitFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _keeping(nbytes: int) -> Iterator[None]:
    """Makes an OSError of the temporary file say what to do. nbytes: what it is to hold."""
    try:
        yield
    except OSError as error:
        raise CompareError(
            f"{size_text(nbytes)} of logits cannot be kept in a temporary file: {error.strerror or error}; name a folder with more room "
            "in the environment variable TMPDIR, or give fewer prompts or a smaller --max-tokens"
        ) from None


class _Watched(Memory):
    """A sequence that shows the logits of the last step (valid until the next)."""

    logits: np.ndarray | None = None

    def next_logits(self, ids: list[int]) -> np.ndarray:
        self.logits = super().next_logits(ids)
        return self.logits


def answer(
    engine: Engine,
    ids: Sequence[int],
    params: SamplingParams,
    continues: bool = False,
    keep: LogitFile | None = None,
    advance: Callable[[int], None] = lambda tokens: None,
) -> Answer:
    """The answer to a prompt. keep: where the logits of its tokens go. advance(tokens): called as the answer grows.

    Only the time that the model takes is counted, not that of keeping logits or showing progress.
    Raises PromptError, LogitsError; CompareError if logits cannot be kept.
    """
    found = Answer(len(ids), row=0 if keep is None else keep.rows)
    sequence = _Watched(engine)
    try:
        state = GenerationState(engine.tokenizer, ids, params, engine.context, continues)
        pieces = run(engine, state, memory=sequence)
        while found.finish_reason is None:
            start = time.perf_counter()
            piece = next(pieces)
            spent = time.perf_counter() - start
            if found.first_token_s == 0.0:
                found.first_token_s = spent
            else:
                found.decode_s += spent
            if keep is not None and sequence.logits is not None:
                keep.append(sequence.logits)
            found.ids += piece.ids
            found.text += piece.text
            found.ends += [len(found.text)] * len(piece.ids)
            found.finish_reason = piece.finish_reason
            advance(len(found.ids))
        found.end = state.matched if isinstance(state.matched, int) else None
    finally:
        sequence.close()
    return found


def agreement(engine: Engine, prompt: Sequence[int], chosen: Sequence[int], kept: LogitFile, row: int) -> Agreement:
    """How the model in `engine` judges an answer of the model whose logits were kept, from `row` on.

    prompt, chosen: the ids of the prompt and of the answer as that model had them. Tokens that do not fit the context are left out.
    """
    fit = max(0, min(len(chosen), engine.context + 1 - len(prompt)))
    feed = [prompt[-1], *chosen[: fit - 1]] if fit else []
    targets = np.array(chosen[:fit], np.int64)
    same, kl = np.zeros(fit, bool), np.zeros(fit)
    sequence = engine.open_sequence()
    try:
        if fit and len(prompt) > 1:
            engine.step([Work(sequence, prompt[:-1], "none")])
        for at in range(0, fit, RUN):
            part = slice(at, min(at + RUN, fit))
            with engine.lock:
                logits = engine.step([Work(sequence, feed[part], "all")])
                same[part] = logits.argmax(axis=1) == targets[part]
                kl[part] = _divergence(kept.read(row + at, part.stop - at), logits)
    finally:
        engine.close_sequence(sequence)
    return Agreement(same, kl)


def _divergence(reference: np.ndarray, logits: np.ndarray) -> np.ndarray:
    step = max(1, _VALUES // max(logits.shape[1], 1))
    parts: list[Any] = []
    with np.errstate(invalid="ignore", over="ignore"):
        for first in range(0, logits.shape[0], step):
            parts.append(kl_divergence(reference[first : first + step], logits[first : first + step]))
    return np.concatenate(parts)
