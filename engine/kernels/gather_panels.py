"""Panels of the tokens of each expert, gathered from the panels of the step: a token's numbers are copied as they are.

Parameters: the kind of panels.
"""

from __future__ import annotations

from ...quant.jit.fields import ArgumentBlock, view
from ...quant.jit.memory import load_i32, store_i32
from ...quant.jit.piece import inline
from ...quant.jit.simd import F32, load, store
from .panels import locate
from .structs import GROUP, GROUP_BYTES, RECORD, ROUTE_BYTES, STEP

FIELDS = "step x x_worker columns routes used groups out"
"""x       panels of the step; a lone token's are at x + worker * x_worker
routes  of all tokens, with their places
groups  a GROUP for each expert
out     an expert's panels begin where those of its start would end
"""


@inline
def copy_int8(source, source_width, source_column, out, width, column):
    """A token's codes, scale and two sums (panels.py), from a record to another."""
    x, to = source + 32 * source_column, out + 32 * column
    for i in range(8):
        store_i32(to + 4 * i, load_i32(x + 4 * i))
    x, to = source + 32 * source_width + 4 * source_column, out + 32 * width + 4 * column
    for i in range(3):
        store_i32(to + 4 * width * i, load_i32(x + 4 * source_width * i))


@inline
def copy_f32(source, source_width, source_column, out, width, column):
    x, to = source + 128 * source_column, out + 128 * column
    store(to, load(F32, x))
    store(to + 64, load(F32, x + 64))


def build(kind: str):
    copy, record = {"int8": copy_int8, "f32": copy_f32}[kind], RECORD[kind]
    Arguments, Step, Group = ArgumentBlock(FIELDS), ArgumentBlock(STEP), ArgumentBlock(GROUP)

    def kernel(arguments, worker, workers):
        a = view(Arguments, arguments)
        tokens = view(Step, a.step).tokens
        blocks = (a.columns + 31) // 32
        x = a.x + (worker * a.x_worker if tokens == 1 else 0)
        for t in range(tokens * worker // workers, tokens * (worker + 1) // workers):
            panel, width, column = locate(t, tokens, blocks, record)
            for r in range(a.used):
                route = a.routes + (t * a.used + r) * ROUTE_BYTES
                group = view(Group, a.groups + load_i32(route) * GROUP_BYTES)
                to_panel, to_width, to_column = locate(load_i32(route + 4), group.count, blocks, record)
                out = a.out + group.start * blocks * record + to_panel
                for i in range(blocks):
                    copy(x + panel + i * record * width, width, column, out + i * record * to_width, to_width, to_column)

    return kernel
