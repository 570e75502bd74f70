"""The grids (scales.py) as SIMD code: 16 rows at once, one lane each, the same operations in the same order as in NumPy.

A block of 16 rows is 32 vectors of float32 in scratch memory, one per column, at `x`. A grid's function leaves the levels (codes
less the bias, as float32) at `levels` and returns the scale and the minimum as they will be stored, as float32.
"""

from __future__ import annotations

from .jit.memory import load_f32
from .jit.piece import inline
from .jit.simd import (
    F32,
    absolute,
    bits_as_f32,
    f32_bits,
    less,
    load,
    maximum,
    minimum,
    round_even,
    staircase,
    store,
    to_f16,
    to_f32,
    to_i32,
    where,
    zeros,
)
from .scales import F16_MAX, F16_OVERFLOW, SINGULAR, AbsoluteMax, Affine, Grid, SignedMax, Symmetric, Table, middles

TINY = 2.0**-126


@inline
def finite_f16(v):
    limit = where(less(v, 0.0), zeros(F32) - F16_MAX, zeros(F32) + F16_MAX)
    return where(less(absolute(v), F16_OVERFLOW), v, limit)


@inline
def inverse_or_zero(v):
    tiny = less(absolute(v), TINY)
    return where(tiny, zeros(F32), 1.0 / where(tiny, zeros(F32) + 1.0, v))


@inline
def power_of_two(v):
    exponent = minimum(maximum((f32_bits(v) >> 23) & 255, 1), 253)
    return bits_as_f32(exponent << 23), bits_as_f32((254 - exponent) << 23)


@inline
def clip(v, low, high):
    return minimum(maximum(v, low), high)


@inline
def stored(v):
    """What is left of float32 numbers after they have been stored as f16."""
    return to_f32(to_f16(finite_f16(v)))


def peak_over(columns: int):
    """peak(x) -> of the first columns the weight of largest magnitude, the first of equals."""

    @inline
    def peak(x):
        found = load(F32, x)
        most = absolute(found)
        for k in range(1, columns):
            v = load(F32, x + 64 * k)
            larger = less(most, absolute(v))
            found, most = where(larger, v, found), where(larger, absolute(v), most)
        return found

    return peak


peak_of = peak_over(32)


def round_of(grid: Symmetric):
    """round(scaled) -> the nearest levels: Grid.round."""
    if isinstance(grid, Table) and grid.halves_to_zero:
        magnitude = staircase(tuple(map(float, middles(grid.upper))), tuple(map(float, grid.upper)))

        @inline
        def signed(scaled):
            found = magnitude(absolute(scaled))
            return where(less(scaled, 0.0), zeros(F32) - found, found)

        return signed
    if isinstance(grid, Table):
        return staircase(tuple(map(float, grid.middles)), tuple(map(float, grid.table)))
    bottom, top = map(float, grid.levels)

    @inline
    def round(scaled):
        return round_even(clip(scaled, bottom, top))

    return round


def codes_of(grid: Grid, order: tuple[int, ...] | None = None):
    """codes(levels) -> i32 lanes: Grid.codes; with `order` (ScaledIntegers.order) the bits that are stored for them."""
    if isinstance(grid, Table) or order is not None:
        number = staircase(tuple(map(float, middles(grid.values))), tuple(map(float, order or range(grid.values.size))))

        @inline
        def codes(levels):
            return to_i32(number(levels))

    else:
        bias = float(grid.bias)

        @inline
        def codes(levels):
            return to_i32(levels + bias)

    return codes


def nearest_of(grid: Grid):
    """nearest(x, levels) -> (scale, minimum)"""
    if isinstance(grid, SignedMax):
        bias, half, top = float(grid.bias), grid.bias + 0.5, 2.0 * grid.bias - 1

        @inline
        def nearest(x, levels):
            scale = finite_f16(peak_of(x) / -bias)
            inverse = inverse_or_zero(scale)
            for k in range(32):
                code = to_i32(clip(load(F32, x + 64 * k) * inverse + half, 0.0, top))
                store(levels + 64 * k, to_f32(code) - bias)
            return to_f32(to_f16(scale)), zeros(F32)

    elif isinstance(grid, Table):
        first, round = float(grid.table[0]), round_of(grid)

        @inline
        def nearest(x, levels):
            scale = stored(peak_of(x) / first)
            inverse = inverse_or_zero(scale)
            for k in range(32):
                store(levels + 64 * k, round(load(F32, x + 64 * k) * inverse))
            return scale, zeros(F32)

    elif isinstance(grid, AbsoluteMax):
        top = float(grid.bias - 1)

        @inline
        def nearest(x, levels):
            scale = finite_f16(absolute(peak_of(x)) / top)
            inverse = inverse_or_zero(scale)
            for k in range(32):
                scaled = load(F32, x + 64 * k) * inverse
                magnitude = minimum(absolute(scaled), top)
                whole = to_f32(to_i32(magnitude))
                rounded = whole + to_f32(to_i32((magnitude - whole) * 2.0))
                store(levels + 64 * k, where(less(scaled, 0.0), zeros(F32) - rounded, rounded))
            return to_f32(to_f16(scale)), zeros(F32)

    else:
        top = float(grid.top)

        @inline
        def nearest(x, levels):
            least, greatest = extremes(x)
            low = finite_f16(least)
            scale = finite_f16((greatest - low) / top)
            inverse = inverse_or_zero(scale)
            for k in range(32):
                code = to_i32(clip((load(F32, x + 64 * k) - low) * inverse + 0.5, 0.0, top))
                store(levels + 64 * k, to_f32(code))
            return to_f32(to_f16(scale)), to_f32(to_f16(low))

    return nearest


@inline
def extremes(x):
    least = load(F32, x)
    greatest = least
    for k in range(1, 32):
        v = load(F32, x + 64 * k)
        least, greatest = minimum(least, v), maximum(greatest, v)
    return least, greatest


@inline
def error_of(x, weights, levels, scale, low):
    """Weighted squared error of x (in the search's units) against scale * level + low."""
    total = zeros(F32)
    for k in range(32):
        rest = load(F32, x + 64 * k) - (scale * load(F32, levels + 64 * k) + low)
        total = total + load_f32(weights + 4 * k) * rest * rest
    return total


@inline
def choose(better, levels, others, scale, low, found_scale, found_low):
    for k in range(32):
        at = 64 * k
        store(levels + at, where(better, load(F32, others + at), load(F32, levels + at)))
    return where(better, found_scale, scale), where(better, found_low, low)


def search_of(grid: Grid):
    """search(x, weights, candidates, count, levels, scratch) -> (scale, minimum)

    weights: 32 float32, the importance of the columns. candidates: `count` pairs of float32, the grid's.
    scratch: room for 64 vectors.
    """
    return _search_affine(grid) if isinstance(grid, Affine) else _search_scale(grid)


def fit_of(grid: Symmetric, columns: int):
    """fit(near, weights, peak, candidates, count) -> the scale with the least weighted squared error found: scales.fit_scale."""
    round = round_of(grid)

    @inline
    def refit(x, weights, scale, inverse):
        rr, rc, cc = zeros(F32), zeros(F32), zeros(F32)
        for k in range(columns):
            v, w = load(F32, x + 64 * k), load_f32(weights + 4 * k)
            c = round(v * inverse)
            rest = v - scale * c
            wr, wc = w * rest, w * c
            rr, rc, cc = rr + wr * rest, rc + wr * c, cc + wc * c
        change = rc * inverse_or_zero(cc)
        return scale + change, rr - rc * change

    @inline
    def fit(near, weights, peak, candidates, count):
        inverse_peak = inverse_or_zero(peak)
        least, scale = bits_as_f32(f32_bits(zeros(F32)) | 0x7F800000), zeros(F32)
        for i in range(count):
            share, level = load_f32(candidates + 8 * i), load_f32(candidates + 8 * i + 4)
            tried, error = refit(near, weights, peak * share, inverse_peak * level)
            better = less(error, least)
            least, scale = where(better, error, least), where(better, tried, scale)
        tried, error = refit(near, weights, scale, inverse_or_zero(scale))
        return where(less(error, least), tried, scale)

    return fit


def _search_scale(grid: Symmetric):
    nearest, fit, round = nearest_of(grid), fit_of(grid, 32), round_of(grid)
    unsigned = isinstance(grid, AbsoluteMax)

    @inline
    def search(x, weights, candidates, count, levels, scratch):
        start, none = nearest(x, levels)
        peak = peak_of(x)
        unit, inverse_unit = power_of_two(absolute(peak))
        near, others = scratch, scratch + 2048
        for k in range(32):
            store(near + 64 * k, load(F32, x + 64 * k) * inverse_unit)
        peak = peak * inverse_unit
        if unsigned:
            peak = absolute(peak)
        found = stored(fit(near, weights, peak, candidates, count) * unit)
        inverse = inverse_or_zero(found * inverse_unit)
        for k in range(32):
            store(others + 64 * k, round(load(F32, near + 64 * k) * inverse))
        error = error_of(near, weights, others, found * inverse_unit, none)
        better = less(error, error_of(near, weights, levels, start * inverse_unit, none))
        return choose(better, levels, others, start, none, found, none)

    return search


def _search_affine(grid: Affine):
    nearest = nearest_of(grid)
    top = float(grid.top)

    @inline
    def refit(x, weights, weight, scale, low):
        inverse = inverse_or_zero(scale)
        rr, r, rc, c1, cc = zeros(F32), zeros(F32), zeros(F32), zeros(F32), zeros(F32)
        for k in range(32):
            v, w = load(F32, x + 64 * k), load_f32(weights + 4 * k)
            c = round_even(clip((v - low) * inverse, 0.0, top))
            rest = v - (scale * c + low)
            wr, wc = w * rest, w * c
            rr, r, rc = rr + wr * rest, r + wr, rc + wr * c
            c1, cc = c1 + wc, cc + wc * c
        determinant = weight * cc - c1 * c1
        inverse = inverse_or_zero(determinant)
        d_scale, d_low = (weight * rc - c1 * r) * inverse, (cc * r - c1 * rc) * inverse
        sound, none = less((weight * cc) * SINGULAR, determinant), zeros(F32)
        d_scale, d_low = where(sound, d_scale, none), where(sound, d_low, none)
        sound = less(none, scale + d_scale)
        d_scale, d_low = where(sound, d_scale, none), where(sound, d_low, none)
        return scale + d_scale, low + d_low, rr - (d_scale * rc + d_low * r)

    @inline
    def search(x, weights, candidates, count, levels, scratch):
        start_scale, start_low = nearest(x, levels)
        least_x, greatest_x = extremes(x)
        middle, width = greatest_x * 0.5 + least_x * 0.5, greatest_x * 0.5 - least_x * 0.5
        unit, inverse_unit = power_of_two(maximum(width, absolute(middle) * 2.0**-24))
        near, others = scratch, scratch + 2048
        weight = zeros(F32)
        for k in range(32):
            store(near + 64 * k, (load(F32, x + 64 * k) - middle) * inverse_unit)
            weight = weight + load_f32(weights + 4 * k)
        width = width * inverse_unit
        least, scale, low = bits_as_f32(f32_bits(zeros(F32)) | 0x7F800000), zeros(F32), zeros(F32)
        for i in range(count):
            tried = width * load_f32(candidates + 8 * i)
            s, m, error = refit(near, weights, weight, tried, tried * load_f32(candidates + 8 * i + 4) - width)
            better = less(error, least)
            scale, low, least = where(better, s, scale), where(better, m, low), where(better, error, least)
        s, m, error = refit(near, weights, weight, scale, low)
        better = less(error, least)
        found_scale = stored(where(better, s, scale) * unit)
        found_low = stored(where(better, m, low) * unit + middle)
        scale, low = found_scale * inverse_unit, (found_low - middle) * inverse_unit
        inverse = inverse_or_zero(scale)
        for k in range(32):
            store(others + 64 * k, round_even(clip((load(F32, near + 64 * k) - low) * inverse, 0.0, top)))
        error = error_of(near, weights, others, scale, low)
        start = error_of(near, weights, levels, start_scale * inverse_unit, (start_low - middle) * inverse_unit)
        return choose(less(error, start), levels, others, start_scale, start_low, found_scale, found_low)

    return search
