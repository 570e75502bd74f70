"""Attention over pages of the KV cache, with an online softmax (Milakov & Gimelshein 2018; Dao et al. 2022).

Parameters: key size; value size; query heads per KV head; layout of the cache (cache_layouts/); then those of ATTENTION_FEATURES that
the layer has. What it does not have is not in its code.

Rows. The queries of a sequence that share a KV head are rows: token by token, head by head. Up to 6 rows are computed together,
so that a key or a value is loaded and converted once for all of them; a row's own arithmetic does not depend on which others are
beside it. Splits. Positions are taken in parts of SPLIT; a part's maximum, sum and values are folded into the row's running ones,
in order. A sequence with one token (decode) may have its parts computed by different workers, into `parts`; then
attention_merge.py folds them, in the same order, with the same arithmetic. So nothing depends on batch, chunking or threads.
Positions that a row must not see get the weight 0 exactly, and their values are not even multiplied by it: they may be infinite.

Window: a row sees its last `window` positions, itself included. Pages wholly before the window of the first of the rows are not looked
at, nor are splits. Folding a split in which a row sees nothing changes none of its bits, so it does not matter which rows are together.
Soft cap: scores s become cap * tanh(s / cap) (Gemma 2, arXiv 2408.00118). Sinks: a score for each query head that belongs to no position,
counted in the softmax's sum alone, when all positions are (Xiao et al. 2023; gpt-oss).
"""

from __future__ import annotations

from numba import float32

from ...quant.jit.fields import ArgumentBlock, view
from ...quant.jit.memory import load_f32, load_i64, store_f32
from ...quant.jit.piece import inline
from ...quant.jit.simd import (
    F32,
    I32,
    exp,
    fma,
    iota,
    lanes_max,
    lanes_sum,
    less,
    load,
    load_tile,
    load_tile_2d,
    maximum,
    spread,
    store,
    store_tile,
    tile,
    where,
    zeros,
)
from .cache_layouts import get_layout
from .structs import PAGE, ROWS, SEQUENCE, SEQUENCE_BYTES, SPLIT, STEP, padded_head, part_bytes

FIELDS = (
    "step q lone lone_worker q_stride out_stride cache page_bytes heads kv_heads out scratch scratch_worker parts "
    "window soft_cap:f32 sinks"
)
"""q        rotated and scaled queries, token t at q + t * q_stride (a lone token's at lone + worker * lone_worker)
cache    the layer's pages (cache_layouts/)
out      float32, token t at out + t * out_stride
scratch  attention_scratch() per worker
parts    of every lone token, head and split a record of maximum, sum and values (part_bytes()); used where a sequence has splits
window, soft_cap, sinks  positions that a row sees; the cap of scores; address of float32[heads]. Read where the feature is a parameter
"""

NOTHING = -1e30
"""Maximum of no scores at all."""


@inline
def fold(total, part, vectors):
    """Folds a part's maximum, sum and values into the running ones."""
    old, new = load_f32(total), load_f32(part)
    largest = old if old > new else new
    keep, add = exp_f32(old - largest), exp_f32(new - largest)
    store_f32(total, largest)
    store_f32(total + 4, load_f32(total + 4) * keep + load_f32(part + 4) * add)
    for c in range(vectors):
        at = 64 + 64 * c
        store(total + at, load(F32, total + at) * keep + load(F32, part + at) * add)


@inline
def exp_f32(x):
    """exp of one number, by the same polynomial as the vectors'."""
    return lanes_max(exp(zeros(F32) + x))


@inline
def finish(total, out, value_size, inverse):
    """Running values times the inverse of the softmax's sum, to `out`."""
    for c in range(value_size // 16):
        store(out + 64 * c, load(F32, total + 64 + 64 * c) * inverse)
    for i in range(value_size // 16 * 16, value_size):
        store_f32(out + 4 * i, load_f32(total + 64 + 4 * i) * inverse)


@inline
def inverse_of_sum(total):
    """What running values are multiplied by in the end."""
    return float32(1) / load_f32(total + 4)


@inline
def inverse_with_sink(total, sink):
    """The same where the sum has one more score, that of no position."""
    top = load_f32(total)
    largest = top if top > sink else sink
    keep = exp_f32(top - largest)
    return keep / (load_f32(total + 4) * keep + exp_f32(sink - largest))


@inline
def start(total, vectors):
    """Running results of no positions."""
    store_f32(total, float32(NOTHING))
    store_f32(total + 4, float32(0))
    for c in range(vectors):
        store(total + 64 + 64 * c, zeros(F32))


@inline
def first_split(seen, window):
    """The first split that a row sees part of which sees positions below `seen`."""
    return max(seen - window, 0) // SPLIT


def build(key_size_text: str, value_size_text: str, group_text: str, layout_name: str, *features: str):
    key_size, value_size, group = int(key_size_text), int(value_size_text), int(group_text)
    both_bytes = get_layout(layout_name).head_bytes(key_size, value_size)
    vectors, part = padded_head(value_size) // 16, part_bytes(value_size)
    windowed, sinking = "window" in features, "sinks" in features
    Arguments, Step, Sequence = ArgumentBlock(FIELDS), ArgumentBlock(STEP), ArgumentBlock(SEQUENCE)
    split_of = {rows: _split(key_size, value_size, group, layout_name, features, rows) for rows in {1, min(group, ROWS), ROWS}}
    one_row, group_rows, six_rows = split_of[1], split_of[min(group, ROWS)], split_of[ROWS]
    queries_bytes, scores_bytes = ROWS * 4 * key_size, ROWS * 4 * SPLIT

    @inline
    def rows_at(row, rows_left):
        """Rows to compute together from here: 6, or as many as share a KV head, or one."""
        if rows_left >= ROWS:
            return ROWS
        return group if group < ROWS and rows_left >= group else 1

    @inline
    def split(count, scratch, cache, pages, page_bytes, first, last, limit, row, window, cap, results):
        """Maximum, sum and values of `count` rows over positions first..last - 1."""
        scores = scratch + queries_bytes
        if count == ROWS:
            six_rows(scratch, scores, cache, pages, page_bytes, first, last, limit, row, window, cap, results)
        elif count == 1:
            one_row(scratch, scores, cache, pages, page_bytes, first, last, limit, row, window, cap, results)
        else:
            group_rows(scratch, scores, cache, pages, page_bytes, first, last, limit, row, window, cap, results)

    def kernel(arguments, worker, workers):
        a = view(Arguments, arguments)
        step = view(Step, a.step)
        scratch = a.scratch + worker * a.scratch_worker
        running, partial = scratch + queries_bytes + scores_bytes, scratch + queries_bytes + scores_bytes + ROWS * part
        queries = a.lone + worker * a.lone_worker if step.tokens == 1 else a.q
        window, cap = a.window, a.soft_cap
        item, part_base = 0, a.parts
        for s in range(step.sequences):
            q = view(Sequence, step.table + s * SEQUENCE_BYTES)
            first, rows, pages = q.first, q.count * group, q.pages
            end = q.start + q.count
            for h in range(a.kv_heads):
                cache = a.cache + h * both_bytes
                row = 0
                while row < rows:
                    count = rows_at(row, rows - row)
                    limit = q.start + 1  # row r sees positions below limit + r // group
                    seen = min(end, limit + (row + count - 1) // group)
                    begin = first_split(limit + row // group, window) if windowed else 0
                    splits = q.splits
                    if splits > 0:
                        loaded = False
                        for i in range(begin, splits):
                            if (item + i - begin) % workers == worker:
                                if not loaded:
                                    load_queries(queries, a.q_stride, first, h * group, row, count, scratch, key_size, group)
                                    loaded = True
                                results = part_base + ((h * group + row) * splits + i) * part
                                last = min(seen, (i + 1) * SPLIT)
                                split(count, scratch, cache, pages, a.page_bytes, i * SPLIT, last, limit, row, window, cap, partial)
                                for r in range(count):
                                    copy_part(partial + r * part, results + r * splits * part, vectors)
                        item += splits - begin
                    else:
                        if item % workers == worker:
                            load_queries(queries, a.q_stride, first, h * group, row, count, scratch, key_size, group)
                            for r in range(count):
                                start(running + r * part, vectors)
                            for i in range(begin, (seen + SPLIT - 1) // SPLIT):
                                last = min(seen, (i + 1) * SPLIT)
                                split(count, scratch, cache, pages, a.page_bytes, i * SPLIT, last, limit, row, window, cap, partial)
                                for r in range(count):
                                    fold(running + r * part, partial + r * part, vectors)
                            for r in range(count):
                                token, head, total = first + (row + r) // group, h * group + (row + r) % group, running + r * part
                                inverse = inverse_with_sink(total, load_f32(a.sinks + 4 * head)) if sinking else inverse_of_sum(total)
                                finish(total, a.out + token * a.out_stride + head * (4 * value_size), value_size, inverse)
                        item += 1
                    row += count
            if q.splits > 0:
                part_base += a.heads * q.splits * part

    return kernel


@inline
def load_queries(q, stride, first, head, row, count, out, key_size, group):
    """The rows' queries, one after another."""
    for r in range(count):
        source = q + (first + (row + r) // group) * stride + (head + (row + r) % group) * (4 * key_size)
        for i in range(key_size // 16):
            store(out + r * (4 * key_size) + 64 * i, load(F32, source + 64 * i))
        for i in range(key_size // 16 * 16, key_size):
            store_f32(out + r * (4 * key_size) + 4 * i, load_f32(source + 4 * i))


@inline
def copy_part(source, out, vectors):
    for c in range(vectors + 1):
        store(out + 64 * c, load(F32, source + 64 * c))


@inline
def head_at(cache, pages, page_bytes, position):
    """Address of the KV head, in the page that holds a position."""
    return cache + load_i64(pages + position // PAGE * 8) * page_bytes


def _split(key_size: int, value_size: int, group: int, layout_name: str, features: tuple[str, ...], rows: int):
    """A function for `rows` rows over one split: scores, softmax, values."""
    vectors, part = padded_head(value_size) // 16, part_bytes(value_size)
    windowed, capped = "window" in features, "soft_cap" in features
    query_type, score_type, one_type = tile(F32, 1, rows), tile(F32, PAGE // 16, rows), tile(F32, 1, 1)
    reader = get_layout(layout_name).reader(key_size, value_size)
    keys_of, scores_of = reader.keys, reader.scores

    if reader.weights is None:

        @inline
        def weights_of(cache, pages, page_bytes, position, e):
            return e

    else:
        factors = reader.weights

        @inline
        def weights_of(cache, pages, page_bytes, position, e):
            return factors(head_at(cache, pages, page_bytes, position), position % PAGE // 16, e)

    def values_of(width):
        sum_type, weight_type, value_of = tile(F32, rows, width), tile(F32, rows, 1), reader.values(width)

        @inline
        def run(scores, cache, pages, page_bytes, base, first, last, results, c):
            """Values of `width` vectors from vector c on, summed over positions that all rows see; `scores` begin at position base."""
            sums = load_tile_2d(sum_type, results + 64 + 64 * c, part, 64) if windowed else zeros(sum_type)
            for p in range(first // PAGE * PAGE if windowed else first, last, PAGE):
                head = head_at(cache, pages, page_bytes, p)
                for i in range(max(first - p, 0) if windowed else 0, min(PAGE, last - p)):
                    v = value_of(head, i, c)
                    sums = fma(spread(weight_type, scores + 4 * (p - base + i), 4 * SPLIT), v, sums)
            store_tile(results + 64 + 64 * c, sums, part, 64)

        return run

    wide = min(4, vectors)
    four, value_of = values_of(wide), reader.values(1)
    rest = values_of(vectors % wide) if vectors % wide else four
    whole = vectors // wide

    @inline
    def values_of_row(scores, cache, pages, page_bytes, base, first, last, results):
        """Adds the values of positions first..last - 1, which not all rows see; `scores` begin at position base."""
        for c in range(vectors):
            sums = load_tile(one_type, results + 64 + 64 * c, 64)
            for p in range(first, last):
                v = value_of(head_at(cache, pages, page_bytes, p), p % PAGE, c)
                sums = fma(spread(one_type, scores + 4 * (p - base), 4), v, sums)
            store_tile(results + 64 + 64 * c, sums, 64, 64)

    @inline
    def visible(position, seen, low, x, otherwise):
        """x where 16 positions from `position` on are below `seen` and, if there is a window, not below `low`; else the other."""
        if windowed:
            x = where(less(iota(position), zeros(I32) + low), otherwise, x)
        return where(less(iota(position), zeros(I32) + seen), x, otherwise)

    @inline
    def run(queries, scores, cache, pages, page_bytes, first, last, limit, row, window, cap, results):
        begin = max(first, (limit + row // group - window) // PAGE * PAGE) if windowed else first
        for r in range(rows):
            store(results + r * part, zeros(F32) + float32(NOTHING))
        for p in range(begin, last, PAGE):
            head = head_at(cache, pages, page_bytes, p)
            sums = zeros(score_type)
            for d in range(key_size):
                sums = fma(keys_of(head, d), spread(query_type, queries + 4 * d, 4 * key_size), sums)
            sums = scores_of(head, sums)
            if capped:
                sums = cap - float32(2) * cap / (exp(sums * (float32(2) / cap)) + 1)
            store_tile(scores + 4 * (p - first), sums, 64, 4 * SPLIT)
        span = (last - first + PAGE - 1) // PAGE * 2
        for r in range(rows):
            line, seen = scores + r * (4 * SPLIT), limit + (row + r) // group
            largest = zeros(F32) + float32(NOTHING)
            for i in range((begin - first) // 16, span):
                at = line + 64 * i
                x = visible(first + 16 * i, seen, seen - window, load(F32, at), zeros(F32) + float32(NOTHING))
                store(at, x)
                largest = maximum(x, largest)
            top = lanes_max(largest)
            total = zeros(F32)
            for i in range((begin - first) // 16, span):
                at = line + 64 * i
                e = exp(load(F32, at) - top)
                e = visible(first + 16 * i, seen, seen - window, e, zeros(F32))
                store(at, weights_of(cache, pages, page_bytes, first + 16 * i, e))
                total = total + e
            store_f32(results + r * part, top)
            store_f32(results + r * part + 4, lanes_sum(total))
        # Position by position in order, for every row: those before all rows see one, those that all see, those after.
        common = min(max(limit + row // group, first), last)  # all rows see the positions below it
        lowest = first
        if windowed:
            lowest = min(max(limit + (row + rows - 1) // group - window, first), last)  # and not below this
            for r in range(rows):
                for c in range(vectors):
                    store(results + r * part + 64 + 64 * c, zeros(F32))
                seen = min(limit + (row + r) // group, last)
                low = max(limit + (row + r) // group - window, first)
                values_of_row(scores + r * (4 * SPLIT), cache, pages, page_bytes, first, low, min(lowest, seen), results + r * part)
        for c in range(whole):
            four(scores, cache, pages, page_bytes, first, lowest, common, results, c * wide)
        if whole * wide < vectors:
            rest(scores, cache, pages, page_bytes, first, lowest, common, results, whole * wide)
        for r in range(1, rows):
            seen = min(limit + (row + r) // group, last)
            if seen > common:
                values_of_row(scores + r * (4 * SPLIT), cache, pages, page_bytes, first, max(common, lowest), seen, results + r * part)

    return run
