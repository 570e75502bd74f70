"""The kernel of error feedback and coordinate descent (feedback.py): 16 rows in the lanes, their codes chosen column after column.

Parameters: kind of levels ("even": whole numbers one apart, or "table"), kind of numbers ("scale" or "affine", with a minimum), how a
scale is rounded (ScaleStorage.rounding: "f16", "integers" times a row's number, or "fixed" if it may not move), and the columns that
share a scale.

All matrices of a group of rows are vectors of 16 rows, one per column. Nearly all the work is two kinds of matrix products between them and
H or its factor, done for several groups at once. Each of their sums has one order, ascending with one fma for each term, so results
depend on no tile size and on no number of workers.

* Error feedback looks ahead: what a block of 32 columns does to all that come later is added to them at once (`scatter`).
* Descent looks back: the gradient of a block, what all errors do to its columns, is summed when it is the block's turn (`gather`). So it
  is always that of the codes as they are, and none has to be kept up to date: a pass is one product of the errors with H.

The loss is known without more products: with H = U D Uᵀ it is a sum of squares over the columns as feedback goes through them, and
descent knows what each block takes from it.
"""

from __future__ import annotations

from .feedback import BATCH, BLOCK, LOCAL_BYTES, LOSS
from .grid_kernels import clip, inverse_or_zero, stored
from .jit.fields import ArgumentBlock, view
from .jit.memory import load_f32, load_i64
from .jit.piece import inline
from .jit.simd import (
    F32,
    I32,
    absolute,
    fma,
    lanes_max,
    less,
    load,
    load_tile,
    load_tile_2d,
    maximum,
    round_even,
    spread,
    store,
    store_tile,
    tile,
    to_bytes,
    to_i32,
    where,
    zeros,
)
from .jit.target import current

FIELDS = """
weights scales minima storage codes losses groups columns
hessian damping factor order sums levels middles level_count first:f32 last:f32 top:f32
rounds passes scratch scratch_bytes
"""
"""
weights            float32[groups, columns, 16]; columns is a multiple of 32
scales, minima     float32[groups, columns / scale columns, 16] in the units of the weights; changed in place
storage            float32[groups, 2, 16]: what a scale is multiplied with to get what is stored, and back
codes              uint8[groups, columns, 16]
losses             float32[groups, 2, 16]: of the nearest codes, and of the result
hessian, damping   float32[columns, columns], symmetric; float32[columns], what is added to its diagonal: 0 for padding, whose errors do
                   not count
factor             float32[columns, columns]: row k, columns j < k: what a unit of error in column order[k] adds to column order[j];
                   on the diagonal the pivots, 0 for padding
order              int64[columns]
sums               float32[columns / scale columns, 32]: damped hessian summed over the rows of a group of columns, for the 32 of its block
levels, middles    float32[level_count], and [level_count - 1]; first and last of the levels
top                largest code of a scale (rounding "integers")
rounds, passes     of feedback and descent; of descent in each
scratch            feedback.scratch_bytes for each worker
"""

DEPTH = 64
"""Columns of a sum after which a tile of sums makes room for the next, so that their errors stay in the nearest cache."""


def build(kind: str, numbers: str, rounding: str, scale_columns: str):
    tall, wide = (4, 4) if "avx512f" in current().features else (2, 2)
    width = tall * wide
    shared = int(scale_columns)
    even, affine, movable = kind == "even", numbers == "affine", rounding != "fixed"
    Arguments, Tile = ArgumentBlock(FIELDS), tile(F32, width, 1)

    # ---- levels and scales -------------------------------------------------------------------------------------------

    if even:

        @inline
        def nearest(a, y):
            return round_even(clip(y, a.first, a.last))

        @inline
        def index(a, level):
            return to_i32(level - a.first)

    else:

        @inline
        def nearest(a, y):
            level = zeros(F32) + a.first
            for i in range(a.level_count - 1):
                level = where(less(load_f32(a.middles + 4 * i), y), zeros(F32) + load_f32(a.levels + 4 * i + 4), level)
            return level

        @inline
        def index(a, level):
            code = zeros(I32)
            for i in range(a.level_count - 1):
                code = code + where(less(load_f32(a.middles + 4 * i), level), zeros(I32) + 1, zeros(I32))
            return code

    if rounding == "f16":

        @inline
        def storable(a, scale, units):
            return stored(scale * load(F32, units)) * load(F32, units + 64)

    else:

        @inline
        def storable(a, scale, units):
            return round_even(clip(scale * load(F32, units), 0.0 - a.top, a.top)) * load(F32, units + 64)

    # ---- what columns do to others -------------------------------------------------------------------------------------

    def products(columns: int, groups: int):
        """Functions that add to a tile of so many columns by so many groups, which stays in registers meanwhile."""
        Sums, Columns, Groups = tile(F32, columns, groups), tile(F32, columns, 1), tile(F32, 1, groups)

        @inline
        def scattered(x, x_bytes, e, e_bytes, matrix, stride):
            """x[j] += sum over a block of 32 columns k of e[k] * matrix[k, j]."""
            total = load_tile_2d(Sums, x, 64, x_bytes)
            for k in range(BLOCK):
                total = fma(spread(Columns, matrix + k * stride, 4), load_tile(Groups, e + 64 * k, e_bytes), total)
            store_tile(x, total, 64, x_bytes)

        @inline
        def gathered(x, x_bytes, e, e_bytes, matrix, stride, depth):
            """x[j] += sum over `depth` columns k of e[k] * matrix[j, k]."""
            total = load_tile_2d(Sums, x, 64, x_bytes)
            for k in range(depth):
                total = fma(spread(Columns, matrix + 4 * k, stride), load_tile(Groups, e + 64 * k, e_bytes), total)
            store_tile(x, total, 64, x_bytes)

        return scattered, gathered

    scattered, gathered = products(tall, wide)
    scattered_alone, gathered_alone = products(width, 1)  # of groups that are left over

    @inline
    def scatter(x, x_bytes, e, e_bytes, count, matrix, stride, last):
        """Adds to columns 0..last of `count` groups what the block of 32 columns in e does to them, by rows of the matrix."""
        whole = count // wide * wide
        for j in range(0, last, width):
            for g in range(0, whole, wide):
                for i in range(j, j + width, tall):
                    scattered(x + g * x_bytes + 64 * i, x_bytes, e + g * e_bytes, e_bytes, matrix + 4 * i, stride)
            for g in range(whole, count):
                scattered_alone(x + g * x_bytes + 64 * j, x_bytes, e + g * e_bytes, e_bytes, matrix + 4 * j, stride)

    @inline
    def gather(x, x_bytes, e, e_bytes, count, matrix, stride, columns):
        """Adds to the block of 32 columns at x what all columns in e do to it, by rows of the matrix."""
        whole = count // wide * wide
        for first in range(0, columns, DEPTH):
            depth, from_first, row = min(DEPTH, columns - first), e + 64 * first, matrix + 4 * first
            for g in range(0, whole, wide):
                for i in range(0, BLOCK, tall):
                    gathered(x + g * x_bytes + 64 * i, x_bytes, from_first + g * e_bytes, e_bytes, row + i * stride, stride, depth)
            for g in range(whole, count):
                for i in range(0, BLOCK, width):
                    gathered_alone(x + g * x_bytes + 64 * i, x_bytes, from_first + g * e_bytes, e_bytes, row + i * stride, stride, depth)

    # ---- codes and errors ----------------------------------------------------------------------------------------------

    @inline
    def nearest_level(a, value, scales, minima, column):
        at = 64 * (column // shared)
        if affine:
            value = value - load(F32, minima + at)
        return nearest(a, value * inverse_or_zero(load(F32, scales + at)))

    @inline
    def level_value(scales, minima, column, level):
        at = 64 * (column // shared)
        value = load(F32, scales + at) * level
        if affine:
            value = value + load(F32, minima + at)
        return value

    @inline
    def nearest_levels(a, w, scales, minima, levels, rest):
        """Levels of the weights as they are, and what is left of the weights."""
        for k in range(a.columns):
            level = nearest_level(a, load(F32, w + 64 * k), scales, minima, k)
            store(levels + 64 * k, level)
            store(rest + 64 * k, load(F32, w + 64 * k) - level_value(scales, minima, k, level))

    @inline
    def in_order(a, source, out):
        for k in range(a.columns):
            store(out + 64 * k, load(F32, source + 64 * load_i64(a.order + 8 * k)))

    # ---- error feedback ------------------------------------------------------------------------------------------------

    @inline
    def pass_on(a, b, k, x, error, term, loss):
        """Adds an error in column order[k] to the columns of its block that come later, and its term to the loss, which is returned."""
        row = a.factor + 4 * (k * a.columns)
        for j in range(b, k):
            store(x + 64 * j, fma(error, zeros(F32) + load_f32(row + 4 * j), load(F32, x + 64 * j)))
        return fma(term * term, zeros(F32) + load_f32(row + 4 * k), loss)

    @inline
    def feedback_block(a, b, w, x, scales, minima, levels, rest, errors, loss):
        """Columns order[b + 31] down to order[b]: the nearest level to what the errors so far have made of each."""
        total = load(F32, loss)
        for i in range(BLOCK):
            k = b + BLOCK - 1 - i
            column, wanted = load_i64(a.order + 8 * k), load(F32, x + 64 * k)
            level = nearest_level(a, wanted, scales, minima, column)
            value = level_value(scales, minima, column, level)
            error = load(F32, w + 64 * column) - value
            store(levels + 64 * column, level)
            store(rest + 64 * column, error)
            store(errors + 64 * (k - b), error)
            total = pass_on(a, b, k, x, error, wanted - value, total)
        store(loss, total)

    @inline
    def loss_block(a, b, x, rest, errors, loss):
        """The same for errors that are there already: their loss."""
        total = load(F32, loss)
        for i in range(BLOCK):
            k = b + BLOCK - 1 - i
            error = load(F32, rest + 64 * load_i64(a.order + 8 * k))
            store(errors + 64 * (k - b), error)
            total = pass_on(a, b, k, x, error, load(F32, x + 64 * k), total)
        store(loss, total)

    # ---- coordinate descent --------------------------------------------------------------------------------------------

    @inline
    def descend_codes(a, matrix, damping, scale, levels, gradient, first):
        """Each column of those that share a scale to the level that is best while all others stay."""
        inverse = inverse_or_zero(scale)
        for k in range(first, first + shared):
            row, own = matrix + 4 * k * a.columns, load_f32(damping + 4 * k)
            if own > 0.0:
                level, slope = load(F32, levels + 64 * k), load(F32, gradient + 64 * k)
                better = nearest(a, fma(slope * (1.0 / (load_f32(row + 4 * k) + own)), inverse, level))
                change = scale * (level - better)
                if lanes_max(absolute(change)) > 0.0:
                    store(levels + 64 * k, better)
                    for j in range(BLOCK):
                        store(gradient + 64 * j, fma(change, zeros(F32) + load_f32(row + 4 * j), load(F32, gradient + 64 * j)))
                    store(gradient + 64 * k, fma(change, zeros(F32) + own, load(F32, gradient + 64 * k)))

    @inline
    def descend_scale(a, matrix, damping, sums, scales, minima, units, levels, gradient, product, first):
        """The scale (and minimum) that are best while codes stay, rounded to storage; taken where they lessen the loss."""
        for j in range(BLOCK):
            store(product + 64 * j, zeros(F32))
        for k in range(first, first + shared):
            store(product + 64 * k, load(F32, levels + 64 * k) * load_f32(damping + 4 * k))
        for j in range(0, BLOCK, width):
            total = load_tile(Tile, product + 64 * j, 64)
            for k in range(first, first + shared):
                total = fma(spread(Tile, matrix + 4 * (k * a.columns + j), 4), load(F32, levels + 64 * k), total)
            store_tile(product + 64 * j, total, 64, 0)
        slope, curvature = zeros(F32), zeros(F32)
        slope_low, mixed, curvature_low = zeros(F32), zeros(F32), zeros(F32)
        for k in range(first, first + shared):
            level, g = load(F32, levels + 64 * k), load(F32, gradient + 64 * k)
            slope, curvature = fma(level, g, slope), fma(level, load(F32, product + 64 * k), curvature)
            if affine:
                row = zeros(F32) + load_f32(sums + 4 * k)
                slope_low, mixed, curvature_low = slope_low + g, fma(level, row, mixed), curvature_low + row
        scale = load(F32, scales)
        if affine:
            low = load(F32, minima)
            determinant = curvature * curvature_low - mixed * mixed
            inverse = inverse_or_zero(determinant)
            step = storable(a, scale + (curvature_low * slope - mixed * slope_low) * inverse, units) - scale
            step_low = storable(a, low + (curvature * slope_low - mixed * slope) * inverse, units) - low
            gain = step * (slope * 2.0 - step * curvature - step_low * mixed * 2.0)
            gain = gain + step_low * (slope_low * 2.0 - step_low * curvature_low)
            better = less(zeros(F32), gain)
            step, step_low = where(better, step, zeros(F32)), where(better, step_low, zeros(F32))
            store(scales, scale + step)
            store(minima, low + step_low)
        else:
            step = storable(a, scale + slope * inverse_or_zero(curvature), units) - scale
            gain = step * (slope * 2.0 - step * curvature)
            step = where(less(zeros(F32), gain), step, zeros(F32))
            step_low = step
            store(scales, scale + step)
        for j in range(BLOCK):
            change = step * load(F32, product + 64 * j)
            if affine:
                change = change + step_low * load_f32(sums + 4 * j)
            store(gradient + 64 * j, load(F32, gradient + 64 * j) - change)

    @inline
    def descend(a, b, w, scales, minima, units, levels, rest, gradient, loss):
        """One block, whose 32 columns of the gradient are given: codes and scales in turn. loss: changed by what that gains."""
        matrix = a.hessian + 4 * (b * a.columns + b)
        w, damping, levels, rest = w + 64 * b, a.damping + 4 * b, levels + 64 * b, rest + 64 * b
        before, product = gradient + 64 * BLOCK, gradient + 128 * BLOCK
        for k in range(BLOCK):
            store(before + 64 * k, load(F32, gradient + 64 * k))
        for first in range(0, BLOCK, shared):
            at = (b + first) // shared
            descend_codes(a, matrix, damping, load(F32, scales + 64 * at), levels, gradient, first)
            if movable:
                sums = a.sums + 4 * BLOCK * at
                descend_scale(a, matrix, damping, sums, scales + 64 * at, minima + 64 * at, units, levels, gradient, product, first)
                descend_codes(a, matrix, damping, load(F32, scales + 64 * at), levels, gradient, first)
        total = load(F32, loss)
        for k in range(BLOCK):  # d' H d'ᵀ - d H dᵀ = (d' - d) (H d' + H d)ᵀ, where d' and d differ in this block alone
            value = level_value(scales, minima, b + k, load(F32, levels + 64 * k))
            error = load(F32, w + 64 * k) - value
            slopes = load(F32, gradient + 64 * k) + load(F32, before + 64 * k)
            total = fma(error - load(F32, rest + 64 * k), slopes, total)
            store(rest + 64 * k, error)
        store(loss, total)

    # ---- all of it -------------------------------------------------------------------------------------------------------

    @inline
    def keep_better(a, found, best, levels, best_levels, scales, best_scales, minima, best_minima):
        """Where `found` is less than the loss at `best`: everything of that row becomes its best."""
        better = less(found, load(F32, best))
        store(best, where(better, found, load(F32, best)))
        for k in range(a.columns):
            i = 64 * k
            store(best_levels + i, where(better, load(F32, levels + i), load(F32, best_levels + i)))
        for k in range(a.columns // shared):
            i = 64 * k
            store(best_scales + i, where(better, load(F32, scales + i), load(F32, best_scales + i)))
            if affine:
                store(best_minima + i, where(better, load(F32, minima + i), load(F32, best_minima + i)))

    def kernel(arguments, worker, workers):
        a = view(Arguments, arguments)
        x_bytes, s_bytes, e_bytes = 64 * a.columns, 64 * (a.columns // shared), LOCAL_BYTES
        x, stride = a.scratch + worker * a.scratch_bytes, 4 * a.columns
        rest, levels, best_levels = x + BATCH * x_bytes, x + 2 * BATCH * x_bytes, x + 3 * BATCH * x_bytes
        scales = x + 4 * BATCH * x_bytes
        minima = scales + BATCH * s_bytes
        local = minima + BATCH * s_bytes
        batches = (a.groups + BATCH - 1) // BATCH
        for batch in range(batches * worker // workers, batches * (worker + 1) // workers):
            first = BATCH * batch
            count = min(BATCH, a.groups - first)
            w, units, losses = a.weights + first * x_bytes, a.storage + 128 * first, a.losses + 128 * first
            best_scales, best_minima = a.scales + first * s_bytes, a.minima + first * s_bytes
            for i in range(0, count * s_bytes, 64):
                store(scales + i, load(F32, best_scales + i))
                if affine:
                    store(minima + i, load(F32, best_minima + i))
            for g in range(count):
                at, s = g * x_bytes, g * s_bytes
                nearest_levels(a, w + at, scales + s, minima + s, best_levels + at, rest + at)
                in_order(a, rest + at, x + at)
                store(losses + 128 * g, zeros(F32))
            for i in range(a.columns // BLOCK):
                b = a.columns - BLOCK * (i + 1)
                for g in range(count):
                    at = g * x_bytes
                    loss_block(a, b, x + at, rest + at, local + g * e_bytes, losses + 128 * g)
                scatter(x, x_bytes, local, e_bytes, count, a.factor + b * stride, stride, b)
            for g in range(count):
                store(losses + 128 * g + 64, load(F32, losses + 128 * g))

            for _round in range(a.rounds):
                for g in range(count):
                    in_order(a, w + g * x_bytes, x + g * x_bytes)
                    store(local + g * e_bytes + LOSS, zeros(F32))
                for i in range(a.columns // BLOCK):
                    b = a.columns - BLOCK * (i + 1)
                    for g in range(count):
                        at, s, errors = g * x_bytes, g * s_bytes, local + g * e_bytes
                        feedback_block(
                            a, b, w + at, x + at, scales + s, minima + s, levels + at, rest + at, errors, errors + LOSS
                        )  # fmt: skip
                    scatter(x, x_bytes, local, e_bytes, count, a.factor + b * stride, stride, b)
                for _pass in range(a.passes):
                    for b in range(0, a.columns, BLOCK):
                        for g in range(count):
                            for k in range(BLOCK):
                                error = load(F32, rest + g * x_bytes + 64 * (b + k))
                                store(local + g * e_bytes + 64 * k, error * load_f32(a.damping + 4 * (b + k)))
                        gather(local, e_bytes, rest, x_bytes, count, a.hessian + b * stride, stride, a.columns)
                        for g in range(count):
                            at, s, gradient = g * x_bytes, g * s_bytes, local + g * e_bytes
                            descend(
                                a, b, w + at, scales + s, minima + s, units + 128 * g, levels + at, rest + at, gradient, gradient + LOSS
                            )  # fmt: skip
                for g in range(count):
                    at, s = g * x_bytes, g * s_bytes
                    found = maximum(zeros(F32), load(F32, local + g * e_bytes + LOSS))  # where nothing is left, rounding may go below 0
                    keep_better(
                        a, found, losses + 128 * g + 64, levels + at, best_levels + at,
                        scales + s, best_scales + s, minima + s, best_minima + s,
                    )  # fmt: skip

            for g in range(count):
                codes, s = a.codes + 16 * (first + g) * a.columns, g * s_bytes
                for k in range(a.columns):
                    level = load(F32, best_levels + g * x_bytes + 64 * k)
                    if load_f32(a.damping + 4 * k) == 0.0:
                        at = 64 * (k // shared)
                        level = zeros(F32)
                        if affine:
                            level = level - load(F32, best_minima + s + at)
                        level = nearest(a, level * inverse_or_zero(load(F32, best_scales + s + at)))
                    store(codes + 16 * k, to_bytes(index(a, level)))

    return kernel
