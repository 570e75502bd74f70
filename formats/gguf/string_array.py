"""Walking over an array of length-prefixed strings without a Python step per string.

A GGUF file holds its vocabulary as (length u64, bytes) one after another, so where a string begins is known only from the one
before. Lengths below 256 show as a byte followed by seven zeros, a pattern that text does not have. All places of that pattern
are found at once; where each one's end is the next one's beginning, the chain is followed by whole runs. Where it breaks (a long
string, an empty one, zeros in the text) single steps are taken. So the result is exact for any bytes, and fast for real ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import HeaderError, TruncatedError

MAX_STRINGS = 1 << 23
"""Most strings in one array that are read; the largest vocabularies have a fourteenth of that. Bounds time and memory."""
_WINDOW = 1 << 20


def find_strings(path: Any, data: np.ndarray, start: int, count: int, wide: bool, where: str) -> np.ndarray:
    """int64[count + 1]: where each string's length field begins in `data` (uint8[n]), and the end of the last string.

    wide: lengths are u64, else u32. Raises TruncatedError if the strings leave the data, HeaderError beyond MAX_STRINGS.
    """
    lead = 8 if wide else 4
    if count > (len(data) - start) // lead:
        raise TruncatedError(path, start + lead * count, len(data), where=where, offset=start)
    if count > MAX_STRINGS:
        raise HeaderError(path, f"an array of {count} strings; at most {MAX_STRINGS} are read", where=where, offset=start)
    places = np.empty(count + 1, np.int64)
    view, size = data.data, len(data)
    done, position, patience = 0, start, 16
    runs = _Runs(data, position)
    while done < count:
        if wide:
            if position >= runs.stop:
                runs, patience = _Runs(data, position), 16
            found = runs.follow(position, count - done)
            if len(found):
                places[done : done + len(found)] = found
                done += len(found)
                position = int(found[-1]) + lead + data[found[-1]].item()
                if position > size:
                    raise TruncatedError(path, position, size, where=where, offset=int(found[-1]))
        # Where the pattern keeps breaking, the walk goes step by step in ever longer stretches.
        patience = 16 if wide and len(found) > 64 else 2 * patience
        steps = []
        for _ in range(min(patience, count - done)):
            if size - position < lead:
                raise TruncatedError(path, position + lead, size, where=where, offset=position)
            steps.append(position)
            position += lead + int.from_bytes(view[position : position + lead], "little")
            if position > size:
                raise TruncatedError(path, position, size, where=where, offset=steps[-1])
        places[done : done + len(steps)] = steps
        done += len(steps)
    places[count] = position
    return places


class _Runs:
    """All places of the pattern in one window of the data, and where chains of them break."""

    def __init__(self, data: np.ndarray, start: int):
        window = data[start : start + _WINDOW]
        self.start, self.stop = start, start + max(len(window) - 8, 1)
        zero = window == 0
        two = zero[:-1] & zero[1:]
        four = two[:-2] & two[2:]
        seven = four[:-3] & four[3:]
        self.places = np.flatnonzero(seven[1:])
        ends = self.places + 8 + window[self.places]
        self.breaks = np.flatnonzero(ends[:-1] != self.places[1:])

    def follow(self, position: int, count: int) -> np.ndarray:
        """int64[n]: beginnings of the strings from `position` on that the chain proves, at most `count`."""
        first = int(np.searchsorted(self.places, position - self.start))
        if first == len(self.places) or self.places[first] != position - self.start:
            return self.places[:0]
        broken = int(np.searchsorted(self.breaks, first))
        last = int(self.breaks[broken]) if broken < len(self.breaks) else len(self.places) - 1
        return self.places[first : min(last + 1, first + count)] + self.start
