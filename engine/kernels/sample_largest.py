"""The largest logit of each row and the lowest id that has it; or that a logit is not finite, or that no token is left."""

from __future__ import annotations

from numba import int64

from ...quant.jit.fields import ArgumentBlock, view
from ...quant.jit.memory import store_f32, store_f64, store_i64
from ...quant.jit.piece import inline
from ...quant.jit.simd import F32, less, load, lowest_bit, mask_bits
from .sampling import BEST, ID, LARGEST, LOGIT, MAXIMA, STATUS, SUM, largest_of, read, runs_of
from .structs import SAMPLE, SAMPLE_BYTES, SAMPLE_RUN, SAMPLE_RUN_BYTES, SAMPLED_BYTES, STEP

FIELDS = "step table columns work work_row results"
"""As in sample_maxima.py, which has run before; and
results        a SAMPLED for each row, SAMPLED_BYTES apart
"""


@inline
def first_largest(row, work, columns, largest):
    """The lowest id of those with the largest logit."""
    for run in range(runs_of(columns)):
        if mask_bits(less(load(F32, work + run * SAMPLE_RUN_BYTES + MAXIMA), largest)) != 0xFFFF:
            for c in range(run * SAMPLE_RUN, min((run + 1) * SAMPLE_RUN, columns), 16):
                bits = mask_bits(less(read(row, c, columns), largest)) ^ 0xFFFF
                if bits:
                    return c + lowest_bit(bits)
    return int64(-1)


def build():
    Arguments, Step, Row = ArgumentBlock(FIELDS), ArgumentBlock(STEP), ArgumentBlock(SAMPLE)

    def kernel(arguments, worker, workers):
        a = view(Arguments, arguments)
        rows = view(Step, a.step).tokens
        for t in range(rows * worker // workers, rows * (worker + 1) // workers):
            work, result = a.work + t * a.work_row, a.results + t * SAMPLED_BYTES
            status, largest = largest_of(work, a.columns)
            store_i64(result + STATUS, status)
            store_i64(result + ID, first_largest(view(Row, a.table + t * SAMPLE_BYTES), work, a.columns, largest) if status == 0 else 0)
            store_f32(result + LOGIT, largest)
            store_f32(result + LARGEST, largest)
            store_f64(result + SUM, 0.0)
            store_i64(result + BEST, 0)

    return kernel
