"""q5_0: 5-bit integers and an f16 scale per 32 columns: 5.5 bits per weight. The same bits as GGUF's Q5_0."""

from __future__ import annotations

from .block import register
from .parts import FIFTH_BITS, NIBBLES
from .scaled import ScaledIntegers
from .scales import SignedMax


@register
class Q5_0(ScaledIntegers):
    name = "q5_0"
    gguf_type = "Q5_0"
    gguf_file_type = 8
    grid = SignedMax(5)
    parts = (FIFTH_BITS, NIBBLES)
    tile_parts = (NIBBLES, FIFTH_BITS)
