"""iq4_nl: 4-bit codes of uneven levels, an f16 scale per 32 columns: 4.5 bits per weight. The same bits as GGUF's IQ4_NL."""

from __future__ import annotations

from .block import register
from .parts import NIBBLES
from .scaled import ScaledIntegers
from .scales import Table


@register
class IQ4_NL(ScaledIntegers):
    name = "iq4_nl"
    gguf_type = "IQ4_NL"
    gguf_file_type = 25
    grid = Table()
    parts = (NIBBLES,)
    method = "search"
