"""Rows of the last hidden state for which logits are wanted, one after another: the head then sees only those."""

from __future__ import annotations

from ...quant.jit.fields import ArgumentBlock, view
from ...quant.jit.memory import load_i32
from ...quant.jit.simd import F32, load, store
from .panels import share
from .structs import STEP

FIELDS = "step x x_stride columns out"
"""step  the step of the outputs: its ids are the rows of x to take
x     float32, row r at x + r * x_stride bytes
out   float32, row after row with the same stride; must not overlap x
"""


def build():
    Arguments, Step = ArgumentBlock(FIELDS), ArgumentBlock(STEP)

    def kernel(arguments, worker, workers):
        a = view(Arguments, arguments)
        step = view(Step, a.step)
        first, last = share(step.tokens, worker, workers)
        for t in range(first, last):  # a lone row is copied by every worker: the same bytes, and no barrier
            source, out = a.x + load_i32(step.ids + 4 * t) * a.x_stride, a.out + t * a.x_stride
            for i in range((a.columns + 15) // 16):
                store(out + 64 * i, load(F32, source + 64 * i))

    return kernel
