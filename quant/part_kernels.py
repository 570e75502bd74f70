"""The parts of a block (layout.py) as SIMD code: codes of 16 rows to the planes of a tile, to the words of 16 blocks, and back.

Codes are 8 vectors of 32-bit lanes in scratch memory: byte c of lane r of vector t is the code of row r, column 4t + c. That is a
tile's own order, so a plane is a vector; and a word of 16 blocks, one lane per row, is a vector too.
"""

from __future__ import annotations

from .jit.memory import load_i32, store_i32
from .jit.piece import inline
from .jit.simd import I32, load, store, zeros

ALL = 0x01010101
"""Times a byte: that byte in all four places."""


@inline
def _put(address, t, bits):
    store(address + 64 * t, load(I32, address + 64 * t) | bits)


@inline
def bytes_to_planes(codes, out):
    for t in range(8):
        store(out + 64 * t, load(I32, codes + 64 * t))


@inline
def bytes_to_words(codes, out):
    for t in range(8):
        store(out + 64 * t, load(I32, codes + 64 * t) ^ (0x80 * ALL))


@inline
def bytes_from_words(words, codes):
    for t in range(8):
        _put(codes, t, load(I32, words + 64 * t) ^ (0x80 * ALL))


@inline
def _nibble_pair(codes, low, high):
    return (load(I32, codes + 64 * low) & (0x0F * ALL)) | ((load(I32, codes + 64 * high) & (0x0F * ALL)) << 4)


@inline
def nibbles_to_planes(codes, out):
    for j in range(4):
        store(out + 64 * j, _nibble_pair(codes, 2 * j, 2 * j + 1))


@inline
def nibbles_to_words(codes, out):
    for t in range(4):
        store(out + 64 * t, _nibble_pair(codes, t, t + 4))


@inline
def nibbles_from_words(words, codes):
    for t in range(4):
        word = load(I32, words + 64 * t)
        _put(codes, t, word & (0x0F * ALL))
        _put(codes, t + 4, (word >> 4) & (0x0F * ALL))


@inline
def fifth_bits_to_planes(codes, out):
    plane = zeros(I32)
    for t in range(8):
        plane = plane | (((load(I32, codes + 64 * t) >> 4) & ALL) << t)
    store(out, plane)


@inline
def fifth_bits_to_words(codes, out):
    word = zeros(I32)
    for t in range(8):
        bits = (load(I32, codes + 64 * t) >> 4) & ALL
        word = word | (((bits | (bits >> 7) | (bits >> 14) | (bits >> 21)) & 15) << (4 * t))
    store(out, word)


@inline
def fifth_bits_from_words(words, codes):
    word = load(I32, words)
    for t in range(8):
        bits = (word >> (4 * t)) & 15
        _put(codes, t, ((bits | (bits << 7) | (bits << 14) | (bits << 21)) & ALL) << 4)


@inline
def _top_pairs(codes, first, step):
    packed = zeros(I32)
    for q in range(4):
        packed = packed | (((load(I32, codes + 64 * (first + step * q)) >> 4) & (3 * ALL)) << (2 * q))
    return packed


@inline
def top_pairs_to_planes(codes, out):
    store(out, _top_pairs(codes, 0, 1))
    store(out + 64, _top_pairs(codes, 4, 1))


@inline
def top_pairs_to_words(codes, out):
    store(out, _top_pairs(codes, 0, 2))
    store(out + 64, _top_pairs(codes, 1, 2))


@inline
def top_pairs_from_words(words, codes):
    for i in range(2):
        word = load(I32, words + 64 * i)
        for q in range(4):
            _put(codes, i + 2 * q, ((word >> (2 * q)) & (3 * ALL)) << 4)


PARTS = {
    "Bytes": (8, bytes_to_planes, bytes_to_words, bytes_from_words),
    "Nibbles": (4, nibbles_to_planes, nibbles_to_words, nibbles_from_words),
    "FifthBits": (1, fifth_bits_to_planes, fifth_bits_to_words, fifth_bits_from_words),
    "TopPairs": (2, top_pairs_to_planes, top_pairs_to_words, top_pairs_from_words),
}
"""Class name of a part -> (vectors, to_planes(codes, out), to_words(codes, out), from_words(words, codes))."""


def joined(names: tuple[str, ...], which: int):
    """One function for parts that lie one after another: which = 1 to_planes, 2 to_words, 3 from_words."""
    first = PARTS[names[0]][which]
    if len(names) == 1:
        return first
    size, rest = 64 * PARTS[names[0]][0], joined(names[1:], which)
    if which == 3:

        @inline
        def function(words, codes):
            first(words, codes)
            rest(words + size, codes)

    else:

        @inline
        def function(codes, out):
            first(codes, out)
            rest(codes, out + size)

    return function


@inline
def scatter_words(words, count, out, row_stride):
    """`count` vectors of words, lane r of each to row r: out + r * row_stride, 4 bytes after another."""
    for r in range(16):
        for i in range(count):
            store_i32(out + r * row_stride + 4 * i, load_i32(words + 64 * i + 4 * r))


@inline
def gather_words(source, row_stride, count, words):
    """The inverse of scatter_words."""
    for r in range(16):
        for i in range(count):
            store_i32(words + 64 * i + 4 * r, load_i32(source + r * row_stride + 4 * i))
