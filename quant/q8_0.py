"""q8_0: 8-bit integers and an f16 scale per 32 columns: 8.5 bits per weight. The same bits as GGUF's Q8_0."""

from __future__ import annotations

from .block import register
from .parts import BYTES
from .scaled import ScaledIntegers
from .scales import AbsoluteMax


@register
class Q8_0(ScaledIntegers):
    name = "q8_0"
    gguf_type = "Q8_0"
    gguf_file_type = 7
    grid = AbsoluteMax(8)
    parts = (BYTES,)
