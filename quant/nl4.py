"""nl4: 4-bit codes of uneven levels, an 8-bit scale per 32 columns and a number per row: 4.25 bits per weight. Not a GGUF type."""

from __future__ import annotations

from .block import register
from .parts import NIBBLES
from .row_storage import ROW_SCALES
from .scaled import ScaledIntegers
from .scales import Table


@register
class NL4(ScaledIntegers):
    name = "nl4"
    grid = Table()
    scales = ROW_SCALES
    parts = (NIBBLES,)
    method = "search"
