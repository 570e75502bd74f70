"""Float activations into panels, for a matrix product whose input no other op makes ready.

Parameters: the kind of panels.
"""

from __future__ import annotations

from ...quant.jit.fields import ArgumentBlock, view
from ...quant.jit.simd import F32, load
from .panels import locate, share, writer
from .structs import RECORD, STEP

FIELDS = "step x x_stride columns out out_worker"
"""As in rms_norm.py, without weight."""


def build(kind: str):
    put, record = writer(kind), RECORD[kind]
    Arguments, Step = ArgumentBlock(FIELDS), ArgumentBlock(STEP)

    def kernel(arguments, worker, workers):
        a = view(Arguments, arguments)
        tokens = view(Step, a.step).tokens
        blocks = (a.columns + 31) // 32
        first, last = share(tokens, worker, workers)
        out = a.out + (worker * a.out_worker if tokens == 1 else 0)
        for t in range(first, last):
            panel, width, column = locate(t, tokens, blocks, record)
            for i in range(blocks):
                x = a.x + t * a.x_stride + 128 * i
                put(load(F32, x), load(F32, x + 64), out + panel + i * record * width, width, column)

    return kernel
