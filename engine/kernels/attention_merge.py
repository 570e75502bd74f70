"""Folds the parts of lone tokens' attention that different workers computed, then puts all attention results into panels.

Parameters: head size; the kind of panels. Tokens whose attention was done in one piece are only converted.
"""

from __future__ import annotations

from numba import float32

from ...quant.jit.fields import ArgumentBlock, view
from ...quant.jit.memory import store_f32
from ...quant.jit.simd import F32, load
from .attention import finish, fold, start
from .panels import locate, share, writer
from .structs import RECORD, SEQUENCE, SEQUENCE_BYTES, STEP, padded_head, part_bytes

FIELDS = "step x x_stride heads columns parts out out_worker scratch scratch_worker"
"""x        float32 attention results, token t at x + t * x_stride bytes, zero from `columns` up to a multiple of 32
parts    as in attention.py
scratch  part_bytes() and a row of x, per worker
"""


def build(head_size_text: str, kind: str):
    head_size = int(head_size_text)
    vectors, part = padded_head(head_size) // 16, part_bytes(head_size)
    put, record = writer(kind), RECORD[kind]
    Arguments, Step, Sequence = ArgumentBlock(FIELDS), ArgumentBlock(STEP), ArgumentBlock(SEQUENCE)

    def kernel(arguments, worker, workers):
        a = view(Arguments, arguments)
        step = view(Step, a.step)
        blocks = (a.columns + 31) // 32
        first, last = share(step.tokens, worker, workers)
        out = a.out + (worker * a.out_worker if step.tokens == 1 else 0)
        total = a.scratch + worker * a.scratch_worker
        merged = total + part
        parts = a.parts
        for s in range(step.sequences):
            q = view(Sequence, step.table + s * SEQUENCE_BYTES)
            for t in range(max(first, q.first), min(last, q.first + q.count)):
                x = a.x + t * a.x_stride
                if q.splits > 0:
                    for h in range(a.heads):
                        start(total, vectors)
                        for i in range(q.splits):
                            fold(total, parts + (h * q.splits + i) * part, vectors)
                        finish(total, merged + h * (4 * head_size), head_size, vectors)
                    for c in range(a.columns, 32 * blocks):
                        store_f32(merged + 4 * c, float32(0))
                    x = merged
                panel, width, column = locate(t, step.tokens, blocks, record)
                for i in range(blocks):
                    put(load(F32, x + 128 * i), load(F32, x + 128 * i + 64), out + panel + i * record * width, width, column)
            parts += a.heads * q.splits * part

    return kernel
