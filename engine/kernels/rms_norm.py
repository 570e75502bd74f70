"""Root-mean-square norm (Zhang & Sennrich 2019), straight into activation panels: x / sqrt(mean(x²) + epsilon) * weight.

Parameters: the kind of panels. With one token every worker norms it into a panel of its own, which costs less than a barrier.
"""

from __future__ import annotations

from numba import float32

from ...quant.jit.fields import ArgumentBlock, view
from ...quant.jit.memory import sqrt_f32
from ...quant.jit.piece import inline
from ...quant.jit.simd import F32, fma, lanes_sum, load, zeros
from .panels import locate, share, writer
from .structs import RECORD, STEP

FIELDS = "step x x_stride weight columns out out_worker epsilon:f32"
"""x       float32, token t at x + t * x_stride bytes, zero from `columns` up to a multiple of 32
weight  float32[columns padded to 32 with zeros]
out     panels; a lone token's at out + worker * out_worker
"""


@inline
def inverse_rms(x, columns, epsilon):
    """1 / sqrt(mean of squares + epsilon), summed in a fixed order."""
    first, second = zeros(F32), zeros(F32)
    for i in range((columns + 31) // 32):
        a, b = load(F32, x + 128 * i), load(F32, x + 128 * i + 64)
        first, second = fma(a, a, first), fma(b, b, second)
    mean = lanes_sum(first + second) / float32(columns)
    return float32(1) / sqrt_f32(mean + epsilon)


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
            x = a.x + t * a.x_stride
            factor = inverse_rms(x, a.columns, a.epsilon)
            panel, width, column = locate(t, tokens, blocks, record)
            for i in range(blocks):
                low = load(F32, x + 128 * i) * factor * load(F32, a.weight + 128 * i)
                high = load(F32, x + 128 * i + 64) * factor * load(F32, a.weight + 128 * i + 64)
                put(low, high, out + panel + i * record * width, width, column)

    return kernel
