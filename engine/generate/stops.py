"""Stop strings: where an answer ends because of what it says.

An answer ends at the first place where a stop string is complete; if several are complete at the same place, the longest counts.
The text before it is the answer; nothing of the stop string is. This depends on the text alone, not on how it came in pieces.

While a piece of text could still be the beginning of a stop string it is held back, and no longer: each string is followed by a
Knuth-Morris-Pratt automaton, whose state is exactly how many of the last characters are a beginning of it. So a character costs
one step per string, whatever the strings are.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches a text that comes in pieces.

    stops: the strings; none may be empty (sampler.SamplingParams sees to that).
    matched: the stop string that ended the text, or None.
    """

    def __init__(self, stops: Sequence[str]):
        if "" in stops:
            raise ValueError("a stop string is empty")
        self.matched: str | None = None
        self._stops = tuple(stops)
        self._failures = [_failures(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._held = ""

    @property
    def held(self) -> str:
        """Text that is held back because a stop string may be beginning with it."""
        return self._held

    def push(self, text: str) -> str:
        """Takes the next piece of text; gives what can be shown now. Once `matched` is set the text is over and this gives ""."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        known = len(self._held)
        buffer = self._held + text
        for position in range(known, len(buffer)):
            length = self._advance(buffer[position])
            if length:
                self._held = ""
                return buffer[: position + 1 - length]
        keep = len(buffer) - max(self._states)
        self._held = buffer[keep:]
        return buffer[:keep]

    def finish(self) -> str:
        """The text ends here for another reason: what was held back. Nothing is held afterwards."""
        rest, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return rest

    def _advance(self, character: str) -> int:
        """One character further; the length of the longest stop string that it completes, or 0."""
        longest = 0
        for i, (stop, failures) in enumerate(zip(self._stops, self._failures, strict=True)):
            state = self._states[i]
            while state and stop[state] != character:
                state = failures[state]
            if stop[state] == character:
                state += 1
            self._states[i] = state
            if state == len(stop) and state > longest:
                longest, self.matched = state, stop
        return longest


def _failures(stop: str) -> list[int]:
    """failures[n] is the length of the longest proper beginning of stop[:n] that is also its end."""
    failures = [0] * (len(stop) + 1)
    state = 0
    for n in range(1, len(stop)):
        while state and stop[n] != stop[state]:
            state = failures[state]
        if stop[n] == stop[state]:
            state += 1
        failures[n + 1] = state
    return failures
