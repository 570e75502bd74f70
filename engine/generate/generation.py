"""From a prompt to an answer, token by token.

`GenerationState` is one answer in the making. It has no loop and knows no model: it says which ids the model must see next
(`feed`), takes the logits that follow them (`push`), and gives a piece of the answer. Whoever holds many states can put the ids
of all of them into one step of the engine. `generate` is the loop for one.

    ids → Sampler → id → end-of-text or stop id? → Detokenizer → StopStrings → text
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from ...quant.errors import HalfbyteError
from ..text.detokenizer import Detokenizer
from .sampler import Sampler, SamplingParams
from .stops import StopStrings

FinishReason = Literal["stop", "length"]

CHUNK = 512
"""Ids of a prompt that are fed at once. Between chunks a caller can interrupt; larger ones are no faster."""


class PromptError(HalfbyteError):
    """The prompt cannot be answered: empty, or longer than the context."""


class TokenLogprob(NamedTuple):
    """The natural log-probability of a token of the answer, and of the likeliest tokens in its place (likeliest first)."""

    id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Piece:
    """What one step added to an answer.

    text           new text; may be empty: a character may not be whole yet, or a stop string may be beginning
    ids            token ids that this step added to the answer. A token that ends it (end of text, stop id) is not part of it
    logprobs       for each of `ids`, if they were asked for
    finish_reason  None; on the last piece "stop" (end of text, a stop id, a stop string) or "length" (max_tokens, a full context)
    """

    text: str = ""
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None


class GenerationState:
    """One answer in the making.

    feed           ids that the model must see next: the prompt, then the token chosen last. Empty when the answer is over
    prompt_ids     the ids of the prompt
    ids            the ids of the answer so far
    finish_reason  None while the answer goes on
    matched        the stop string, or the id, that ended it; None for "length"
    seed           the seed in use, also when none was given

    tokenizer: the model's; context: the most tokens, prompt and answer together; continues: the answer goes on a text that the
    prompt is, so a space at its beginning is part of it (SentencePiece puts one before every text of its own).
    Raises PromptError for an empty prompt, or one longer than the context (with both numbers).
    """

    def __init__(
        self, tokenizer: Any, prompt_ids: Sequence[int], params: SamplingParams, context: int, continues: bool = False
    ):
        self.params = params
        self.prompt_ids = list(prompt_ids)
        self.matched: str | int | None = None
        self.finish_reason: FinishReason | None = None
        _check_prompt(len(self.prompt_ids), context)
        self._history = list(self.prompt_ids)
        room = context - len(self.prompt_ids)
        self._most = room if params.max_tokens is None else min(params.max_tokens, room)
        self._ends = frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else frozenset(tokenizer.eos_ids))
        self._sampler = Sampler(params)
        self._detokenizer = Detokenizer(tokenizer, continues=continues)
        self._stops = StopStrings(tuple(params.stop))
        if self._most == 0:
            self.finish_reason = "length"
        self.feed: list[int] = [] if self.finish_reason else self.prompt_ids

    @property
    def ids(self) -> list[int]:
        return self._history[len(self.prompt_ids) :]

    @property
    def seed(self) -> int:
        return self._sampler.seed

    def push(self, logits: np.ndarray) -> Piece:
        """Takes the logits (float32[vocabulary]) that follow `feed`, and chooses the next token.

        Raises LogitsError for logits that no token can be drawn from.
        """
        if self.finish_reason is not None:
            raise RuntimeError("this answer is over")
        id, logprob, top = self._sampler.sample(logits, self._history, len(self.prompt_ids))
        if id in self._ends:
            self.matched = id
            return self._end("", "stop", (), None)
        self._history.append(id)
        text = self._stops.push(self._detokenizer.push(id))
        logprobs = None if logprob is None else (TokenLogprob(id, logprob, top or []),)
        if self._stops.matched is not None or len(self._history) - len(self.prompt_ids) >= self._most:
            return self._end(text, "length", (id,), logprobs)
        self.feed = [id]
        return Piece(text, (id,), logprobs)

    def _end(self, text: str, reason: FinishReason, ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...] | None) -> Piece:
        """The last piece, with all that was held back; a stop string may still become complete in it."""
        text += self._stops.push(self._detokenizer.finish())
        text += self._stops.finish()
        if self._stops.matched is not None:
            reason, self.matched = "stop", self._stops.matched
        self.finish_reason, self.feed = reason, []
        return Piece(text, ids, logprobs, reason)


def _check_prompt(length: int, context: int) -> None:
    if length == 0:
        raise PromptError("the prompt is empty: give at least one token to continue from")
    if length > context:
        raise PromptError(
            f"the prompt has {length} tokens and the context holds {context}: shorten it, or ask for more context (--context)"
        )


class Stepper(Protocol):
    """What `generate` needs of an engine."""

    @property
    def tokenizer(self) -> Any: ...
    @property
    def context(self) -> int: ...

    def open_sequence(self) -> Any:
        """An empty sequence of the KV cache."""

    def next_logits(self, sequence: Any, token_ids: Sequence[int]) -> np.ndarray:
        """Puts ids behind a sequence and gives the logits after the last: float32[vocabulary]."""

    def truncate_sequence(self, sequence: Any, length: int) -> int:
        """Forgets all but the first `length` tokens of a sequence, or all of them where these cannot be gone back to. How many are left."""

    def close_sequence(self, sequence: Any) -> None:
        """Frees a sequence."""


class Memory:
    """A sequence that outlives an answer: the next prompt is computed only from where it differs from what was there.

    A chat sends its whole conversation each turn; with this a turn costs what it adds. The answers are the same, bit for bit,
    because logits do not depend on how a prompt came to the model.

    reused: how many tokens of the last prompt were there already.
    """

    def __init__(self, engine: Stepper):
        self._engine = engine
        self._sequence: Any = None
        self._ids: list[int] = []
        self.reused = 0

    def begin(self, prompt_ids: list[int]) -> list[int]:
        """Makes the sequence a beginning of the prompt; the ids that are still to be fed (at least one)."""
        if self._sequence is None:
            self._sequence, self._ids = self._engine.open_sequence(), []
        self.reused = common_prefix(self._ids, prompt_ids[:-1])
        if self.reused < len(self._ids):
            self.reused = self._engine.truncate_sequence(self._sequence, self.reused)
            del self._ids[self.reused :]
        return prompt_ids[self.reused :]

    def next_logits(self, ids: list[int]) -> np.ndarray:
        try:
            logits = self._engine.next_logits(self._sequence, ids)
        except BaseException:
            self.close()  # an interrupt may have come after the step as well as in the middle of it
            raise
        self._ids += ids
        return logits

    def close(self) -> None:
        """Frees the sequence. The memory can be used again; it is empty then."""
        if self._sequence is not None:
            sequence, self._sequence, self._ids = self._sequence, None, []
            self._engine.close_sequence(sequence)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two lists have in common at their beginning."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return next(i for i in range(shorter) if a[i] != b[i])


def generate(
    engine: Stepper,
    prompt_ids: Sequence[int],
    params: SamplingParams | None = None,
    progress: Callable[[int, int], None] | None = None,
    continues: bool = False,
) -> Iterator[Piece]:
    """The pieces of one answer, as they are made; the last one, and only it, has a finish reason.

    The prompt is checked at once, not at the first piece. Closing the iterator, or dropping it, frees the sequence.
    progress: called before each part of the prompt with how many of its tokens are done, and how many there are; what it raises
    ends the answer and reaches the caller. continues: see GenerationState.
    """
    state = GenerationState(engine.tokenizer, prompt_ids, params or SamplingParams(), engine.context, continues)
    return run(engine, state, progress)


def run(
    engine: Stepper,
    state: GenerationState,
    progress: Callable[[int, int], None] | None = None,
    memory: Memory | None = None,
) -> Iterator[Piece]:
    """The loop of `generate` over a state that the caller keeps (for its seed, its ids, what matched), and perhaps a memory."""
    if state.finish_reason is not None:
        yield Piece(finish_reason=state.finish_reason)
        return
    own = memory or Memory(engine)
    lock = getattr(engine, "lock", None) or nullcontext()
    try:
        feed = own.begin(state.prompt_ids)
        while state.finish_reason is None:
            for start in range(0, len(feed), CHUNK):
                if progress is not None and state.feed is state.prompt_ids:
                    progress(len(state.prompt_ids) - len(feed) + start, len(state.prompt_ids))
                part = feed[start : start + CHUNK]
                with lock:  # the logits are the engine's: another thread's step would overwrite them
                    logits = own.next_logits(part)
                    piece = state.push(logits) if start + CHUNK >= len(feed) else None
            assert piece is not None
            yield piece
            feed = state.feed
    finally:
        if memory is None:
            own.close()
