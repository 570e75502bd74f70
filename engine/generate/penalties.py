"""Which tokens of an answer have a bias or a penalty, with counts that are kept as the text grows, never counted anew."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from .params import SamplingParams


class PenalizedTokens:
    """The tokens that SamplingParams make likelier or less likely, each listed once: an AdjustedTokens (run/token_choice.py).

    history: ids of the prompt and of what was said so far; the first `prompt_length` are the prompt.
    count: tokens listed. ids, seen, said: int32; bias, raw: float32; arrays are longer than `count`. addresses: where they lie.
    """

    def __init__(self, params: SamplingParams, history: Sequence[int], prompt_length: int):
        repeats = params.repetition_penalty != 1.0
        window = params.repetition_window
        self._counts_seen, self._counts_said = repeats, bool(params.frequency_penalty or params.presence_penalty)
        self._last: deque[int] | None = deque(history[-window:], window) if repeats and window else None
        seen = np.array((self._last or history) if repeats else (), np.int64)
        said = np.array(history[prompt_length:] if self._counts_said else (), np.int64)
        biased = np.fromiter(params.logit_bias, np.int64, len(params.logit_bias))
        ids = np.unique(np.concatenate([biased, seen, said]))
        self.count = ids.size
        self._place = dict(zip(ids.tolist(), range(ids.size), strict=True))
        room = 64 + 2 * ids.size
        self.ids, self.seen, self.said = (np.zeros(room, np.int32) for _ in range(3))
        self.bias, self.raw = np.zeros(room, np.float32), np.zeros(room, np.float32)
        self.ids[: ids.size] = ids
        with np.errstate(over="ignore"):
            self.bias[np.searchsorted(ids, biased)] = np.fromiter(params.logit_bias.values(), np.float64, biased.size)
        self.seen[:room] = np.bincount(np.searchsorted(ids, seen), minlength=room)
        self.said[:room] = np.bincount(np.searchsorted(ids, said), minlength=room)
        self.addresses = self._addresses()

    def push(self, id: int) -> None:
        """One token more was said."""
        place = self._place_of(id) if self._counts_seen or self._counts_said else 0
        if self._counts_seen:
            last = self._last
            if last is not None:
                if len(last) == last.maxlen:
                    self.seen[self._place[last[0]]] -= 1
                last.append(id)
            self.seen[place] += 1
        if self._counts_said:
            self.said[place] += 1

    def _place_of(self, id: int) -> int:
        place = self._place.get(id)
        if place is None:
            place = self._place[id] = self.count
            if place == self.ids.size:
                for name in ("ids", "seen", "said", "bias", "raw"):
                    array = getattr(self, name)
                    setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
                self.addresses = self._addresses()
            self.ids[place] = id
            self.count += 1
        return place

    def _addresses(self) -> tuple[int, ...]:
        return tuple(array.ctypes.data for array in (self.ids, self.bias, self.seen, self.said, self.raw))
