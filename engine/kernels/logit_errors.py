"""Sums over the vocabulary by which two sets of logits are compared: KL divergence and cosine of a token follow from them.

A report compares hundreds of millions of logits, so this is a kernel. Sums are over runs of LOGIT_RUN columns, in float32; the caller
adds the runs in float64. Exponentials are of the distance to the row's largest logit, which the caller has found.
"""

from __future__ import annotations

from ...quant.jit.fields import ArgumentBlock, view
from ...quant.jit.memory import load_f32, store_f32
from ...quant.jit.piece import inline
from ...quant.jit.simd import F32, I32, exp, fma, iota, lanes_sum, less, load, where, zeros
from .structs import LOGIT_RUN, LOGIT_SUMS, STEP

FIELDS = "step reference model stride columns maxima out out_stride"
"""step              its tokens are the rows
reference, model  float32, row t at + t * stride bytes, readable up to a multiple of 16 columns
maxima            float32[rows][2]: the largest of the reference's row and of the model's
out               float32[runs][LOGIT_SUMS] at + t * out_stride; with r and m the two logits, e^r and e^m relative to their maxima:
                  sum of e^r, e^m, e^r (r - m), r r, m m, r m
"""


def build():
    Arguments, Step = ArgumentBlock(FIELDS), ArgumentBlock(STEP)

    @inline
    def add(sums, r, m, e, f):
        difference = r - m
        return (
            sums[0] + e, sums[1] + f, fma(e, difference, sums[2]), fma(r, r, sums[3]), fma(m, m, sums[4]), fma(r, m, sums[5]),
        )  # fmt: skip

    def kernel(arguments, worker, workers):
        a = view(Arguments, arguments)
        tokens = view(Step, a.step).tokens
        nothing = zeros(F32)
        for t in range(tokens * worker // workers, tokens * (worker + 1) // workers):
            reference, model, out = a.reference + t * a.stride, a.model + t * a.stride, a.out + t * a.out_stride
            top, other = load_f32(a.maxima + 8 * t), load_f32(a.maxima + 8 * t + 4)
            for start in range(0, a.columns, LOGIT_RUN):
                stop = min(start + LOGIT_RUN, a.columns)
                whole = start + (stop - start) // 16 * 16
                sums = (nothing, nothing, nothing, nothing, nothing, nothing)
                for c in range(start, whole, 16):
                    r, m = load(F32, reference + 4 * c), load(F32, model + 4 * c)
                    sums = add(sums, r, m, exp(r - top), exp(m - other))
                if whole < stop:
                    there = less(iota(whole), zeros(I32) + stop)
                    r, m = load(F32, reference + 4 * whole), load(F32, model + 4 * whole)
                    e, f = where(there, exp(r - top), nothing), where(there, exp(m - other), nothing)
                    sums = add(sums, where(there, r, nothing), where(there, m, nothing), e, f)
                at = out + start // LOGIT_RUN * (4 * LOGIT_SUMS)
                store_f32(at, lanes_sum(sums[0]))
                store_f32(at + 4, lanes_sum(sums[1]))
                store_f32(at + 8, lanes_sum(sums[2]))
                store_f32(at + 12, lanes_sum(sums[3]))
                store_f32(at + 16, lanes_sum(sums[4]))
                store_f32(at + 20, lanes_sum(sums[5]))

    return kernel
