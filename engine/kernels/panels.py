"""Panels: how the activations of a step lie in memory for the matrix kernels.

A step of n tokens is n // 6 panels of 6 tokens and a last one of 1, 2, 4 or 6. A panel holds, block after block of 32 columns, one record:

    int8   6 x 32 int8 | 6 x f32 scale | 6 x i32 sum of the 32 | 6 x i32 sum of the first 16       44 bytes per token and block
    f32    6 x 32 f32                                                                            128 bytes per token and block

so a tile reads one stream with constant offsets. One token is a panel 1 wide: decode and prefill are the same data.
Each token is quantized for itself, 32 columns at a time (scale = largest magnitude / 127), so no token's numbers depend on its neighbours.
"""

from __future__ import annotations

from numba import float32

from ...quant.jit.memory import store_f32, store_i32
from ...quant.jit.piece import inline
from ...quant.jit.simd import absolute, lanes_max, lanes_sum, maximum, round_even, store, to_bytes, to_i32
from .structs import TOKENS, UNIT, WHOLE


@inline
def last_width(tokens):
    """Width of the panel after the full ones; 0 if there is none."""
    rest = tokens % TOKENS
    return rest if rest <= 2 else (rest + 1) // 2 * 2


@inline
def locate(token, tokens, blocks, record):
    """(byte offset of the token's panel, its width, the token's column in it)"""
    full = tokens // TOKENS * TOKENS
    if token < full:
        return token // TOKENS * (blocks * record * TOKENS), TOKENS, token % TOKENS
    return full * blocks * record, last_width(tokens), token - full


@inline
def put_int8(low, high, record, width, column):
    """Quantizes 32 floats (two vectors) into a token's column of a record."""
    largest = lanes_max(maximum(absolute(low), absolute(high)))
    inverse = float32(127) / largest if largest > 0 else float32(0)
    low_codes, high_codes = to_i32(round_even(low * inverse)), to_i32(round_even(high * inverse))
    codes = record + 32 * column
    store(codes, to_bytes(low_codes))
    store(codes + 16, to_bytes(high_codes))
    numbers = record + 32 * width + 4 * column
    first = lanes_sum(low_codes)
    store_f32(numbers, largest * float32(1 / 127))
    store_i32(numbers + 4 * width, first + lanes_sum(high_codes))
    store_i32(numbers + 8 * width, first)


@inline
def put_f32(low, high, record, width, column):
    """Copies 32 floats (two vectors) into a token's column of a record."""
    store(record + 128 * column, low)
    store(record + 128 * column + 64, high)


def writer(kind: str):
    """The function that puts 32 floats into a record of that kind."""
    return {"int8": put_int8, "f32": put_f32}[kind]


@inline
def share(tokens, worker, workers):
    """The worker's tokens of an op that prepares panels. A single token every worker does for itself, into a panel of its own."""
    if tokens == 1:
        return 0, 1
    return tokens * worker // workers, tokens * (worker + 1) // workers


@inline
def units(rows, span):
    """(first, last) of the units of 32 rows of a matrix that a span (structs.span) stands for: the same in every op with as many rows,
    so that who claimed a span may go on with rows it made itself."""
    count = (rows + (UNIT - 1)) // UNIT
    return count * (span & 0xFFFF) // WHOLE, count * (span >> 16) // WHOLE
