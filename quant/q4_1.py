"""q4_1: 4-bit integers, an f16 scale and an f16 minimum per 32 columns: 5 bits per weight. The same bits as GGUF's Q4_1."""

from __future__ import annotations

from .block import register
from .layout import NIBBLES
from .scaled import ScaledIntegers
from .scales import Affine


@register
class Q4_1(ScaledIntegers):
    name = "q4_1"
    gguf_type = "Q4_1"
    grid = Affine(4)
    parts = (NIBBLES,)
    method = "search"
