"""A sequence that outlives an answer, so that the next prompt is computed only from where it differs from what was there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .sampler import Sampled, Sampler


class Stepper(Protocol):
    """What an answer needs of an engine."""

    @property
    def tokenizer(self) -> Any: ...
    @property
    def context(self) -> int: ...

    def open_sequence(self) -> Any:
        """An empty sequence of the KV cache."""

    def extend_sequence(self, sequence: Any, token_ids: Sequence[int]) -> None:
        """Puts ids behind a sequence."""

    def sample_next(self, sequence: Any, token_ids: Sequence[int], sampler: Sampler) -> Sampled:
        """Puts ids behind a sequence, and chooses the token after them."""

    def truncate_sequence(self, sequence: Any, length: int) -> int:
        """Forgets all but the first `length` tokens of a sequence."""

    def close_sequence(self, sequence: Any) -> None:
        """Frees a sequence."""


class KeptSequence:
    """A sequence of the KV cache and the ids that it holds, for one answer after another.

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

    def extend(self, ids: list[int]) -> None:
        """Puts ids behind what is there. After an error the sequence is empty: nobody knows how far the step came."""
        try:
            self._engine.extend_sequence(self._sequence, ids)
        except BaseException:
            self.close()
            raise
        self._ids += ids

    def sample_next(self, ids: list[int], sampler: Sampler) -> Sampled:
        """The same, and the token that comes next."""
        try:
            sampled = self._engine.sample_next(self._sequence, ids, sampler)
        except BaseException:
            self.close()
            raise
        self._ids += ids
        return sampled

    def close(self) -> None:
        """Frees the sequence. It can be used again; it is empty then."""
        if self._sequence is not None:
            sequence, self._sequence, self._ids = self._sequence, None, []
            self._engine.close_sequence(sequence)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two lists have in common at their beginning."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return next(i for i in range(shorter) if a[i] != b[i])
