"""f16: IEEE half precision, 11 bits of significand, largest number 65504."""

from __future__ import annotations

import numpy as np

from .block import register
from .floats import Floats
from .scales import finite_f16


@register
class F16(Floats):
    name = "f16"
    gguf_type = "F16"
    gguf_file_type = 1
    word = "<f2"

    def to_words(self, values: np.ndarray) -> np.ndarray:
        return np.where(np.isinf(values), values, finite_f16(values)).astype(np.float16)

    def from_words(self, words: np.ndarray) -> np.ndarray:
        return words.astype(np.float32)
