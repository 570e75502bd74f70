"""q4_1: 4-bit integers, an f16 scale and an f16 minimum per 32 columns: 5 bits per weight. The same bits as GGUF's Q4_1."""

from __future__ import annotations

from .block import register
from .parts import NIBBLES
from .scaled import ScaledIntegers
from .scales import Affine
from .storage import F16_WITH_MINIMUM


@register
class Q4_1(ScaledIntegers):
    name = "q4_1"
    gguf_type = "Q4_1"
    gguf_file_type = 3
    grid = Affine(4)
    scales = F16_WITH_MINIMUM
    parts = (NIBBLES,)
    method = "search"
