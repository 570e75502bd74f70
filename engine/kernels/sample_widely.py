"""The token of a row of which top-k, top-p and min-p leave more than the best SAMPLE_BEST: see sample_choose.py, which has run before."""

from __future__ import annotations

from numba import float32, float64

from ...quant.jit.fields import ArgumentBlock, view
from ...quant.jit.memory import load_f32, load_f64, load_i64, store_f32, store_f64, store_i64
from ...quant.jit.piece import inline
from ...quant.jit.simd import F64, lanes_sum, to_f64, zeros
from .sample_threshold import threshold
from .sampling import (
    BELOW_ALL,
    BEST,
    ID,
    LARGEST,
    LOGIT,
    SORTED,
    SPILL,
    SPREAD,
    STATUS,
    SUM,
    draw_from_row,
    float_of,
    key_of,
    runs_of,
    shares,
    weigh_list,
)
from .structs import SAMPLE, SAMPLE_BEST, SAMPLE_BYTES, SAMPLE_RUN, SAMPLE_RUN_BYTES, SAMPLED_BYTES, SAMPLED_LISTS, SAMPLED_WIDE, STEP

FIELDS = "step table columns work work_row results scratch scratch_worker"
"""As in sample_choose.py"""


@inline
def cut_by_row(row, columns, largest, total, best, values, scratch):
    """(the logit at which the list of kept tokens ends, the last id of those that have it)"""
    cut, last = float32(BELOW_ALL), columns
    for by_weight in range(2):
        limited = 0 < row.top_k < columns
        if by_weight == 0:
            target = float64(row.top_k)
        else:
            if limited:
                sums, after = zeros(F64), float_of(key_of(cut, scratch + SPILL) + 1, scratch + SPILL)
                for c in range(0, columns, 16):
                    sums += to_f64(shares(row, c, columns, largest, float32(1), cut, after, last))
                total = lanes_sum(sums)
            target = row.top_p * total
        if (row.top_p < float64(1)) if by_weight else (limited and row.top_k > best):
            weigh_list(values, best, largest, float32(1), scratch + SORTED)
            cut, last = threshold(row, columns, largest, by_weight, target, best, values, scratch)
    floor = float32(float64(largest) + row.log_min_p)
    if floor > cut:
        cut, last = floor, columns
    return cut, last


def build():
    Arguments, Step, Row = ArgumentBlock(FIELDS), ArgumentBlock(STEP), ArgumentBlock(SAMPLE)

    @inline
    def choose(row, work, columns, result, scratch):
        largest, best = load_f32(result + LARGEST), load_i64(result + BEST)
        values = result + SAMPLED_LISTS + 4 * SAMPLE_BEST
        cut, last = cut_by_row(row, columns, largest, load_f64(result + SUM), best, values, scratch)
        after = float_of(key_of(cut, scratch + SPILL) + 1, scratch + SPILL)
        for run in range(runs_of(columns)):
            sums = zeros(F64)
            for c in range(run * SAMPLE_RUN, min((run + 1) * SAMPLE_RUN, columns), 16):
                sums += to_f64(shares(row, c, columns, largest, row.scale, cut, after, last))
            store_f64(work + run * SAMPLE_RUN_BYTES + SPREAD, lanes_sum(sums))
        id = draw_from_row(row, work, columns, largest, cut, after, last, scratch)
        store_i64(result + STATUS, 0)
        store_i64(result + ID, id)
        store_f32(result + LOGIT, load_f32(row.logits + 4 * id))

    def kernel(arguments, worker, workers):
        a = view(Arguments, arguments)
        rows, scratch = view(Step, a.step).tokens, a.scratch + worker * a.scratch_worker
        for t in range(rows * worker // workers, rows * (worker + 1) // workers):
            result = a.results + t * SAMPLED_BYTES
            if load_i64(result + STATUS) == SAMPLED_WIDE:
                choose(view(Row, a.table + t * SAMPLE_BYTES), a.work + t * a.work_row, a.columns, result, scratch)

    return kernel
