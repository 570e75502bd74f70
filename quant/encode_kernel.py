"""The kernel that quantizes: rows of bf16, f16 or f32 numbers to tiles or blocks of a format, 16 rows by 32 columns at a time.

Parameters: name of a format (a ScaledIntegers whose scales have writers), type of the source, method, byte order of the result ("tiles"
or "blocks").
"""

from __future__ import annotations

from .block import get_format
from .grid_kernels import codes_of
from .jit.fields import ArgumentBlock, view
from .jit.memory import load_i32, store_f32, store_i32
from .jit.piece import inline
from .jit.simd import (
    F16,
    F32,
    I16,
    I32,
    absolute,
    iota,
    lanes_max,
    lanes_sum,
    less,
    load,
    maximum,
    store,
    to_f32,
    where,
    zeros,
)
from .parts import joined_packers
from .scaled import ScaledIntegers

FIELDS = "source row_bytes columns blocks groups out out_bytes importance candidates candidate_count scratch scratch_bytes sums"
"""
source, row_bytes         first of 16 * groups rows, and from one row to the next
columns, blocks, groups   weights of a row that are not padding; 32 columns each, padding included; 16 rows each
out, out_bytes            the result, and from one group to the next
importance                float32[32 * blocks]
candidates                float32[candidate_count, 2], the grid's candidates
scratch, scratch_bytes    encoders.ENCODE_SCRATCH bytes for each worker, and from one worker's to the next
sums                      float32[groups, 8]: sum of weight², weight · error, error²; 0; largest |error|; and of the block with
                          the largest error²: that sum, its row in the group, its number. error = decoded weight - weight
"""

X, LEVELS, SEARCH, CODES, WORDS = 0, 2048, 4096, 8192, 9216
SOURCES = {"f32": (F32, 4), "f16": (F16, 2), "bf16": (I16, 2)}


def reader(source: str):
    """read(address, row_bytes, staging, x): 16 rows of 32 columns of that type -> 32 vectors of 16 rows at x. staging: 2048 bytes."""
    vector, size = SOURCES[source]

    if source == "f32":

        @inline
        def floats(address):
            return load(F32, address)

    else:

        @inline
        def floats(address):
            return to_f32(load(vector, address))

    @inline
    def read(address, row_bytes, staging, x):
        """16 rows of 32 columns -> 32 vectors of 16 rows."""
        for r in range(16):
            for h in range(2):
                store(staging + 128 * r + 64 * h, floats(address + r * row_bytes + 16 * size * h))
        for k in range(32):
            for r in range(16):
                store_i32(x + 64 * k + 4 * r, load_i32(staging + 128 * r + 4 * k))

    return read


@inline
def scatter_words(words, count, out, row_stride):
    """`count` vectors of words, lane r of each to row r: out + r * row_stride, 4 bytes after another."""
    for r in range(16):
        for i in range(count):
            store_i32(out + r * row_stride + 4 * i, load_i32(words + 64 * i + 4 * r))


@inline
def finish_sums(sums, energy, cross, error_energy, largest, worst, worst_block, scratch):
    """Stores what was measured of a group of rows (see `sums` in FIELDS). worst: largest error² of a row's blocks, and which it was."""
    store_f32(sums, energy)
    store_f32(sums + 4, cross)
    store_f32(sums + 8, error_energy)
    store_f32(sums + 12, 0.0)
    store_f32(sums + 16, lanes_max(largest))
    most = lanes_max(worst)
    lanes = where(less(worst, most), zeros(I32) + 16, iota(0))  # the first lane that has it
    lane = 15 - lanes_max(15 - lanes)
    store(scratch, worst_block)
    store_f32(sums + 20, most)
    store_f32(sums + 24, lane)
    store_f32(sums + 28, load_i32(scratch + 4 * lane))


def build(name: str, source: str, method: str, order: str):
    block_format = get_format(name)
    assert isinstance(block_format, ScaledIntegers)
    storage, code = block_format.scales, codes_of(block_format.grid, block_format.order)
    affine, searching = storage.numbers == 2, method == "search"
    nearest, search, scales_to_tile, scales_to_rows, _ = storage.writers(block_format.grid)
    size = SOURCES[source][1]
    block_bytes, tile_bytes, as_tiles = block_format.block_bytes, block_format.tile_bytes, order == "tiles"
    to_planes = joined_packers(block_format.tile_parts or block_format.parts).to_planes
    to_words = joined_packers(block_format.parts).to_words
    scale_bytes, tile_scale_bytes = storage.block_bytes, storage.tile_bytes
    words = (block_bytes - scale_bytes) // 4
    Arguments = ArgumentBlock(FIELDS)

    read = reader(source)

    def kernel(arguments, worker, workers):
        a = view(Arguments, arguments)
        scratch = a.scratch + worker * a.scratch_bytes
        x, levels, codes = scratch + X, scratch + LEVELS, scratch + CODES
        first, last = a.groups * worker // workers, a.groups * (worker + 1) // workers
        for g in range(first, last):
            energy = cross = error_energy = 0.0
            largest, worst, worst_block = zeros(F32), zeros(F32) - 1.0, zeros(I32)
            for b in range(a.blocks):
                read(a.source + 16 * g * a.row_bytes + 32 * size * b, a.row_bytes, scratch + SEARCH, x)
                if searching:
                    weights = a.importance + 128 * b
                    scale, low = search(x, weights, a.candidates, a.candidate_count, levels, scratch + SEARCH)
                else:
                    scale, low = nearest(x, levels)
                for t in range(8):
                    packed = zeros(I32)
                    for c in range(4):
                        packed = packed | (code(load(F32, levels + 64 * (4 * t + c))) << (8 * c))
                    store(codes + 64 * t, packed)
                xx, xe, ee = zeros(F32), zeros(F32), zeros(F32)
                for k in range(min(32, a.columns - 32 * b)):
                    w, value = load(F32, x + 64 * k), scale * load(F32, levels + 64 * k)
                    if affine:
                        value = value + low
                    error = value - w
                    xx, xe, ee = xx + w * w, xe + w * error, ee + error * error
                    largest = maximum(absolute(error), largest)
                energy, cross, error_energy = energy + lanes_sum(xx), cross + lanes_sum(xe), error_energy + lanes_sum(ee)
                more = less(worst, ee)
                worst, worst_block = where(more, ee, worst), where(more, zeros(I32) + b, worst_block)
                at = scratch + WORDS
                if as_tiles:
                    out = a.out + g * a.out_bytes + b * tile_bytes
                    scales_to_tile(scale, low, out)
                    to_planes(codes, out + tile_scale_bytes)
                else:
                    out, row = a.out + g * a.out_bytes + b * block_bytes, a.blocks * block_bytes
                    scales_to_rows(scale, low, at, out, row)
                    to_words(codes, at)
                    scatter_words(at, words, out + scale_bytes, row)
            finish_sums(a.sums + 32 * g, energy, cross, error_energy, largest, worst, worst_block, scratch + WORDS)

    return kernel
