"""The kernel of matrix products in a Cholesky factor (cholesky.py): out -= left · right, STRIP columns of left at a time.

Each number of `out` is one sum, one fma after another in ascending order, so it depends on no number of workers.
"""

from __future__ import annotations

from .cholesky import PANEL, STRIP
from .jit.fields import ArgumentBlock, view
from .jit.piece import inline
from .jit.simd import F32, fma, load_tile, load_tile_2d, spread, store_tile, tile
from .jit.target import current

FIELDS = "out stride left left_stride panels rows columns lower scratch scratch_bytes"
"""
out, stride        float32[rows, columns], rows a multiple of 32, and the bytes from one row to the next
left, left_stride  float32[rows, STRIP]
panels             float32[columns / 32, STRIP, 32]: minus right, 32 columns after 32 columns
lower              1: only where the column is not beyond the row's block of 32 rows
scratch            nothing
"""


def build():
    height, vectors = (8, 2) if "avx512f" in current().features else (4, 1)
    Sums, Left, Right = tile(F32, height, vectors), tile(F32, height, 1), tile(F32, 1, vectors)

    @inline
    def multiply(out, stride, left, left_stride, panel):
        sums = load_tile_2d(Sums, out, stride, 64)
        for k in range(STRIP):
            sums = fma(spread(Left, left + 4 * k, left_stride), load_tile(Right, panel + 4 * PANEL * k, 64), sums)
        store_tile(out, sums, stride, 64)

    Arguments = ArgumentBlock(FIELDS)

    def kernel(arguments, worker, workers):
        a = view(Arguments, arguments)
        blocks, panels = a.rows // PANEL, a.columns // PANEL
        block = int(worker)  # every `workers`-th, because those of a triangle grow
        while block < blocks:
            # Along the rows of `out`, whose pages then stay known to the processor, though it is the panels that are read again.
            for p in range(min(block + 1, panels) if a.lower else panels):
                panel = a.panels + 4 * PANEL * STRIP * p
                for r in range(PANEL // height):
                    row = PANEL * block + height * r
                    for v in range(0, PANEL // 16, vectors):
                        at = a.out + row * a.stride + 4 * PANEL * p + 64 * v
                        multiply(at, a.stride, a.left + row * a.left_stride, a.left_stride, panel + 64 * v)
            block += workers

    return kernel
