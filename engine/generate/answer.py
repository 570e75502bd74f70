"""From a prompt to an answer, token by token.

An `Answer` is iterated for its pieces; it keeps what was said and what that took. Whoever holds many answers, and puts what each of them
needs next into one step of the engine, does not iterate: `feed` says which ids the model must see next, and `push` takes the token that
was chosen after them and gives a piece.

    ids → Sampler → id → end-of-text or stop id? → Detokenizer → StopStrings → text
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ...quant.errors import HalfbyteError
from ..text.detokenizer import Detokenizer
from .kept_sequence import KeptSequence, Stepper
from .params import SamplingParams
from .sampler import Sampled, Sampler
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


@dataclass(slots=True)
class Timings:
    """What an answer took of the engine's time; the time that its reader took between pieces does not count.

    prompt_tokens, reused  tokens of the prompt, and how many of them were computed for an earlier one
    first_token_s          seconds until the first token was chosen: the prompt
    decode_s, decoded      seconds for the tokens after that, and how many were chosen, the one that ended the answer among them
    """

    prompt_tokens: int = 0
    reused: int = 0
    first_token_s: float = 0.0
    decode_s: float = 0.0
    decoded: int = 0

    @property
    def prefill_tok_s(self) -> float:
        """Tokens of the prompt per second, those that were there already left out."""
        return (self.prompt_tokens - self.reused) / max(self.first_token_s, 1e-9)

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens per second after the first; None for an answer too short to say."""
        return self.decoded / max(self.decode_s, 1e-9) if self.decoded else None


class Answer:
    """One answer: an iterator of its pieces, of which the last one, and only it, has a finish reason.

    prompt_ids     the ids of the prompt
    text           what was said so far
    logprobs       for each of `ids`, if they were asked for
    finish_reason  None while the answer goes on
    matched        the stop string, or the id, that ended it; None for "length"
    timings        what it took, when it is iterated
    feed           ids that the model must see next: the prompt, then the token chosen last. Empty when the answer is over
    sampler        chooses the tokens

    engine: a Stepper; params: greedy if None; continues: the answer goes on a text that the prompt is, so a space at its beginning is
    part of it (SentencePiece puts one before every text of its own). progress: called before each part of the prompt with how many of
    its tokens are done, and how many there are; what it raises ends the answer and reaches the caller. kept: a sequence that stays
    when the answer is over; without one, ending, closing or dropping the answer frees its sequence.
    Raises PromptError for an empty prompt, or one longer than the context (with both numbers).
    """

    def __init__(
        self,
        engine: Stepper,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        progress: Callable[[int, int], None] | None = None,
        continues: bool = False,
        kept: KeptSequence | None = None,
    ):
        self.params = params or SamplingParams()
        self.prompt_ids = list(prompt_ids)
        self.text = ""
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.matched: str | int | None = None
        self.timings = Timings(len(self.prompt_ids))
        self._sequence, self._owned = kept or KeptSequence(engine), kept is None
        self._closed = False
        _check_prompt(len(self.prompt_ids), engine.context)
        room = engine.context - len(self.prompt_ids)
        self._most = room if self.params.max_tokens is None else min(self.params.max_tokens, room)
        ends = () if self.params.ignore_eos else engine.tokenizer.eos_ids
        self._ends = frozenset(self.params.stop_ids) | frozenset(ends)
        self.sampler = Sampler(self.params, self.prompt_ids)
        self._detokenizer = Detokenizer(engine.tokenizer, continues=continues)
        self._stops = StopStrings(tuple(self.params.stop))
        self._progress = progress
        if self._most == 0:
            self.finish_reason = "length"
        self.feed: list[int] = [] if self.finish_reason else self.prompt_ids

    @property
    def ids(self) -> list[int]:
        """The ids of the answer so far."""
        return self.sampler.history[len(self.prompt_ids) :]

    @property
    def seed(self) -> int:
        """The seed in use, also when none was given."""
        return self.sampler.seed

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Answer:
        return self

    def __next__(self) -> Piece:
        if self._closed:
            raise StopIteration
        if self.finish_reason is not None:  # nothing may be said at all
            self.close()
            return Piece(finish_reason=self.finish_reason)
        start = time.perf_counter()
        try:
            piece = self._step()
        except BaseException:
            self.close()
            raise
        if piece.finish_reason is not None:
            self.close()
        spent = time.perf_counter() - start
        if self.timings.first_token_s == 0.0:
            self.timings.first_token_s = spent
        else:
            self.timings.decode_s += spent
            self.timings.decoded += 1
        return piece

    def _step(self) -> Piece:
        """Feeds what is to be fed, and takes the token after it."""
        feed = self.feed
        if feed is self.prompt_ids:
            feed = self._sequence.begin(feed)
            self.timings.reused = self._sequence.reused
            done, total = self._sequence.reused, len(self.prompt_ids)
            while True:
                if self._progress is not None:
                    self._progress(done, total)
                if len(feed) <= CHUNK:
                    break
                self._sequence.extend(feed[:CHUNK])
                done, feed = done + CHUNK, feed[CHUNK:]
        return self.push(self._sequence.sample_next(feed, self.sampler))

    def close(self) -> None:
        """Ends the iteration and frees the sequence, if it is not kept for others."""
        self._closed = True
        if self._owned:
            self._sequence.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    # ---- a step ------------------------------------------------------------------------------------------------------

    def push(self, sampled: Sampled) -> Piece:
        """Takes the token that was chosen after `feed`."""
        if self.finish_reason is not None:
            raise RuntimeError("this answer is over")
        id, logprob, top = sampled
        if id in self._ends:
            self.matched = id
            return self._end("", "stop", (), None)
        self.sampler.push(id)
        text = self._stops.push(self._detokenizer.push(id))
        logprobs = None
        if logprob is not None:
            self.logprobs.append(TokenLogprob(id, logprob, top or []))
            logprobs = (self.logprobs[-1],)
        if self._stops.matched is not None or len(self.sampler.history) - len(self.prompt_ids) >= self._most:
            return self._end(text, "length", (id,), logprobs)
        self.feed = [id]
        self.text += text
        return Piece(text, (id,), logprobs)

    def _end(self, text: str, reason: FinishReason, ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...] | None) -> Piece:
        """The last piece, with all that was held back; a stop string may still become complete in it."""
        text += self._stops.push(self._detokenizer.finish())
        text += self._stops.finish()
        if self._stops.matched is not None:
            reason, self.matched = "stop", self._stops.matched
        self.finish_reason, self.feed = reason, []
        self.text += text
        return Piece(text, ids, logprobs, reason)


def _check_prompt(length: int, context: int) -> None:
    if length == 0:
        raise PromptError("the prompt is empty: give at least one token to continue from")
    if length > context:
        raise PromptError(
            f"the prompt has {length} tokens and the context holds {context}: shorten it, or ask for more context (--context)"
        )
