"""bf16: the upper half of a float32, 8 bits of significand and float32's range. NumPy has no such type; words are uint16."""

from __future__ import annotations

import numpy as np

from .block import register
from .floats import Floats

_LARGEST = np.uint32(0x7F7F)


@register
class BF16(Floats):
    name = "bf16"
    gguf_type = "BF16"
    gguf_file_type = 32
    word = "<u2"

    def to_words(self, values: np.ndarray) -> np.ndarray:
        """Rounds to nearest even, by integer arithmetic on the bits."""
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        magnitude, sign = bits & np.uint32(0x7FFFFFFF), (bits >> 16) & np.uint32(0x8000)
        rounded = (magnitude + np.uint32(0x7FFF) + ((magnitude >> 16) & np.uint32(1))) >> 16
        finite = np.minimum(rounded, _LARGEST)
        special = (magnitude >> 16) | np.where(magnitude > 0x7F800000, np.uint32(0x40), np.uint32(0))  # a NaN stays a NaN
        return (sign | np.where(magnitude < 0x7F800000, finite, special)).astype(np.uint16)

    def from_words(self, words: np.ndarray) -> np.ndarray:
        return (words.astype(np.uint32) << 16).view(np.float32)
