"""bf16: the upper half of a float32, 8 bits of significand and float32's range. NumPy has no such type; words are uint16."""

from __future__ import annotations

import numpy as np

from .block import register
from .floats import Floats

LARGEST = np.uint32(0x7F7F0000).view(np.float32)
"""The largest finite number of the type."""


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32[...] -> uint16[...]: to nearest even; what is too large becomes infinity, NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & np.uint32(1))) >> 16
    return np.where(np.isnan(values), bits >> 16 | np.uint32(0x40), rounded).astype(np.uint16)


def from_bf16(words: np.ndarray) -> np.ndarray:
    """uint16[...] -> float32[...]."""
    bits = words.astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


@register
class BF16(Floats):
    name = "bf16"
    gguf_type = "BF16"
    gguf_file_type = 32
    word = "<u2"

    def to_words(self, values: np.ndarray) -> np.ndarray:
        return to_bf16(np.where(np.isinf(values), values, values.clip(-LARGEST, LARGEST)))

    def from_words(self, words: np.ndarray) -> np.ndarray:
        return from_bf16(words)
