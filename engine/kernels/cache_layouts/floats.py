"""Keys and values as f16 or f32, with no scales.

Keys are [key size][PAGE], so that scores of 16 positions need no horizontal sums; values are [PAGE][value size padded to 16].
"""

from __future__ import annotations

from ..structs import PAGE, padded_head
from .layout import CacheLayout, CacheReader, CacheWriter


class FloatLayout(CacheLayout):
    """name: "f16" or "f32"; size: bytes of a number."""

    def __init__(self, name: str, size: int):
        self.name, self.size = name, size

    def keys_bytes(self, key_size: int) -> int:
        return key_size * PAGE * self.size

    def values_bytes(self, value_size: int) -> int:
        return PAGE * padded_head(value_size) * self.size

    def writer(self, key_size: int, value_size: int) -> CacheWriter:
        from ....quant.jit.memory import load_f32, store_f16, store_f32
        from ....quant.jit.piece import inline

        size, keys_bytes, value_stride = self.size, self.keys_bytes(key_size), padded_head(value_size) * self.size
        put = store_f16 if self.name == "f16" else store_f32

        @inline
        def key(x, head, slot, room):
            for i in range(key_size):
                put(head + slot * size + i * (PAGE * size), load_f32(x + 4 * i))

        @inline
        def value(x, head, slot, room):
            for i in range(value_size):
                put(head + keys_bytes + slot * value_stride + i * size, load_f32(x + 4 * i))

        return CacheWriter(key, value)

    def reader(self, key_size: int, value_size: int) -> CacheReader:
        from ....quant.jit.piece import inline
        from ....quant.jit.simd import F16, F32, load_tile, tile, to_f32

        size, keys_bytes, value_stride = self.size, self.keys_bytes(key_size), padded_head(value_size) * self.size
        element = F16 if self.name == "f16" else F32
        key_type = tile(element, PAGE // 16, 1)

        if self.name == "f16":
            widen = to_f32
        else:

            @inline
            def widen(x):
                return x

        @inline
        def keys(head, d):
            return widen(load_tile(key_type, head + d * (PAGE * size), 16 * size))

        @inline
        def scores(head, sums):
            return sums

        def values(width):
            value_type = tile(element, 1, width)

            @inline
            def value(head, slot, c):
                return widen(load_tile(value_type, head + keys_bytes + c * (16 * size) + slot * value_stride, 16 * size))

            return value

        return CacheReader(keys, scores, None, values)
