"""The kernel that reorders: blocks, as GGUF has them, to tiles. Parameter: name of a format (a ScaledIntegers whose
scales have writers)."""

from __future__ import annotations

from .block import get_format
from .jit.fields import ArgumentBlock, view
from .jit.memory import load_i32, store_i32
from .jit.piece import inline
from .jit.simd import I32, store, zeros
from .parts import joined_packers
from .scaled import ScaledIntegers

FIELDS = "source blocks groups out out_bytes scratch scratch_bytes"
"""
source                    uint8[16 * groups, blocks, block_bytes]
out, out_bytes            tiles, and from one group of 16 rows to the next
scratch, scratch_bytes    encoders.TILE_SCRATCH bytes for each worker, and from one worker's to the next
"""

CODES, WORDS = 0, 1024


@inline
def gather_words(source, row_stride, count, words):
    """`count` words of each of 16 rows: row r's to lane r of as many vectors."""
    for r in range(16):
        for i in range(count):
            store_i32(words + 64 * i + 4 * r, load_i32(source + r * row_stride + 4 * i))


def build(name: str):
    block_format = get_format(name)
    assert isinstance(block_format, ScaledIntegers)
    block_bytes, tile_bytes, storage = block_format.block_bytes, block_format.tile_bytes, block_format.scales
    to_planes = joined_packers(block_format.tile_parts or block_format.parts).to_planes
    from_words, gather_scales = joined_packers(block_format.parts).from_words, storage.writers(block_format.grid).gather
    scale_bytes, tile_scale_bytes = storage.block_bytes, storage.tile_bytes
    words = (block_bytes - scale_bytes) // 4
    Arguments = ArgumentBlock(FIELDS)

    def kernel(arguments, worker, workers):
        a = view(Arguments, arguments)
        scratch = a.scratch + worker * a.scratch_bytes
        row = a.blocks * block_bytes
        first, last = a.groups * worker // workers, a.groups * (worker + 1) // workers
        for g in range(first, last):
            for b in range(a.blocks):
                source, out = a.source + 16 * g * row + b * block_bytes, a.out + g * a.out_bytes + b * tile_bytes
                gather_scales(source, row, out)
                gather_words(source + scale_bytes, row, words, scratch + WORDS)
                for t in range(8):
                    store(scratch + CODES + 64 * t, zeros(I32))
                from_words(scratch + WORDS, scratch + CODES)
                to_planes(scratch + CODES, out + tile_scale_bytes)

    return kernel
