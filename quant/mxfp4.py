"""mxfp4: OCP's 4-bit floats (E2M1) and a power of two per 32 columns: 4.25 bits per weight. The same bits as GGUF's MXFP4.

The values of E2M1 are 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with a sign; levels are twice that. What is stored is sign and magnitude, so there
are two zeros, of which a choice of codes never gives the negative one.
"""

from __future__ import annotations

from .block import register
from .e8m0 import E8M0
from .parts import NIBBLES
from .scaled import ScaledIntegers
from .scales import E2M1_LEVELS, Table


@register
class MXFP4(ScaledIntegers):
    name = "mxfp4"
    gguf_type = "MXFP4"
    gguf_file_type = 38
    grid = Table(E2M1_LEVELS, halves_to_zero=True)
    scales = E8M0(reach=3)
    parts = (NIBBLES,)
    order = (*range(15, 7, -1), *range(8))
    method = "search"
