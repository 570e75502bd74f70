"""q4_0: 4-bit integers and an f16 scale per 32 columns: 4.5 bits per weight. The same bits as GGUF's Q4_0."""

from __future__ import annotations

from .block import register
from .parts import NIBBLES
from .scaled import ScaledIntegers
from .scales import SignedMax


@register
class Q4_0(ScaledIntegers):
    name = "q4_0"
    gguf_type = "Q4_0"
    gguf_file_type = 2
    grid = SignedMax(4)
    parts = (NIBBLES,)
    method = "search"
