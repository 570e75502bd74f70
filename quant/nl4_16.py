"""nl4_16: 4-bit codes of uneven levels, a 6-bit scale per 16 columns and a number per row: 4.375 bits per weight. Not a GGUF type."""

from __future__ import annotations

from .block import register
from .parts import NIBBLES
from .row_storage import RowScales
from .scaled import ScaledIntegers
from .scales import Table


@register
class NL4_16(ScaledIntegers):
    name = "nl4_16"
    grid = Table()
    scales = RowScales(columns=16, bits=6)
    parts = (NIBBLES,)
    method = "search"
