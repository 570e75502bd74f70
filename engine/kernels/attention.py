"""Attention over pages of the KV cache, with an online softmax (Milakov & Gimelshein 2018; Dao et al. 2022).

Parameters: head size; query heads per KV head; type of the cache.

Rows. The queries of a sequence that share a KV head are rows: token by token, head by head. Up to 6 rows are computed together,
so that a key or a value is loaded and converted once for all of them; a row's own arithmetic does not depend on which others are
beside it. Splits. Positions are taken in parts of SPLIT; a part's maximum, sum and values are folded into the row's running ones,
in order. A sequence with one token (decode) may have its parts computed by different workers, into `parts`; then
attention_merge.py folds them, in the same order, with the same arithmetic. So nothing depends on batch, chunking or threads.
Positions that a row must not see get the weight 0 exactly, and their values are not even multiplied by it: they may be infinite.
"""

from __future__ import annotations

from numba import float32

from ...quant.jit.fields import ArgumentBlock, view
from ...quant.jit.memory import load_f32, load_i64, store_f32
from ...quant.jit.piece import inline
from ...quant.jit.simd import (
    F16,
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
    maximum,
    spread,
    store,
    store_tile,
    tile,
    to_f32,
    where,
    zeros,
)
from .structs import CACHE_BYTES, PAGE, ROWS, SEQUENCE, SEQUENCE_BYTES, SPLIT, STEP, head_bytes, padded_head, part_bytes

FIELDS = "step q lone lone_worker q_stride cache page_bytes heads kv_heads out scratch scratch_worker parts"
"""q        rotated and scaled queries, token t at q + t * q_stride (a lone token's at lone + worker * lone_worker)
cache    the layer's pages (rope_store.py)
out      float32, token t at out + t * q_stride
scratch  attention_scratch() per worker
parts    of every lone token, head and split a record of maximum, sum and values (part_bytes()); used where a sequence has splits
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
def finish(total, out, head_size, vectors):
    """Running values divided by the running sum, to `out`."""
    inverse = float32(1) / load_f32(total + 4)
    for c in range(head_size // 16):
        store(out + 64 * c, load(F32, total + 64 + 64 * c) * inverse)
    for i in range(head_size // 16 * 16, head_size):
        store_f32(out + 4 * i, load_f32(total + 64 + 4 * i) * inverse)


@inline
def start(total, vectors):
    """Running results of no positions."""
    store_f32(total, float32(NOTHING))
    store_f32(total + 4, float32(0))
    for c in range(vectors):
        store(total + 64 + 64 * c, zeros(F32))


def build(head_size_text: str, group_text: str, cache_type: str):
    head_size, group = int(head_size_text), int(group_text)
    _, both_bytes = head_bytes(head_size, cache_type)
    vectors, part = padded_head(head_size) // 16, part_bytes(head_size)
    Arguments, Step, Sequence = ArgumentBlock(FIELDS), ArgumentBlock(STEP), ArgumentBlock(SEQUENCE)
    split_of = {rows: _split(head_size, group, cache_type, rows) for rows in {1, min(group, ROWS), ROWS}}
    one_row, group_rows, six_rows = split_of[1], split_of[min(group, ROWS)], split_of[ROWS]
    queries_bytes, scores_bytes = ROWS * 4 * head_size, ROWS * 4 * SPLIT

    @inline
    def rows_at(row, rows_left):
        """Rows to compute together from here: 6, or as many as share a KV head, or one."""
        if rows_left >= ROWS:
            return ROWS
        return group if group < ROWS and rows_left >= group else 1

    @inline
    def split(count, scratch, cache, pages, page_bytes, first, last, limit, row, results):
        """Maximum, sum and values of `count` rows over positions first..last - 1."""
        scores = scratch + queries_bytes
        if count == ROWS:
            six_rows(scratch, scores, cache, pages, page_bytes, first, last, limit, row, results)
        elif count == 1:
            one_row(scratch, scores, cache, pages, page_bytes, first, last, limit, row, results)
        else:
            group_rows(scratch, scores, cache, pages, page_bytes, first, last, limit, row, results)

    def kernel(arguments, worker, workers):
        a = view(Arguments, arguments)
        step = view(Step, a.step)
        scratch = a.scratch + worker * a.scratch_worker
        running, partial = scratch + queries_bytes + scores_bytes, scratch + queries_bytes + scores_bytes + ROWS * part
        queries = a.lone + worker * a.lone_worker if step.tokens == 1 else a.q
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
                    splits = q.splits
                    if splits > 0:
                        loaded = False
                        for i in range(splits):
                            if (item + i) % workers == worker:
                                if not loaded:
                                    load_queries(queries, a.q_stride, first, h * group, row, count, scratch, head_size, group)
                                    loaded = True
                                results = part_base + ((h * group + row) * splits + i) * part
                                last = min(seen, (i + 1) * SPLIT)
                                split(count, scratch, cache, pages, a.page_bytes, i * SPLIT, last, limit, row, partial)
                                for r in range(count):
                                    copy_part(partial + r * part, results + r * splits * part, vectors)
                        item += splits
                    else:
                        if item % workers == worker:
                            load_queries(queries, a.q_stride, first, h * group, row, count, scratch, head_size, group)
                            for r in range(count):
                                start(running + r * part, vectors)
                            for i in range((seen + SPLIT - 1) // SPLIT):
                                last = min(seen, (i + 1) * SPLIT)
                                split(count, scratch, cache, pages, a.page_bytes, i * SPLIT, last, limit, row, partial)
                                for r in range(count):
                                    fold(running + r * part, partial + r * part, vectors)
                            for r in range(count):
                                token, head = first + (row + r) // group, h * group + (row + r) % group
                                finish(running + r * part, a.out + token * a.q_stride + head * (4 * head_size), head_size, vectors)
                        item += 1
                    row += count
            if q.splits > 0:
                part_base += a.heads * q.splits * part

    return kernel


@inline
def load_queries(q, stride, first, head, row, count, out, head_size, group):
    """The rows' queries, one after another."""
    for r in range(count):
        source = q + (first + (row + r) // group) * stride + (head + (row + r) % group) * (4 * head_size)
        for i in range(head_size // 16):
            store(out + r * (4 * head_size) + 64 * i, load(F32, source + 64 * i))
        for i in range(head_size // 16 * 16, head_size):
            store_f32(out + r * (4 * head_size) + 4 * i, load_f32(source + 4 * i))


@inline
def copy_part(source, out, vectors):
    for c in range(vectors + 1):
        store(out + 64 * c, load(F32, source + 64 * c))


def _split(head_size: int, group: int, cache_type: str, rows: int):
    """A function for `rows` rows over one split: scores, softmax, values."""
    size = CACHE_BYTES[cache_type]
    keys_bytes, _ = head_bytes(head_size, cache_type)
    vectors, part = padded_head(head_size) // 16, part_bytes(head_size)
    element = F16 if cache_type == "f16" else F32
    key_type, query_type, score_type = tile(element, PAGE // 16, 1), tile(F32, 1, rows), tile(F32, PAGE // 16, rows)
    weight_type = tile(F32, rows, 1)
    value_stride = 16 * vectors * size

    if element is F16:
        widen = to_f32
    else:

        @inline
        def widen(x):
            return x

    def values_of(width):
        value_type, sum_type = tile(element, 1, width), tile(F32, rows, width)

        @inline
        def run(scores, cache, pages, page_bytes, first, last, results, c):
            """Values of `width` vectors from vector c on, summed over the positions."""
            sums = zeros(sum_type)
            for p in range(first, last, PAGE):
                page = cache + load_i64(pages + p // PAGE * 8) * page_bytes + keys_bytes + c * (16 * size)
                for i in range(min(PAGE, last - p)):
                    v = widen(load_tile(value_type, page + i * value_stride, 16 * size))
                    sums = fma(spread(weight_type, scores + 4 * (p - first + i), 4 * SPLIT), v, sums)
            store_tile(results + 64 + 64 * c, sums, part, 64)

        return run

    wide = min(4, vectors)
    four, rest = values_of(wide), values_of(vectors % wide) if vectors % wide else None
    if rest is None:
        rest = four
    whole = vectors // wide

    @inline
    def rest_of_row(scores, cache, pages, page_bytes, base, first, last, results):
        """Adds the values of positions first..last - 1, which the rows before this one do not see; `scores` begin at position base."""
        for c in range(vectors):
            sums = load(F32, results + 64 + 64 * c)
            for p in range(first, last):
                page = cache + load_i64(pages + p // PAGE * 8) * page_bytes + keys_bytes
                v = widen(load(element, page + p % PAGE * value_stride + c * (16 * size)))
                sums = fma(zeros(F32) + load_f32(scores + 4 * (p - base)), v, sums)
            store(results + 64 + 64 * c, sums)

    @inline
    def run(queries, scores, cache, pages, page_bytes, first, last, limit, row, results):
        for r in range(rows):
            store(results + r * part, zeros(F32) + float32(NOTHING))
        for p in range(first, last, PAGE):
            page = cache + load_i64(pages + p // PAGE * 8) * page_bytes
            sums = zeros(score_type)
            for d in range(head_size):
                k = widen(load_tile(key_type, page + d * (PAGE * size), 16 * size))
                sums = fma(k, spread(query_type, queries + 4 * d, 4 * head_size), sums)
            store_tile(scores + 4 * (p - first), sums, 64, 4 * SPLIT)
        span = (last - first + PAGE - 1) // PAGE * 2
        for r in range(rows):
            line, seen = scores + r * (4 * SPLIT), limit + (row + r) // group
            largest = zeros(F32) + float32(NOTHING)
            for i in range(span):
                at = line + 64 * i
                x = where(less(iota(first + 16 * i), zeros(I32) + seen), load(F32, at), zeros(F32) + float32(NOTHING))
                store(at, x)
                largest = maximum(x, largest)
            top = lanes_max(largest)
            total = zeros(F32)
            for i in range(span):
                at = line + 64 * i
                e = exp(load(F32, at) - top)
                e = where(less(iota(first + 16 * i), zeros(I32) + seen), e, zeros(F32))
                store(at, e)
                total = total + e
            store_f32(results + r * part, top)
            store_f32(results + r * part + 4, lanes_sum(total))
        common = min(max(limit + row // group, first), last)  # all rows see the positions below it
        for c in range(whole):
            four(scores, cache, pages, page_bytes, first, common, results, c * wide)
        if whole * wide < vectors:
            rest(scores, cache, pages, page_bytes, first, common, results, whole * wide)
        for r in range(1, rows):
            line, seen = scores + r * (4 * SPLIT), min(limit + (row + r) // group, last)
            if seen > common:
                rest_of_row(line, cache, pages, page_bytes, first, common, seen, results + r * part)

    return run
