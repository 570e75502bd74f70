"""q6_r: 6-bit integers, an 8-bit scale per 32 columns and a number per row: 6.25 bits per weight. Not a GGUF type."""

from __future__ import annotations

from .block import register
from .parts import NIBBLES, TOP_PAIRS
from .row_storage import ROW_SCALES
from .scaled import ScaledIntegers
from .scales import SignedMax


@register
class Q6_R(ScaledIntegers):
    name = "q6_r"
    grid = SignedMax(6)
    scales = ROW_SCALES
    parts = (TOP_PAIRS, NIBBLES)
    method = "search"
