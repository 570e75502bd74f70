"""q5_1: 5-bit integers, an f16 scale and an f16 minimum per 32 columns: 6 bits per weight. The same bits as GGUF's Q5_1."""

from __future__ import annotations

from .block import register
from .parts import FIFTH_BITS, NIBBLES
from .scaled import ScaledIntegers
from .scales import Affine
from .storage import F16_WITH_MINIMUM


@register
class Q5_1(ScaledIntegers):
    name = "q5_1"
    gguf_type = "Q5_1"
    gguf_file_type = 9
    grid = Affine(5)
    scales = F16_WITH_MINIMUM
    parts = (FIFTH_BITS, NIBBLES)
    tile_parts = (NIBBLES, FIFTH_BITS)
