"""The kernel that reorders: blocks, as GGUF has them, to tiles. Parameter: name of a format (a ScaledIntegers)."""

from __future__ import annotations

from .block import get_format
from .jit.fields import ArgumentBlock, view
from .jit.memory import load_u16, store_i16
from .jit.simd import I32, store, zeros
from .part_kernels import gather_words, joined
from .scaled import ScaledIntegers

FIELDS = "source blocks groups out out_bytes scratch scratch_bytes"
"""
source                    uint8[16 * groups, blocks, block_bytes]
out, out_bytes            tiles, and from one group of 16 rows to the next
scratch, scratch_bytes    encoders.TILE_SCRATCH bytes for each worker, and from one worker's to the next
"""

CODES, WORDS = 0, 1024


def build(name: str):
    block_format = get_format(name)
    assert isinstance(block_format, ScaledIntegers)
    block_bytes, tile_bytes, numbers = block_format.block_bytes, block_format.tile_bytes, block_format.numbers
    parts = tuple(type(part).__name__ for part in block_format.parts)
    tile_parts = tuple(type(part).__name__ for part in block_format.tile_parts or block_format.parts)
    to_planes, from_words = joined(tile_parts, 1), joined(parts, 3)
    words = (block_bytes - 2 * numbers) // 4
    Arguments = ArgumentBlock(FIELDS)

    def kernel(arguments, worker, workers):
        a = view(Arguments, arguments)
        scratch = a.scratch + worker * a.scratch_bytes
        row = a.blocks * block_bytes
        first, last = a.groups * worker // workers, a.groups * (worker + 1) // workers
        for g in range(first, last):
            for b in range(a.blocks):
                source, out = a.source + 16 * g * row + b * block_bytes, a.out + g * a.out_bytes + b * tile_bytes
                for r in range(16):
                    for i in range(numbers):
                        store_i16(out + 32 * i + 2 * r, load_u16(source + r * row + 2 * i))
                gather_words(source + 2 * numbers, row, words, scratch + WORDS)
                for t in range(8):
                    store(scratch + CODES + 64 * t, zeros(I32))
                from_words(scratch + WORDS, scratch + CODES)
                to_planes(scratch + CODES, out + 32 * numbers)

    return kernel
