"""Sums of the weights of each run of a row, for the rows that want them: at temperature 1, and at their own."""

from __future__ import annotations

from numba import float32

from ...quant.jit.fields import ArgumentBlock, view
from ...quant.jit.memory import store_f64
from ...quant.jit.piece import inline
from ...quant.jit.simd import F64, lanes_sum, to_f64, zeros
from .sampling import SPREAD, TOTAL, largest_of, read, runs_of, weights
from .structs import SAMPLE, SAMPLE_BYTES, SAMPLE_RUN, SAMPLE_RUN_BYTES, STEP, WANT_SPREAD, WANT_SUM

FIELDS = "step table columns work work_row"
"""As in sample_maxima.py, which has run before."""


def build():
    Arguments, Step, Row = ArgumentBlock(FIELDS), ArgumentBlock(STEP), ArgumentBlock(SAMPLE)

    @inline
    def sum_of(row, first, columns, largest, scale):
        total = zeros(F64)
        for c in range(first, min(first + SAMPLE_RUN, columns), 16):
            total += to_f64(weights(read(row, c, columns), largest, scale))
        return lanes_sum(total)

    def kernel(arguments, worker, workers):
        a = view(Arguments, arguments)
        runs = runs_of(a.columns)
        units = runs * view(Step, a.step).tokens
        first, last = units * worker // workers, units * (worker + 1) // workers
        for t in range(first // runs, (last + runs - 1) // runs):
            row, work = view(Row, a.table + t * SAMPLE_BYTES), a.work + t * a.work_row
            if row.wants & (WANT_SUM | WANT_SPREAD):
                status, largest = largest_of(work, a.columns)
                if status == 0:
                    for run in range(max(first - t * runs, 0), min(last - t * runs, runs)):
                        known = work + run * SAMPLE_RUN_BYTES
                        if row.wants & WANT_SUM:
                            store_f64(known + TOTAL, sum_of(row, run * SAMPLE_RUN, a.columns, largest, float32(1)))
                        if row.wants & WANT_SPREAD:
                            store_f64(known + SPREAD, sum_of(row, run * SAMPLE_RUN, a.columns, largest, row.scale))

    return kernel
