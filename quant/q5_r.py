"""q5_r: 5-bit integers, an 8-bit scale per 32 columns and a number per row: 5.25 bits per weight. Not a GGUF type."""

from __future__ import annotations

from .block import register
from .parts import FIFTH_BITS, NIBBLES
from .row_storage import ROW_SCALES
from .scaled import ScaledIntegers
from .scales import SignedMax


@register
class Q5_R(ScaledIntegers):
    name = "q5_r"
    grid = SignedMax(5)
    scales = ROW_SCALES
    parts = (FIFTH_BITS, NIBBLES)
    method = "search"
