"""The gated activation of every token of every expert, into panels (see gated.py).

Parameters: the kind of panels; the activation.
Claimed together with the two products before: who made units of 32 rows of both goes on with them, so no barrier lies between.
"""

from __future__ import annotations

from ...quant.jit.fields import ArgumentBlock, view
from ...quant.jit.simd import F32, load
from .gated import ACTIVATIONS
from .panels import locate, units, writer
from .structs import GROUP, GROUP_BYTES, RECORD

FIELDS = "groups experts gate up stride columns out"
"""groups    a GROUP for each expert
gate, up  float32, slot s at + s * stride bytes
out       panels of each expert, as gather_panels.py has them
"""


def build(kind: str, activation: str):
    put, record, activate = writer(kind), RECORD[kind], ACTIVATIONS[activation]
    Arguments, Group = ArgumentBlock(FIELDS), ArgumentBlock(GROUP)

    def kernel(arguments, worker, span):
        a = view(Arguments, arguments)
        blocks = (a.columns + 31) // 32
        first, last = units(a.columns, span)
        for e in range(a.experts):
            group = view(Group, a.groups + e * GROUP_BYTES)
            out = a.out + group.start * blocks * record
            for t in range(group.count):
                panel, width, column = locate(t, group.count, blocks, record)
                for i in range(first, last):
                    at = (group.start + t) * a.stride + 128 * i
                    low = activate(load(F32, a.gate + at)) * load(F32, a.up + at)
                    high = activate(load(F32, a.gate + at + 64)) * load(F32, a.up + at + 64)
                    put(low, high, out + panel + i * record * width, width, column)

    return kernel
