"""q6_0: 6-bit integers and an f16 scale per 32 columns: 6.5 bits per weight, for embeddings and heads. Not a GGUF type.

A block: the scale, the low nibbles in the order of q4_0, then the two top bits (parts.TopPairs).
"""

from __future__ import annotations

from .block import register
from .parts import NIBBLES, TOP_PAIRS
from .scaled import ScaledIntegers
from .scales import SignedMax


@register
class Q6_0(ScaledIntegers):
    name = "q6_0"
    grid = SignedMax(6)
    parts = (NIBBLES, TOP_PAIRS)
