"""The kernel that quantizes to formats whose rows have numbers (row_storage.py): twice over 16 rows, for the scales and for the codes.

Parameters: name of a format (a ScaledIntegers with RowScales), type of the source, method, byte order of the result ("tiles" or "blocks").
The same operations in the same order as in NumPy.
"""

from __future__ import annotations

from .block import get_format
from .encode_kernel import CODES, FIELDS, LEVELS, SEARCH, SOURCES, WORDS, X, finish_sums, reader, scatter_words
from .grid_kernels import clip, codes_of, fit_of, inverse_or_zero, peak_over, power_of_two, round_of
from .jit.fields import ArgumentBlock, view
from .jit.memory import load_f32, load_i32, store_i8, store_i16, store_i32
from .jit.piece import inline
from .jit.simd import (
    F32,
    I32,
    absolute,
    bits_as_f32,
    f32_bits,
    iota,
    lanes_sum,
    less,
    load,
    maximum,
    minimum,
    round_even,
    store,
    to_bytes,
    to_i32,
    where,
    zeros,
)
from .parts import joined_packers
from .row_storage import HEADER, NEGLIGIBLE, RowScales
from .scaled import ScaledIntegers
from .scales import SMALLEST, Affine

WANTED = 10240
"""Where in scratch the scales of 16 rows begin, a vector of them for each group of columns that share one."""


def build(name: str, source: str, method: str, order: str):
    form = get_format(name)
    assert isinstance(form, ScaledIntegers) and isinstance(form.scales, RowScales)
    storage, grid = form.scales, form.grid
    assert not isinstance(grid, Affine)
    columns, halves, six_bits = storage.columns, storage.block_bytes, storage.bits == 6
    size, searching, as_tiles = SOURCES[source][1], method == "search", order == "tiles"
    block_bytes, tile_bytes, scale_bytes = form.block_bytes, form.tile_bytes, storage.tile_bytes
    to_planes = joined_packers(form.tile_parts or form.parts).to_planes
    to_words, words = joined_packers(form.parts).to_words, (block_bytes - halves) // 4
    first_level, top, largest_number = float(form.levels[0]), float(storage.top), storage.largest(grid)
    smallest, negligible = float(SMALLEST), float(NEGLIGIBLE)
    read, peak_of, fit = reader(source), peak_over(columns), fit_of(grid, columns)
    round, code = round_of(grid), codes_of(grid, form.order)
    Arguments = ArgumentBlock(FIELDS)

    @inline
    def to_near(x, near):
        """Weights brought near 1; (their peak, the unit, its inverse)."""
        peak = peak_of(x)
        unit, inverse_unit = power_of_two(absolute(peak))
        for k in range(columns):
            store(near + 64 * k, load(F32, x + 64 * k) * inverse_unit)
        return peak * inverse_unit, unit, inverse_unit

    @inline
    def wanted_scale(x, weights, candidates, count, near):
        if searching:
            peak, unit, _ = to_near(x, near)
            return fit(near, weights, peak, candidates, count) * unit
        return peak_of(x) / first_level

    @inline
    def row_number(most):
        number = minimum(most / top, zeros(F32) + largest_number)
        up = bits_as_f32((f32_bits(number) + 0xFFFF) & 0xFFFF0000)
        return where(less(number, smallest), zeros(F32), up)

    @inline
    def nearest_scale(wanted, number):
        scaled = wanted * inverse_or_zero(number)
        whole = round_even(clip(scaled, -top, top))
        one = where(less(scaled, 0.0), zeros(F32) - 1.0, zeros(F32) + 1.0)
        little = where(less(absolute(scaled), negligible), whole, one)
        return where(less(absolute(whole), 0.5), little, whole)

    @inline
    def error_with(near, weights, scale):
        inverse, total = inverse_or_zero(scale), zeros(F32)
        for k in range(columns):
            v = load(F32, near + 64 * k)
            rest = v - scale * round(v * inverse)
            total = total + load_f32(weights + 4 * k) * rest * rest
        return total

    @inline
    def place(x, weights, wanted, number, near, levels):
        """Leaves the levels, returns the scale's code."""
        scale = nearest_scale(wanted, number)
        if searching:
            _, _, inverse_unit = to_near(x, near)
            start, least = scale, error_with(near, weights, number * scale * inverse_unit)
            for i in range(2):
                tried = clip(start + (2.0 * i - 1.0), -top, top)
                error = error_with(near, weights, number * tried * inverse_unit)
                better = less(error, least)
                scale, least = where(better, tried, scale), where(better, error, least)
            inverse = inverse_or_zero(number * scale * inverse_unit)
            for k in range(columns):
                store(levels + 64 * k, round(load(F32, near + 64 * k) * inverse))
        else:
            inverse = inverse_or_zero(number * scale)
            for k in range(columns):
                store(levels + 64 * k, round(load(F32, x + 64 * k) * inverse))
        return scale

    @inline
    def put_tile_scales(scales, out):
        """Codes of scales, a vector of i32 for each group of columns, as a tile has them."""
        if six_bits:
            first, second = load(I32, scales) + 32, load(I32, scales + 64) + 32
            store(out, to_bytes((first & 15) | ((second & 15) << 4)))
            store_i32(out + 16, lanes_sum(((first >> 4) & 3) << (iota(0) * 2)))
            store_i32(out + 20, lanes_sum(((second >> 4) & 3) << (iota(0) * 2)))
        else:
            for h in range(halves):
                store(out + 16 * h, to_bytes(load(I32, scales + 64 * h)))

    def kernel(arguments, worker, workers):
        a = view(Arguments, arguments)
        scratch = a.scratch + worker * a.scratch_bytes
        x, levels, near, codes, at = scratch + X, scratch + LEVELS, scratch + SEARCH, scratch + CODES, scratch + WORDS
        row_bytes = HEADER + a.blocks * block_bytes
        first, last = a.groups * worker // workers, a.groups * (worker + 1) // workers
        for g in range(first, last):
            rows = a.source + 16 * g * a.row_bytes
            most = zeros(F32)
            for b in range(a.blocks):
                read(rows + 32 * size * b, a.row_bytes, near, x)
                for h in range(halves):
                    part, weights = x + 64 * columns * h, a.importance + 128 * b + 4 * columns * h
                    wanted = wanted_scale(part, weights, a.candidates, a.candidate_count, near)
                    store(scratch + WANTED + 64 * (halves * b + h), wanted)
                    most = maximum(absolute(wanted), most)
            number, out = row_number(most), a.out + g * a.out_bytes
            store(at, f32_bits(number))
            for r in range(16):
                header = out + 2 * r if as_tiles else out + r * row_bytes
                store_i16(header, load_i32(at + 4 * r) >> 16)
            out += 16 * HEADER if as_tiles else HEADER

            energy = cross = error_energy = 0.0
            largest, worst, worst_block = zeros(F32), zeros(F32) - 1.0, zeros(I32)
            for b in range(a.blocks):
                read(rows + 32 * size * b, a.row_bytes, near, x)
                for h in range(halves):
                    part, weights = x + 64 * columns * h, a.importance + 128 * b + 4 * columns * h
                    wanted = load(F32, scratch + WANTED + 64 * (halves * b + h))
                    store(at + 64 * h, place(part, weights, wanted, number, near, levels + 64 * columns * h))
                for t in range(8):
                    packed = zeros(I32)
                    for c in range(4):
                        packed = packed | (code(load(F32, levels + 64 * (4 * t + c))) << (8 * c))
                    store(codes + 64 * t, packed)
                xx, xe, ee = zeros(F32), zeros(F32), zeros(F32)
                for k in range(min(32, a.columns - 32 * b)):
                    w = load(F32, x + 64 * k)
                    error = number * load(F32, at + 64 * (k // columns)) * load(F32, levels + 64 * k) - w
                    xx, xe, ee = xx + w * w, xe + w * error, ee + error * error
                    largest = maximum(absolute(error), largest)
                energy, cross, error_energy = energy + lanes_sum(xx), cross + lanes_sum(xe), error_energy + lanes_sum(ee)
                more = less(worst, ee)
                worst, worst_block = where(more, ee, worst), where(more, zeros(I32) + b, worst_block)
                for h in range(halves):
                    store(at + 64 * h, to_i32(load(F32, at + 64 * h)))
                if as_tiles:
                    put_tile_scales(at, out + b * tile_bytes)
                    to_planes(codes, out + b * tile_bytes + scale_bytes)
                else:
                    block = out + b * block_bytes
                    for r in range(16):
                        for h in range(halves):
                            store_i8(block + r * row_bytes + h, load_i32(at + 64 * h + 4 * r))
                    to_words(codes, at)
                    scatter_words(at, words, block + halves, row_bytes)
            finish_sums(a.sums + 32 * g, energy, cross, error_energy, largest, worst, worst_block, at)

    return kernel
