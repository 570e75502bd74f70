"""Bias and penalties, where a row's logits lie: logit bias, then the repetition penalty, then the frequency and presence penalties.

The tokens concerned are listed, each once, with how often they were said, so a long text costs no more than the different tokens in it.
What a logit was before is kept beside the list.
"""

from __future__ import annotations

from numba import float32

from ...quant.jit.fields import ArgumentBlock, view
from ...quant.jit.memory import load_f32, load_i32, store_f32
from .structs import SAMPLE, SAMPLE_BYTES, STEP

FIELDS = "step table"
"""step   its tokens are the rows
table  a SAMPLE for each
"""


def build():
    Arguments, Step, Row = ArgumentBlock(FIELDS), ArgumentBlock(STEP), ArgumentBlock(SAMPLE)

    def kernel(arguments, worker, workers):
        a = view(Arguments, arguments)
        for t in range(view(Step, a.step).tokens):
            row = view(Row, a.table + t * SAMPLE_BYTES)
            for i in range(row.touched * worker // workers, row.touched * (worker + 1) // workers):
                at = row.logits + 4 * load_i32(row.ids + 4 * i)
                x = load_f32(at)
                store_f32(row.raw + 4 * i, x)
                x += load_f32(row.bias + 4 * i)
                if load_i32(row.seen + 4 * i) > 0:
                    divided, multiplied = x / row.repetition, x * row.repetition
                    x = divided if x > float32(0) else multiplied
                times = load_i32(row.said + 4 * i)
                if times > 0:
                    x -= float32(times) * row.frequency + row.presence
                store_f32(at, x)

    return kernel
