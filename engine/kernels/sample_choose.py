"""The token of each row that does not take the largest: a draw from what top-k, top-p and min-p leave; and the best tokens' logits.

What is left is always a beginning of the list of all tokens, largest logit first and equal ones in order of id. Nearly always it ends
among the best SAMPLE_BEST, and is found there. Where it may not (a flat row), the row is left to sample_widely.py. The draw is the same
either way: the kept tokens' weights are added up in order of id until they exceed the random number's share of all.
"""

from __future__ import annotations

from numba import float32, float64, int64

from ...quant.jit.fields import ArgumentBlock, view
from ...quant.jit.memory import load_f32, load_f64, load_i32, load_i64, store_f32, store_f64, store_i64
from ...quant.jit.piece import inline
from .sample_best import best_of
from .sampling import (
    BELOW_ALL,
    BEST,
    ID,
    IDS,
    LARGEST,
    LOGIT,
    RANKS,
    SHARES,
    SORTED,
    STATUS,
    SUM,
    TOTAL,
    VALUES,
    draw_from_row,
    runs_of,
    weigh_list,
)
from .structs import (
    SAMPLE,
    SAMPLE_BEST,
    SAMPLE_BYTES,
    SAMPLE_RUN_BYTES,
    SAMPLED_BYTES,
    SAMPLED_LISTS,
    SAMPLED_WIDE,
    STEP,
    WANT_BEST,
    WANT_DRAW,
    WANT_SPREAD,
    WANT_SUM,
)

FIELDS = "step table columns work work_row results scratch scratch_worker"
"""As in sample_largest.py, which has run before, like sample_sums.py; and
scratch        SAMPLE_SCRATCH bytes for each worker, `scratch_worker` apart
"""


@inline
def cut_by_list(row, columns, largest, total, best, result, scratch):
    """(whether it is sure, how many tokens are kept), as far as the list of the best can say."""
    limit = row.top_k if 0 < row.top_k < columns else columns
    sure, keep = limit <= best, min(limit, best)
    unknown = False  # whether top-p cuts before the end of top-k's list, which is longer than ours
    if row.top_p < float64(1):
        if sure:
            total = float64(0)
            for i in range(keep):
                total += float64(load_f32(scratch + SORTED + 4 * i))
        unknown = not sure and limit < columns
        if not unknown:
            target, mass, i = row.top_p * total, float64(0), int64(0)
            while i < keep and mass < target:
                mass += float64(load_f32(scratch + SORTED + 4 * i))
                i += 1
            if mass >= target:
                sure, keep = True, i
    if row.log_min_p > float64(BELOW_ALL) and not unknown:
        floor, i = float32(float64(largest) + row.log_min_p), int64(0)
        while i < keep and load_f32(result + SAMPLED_LISTS + 4 * SAMPLE_BEST + 4 * i) >= floor:
            i += 1
        if i < keep:
            sure, keep = True, i
    return sure, keep


@inline
def draw_from_list(row, largest, best, keep, scratch):
    """The id that the random number falls on, among the kept of the best."""
    weigh_list(scratch + VALUES, best, largest, row.scale, scratch + SHARES)
    total = float64(0)
    for i in range(best):
        if load_i32(scratch + RANKS + 4 * i) < keep:
            total += float64(load_f32(scratch + SHARES + 4 * i))
    target, mass = row.uniform * total, float64(0)
    for i in range(best):
        if load_i32(scratch + RANKS + 4 * i) < keep:
            mass += float64(load_f32(scratch + SHARES + 4 * i))
            if mass > target:
                return load_i32(scratch + IDS + 4 * i)
    return int64(-1)


def build():
    Arguments, Step, Row = ArgumentBlock(FIELDS), ArgumentBlock(STEP), ArgumentBlock(SAMPLE)

    @inline
    def choose(row, work, columns, result, scratch):
        largest, id, status, total, best = load_f32(result + LARGEST), load_i64(result + ID), 0, float64(0), int64(0)
        if row.wants & WANT_SUM:
            for run in range(runs_of(columns)):
                total += load_f64(work + run * SAMPLE_RUN_BYTES + TOTAL)
        if row.wants & WANT_BEST:
            best = best_of(row, work, columns, largest, scratch, result)
        if row.wants & WANT_SPREAD:
            everything = float32(BELOW_ALL)
            id = draw_from_row(row, work, columns, largest, everything, everything, columns, scratch)
        elif row.wants & WANT_DRAW:
            weigh_list(result + SAMPLED_LISTS + 4 * SAMPLE_BEST, best, largest, float32(1), scratch + SORTED)
            sure, keep = cut_by_list(row, columns, largest, total, best, result, scratch)
            if sure:
                id = draw_from_list(row, largest, best, keep, scratch)
            else:
                status = SAMPLED_WIDE
        store_i64(result + STATUS, status)
        store_i64(result + ID, id)
        store_f32(result + LOGIT, load_f32(row.logits + 4 * id))
        store_f64(result + SUM, total)
        store_i64(result + BEST, best)

    def kernel(arguments, worker, workers):
        a = view(Arguments, arguments)
        rows, scratch = view(Step, a.step).tokens, a.scratch + worker * a.scratch_worker
        for t in range(rows * worker // workers, rows * (worker + 1) // workers):
            row, result = view(Row, a.table + t * SAMPLE_BYTES), a.results + t * SAMPLED_BYTES
            if row.wants and load_i64(result + STATUS) == 0:
                choose(row, a.work + t * a.work_row, a.columns, result, scratch)

    return kernel
