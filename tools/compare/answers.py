"""Answers of a model to prompts, and how far a model agrees with the answers of another.

Models are run one after the other, so that only one has its weights in memory. What the others need of the first is its token ids, and
its logits at every token of its answers; these lie in a temporary file, as llama-perplexity keeps them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...engine.engine import Engine, Work
from ...engine.generate.answer import Answer, Timings
from ...engine.generate.params import SamplingParams
from ...engine.generate.sampler import Sampled, Sampler
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
class ModelAnswer:
    """What a model said to a prompt, and how long that took. It does not hold on to the model.

    ids            tokens of the answer; `end` is the one that ended it, None if it was cut off
    ends           for each token, how many characters of the text there were once it was said
    row            where the logits of its tokens begin in the LogitFile
    agreement      with the answer of the first model, where it was measured
    """

    timings: Timings
    ids: list[int] = field(default_factory=list)
    end: int | None = None
    text: str = ""
    ends: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    row: int = 0
    agreement: Agreement | None = None

    @property
    def chosen(self) -> list[int]:
        """Every token that the model chose: those of the answer, and the one that ended it."""
        return self.ids if self.end is None else [*self.ids, self.end]


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


class _Watched:
    """An engine of which the logits of the last step are wanted (valid until the next): it chooses from them in NumPy."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self.logits: np.ndarray | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def sample_next(self, sequence: Any, token_ids: Sequence[int], sampler: Sampler) -> Sampled:
        self.logits = self._engine.next_logits(sequence, token_ids)
        return sampler.sample(self.logits)


def answer(
    engine: Engine,
    ids: Sequence[int],
    params: SamplingParams,
    continues: bool = False,
    keep: LogitFile | None = None,
    advance: Callable[[int], None] = lambda tokens: None,
) -> ModelAnswer:
    """The answer to a prompt. keep: where the logits of its tokens go. advance(tokens): called as the answer grows.

    Only the time that the model takes is counted, not that of keeping logits or showing progress.
    Raises PromptError, LogitsError; CompareError if logits cannot be kept.
    """
    watched = None if keep is None else _Watched(engine)
    made = Answer(watched or engine, ids, params, continues=continues)
    found = ModelAnswer(made.timings, row=0 if keep is None else keep.rows)
    try:
        for piece in made:
            if keep is not None and watched is not None and watched.logits is not None:
                keep.append(watched.logits)
            found.ends += [len(made.text)] * len(piece.ids)
            advance(len(found.ends))
    finally:
        made.close()
    found.ids, found.text, found.finish_reason = made.ids, made.text, made.finish_reason
    found.end = made.matched if isinstance(made.matched, int) else None
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
