"""Rotary position embedding (Su et al. 2021) of queries and keys, and keys and values into the pages of the KV cache.

Parameters: key size; value size; rotated dimensions of a query and a key; layout of the cache (cache_layouts/). Rotation pairs dimension i
with i + rotated / 2.
"""

from __future__ import annotations

from ...quant.jit.fields import ArgumentBlock, view
from ...quant.jit.memory import load_f32, load_i64, store_f32
from ...quant.jit.piece import inline
from .cache_layouts import get_layout
from .panels import share
from .structs import PAGE, SEQUENCE, SEQUENCE_BYTES, STEP, WRITER_ROOM

FIELDS = (
    "step q k v q_stride k_stride v_stride heads kv_heads table cache page_bytes out lone lone_worker scratch scratch_worker scale:f32"
)
"""q, k, v  float32, token t at + t * q_stride, k_stride or v_stride bytes, heads one after another
table    float32[positions][cosines of rotated / 2 | sines]
cache    the layer's pages, page p at cache + p * page_bytes
out      rotated queries times `scale`, token t at + t * q_stride; a lone token's at lone + worker * lone_worker
scratch  rope_scratch() per worker
"""


def build(key_size_text: str, value_size_text: str, rotated_text: str, layout_name: str):
    key_size, value_size, half = int(key_size_text), int(value_size_text), int(rotated_text) // 2
    layout = get_layout(layout_name)
    head_bytes = layout.head_bytes(key_size, value_size)
    writer = layout.writer(key_size, value_size)
    put_key, put_value = writer.key, writer.value
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
        room = a.scratch + worker * a.scratch_worker
        rotated = room + WRITER_ROOM
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
                x, o = a.q + t * a.q_stride + h * (4 * key_size), out + t * a.q_stride + h * (4 * key_size)
                for i in range(half):
                    one, two = rotate(x, table, i)
                    store_f32(o + 4 * i, one * scale)
                    store_f32(o + 4 * (half + i), two * scale)
                for i in range(2 * half, key_size):
                    store_f32(o + 4 * i, load_f32(x + 4 * i) * scale)
            for h in range(a.kv_heads):
                x, head = a.k + t * a.k_stride + h * (4 * key_size), page + h * head_bytes
                for i in range(half):
                    one, two = rotate(x, table, i)
                    store_f32(rotated + 4 * i, one)
                    store_f32(rotated + 4 * (half + i), two)
                for i in range(2 * half, key_size):
                    store_f32(rotated + 4 * i, load_f32(x + 4 * i))
                put_key(rotated, head, slot, room)
                put_value(a.v + t * a.v_stride + h * (4 * value_size), head, slot, room)

    return kernel
