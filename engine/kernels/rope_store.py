"""Rotary position embedding (Su et al. 2021) of queries and keys, and keys and values into the pages of the KV cache.

Parameters: head size; rotated dimensions; type of the cache ("f16" or "f32"). Rotation pairs dimension i with i + rotated / 2.

A page holds PAGE positions of one layer: for each KV head first the keys, [head size][PAGE], so that scores of 16 positions need no
horizontal sums, then the values, [PAGE][head size padded to 16].
"""

from __future__ import annotations

from ...quant.jit.fields import ArgumentBlock, view
from ...quant.jit.memory import load_f32, load_i64, store_f16, store_f32
from ...quant.jit.piece import inline
from .panels import share
from .structs import CACHE_BYTES, PAGE, SEQUENCE, SEQUENCE_BYTES, STEP, head_bytes, padded_head

FIELDS = "step q k v q_stride kv_stride heads kv_heads table cache page_bytes out lone lone_worker scale:f32"
"""q, k, v  float32, token t at + t * q_stride or kv_stride bytes, heads one after another
table    float32[positions][cosines of rotated / 2 | sines]
cache    the layer's pages, page p at cache + p * page_bytes
out      rotated queries times `scale`, token t at + t * q_stride; a lone token's at lone + worker * lone_worker
"""


def build(head_size_text: str, rotated_text: str, cache_type: str):
    head_size, half = int(head_size_text), int(rotated_text) // 2
    size = CACHE_BYTES[cache_type]
    keys_bytes, both_bytes = head_bytes(head_size, cache_type)
    value_stride = padded_head(head_size) * size
    put = store_f16 if cache_type == "f16" else store_f32
    Arguments, Step, Sequence = ArgumentBlock(FIELDS), ArgumentBlock(STEP), ArgumentBlock(SEQUENCE)

    @inline
    def rotate(x, table, i):
        """Dimensions i and i + half of a rotated head."""
        cosine, sine = load_f32(table + 4 * i), load_f32(table + 4 * (half + i))
        first, second = load_f32(x + 4 * i), load_f32(x + 4 * (half + i))
        return first * cosine - second * sine, second * cosine + first * sine

    def kernel(arguments, worker, workers):
        a = view(Arguments, arguments)
        step = view(Step, a.step)
        tokens = step.tokens
        first, last = share(tokens, worker, workers)
        out = a.lone + worker * a.lone_worker if tokens == 1 else a.out
        scale = a.scale
        s = 0
        for t in range(first, last):
            while t >= view(Sequence, step.table + s * SEQUENCE_BYTES).first + view(Sequence, step.table + s * SEQUENCE_BYTES).count:
                s += 1
            pages = view(Sequence, step.table + s * SEQUENCE_BYTES).pages
            position = load_i64(step.positions + 8 * t)
            table = a.table + position * (8 * half)
            page = a.cache + load_i64(pages + position // PAGE * 8) * a.page_bytes
            slot = position % PAGE
            for h in range(a.heads):
                x, o = a.q + t * a.q_stride + h * (4 * head_size), out + t * a.q_stride + h * (4 * head_size)
                for i in range(half):
                    one, two = rotate(x, table, i)
                    store_f32(o + 4 * i, one * scale)
                    store_f32(o + 4 * (half + i), two * scale)
                for i in range(2 * half, head_size):
                    store_f32(o + 4 * i, load_f32(x + 4 * i) * scale)
            for h in range(a.kv_heads):
                x, keys = a.k + t * a.kv_stride + h * (4 * head_size), page + h * both_bytes + slot * size
                for i in range(half):
                    one, two = rotate(x, table, i)
                    put(keys + i * (PAGE * size), one)
                    put(keys + (half + i) * (PAGE * size), two)
                for i in range(2 * half, head_size):
                    put(keys + i * (PAGE * size), load_f32(x + 4 * i))
                x, values = a.v + t * a.kv_stride + h * (4 * head_size), page + h * both_bytes + keys_bytes + slot * value_stride
                for i in range(head_size):
                    put(values + i * size, load_f32(x + 4 * i))

    return kernel
