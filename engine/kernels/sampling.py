"""What the kernels that choose tokens share: a row's logits as they count, weights of tokens, and the order of floats.

A weight is e^((logit - largest) * scale), rounded to a multiple of 2^-34. So sums of up to 2^19 weights, none above 1, are exact in
float64: they do not depend on the order of summation, on threads, or on how a threshold was found, and NumPy gets the same ones
(generate/weights.py). What is lost, at most 3e-11 of the likeliest token's probability for each token, no statistic could tell.
"""

from __future__ import annotations

from numba import float32, float64, int32, int64

from ...quant.jit.memory import load_f32, load_f64, load_i32, load_u16, store_f32, store_i32
from ...quant.jit.piece import inline
from ...quant.jit.simd import F32, I32, bits_as_f32, exp, iota, lanes_max, less, load, maximum, store, where, zeros
from .structs import SAMPLE_BEST, SAMPLE_FOUND, SAMPLE_RUN, SAMPLE_RUN_BYTES, SAMPLED, SAMPLED_NOT_FINITE, SAMPLED_NOTHING

BELOW_ALL = float("-inf")
ABOVE_ALL = float("inf")
ROUNDER = 3 * 2.0**-12
"""Added to a float32 in [0, 1] and subtracted again, leaves a multiple of 2^-34."""

STATUS, ID, LOGIT, LARGEST, SUM, BEST = range(0, 8 * len(SAMPLED.split()), 8)
"""Where in a result things are."""

MAXIMA, WORST, TOTAL, SPREAD = 0, 64, 72, 80
"""Where in a run's SAMPLE_RUN_BYTES things are."""

SPILL, VALUES, IDS, SHARES = 0, 64, 64 + 4 * SAMPLE_FOUND, 64 + 8 * SAMPLE_FOUND
RANKS = 64 + 12 * SAMPLE_FOUND
SORTED = RANKS + 4 * (SAMPLE_BEST + 16)
"""Where in a worker's scratch things are: a vector that is looked into; what was found (logits, ids, weights); of the best tokens in
order of id their ranks; weights of the best, in order of rank."""


@inline
def read(row, c, columns):
    """16 logits of a row (a SAMPLE) from column c on; -inf beyond the end, and where the mask forbids."""
    x = load(F32, row.logits + 4 * c) + float32(0)  # -0 becomes 0
    if row.mask:
        bits = (zeros(I32) + load_u16(row.mask + c // 8)) >> iota(int64(0)) & 1
        x = where(less(zeros(I32), bits), x, BELOW_ALL)
    if c + 16 > columns:
        x = where(less(iota(c), zeros(I32) + columns), x, BELOW_ALL)
    return x


@inline
def weights(x, largest, scale):
    """Weights of 16 logits."""
    return (exp((x - largest) * scale) + ROUNDER) - ROUNDER


@inline
def runs_of(columns):
    return (columns + SAMPLE_RUN - 1) // SAMPLE_RUN


@inline
def largest_of(work, columns):
    """(status, largest logit) of a row from what is known of its runs."""
    largest, worst = zeros(F32) + BELOW_ALL, int64(0)
    for run in range(runs_of(columns)):
        known = work + run * SAMPLE_RUN_BYTES
        largest = maximum(load(F32, known + MAXIMA), largest)
        worst = max(worst, load_i32(known + WORST))
    top, status = lanes_max(largest), 0
    if worst > 0x7F800000 or top == float32(ABOVE_ALL):
        status = SAMPLED_NOT_FINITE
    elif top == float32(BELOW_ALL):
        status = SAMPLED_NOTHING
    return status, top


@inline
def weigh_list(values, count, largest, scale, out):
    """Weights of a list of logits, in whole vectors."""
    for i in range((count + 15) // 16):
        store(out + 64 * i, weights(load(F32, values + 64 * i), largest, scale))


@inline
def shares(row, c, columns, largest, scale, cut, after, last):
    """Weights of 16 tokens that are kept: at least `cut`, or beyond id `last` at least `after`, the float after it."""
    x = read(row, c, columns)
    least = where(less(iota(c), last + 1), zeros(F32) + cut, after)
    return where(less(x, least), 0, weights(x, largest, scale))


@inline
def draw_from_row(row, work, columns, largest, cut, after, last, scratch):
    """The id that the random number falls on, by the runs' sums of shares."""
    total, mass = float64(0), float64(0)
    for run in range(runs_of(columns)):
        total += load_f64(work + run * SAMPLE_RUN_BYTES + SPREAD)
    target, run = row.uniform * total, int64(0)
    while mass + load_f64(work + run * SAMPLE_RUN_BYTES + SPREAD) <= target:
        mass += load_f64(work + run * SAMPLE_RUN_BYTES + SPREAD)
        run += 1
    for c in range(run * SAMPLE_RUN, min((run + 1) * SAMPLE_RUN, columns), 16):
        store(scratch + SPILL, shares(row, c, columns, largest, row.scale, cut, after, last))
        for lane in range(16):
            mass += float64(load_f32(scratch + SPILL + 4 * lane))
            if mass > target:
                return c + lane
    return int64(-1)


# ---- floats in order: key_of is an integer that grows with the float; both zeros are 0 and -1 ------------------------------


@inline
def key_of(x, spill):
    """The key of a float32, in an int64. spill: 4 bytes to work in."""
    store_f32(spill, x)
    bits = load_i32(spill)
    return bits if bits >= 0 else bits ^ 0x7FFFFFFF


@inline
def float_of(key, spill):
    """The float32 of a key."""
    store_i32(spill, key if key >= 0 else key ^ 0x7FFFFFFF)
    return load_f32(spill)


@inline
def vector_of(key):
    """The float of a key in all lanes."""
    bits = key if key >= 0 else key ^ 0x7FFFFFFF
    return bits_as_f32(zeros(I32) + int32(bits))
