"""The gated activation of a feed-forward layer, into panels: activation(gate) * up (Shazeer 2020).

Parameters: the kind of panels; the activation, "silu".
Claimed together with the two products before: who made units of 32 rows of both goes on with them, so no barrier lies between.
"""

from __future__ import annotations

from ...quant.jit.fields import ArgumentBlock, view
from ...quant.jit.piece import inline
from ...quant.jit.simd import F32, exp, load, zeros
from .panels import locate, units, writer
from .structs import RECORD, STEP

FIELDS = "step gate up stride columns out"
"""gate, up  float32, token t at + t * stride bytes
out       panels, shared by all workers
"""


@inline
def silu(x):
    """x / (1 + e**-x), the swish of Ramachandran et al. 2017"""
    return x / (exp(zeros(F32) - x) + 1)


ACTIVATIONS = {"silu": silu}


def build(kind: str, activation: str):
    put, record, activate = writer(kind), RECORD[kind], ACTIVATIONS[activation]
    Arguments, Step = ArgumentBlock(FIELDS), ArgumentBlock(STEP)

    def kernel(arguments, worker, span):
        a = view(Arguments, arguments)
        tokens = view(Step, a.step).tokens
        blocks = (a.columns + 31) // 32
        first, last = units(a.columns, span)
        for t in range(tokens):
            panel, width, column = locate(t, tokens, blocks, record)
            for i in range(first, last):
                at = t * a.stride + 128 * i
                low = activate(load(F32, a.gate + at)) * load(F32, a.up + at)
                high = activate(load(F32, a.gate + at + 64)) * load(F32, a.up + at + 64)
                put(low, high, a.out + panel + i * record * width, width, column)

    return kernel
