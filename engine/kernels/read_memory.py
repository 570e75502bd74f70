"""Reads memory and does nothing else: the limit that decoding a large model runs into. For benchmarks."""

from __future__ import annotations

from ...quant.jit.fields import ArgumentBlock, view
from ...quant.jit.simd import I32, load, store, zeros

FIELDS = "address nbytes out"
"""address  of nbytes bytes; each worker reads its share in one sequential stream, 64 bytes at a time
out      64 bytes per worker, so that the compiler cannot leave out the reading
"""


def build():
    Arguments = ArgumentBlock(FIELDS)

    def kernel(arguments, worker, workers):
        a = view(Arguments, arguments)
        lines = a.nbytes // 256
        first, second = zeros(I32), zeros(I32)
        for i in range(lines * worker // workers, lines * (worker + 1) // workers):
            at = a.address + 256 * i
            first = first ^ load(I32, at) ^ load(I32, at + 128)
            second = second ^ load(I32, at + 64) ^ load(I32, at + 192)
        store(a.out + 64 * worker, first ^ second)

    return kernel
