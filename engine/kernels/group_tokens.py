"""Tokens by the expert that computes them, in the order of the step: where each of an expert's tokens has its place.

One worker counts, the others wait at the barrier that follows: a step has few choices beside what they then cost.
"""

from __future__ import annotations

from ...quant.jit.fields import ArgumentBlock, view
from ...quant.jit.memory import load_i32, load_i64, store_i32, store_i64
from .structs import GROUP_BYTES, ROUTE_BYTES, STEP, TOKENS

FIELDS = "step routes used experts out"
"""routes  of all tokens; their places are filled in
out     a GROUP for each expert
"""


def build():
    Arguments, Step = ArgumentBlock(FIELDS), ArgumentBlock(STEP)

    def kernel(arguments, worker, workers):
        if worker != 0:
            return
        a = view(Arguments, arguments)
        for e in range(a.experts):
            store_i64(a.out + e * GROUP_BYTES + 8, 0)
        for i in range(view(Step, a.step).tokens * a.used):
            route = a.routes + i * ROUTE_BYTES
            count = a.out + load_i32(route) * GROUP_BYTES + 8
            place = load_i64(count)
            store_i32(route + 4, place)
            store_i64(count, place + 1)
        start = 0
        for e in range(a.experts):
            store_i64(a.out + e * GROUP_BYTES, start)
            start += (load_i64(a.out + e * GROUP_BYTES + 8) + TOKENS - 1) // TOKENS * TOKENS

    return kernel
