"""out[token, row] = sum over columns of weight[row, column] * x[token, column] (+ bias) (+ out): GEMV and GEMM in one kernel.

Parameters: the weights' block format; the kind of activation panels ("int8" or "f32").

Every output has one accumulator, to which one fma per 32 (or 16) columns is added in order, so its value does not depend on how many
tokens or rows are computed beside it. So whole units of 32 rows are claimed by whoever comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...quant.block import get_format
from ...quant.errors import FormatError
from ...quant.jit.fields import ArgumentBlock, view
from ...quant.jit.piece import FloatPiece, IntegerPiece, inline
from ...quant.jit.simd import (
    F16,
    F32,
    I32,
    Vector,
    dot4,
    dot4_full,
    fma,
    load_tile,
    load_tile_2d,
    spread,
    store_tile,
    tile,
    to_f32,
    zeros,
)
from ...quant.jit.target import current
from .panels import last_width, locate, units
from .structs import RECORD, STEP, TOKENS

FIELDS = "step weights columns rows x x_worker out out_stride bias add"
"""x         panels; a lone token's are at x + worker * x_worker, the same bytes for every worker
out       float32, token t at out + t * out_stride bytes; written in whole groups of 16 rows
bias      address of float32[rows, padded to 16], or 0
add       1: out += result (the residual)
"""


def build(format_name: str, kind: str):
    """The kernel for weights of a format and activations of a kind."""
    product = groups_product(format_name, kind)
    Arguments, Step = ArgumentBlock(FIELDS), ArgumentBlock(STEP)

    def kernel(arguments, worker, span):
        a = view(Arguments, arguments)
        tokens = view(Step, a.step).tokens
        first, last = units(a.rows, span)
        first, last = 2 * first, min(2 * last, (a.rows + 15) // 16)
        x = a.x
        if tokens == 1:
            x += worker * a.x_worker
        product(a.weights, (a.columns + 31) // 32, first, last, x, tokens, a.out, a.out_stride, a.bias, a.add)

    return kernel


def groups_product(format_name: str, kind: str):
    """product(weights, blocks, first, last, x, tokens, out, out_stride, bias, add), inline: row groups first..last - 1 times all tokens.

    weights, out and bias are those of row 0, `blocks` the blocks of 32 columns of a row, x the panels of the tokens. Raises FormatError.
    """
    piece = get_format(format_name).piece()
    sub_tiles = get_format(format_name).block_columns // 32
    if sub_tiles != 1:
        raise FormatError(f"{format_name}: the kernels read blocks of 32 columns, not of {32 * sub_tiles}; convert to another format")
    make: Callable[..., Any] = _integer_tile
    if kind != "int8":
        make = _float_tile if isinstance(piece, FloatPiece) else _dequantizing_tile
    tile_bytes, header, record = piece.tile_bytes, 16 * piece.header_bytes, RECORD[kind]
    groups = current().row_groups
    single = make(piece, 1, 1)
    two, four, six = (_with_epilogue(make(piece, groups, width), groups, width) for width in (2, 4, 6))
    single = _with_epilogue(single, 1, 1)

    @inline
    def panels(weights, stride, blocks, x, tokens, out, out_stride, bias, add):
        """`groups` row groups times all tokens but an odd last one."""
        for t in range(0, tokens, TOKENS):
            width = last_width(tokens - t)
            if tokens - t >= TOKENS or width == TOKENS:
                six(weights, stride, blocks, x, 6, 0, out, out_stride, bias, add)
            elif width == 4:
                four(weights, stride, blocks, x, 4, 0, out, out_stride, bias, add)
            else:
                two(weights, stride, blocks, x, 2, 0, out, out_stride, bias, add)
            x += TOKENS * blocks * record
            out += TOKENS * out_stride

    @inline
    def product(weights, blocks, first, last, x, tokens, out, out_stride, bias, add):
        stride = header + blocks * tile_bytes
        even_tokens = tokens - (1 if tokens % TOKENS == 1 else 0)  # a panel of one has no tile of its own width
        g = first
        while g < last:
            count, token = 1, 0
            if tokens > 1 and last - g >= groups:
                count, token = groups, even_tokens
                group_bias = bias + 64 * g if bias else 0
                panels(weights + g * stride, stride, blocks, x, even_tokens, out + 64 * g, out_stride, group_bias, add)
            while token < tokens:  # what is left: one group of rows and one token at a time
                panel, width, column = locate(token, tokens, blocks, record)
                for each in range(g, g + count):
                    at, to = weights + each * stride, out + 64 * each + token * out_stride
                    single(at, stride, blocks, x + panel, width, column, to, out_stride, bias + 64 * each if bias else 0, add)
                token += 1
            g += count

    return product


def _with_epilogue(compute, groups: int, width: int):
    """Adds bias and residual to a tile's sums and stores them: out[t, 16 g ...]."""
    shape, column = tile(F32, groups, width), tile(F32, groups, 1)

    @inline
    def run(weights, stride, blocks, panel, panel_width, panel_column, out, out_stride, bias, add):
        sums = compute(weights, stride, blocks, panel, panel_width, panel_column)
        if bias:
            sums = sums + load_tile(column, bias, 64)
        if add:
            sums = load_tile_2d(shape, out, 64, out_stride) + sums
        store_tile(out, sums, 64, out_stride)

    return run


def _integer_tile(piece: IntegerPiece, groups: int, width: int):
    """Integer products summed in int32 over the columns that share a scale, then one fma in float32."""
    sums_type, dots_type, codes_type = tile(F32, groups, width), tile(I32, groups, width), tile(I32, groups, 1)
    scale_type, x_type, number_type = tile(F16, groups, 1), tile(I32, 1, width), tile(F32, 1, width)
    dot = dot4_full if piece.wide else dot4
    codes, scale, minimum = piece.codes, piece.scale, piece.minimum
    bias, tile_bytes, header = piece.bias, piece.tile_bytes, 16 * piece.header_bytes
    finish = _finish(piece, groups, width)
    halves = piece.scale_columns == 16
    has_minimum = minimum is not None
    if minimum is None:
        minimum = scale

    @inline
    def quarter(dots, at, stride, x, j):
        low, high = codes(codes_type, at, stride, j)
        dots = dot(dots, low, spread(x_type, x + 8 * j, 32))
        return dot(dots, high, spread(x_type, x + 8 * j + 4, 32))

    @inline
    def fold(sums, dots, total, at, stride, x_scale, half):
        sums = fma(to_f32(dots), scale(scale_type, at, stride, half) * x_scale, sums)
        if has_minimum:
            sums = fma(to_f32(total) * x_scale, minimum(scale_type, at, stride, half), sums)
        return sums

    @inline
    def compute(weights, stride, blocks, panel, panel_width, panel_column):
        sums = zeros(sums_type)
        numbers = 32 * panel_width + 4 * panel_column
        for i in range(blocks):
            at = weights + header + i * tile_bytes
            record = panel + i * (44 * panel_width)
            x = record + 32 * panel_column
            x_scale = spread(number_type, record + numbers, 4)
            total = spread(x_type, record + numbers + 4 * panel_width, 4)
            if halves:
                first = spread(x_type, record + numbers + 8 * panel_width, 4)
                dots = zeros(dots_type) - first * bias
                dots = quarter(quarter(dots, at, stride, x, 0), at, stride, x, 1)
                sums = fold(sums, dots, first, at, stride, x_scale, 0)
                total = total - first
                dots = zeros(dots_type) - total * bias
                dots = quarter(quarter(dots, at, stride, x, 2), at, stride, x, 3)
                sums = fold(sums, dots, total, at, stride, x_scale, 1)
            else:
                dots = zeros(dots_type) - total * bias
                dots = quarter(quarter(dots, at, stride, x, 0), at, stride, x, 1)
                dots = quarter(quarter(dots, at, stride, x, 2), at, stride, x, 3)
                sums = fold(sums, dots, total, at, stride, x_scale, 0)
        return finish(sums, weights, stride)

    return compute


def _finish(piece: IntegerPiece, groups: int, width: int):
    """Multiplies a tile's sums by the numbers of its rows, if the format has any."""
    number_type, row = tile(F32, groups, 1), piece.row
    if row is None:

        @inline
        def finish(sums, weights, stride):
            return sums

    else:

        @inline
        def finish(sums, weights, stride):
            return sums * row(number_type, weights, stride)

    return finish


def _dequantizing_tile(piece: IntegerPiece, groups: int, width: int):
    """Integers turned into float32 weights in registers, times float32 activations: what accuracy is measured with."""
    sums_type, codes_type, scale_type = tile(F32, groups, width), tile(I32, groups, 1), tile(F16, groups, 1)
    number_type = tile(F32, 1, width)
    codes, scale, minimum = piece.codes, piece.scale, piece.minimum
    bias, tile_bytes, header = piece.bias, piece.tile_bytes, 16 * piece.header_bytes
    finish = _finish(piece, groups, width)
    has_minimum = minimum is not None
    if minimum is None:
        minimum = scale

    @inline
    def column(sums, packed, byte, factor, offset, x):
        value = to_f32((packed >> (8 * byte)) & 255) - bias
        value = value * factor
        if has_minimum:
            value = value + offset
        return fma(value, spread(number_type, x, 128), sums)

    @inline
    def vector(sums, packed, factor, offset, x):
        sums = column(sums, packed, 0, factor, offset, x)
        sums = column(sums, packed, 1, factor, offset, x + 4)
        sums = column(sums, packed, 2, factor, offset, x + 8)
        return column(sums, packed, 3, factor, offset, x + 12)

    @inline
    def compute(weights, stride, blocks, panel, panel_width, panel_column):
        sums = zeros(sums_type)
        for i in range(blocks):
            at = weights + header + i * tile_bytes
            x = panel + i * (128 * panel_width) + 128 * panel_column
            for j in range(4):
                factor = scale(scale_type, at, stride, j // 2)
                offset = minimum(scale_type, at, stride, j // 2)
                low, high = codes(codes_type, at, stride, j)
                sums = vector(sums, low, factor, offset, x + 32 * j)
                sums = vector(sums, high, factor, offset, x + 32 * j + 16)
        return finish(sums, weights, stride)

    return compute


def _float_tile(piece: FloatPiece, groups: int, width: int):
    """Weights that are floats already."""
    sums_type, number_type = tile(F32, groups, width), tile(F32, 1, width)
    values, value_type = piece.values, tile(Vector(piece.element), groups, 1)
    tile_bytes, header = piece.tile_bytes, 16 * piece.header_bytes

    @inline
    def compute(weights, stride, blocks, panel, panel_width, panel_column):
        sums = zeros(sums_type)
        for i in range(blocks):
            at = weights + header + i * tile_bytes
            x = panel + i * (128 * panel_width) + 128 * panel_column
            for k in range(32):
                sums = fma(values(value_type, at, stride, k), spread(number_type, x + 4 * k, 128), sums)
        return sums

    return compute
