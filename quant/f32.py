"""f32: single precision, the reference that everything else is measured against."""

from __future__ import annotations

import numpy as np

from .block import register
from .floats import Floats


@register
class F32(Floats):
    name = "f32"
    gguf_type = "F32"
    gguf_file_type = 0
    word = "<f4"

    def to_words(self, values: np.ndarray) -> np.ndarray:
        return values

    def from_words(self, words: np.ndarray) -> np.ndarray:
        return words.astype(np.float32)
