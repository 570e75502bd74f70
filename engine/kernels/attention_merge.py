"""Folds the parts of lone tokens' attention that different workers computed, then puts all attention results into panels.

Parameters: value size; the kind of panels; "window" and "sinks" if attention.py has them. Tokens whose attention was done in one piece are
only converted.
"""

from __future__ import annotations

from numba import float32

from ...quant.jit.fields import ArgumentBlock, view
from ...quant.jit.memory import load_f32, store_f32
from ...quant.jit.simd import F32, load
from .attention import finish, first_split, fold, inverse_of_sum, inverse_with_sink, start
from .panels import locate, share, writer
from .structs import RECORD, SEQUENCE, SEQUENCE_BYTES, STEP, padded_head, part_bytes

FIELDS = "step x x_stride heads columns parts out out_worker scratch scratch_worker window sinks"
"""x        float32 attention results, token t at x + t * x_stride bytes, zero from `columns` up to a multiple of 32
parts, window, sinks  as in attention.py
scratch  part_bytes() and a row of x, per worker
"""


def build(value_size_text: str, kind: str, *features: str):
    value_size = int(value_size_text)
    vectors, part = padded_head(value_size) // 16, part_bytes(value_size)
    windowed, sinking = "window" in features, "sinks" in features
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
                    begin = first_split(q.start + 1, a.window) if windowed else 0
                    for h in range(a.heads):
                        start(total, vectors)
                        for i in range(begin, q.splits):
                            fold(total, parts + (h * q.splits + i) * part, vectors)
                        inverse = inverse_with_sink(total, load_f32(a.sinks + 4 * h)) if sinking else inverse_of_sum(total)
                        finish(total, merged + h * (4 * value_size), value_size, inverse)
                    for c in range(a.columns, 32 * blocks):
                        store_f32(merged + 4 * c, float32(0))
                    x = merged
                panel, width, column = locate(t, step.tokens, blocks, record)
                for i in range(blocks):
                    put(load(F32, x + 128 * i), load(F32, x + 128 * i + 64), out + panel + i * record * width, width, column)
            parts += a.heads * q.splits * part

    return kernel
