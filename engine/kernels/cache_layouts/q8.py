"""Keys and values as 8-bit integers, each key and each value with a float32 scale of its own: largest magnitude / 127.

Keys: codes int8[key size][PAGE], then scales float32[PAGE]. Values: codes int8[PAGE][value size padded to 16], then scales float32[PAGE].
Where a key or a value is not finite, its scale is NaN. Scales of keys multiply whole scores, those of values the softmax's weights, so
neither is applied number by number.
"""

from __future__ import annotations

from ..structs import PAGE, padded_head
from .layout import CacheLayout, CacheReader, CacheWriter


class Q8Layout(CacheLayout):
    name = "q8"

    def keys_bytes(self, key_size: int) -> int:
        return PAGE * (key_size + 4)

    def values_bytes(self, value_size: int) -> int:
        return PAGE * (padded_head(value_size) + 4)

    def writer(self, key_size: int, value_size: int) -> CacheWriter:
        from numba import float32

        from ....quant.jit.memory import load_f32, load_u8, store_f32, store_i8
        from ....quant.jit.piece import inline
        from ....quant.jit.simd import F32, absolute, fma, lanes_max, lanes_sum, load, maximum, round_even, store, to_bytes, to_i32, zeros

        keys_bytes, value_stride = self.keys_bytes(key_size), padded_head(value_size)

        def quantizer(size):
            whole, chunks = size // 16, padded_head(size) // 16

            @inline
            def numbers(x, c, room):
                """Dimensions 16 * c and on, zero beyond the last."""
                if c < whole:
                    return load(F32, x + 64 * c)
                store(room, zeros(F32))
                for i in range(16 * whole, size):
                    store_f32(room + 4 * (i - 16 * whole), load_f32(x + 4 * i))
                return load(F32, room)

            @inline
            def scale_of(x, room):
                """(scale, what numbers are multiplied by to become codes)"""
                largest, not_finite = zeros(F32), zeros(F32)
                for c in range(chunks):
                    v = numbers(x, c, room)
                    largest = maximum(absolute(v), largest)
                    not_finite = fma(v, zeros(F32), not_finite)  # NaN where v is NaN or infinite
                top = lanes_max(largest)
                return top * float32(1 / 127) + lanes_sum(not_finite), float32(127) / top if top > 0 else float32(0)

            @inline
            def codes(x, c, inverse, room):
                return to_bytes(to_i32(round_even(numbers(x, c, room) * inverse)))

            return chunks, scale_of, codes

        key_chunks, key_scale, key_codes = quantizer(key_size)
        value_chunks, value_scale, value_codes = quantizer(value_size)

        @inline
        def key(x, head, slot, room):
            scale, inverse = key_scale(x, room)
            for c in range(key_chunks):
                store(room + 64, key_codes(x, c, inverse, room))
                for i in range(min(16, key_size - 16 * c)):
                    store_i8(head + (16 * c + i) * PAGE + slot, load_u8(room + 64 + i))
            store_f32(head + key_size * PAGE + 4 * slot, scale)

        @inline
        def value(x, head, slot, room):
            scale, inverse = value_scale(x, room)
            values = head + keys_bytes
            for c in range(value_chunks):
                store(values + slot * value_stride + 16 * c, value_codes(x, c, inverse, room))
            store_f32(values + PAGE * value_stride + 4 * slot, scale)

        return CacheWriter(key, value)

    def reader(self, key_size: int, value_size: int) -> CacheReader:
        from ....quant.jit.piece import inline
        from ....quant.jit.simd import F32, I8, load, load_tile, tile, to_f32, to_i32

        keys_bytes, value_stride = self.keys_bytes(key_size), padded_head(value_size)
        code_type, scale_type = tile(I8, PAGE // 16, 1), tile(F32, PAGE // 16, 1)

        @inline
        def keys(head, d):
            return to_f32(to_i32(load_tile(code_type, head + d * PAGE, 16)))

        @inline
        def scores(head, sums):
            return sums * load_tile(scale_type, head + key_size * PAGE, 64)

        @inline
        def weights(head, half, e):
            return e * load(F32, head + keys_bytes + PAGE * value_stride + 64 * half)

        def values(width):
            value_type = tile(I8, 1, width)

            @inline
            def value(head, slot, c):
                return to_f32(to_i32(load_tile(value_type, head + keys_bytes + c * 16 + slot * value_stride, 16)))

            return value

        return CacheReader(keys, scores, weights, values)
