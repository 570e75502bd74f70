"""nl4_16: 4-bit codes of uneven levels, a 6-bit scale per 16 columns and a number per row: 4.375 bits per weight. Not a GGUF type."""

from __future__ import annotations

from .block import register
from .layout import NIBBLES
from .row_scaled import RowScaledIntegers
from .scales import Table


@register
class NL4_16(RowScaledIntegers):
    name = "nl4_16"
    grid = Table()
    parts = (NIBBLES,)
    scale_columns = 16
    scale_bits = 6
