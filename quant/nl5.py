"""nl5: 5-bit codes of uneven levels, an 8-bit scale per 32 columns and a number per row: 5.25 bits per weight. Not a GGUF type."""

from __future__ import annotations

from .block import register
from .parts import FIFTH_BITS, NIBBLES
from .row_storage import ROW_SCALES
from .scaled import ScaledIntegers
from .scales import NL5_LEVELS, Table


@register
class NL5(ScaledIntegers):
    name = "nl5"
    grid = Table(NL5_LEVELS)
    scales = ROW_SCALES
    parts = (FIFTH_BITS, NIBBLES)
    method = "search"
