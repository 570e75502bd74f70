"""Which experts compute a token, and by how much each counts: those with the highest router scores (Shazeer et al. 2017).

Parameters: "chosen" for weights that are a softmax over the chosen experts, "all" for those of the softmax over all of them.
Of equal scores the one with the lower number comes first, so a token's experts and their ranks depend on its scores alone.
"""

from __future__ import annotations

from numba import float32

from ...quant.jit.fields import ArgumentBlock, view
from ...quant.jit.memory import load_f32, load_i32, store_f32, store_i32
from ...quant.jit.piece import inline
from ...quant.jit.simd import F32, I32, exp, iota, lanes_max, lanes_sum, less, load, where, zeros
from .structs import ROUTE_BYTES, STEP

FIELDS = "step scores stride experts used out scratch scratch_worker"
"""scores   float32, token t at scores + t * stride bytes, readable up to a multiple of 16
used     experts of a token, at most `experts`
out      for each token `used` routes (structs.py); their places are left to group_tokens.py
scratch  route_scratch() bytes per worker
"""


@inline
def scalar_exp(x):
    return lanes_max(exp(zeros(F32) + x))


def build(over: str):
    over_all = over == "all"
    Arguments, Step = ArgumentBlock(FIELDS), ArgumentBlock(STEP)

    @inline
    def best(scores, taken, experts):
        """The expert with the highest score that is not taken; where scores are NaN, some expert."""
        found, highest = -1, float32(0)
        for e in range(experts):
            score = load_f32(scores + 4 * e)
            if load_i32(taken + 4 * e) == 0 and (found < 0 or score > highest):
                found, highest = e, score
        return found, highest

    @inline
    def total_of_all(scores, top, experts):
        sums = zeros(F32)
        for e in range(0, experts, 16):
            there = less(iota(e), zeros(I32) + experts)
            sums = sums + where(there, exp(load(F32, scores + 4 * e) - top), zeros(F32))
        return lanes_sum(sums)

    def kernel(arguments, worker, workers):
        a = view(Arguments, arguments)
        tokens = view(Step, a.step).tokens
        taken = a.scratch + worker * a.scratch_worker
        for t in range(tokens * worker // workers, tokens * (worker + 1) // workers):
            scores, routes = a.scores + t * a.stride, a.out + t * a.used * ROUTE_BYTES
            for e in range(a.experts):
                store_i32(taken + 4 * e, 0)
            top, total = float32(0), float32(0)
            for r in range(a.used):
                expert, score = best(scores, taken, a.experts)
                if r == 0:
                    top = score
                store_i32(taken + 4 * expert, 1)
                weight = scalar_exp(score - top)
                total += weight
                store_i32(routes + r * ROUTE_BYTES, expert)
                store_f32(routes + r * ROUTE_BYTES + 8, weight)
            if over_all:
                total = total_of_all(scores, top, a.experts)
            for r in range(a.used):
                at = routes + r * ROUTE_BYTES + 8
                store_f32(at, load_f32(at) / total)

    return kernel
