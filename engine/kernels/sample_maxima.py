"""The largest logit of each lane of each run of a row, and whether there is a NaN: what the threshold of the best tokens comes from."""

from __future__ import annotations

from ...quant.jit.fields import ArgumentBlock, view
from ...quant.jit.memory import store_i32
from ...quant.jit.simd import F32, I32, f32_bits, lanes_max, maximum, store, zeros
from .sampling import BELOW_ALL, MAXIMA, WORST, read, runs_of
from .structs import SAMPLE, SAMPLE_BYTES, SAMPLE_RUN, SAMPLE_RUN_BYTES, STEP

FIELDS = "step table columns work work_row"
"""step           its tokens are the rows
table          a SAMPLE for each
columns        logits of a row
work           SAMPLE_RUN_BYTES for each run, row t's at work + t * work_row
"""


def build():
    Arguments, Step, Row = ArgumentBlock(FIELDS), ArgumentBlock(STEP), ArgumentBlock(SAMPLE)

    def kernel(arguments, worker, workers):
        a = view(Arguments, arguments)
        runs = runs_of(a.columns)
        units = runs * view(Step, a.step).tokens
        for unit in range(units * worker // workers, units * (worker + 1) // workers):
            t, run = unit // runs, unit % runs
            row = view(Row, a.table + t * SAMPLE_BYTES)
            largest, worst = zeros(F32) + BELOW_ALL, zeros(I32)
            for c in range(run * SAMPLE_RUN, min((run + 1) * SAMPLE_RUN, a.columns), 16):
                x = read(row, c, a.columns)
                largest = maximum(x, largest)  # a NaN is passed over here
                worst = maximum(f32_bits(x) & 0x7FFFFFFF, worst)
            known = a.work + t * a.work_row + run * SAMPLE_RUN_BYTES
            store(known + MAXIMA, largest)
            store_i32(known + WORST, lanes_max(worst))

    return kernel
