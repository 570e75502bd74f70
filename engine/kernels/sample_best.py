"""The best SAMPLE_BEST tokens of a row, for about one more read of the row's cache lines that can hold one.

A lane of a run has at most 64 tokens. The 256th largest of the lanes' maxima is a bound that at least 256 tokens reach, and fewer than
256 lanes hold anything above it: at most 255 * 64 tokens, which are collected with the first 256 that are equal to it. Among these the
256th is found by halving the interval in which it lies, and the best are ranked by counting, for each, those before it. All of it is
in whole vectors and without branches that depend on the logits, so flat and peaked rows cost the same.
"""

from __future__ import annotations

from numba import float32, int32, int64

from ...quant.jit.memory import load_f32, load_i32, store_f32, store_i32
from ...quant.jit.piece import inline
from ...quant.jit.simd import (
    F32,
    I32,
    f32_bits,
    iota,
    lanes_sum,
    less,
    load,
    lowest_bit,
    mask_bits,
    store,
    where,
    zeros,
)
from .sampling import BELOW_ALL, IDS, MAXIMA, RANKS, SHARES, SPILL, VALUES, float_of, key_of, read, runs_of, vector_of
from .structs import SAMPLE_BEST, SAMPLE_RUN, SAMPLE_RUN_BYTES, SAMPLED_LISTS


@inline
def reaching(values, count, stride, key):
    """How many of `count` vectors' lanes, `stride` bytes apart, are at least the float of a key."""
    least, below = vector_of(key), zeros(I32)
    for i in range(count):
        below += where(less(load(F32, values + i * stride), least), zeros(I32) + 1, 0)
    return 16 * count - lanes_sum(below)


@inline
def nth_largest(values, count, stride, low, high):
    """The key of the SAMPLE_BEST-th largest: at least that many lanes reach `low`, and none `high`."""
    while high - low > 1:
        middle = (low + high) >> 1
        if reaching(values, count, stride, middle) >= SAMPLE_BEST:
            low = middle
        else:
            high = middle
    return low


@inline
def pad(values, count, value):
    """Fills the last vector of a list of floats."""
    for i in range(count, (count + 15) // 16 * 16):
        store_f32(values + 4 * i, value)


@inline
def collect(row, work, columns, bound, scratch):
    """Puts tokens above `bound`, and the first SAMPLE_BEST at it, into the scratch in order of id; their number."""
    found, equal = int64(0), int64(0)
    for run in range(runs_of(columns)):
        if mask_bits(less(load(F32, work + run * SAMPLE_RUN_BYTES + MAXIMA), bound)) != 0xFFFF:
            for c in range(run * SAMPLE_RUN, min((run + 1) * SAMPLE_RUN, columns), 16):
                x = read(row, c, columns)
                bits = mask_bits(less(x, bound)) ^ 0xFFFF
                if bits:
                    above = mask_bits(less(zeros(F32) + bound, x))
                    store(scratch + SPILL, x)
                    while bits:
                        lane = lowest_bit(bits)
                        bits &= bits - 1
                        if (above >> lane & 1 or equal < SAMPLE_BEST) and c + lane < columns:
                            equal += 1 - (above >> lane & 1)
                            store_f32(scratch + VALUES + 4 * found, load_f32(scratch + SPILL + 4 * lane))
                            store_i32(scratch + IDS + 4 * found, c + lane)
                            found += 1
    return found


@inline
def thin_out(scratch, found, key):
    """Keeps the SAMPLE_BEST best of what was found; `key` is the last one's. Equal ones go by id."""
    bound, above = float_of(key, scratch + SPILL), int64(0)
    for i in range(found):
        if load_f32(scratch + VALUES + 4 * i) > bound:
            above += 1
    kept, equal = int64(0), SAMPLE_BEST - above
    for i in range(found):
        x = load_f32(scratch + VALUES + 4 * i)
        if x > bound or (x == bound and equal > 0):
            if x == bound:
                equal -= 1
            store_f32(scratch + VALUES + 4 * kept, x)
            store_i32(scratch + IDS + 4 * kept, load_i32(scratch + IDS + 4 * i))
            kept += 1
    return kept


@inline
def keys(x):
    """key_of, lane by lane."""
    bits = f32_bits(x)
    return bits ^ where(less(bits, zeros(I32)), zeros(I32) + 0x7FFFFFFF, 0)


@inline
def rank(scratch, count, result):
    """Writes the lists of a result from the best in order of id, and their ranks into the scratch."""
    pad(scratch + VALUES, count, float32(BELOW_ALL))
    vectors, at = (count + 15) // 16, scratch + SHARES
    for j in range(vectors):
        store(at + 64 * j, keys(load(F32, scratch + VALUES + 64 * j)))
    for i in range(count):
        key, before = load_i32(at + 4 * i), zeros(I32)
        for j in range(vectors):  # larger; or as large, and of a lower id
            least = where(less(iota(16 * j), zeros(I32) + i), zeros(I32) + int32(key - 1), int32(key))
            before += where(less(least, load(I32, at + 64 * j)), zeros(I32) + 1, 0)
        place = lanes_sum(before)
        store_i32(scratch + RANKS + 4 * i, place)
        store_i32(result + SAMPLED_LISTS + 4 * place, load_i32(scratch + IDS + 4 * i))
        store_f32(result + SAMPLED_LISTS + 4 * SAMPLE_BEST + 4 * place, load_f32(scratch + VALUES + 4 * i))


@inline
def best_of(row, work, columns, largest, scratch, result):
    """Writes the best tokens' lists; how many there are."""
    runs, none = runs_of(columns), key_of(float32(BELOW_ALL), scratch + SPILL)
    above_all = key_of(largest, scratch + SPILL) + 1
    bound = none
    if 16 * runs >= SAMPLE_BEST:
        bound = nth_largest(work + MAXIMA, runs, SAMPLE_RUN_BYTES, none, above_all)
    found = collect(row, work, columns, float_of(bound, scratch + SPILL), scratch)
    if found > SAMPLE_BEST:
        pad(scratch + VALUES, found, float32(BELOW_ALL))
        found = thin_out(scratch, found, nth_largest(scratch + VALUES, (found + 15) // 16, 64, bound, above_all))
    rank(scratch, found, result)
    return found
