"""The logit at which a list of tokens, largest first, reaches a number of tokens or a sum of weights, sought in the whole row.

Counts and sums of weights are exact, so any way of seeking gives the same. The logit lies in an interval of which the ends are known not
to reach, and to reach, the target. The interval is drawn tight around the tokens in it; while there are many, their sum is taken above
seven logits between its ends at once, evenly spaced by value and by the order of floats in turn, which bounds the passes; few are
taken out of the row.
"""

from __future__ import annotations

from numba import float32, float64, int64

from ...quant.jit.memory import load_f32, store_f32
from ...quant.jit.piece import inline
from ...quant.jit.simd import (
    F32,
    F64,
    count_bits,
    lanes_max,
    lanes_min,
    lanes_sum,
    less,
    load,
    lowest_bit,
    mask_bits,
    maximum,
    minimum,
    store,
    to_f64,
    where,
    zeros,
)  # fmt: skip
from .sample_best import pad
from .sampling import ABOVE_ALL, BELOW_ALL, SHARES, SORTED, SPILL, VALUES, float_of, key_of, read, vector_of, weights

FEW = 4096
"""Tokens that are taken out of the row."""

BEYOND = 25.0
"""A logit so far below the largest has no weight: e^-24.3 is rounded to 0."""


@inline
def tighten(row, columns, low, high, scratch):
    """(number of tokens in [low, high), the least key, the largest). The first FEW logits are in the scratch."""
    first, end = float_of(low, scratch + SPILL), float_of(high, scratch + SPILL)
    least, most, count = zeros(F32) + ABOVE_ALL, zeros(F32) + BELOW_ALL, int64(0)
    for c in range(0, columns, 16):
        x = read(row, c, columns)
        inside = where(less(x, end), where(less(x, first), zeros(F32) + ABOVE_ALL, x), ABOVE_ALL)
        there = less(inside, zeros(F32) + ABOVE_ALL)
        least, most = minimum(inside, least), maximum(where(there, x, BELOW_ALL), most)
        bits = mask_bits(there)
        if bits:
            if count <= FEW:
                store(scratch + SPILL, x)
                at, rest = scratch + VALUES + 4 * count, bits
                while rest:
                    store_f32(at, load_f32(scratch + SPILL + 4 * lowest_bit(rest)))
                    at += 4
                    rest &= rest - 1
            count += count_bits(bits)
    return count, key_of(lanes_min(least), scratch + SPILL), key_of(lanes_max(most), scratch + SPILL)


@inline
def between(low, high, eighths, by_value, scratch):
    """A key that many eighths of the way."""
    if by_value:
        a, b = float64(float_of(low, scratch + SPILL)), float64(float_of(high, scratch + SPILL))
        return min(max(key_of(float32(a + (b - a) * eighths / 8), scratch + SPILL), low), high)
    return low + (high - low) * eighths // 8


@inline
def shares_above(shares, x, key):
    """float64 shares, but 0 where the logit does not reach the key."""
    return where(less(x, vector_of(key)), 0, shares)


@inline
def narrow(low, high, above, key, mass, target):
    """The interval after the sum of weights of what reaches `key` is known."""
    if mass >= target:
        return max(low, key), high, above
    if key < high:
        return low, key, mass
    return low, high, above


@inline
def sum_reaching(count, key, scratch):
    """Of what was taken out: the sum of what reaches a key."""
    sums = zeros(F64)
    for i in range((count + 15) // 16):
        sums += shares_above(to_f64(load(F32, scratch + SHARES + 64 * i)), load(F32, scratch + VALUES + 64 * i), key)
    return lanes_sum(sums)


@inline
def seek(row, columns, largest, by_weight, target, low, high, above, scratch):
    """(key of the logit, the sum above it)"""
    turn, one = int64(0), zeros(F32) + float32(1)
    while high - low > 1:
        count, least, most = tighten(row, columns, low, high, scratch)
        low, high = least, most + 1
        if high - low > 1 and count <= FEW:
            pad(scratch + VALUES, count, float32(BELOW_ALL))
            for i in range((count + 15) // 16):
                at = 64 * i
                store(scratch + SHARES + at, weights(load(F32, scratch + VALUES + at), largest, float32(1)) if by_weight else one)
            beyond = above
            while high - low > 1:
                middle = (low + high) >> 1
                low, high, above = narrow(low, high, above, middle, beyond + sum_reaching(count, middle, scratch), target)
        elif high - low > 1:
            by_value = turn % 2 == 0 and low > key_of(float32(BELOW_ALL), scratch + SPILL)
            turn += 1
            k1, k2 = between(low, high, 1, by_value, scratch), between(low, high, 2, by_value, scratch)
            k3, k4 = between(low, high, 3, by_value, scratch), between(low, high, 4, by_value, scratch)
            k5, k6 = between(low, high, 5, by_value, scratch), between(low, high, 6, by_value, scratch)
            k7 = between(low, high, 7, by_value, scratch)
            s1, s2, s3, s4, s5, s6, s7 = zeros(F64), zeros(F64), zeros(F64), zeros(F64), zeros(F64), zeros(F64), zeros(F64)
            for c in range(0, columns, 16):
                x = read(row, c, columns)
                share = to_f64(weights(x, largest, float32(1)) if by_weight else one)
                s1, s2, s3 = s1 + shares_above(share, x, k1), s2 + shares_above(share, x, k2), s3 + shares_above(share, x, k3)
                s4, s5, s6 = s4 + shares_above(share, x, k4), s5 + shares_above(share, x, k5), s6 + shares_above(share, x, k6)
                s7 = s7 + shares_above(share, x, k7)
            low, high, above = narrow(low, high, above, k1, lanes_sum(s1), target)
            low, high, above = narrow(low, high, above, k2, lanes_sum(s2), target)
            low, high, above = narrow(low, high, above, k3, lanes_sum(s3), target)
            low, high, above = narrow(low, high, above, k4, lanes_sum(s4), target)
            low, high, above = narrow(low, high, above, k5, lanes_sum(s5), target)
            low, high, above = narrow(low, high, above, k6, lanes_sum(s6), target)
            low, high, above = narrow(low, high, above, k7, lanes_sum(s7), target)
    return low, above


@inline
def nth_equal(row, columns, x, n):
    """The id of the n-th token (from 1) whose logit is x."""
    for c in range(0, columns, 16):
        logits = read(row, c, columns)
        bits = (mask_bits(less(logits, x)) | mask_bits(less(zeros(F32) + x, logits))) ^ 0xFFFF
        here = count_bits(bits)
        if here < n:
            n -= here
        else:
            while n > 1:
                bits &= bits - 1
                n -= 1
            return c + lowest_bit(bits)
    return columns


@inline
def threshold(row, columns, largest, by_weight, target, best, values, scratch):
    """(the logit at which the list reaches `target`, the last id of those that have it and are needed).

    by_weight: whether weights are added up, or tokens counted. values: the logits of the best; their weights are in the scratch.
    """
    last = load_f32(values + 4 * (best - 1))
    above, i = float64(0), int64(0)
    while i < best and load_f32(values + 4 * i) > last:
        above += float64(load_f32(scratch + SORTED + 4 * i)) if by_weight else float64(1)
        i += 1
    if above >= target:  # the list reaches it after all: top-k, which is longer, had to be known first
        last, above = largest, float64(0)
    low = key_of(largest - float32(BEYOND) if by_weight else float32(BELOW_ALL), scratch + SPILL)
    key, above = seek(row, columns, largest, by_weight, target, low, key_of(last, scratch + SPILL) + 1, above, scratch)
    cut = float_of(key, scratch + SPILL)
    store(scratch + SPILL, weights(zeros(F32) + cut, largest, float32(1)))
    share = float64(load_f32(scratch + SPILL)) if by_weight else float64(1)
    needed = max(int64((target - above) / share) - 1, 1)
    while above + share * needed < target:
        needed += 1
    return cut, nth_equal(row, columns, cut, needed)
