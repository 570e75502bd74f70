"""Rows of the embedding table, dequantized: the same tiles that serve as the head when the two are tied.

Parameters: the table's block format.
"""

from __future__ import annotations

from numba import float32

from ...quant.block import get_format
from ...quant.jit.fields import ArgumentBlock, view
from ...quant.jit.memory import load_f32, load_i32, store_f32
from ...quant.jit.piece import FloatPiece, inline
from ...quant.jit.simd import F16, I32, Vector, store_tile, tile, to_f32
from .panels import share
from .structs import STEP

FIELDS = "step table columns out out_stride scratch scratch_worker"
"""table    tiles
out      float32, token t at out + t * out_stride bytes, zero from `columns` up to a multiple of 32
scratch  2048 bytes per worker
"""


def build(format_name: str):
    piece = get_format(format_name).piece()
    tile_bytes, header = piece.tile_bytes, 16 * piece.header_bytes
    dequantize = dequantizer(piece)
    Arguments, Step = ArgumentBlock(FIELDS), ArgumentBlock(STEP)

    def kernel(arguments, worker, workers):
        a = view(Arguments, arguments)
        step = view(Step, a.step)
        blocks = (a.columns + 31) // 32
        stride = header + blocks * tile_bytes
        first, last = share(step.tokens, worker, workers)
        if step.tokens == 1 and worker > 0:  # one token is not worth sharing, and all write the same row
            last = first
        scratch = a.scratch + worker * a.scratch_worker
        for t in range(first, last):
            row = load_i32(step.ids + 4 * t)
            group = a.table + row // 16 * stride
            for i in range(blocks):
                dequantize(group, group + header + i * tile_bytes, scratch)
                out = a.out + t * a.out_stride + 128 * i
                for k in range(32):
                    store_f32(out + 4 * k, load_f32(scratch + 64 * k + row % 16 * 4))
            for k in range(a.columns, 32 * blocks):  # zeros do not always survive a block that is padded with them
                store_f32(a.out + t * a.out_stride + 4 * k, float32(0))

    return kernel


def dequantizer(piece):
    """A function (address of the group of 16 rows, of a tile, out): the tile as float32, column after column, 64 bytes each."""
    if isinstance(piece, FloatPiece):
        values, value_type = piece.values, tile(Vector(piece.element), 1, 1)

        @inline
        def dequantize(group, at, out):
            for k in range(32):
                store_tile(out + 64 * k, values(value_type, at, 0, k), 0, 0)

        return dequantize

    codes, scale, minimum, bias, row = piece.codes, piece.scale, piece.minimum, piece.bias, piece.row
    codes_type, scale_type = tile(I32, 1, 1), tile(F16, 1, 1)
    has_minimum = minimum is not None
    if minimum is None:
        minimum = scale

    @inline
    def column(out, packed, byte, factor, offset):
        value = (to_f32((packed >> (8 * byte)) & 255) - bias) * factor
        if has_minimum:
            value = value + offset
        store_tile(out + 64 * byte, value, 0, 0)

    if row is None:

        @inline
        def factor_of(group, at, half):
            return scale(scale_type, at, 0, half)

    else:

        @inline
        def factor_of(group, at, half):
            return row(scale_type, group, 0) * scale(scale_type, at, 0, half)

    @inline
    def dequantize(group, at, out):
        for j in range(4):
            factor, offset = factor_of(group, at, j // 2), minimum(scale_type, at, 0, j // 2)
            low, high = codes(codes_type, at, 0, j)
            for byte in range(4):
                column(out + 512 * j, low, byte, factor, offset)
                column(out + 512 * j + 256, high, byte, factor, offset)

    return dequantize

