"""Parts: how the bits of codes lie in a block, in the planes of a tile, and in the registers of kernels.

A *part* is one run of bytes in a block: a nibble per code, the fifth bits, the two top bits, a whole byte. It knows how its bytes
lie in a block (one row, 32 columns), how the same bits lie in the planes of a tile (16 rows interleaved), and, in functions for Numba
that are made when asked for, how kernels read the planes and how compiled encoders write both. A format is then what its scales are
stored as (storage.py) and a list of parts, and going from blocks to tiles and back is the same code for every format.

Codes of a tile are held in 8 vectors of 64 bytes: byte 4r + c of vector t is the code of row r, column 4t + c. One dot-product
instruction multiplies such a vector by 4 activations repeated 16 times, and gives 16 rows' partial sums without horizontal sums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from .arrays import COLUMNS
from .block import ROWS
from .errors import FormatError

VECTORS = 8
"""Vectors that hold the codes of one tile."""
VECTOR_BYTES = 64
"""Bytes of a vector and of a plane: 4 columns of 16 rows."""
ALL = 0x01010101
"""Times a byte: that byte in all four places of a lane."""


class Packers(NamedTuple):
    """What compiled encoders do with a part, as functions for Numba over addresses of vectors in memory.

    Codes are the 8 vectors of a tile, as i32 lanes: one lane per row, four columns in its bytes. So a plane is a vector; and a word of
    4 bytes of 16 rows' blocks, one lane per row, is a vector too.

    to_planes(codes, out)     8 vectors of codes -> the part's planes
    to_words(codes, out)      8 vectors of codes -> block_bytes / 4 vectors of words
    from_words(words, codes)  the inverse, into codes whose bits of this part are 0
    """

    to_planes: Callable[..., Any]
    to_words: Callable[..., Any]
    from_words: Callable[..., Any]


class Part(ABC):
    """One run of bytes of a block, and the planes that hold the same bits in a tile. Subclasses see only their bits of a code.

    The four functions of arrays are the specification, and enough to convert. `reader` is needed to run, unless the format makes its
    kernel piece itself; with `packers` too, formats of this part are encoded by compiled code.

    block_bytes: bytes in a block of 32 codes, a multiple of 4. A tile holds 16 rows, so it has block_bytes / 4 planes of 64 bytes
    for the part.
    """

    block_bytes: ClassVar[int]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A part that puts bits elsewhere than the class it derives from does not inherit how kernels find them there."""
        super().__init_subclass__(**kwargs)
        own = vars(cls).keys()
        if own & {"to_planes", "from_planes"} and "reader" not in own:
            cls.reader = Part.reader  # type: ignore[method-assign]
        if own & {"to_block", "from_block", "to_planes", "from_planes"} and "packers" not in own:
            cls.packers = Part.packers  # type: ignore[method-assign]

    @property
    def planes(self) -> int:
        return self.block_bytes * ROWS // VECTOR_BYTES

    @property
    def compiled(self) -> bool:
        """Whether it has packers. Imports nothing."""
        return type(self).packers is not Part.packers

    @abstractmethod
    def to_block(self, codes: np.ndarray) -> np.ndarray:
        """uint8[..., 32] -> uint8[..., block_bytes]."""

    @abstractmethod
    def from_block(self, part: np.ndarray) -> np.ndarray:
        """uint8[..., block_bytes] -> uint8[..., 32] with the part's bits in place and all others 0."""

    @abstractmethod
    def to_planes(self, vectors: np.ndarray) -> np.ndarray:
        """uint8[..., 8, 64] -> uint8[..., planes, 64]."""

    @abstractmethod
    def from_planes(self, planes: np.ndarray) -> np.ndarray:
        """uint8[..., planes, 64] -> uint8[..., 8, 64] with the part's bits in place and all others 0."""

    def reader(self, offset: int) -> Callable[..., Any]:
        """`codes` of a kernel piece (jit/piece.py) where the part's planes begin at byte `offset` of a tile. Imports numba.

        Raises FormatError if the part does not say how kernels read it.
        """
        raise FormatError(f"the part {type(self).__name__} has no reader: define one, or the format's piece")

    def packers(self) -> Packers:
        """For compiled encoders. Imports numba. Raises FormatError if the part has none."""
        raise FormatError(f"the part {type(self).__name__} has no packers: formats of it are encoded by NumPy")


class Bytes(Part):
    """Whole 8-bit codes. Blocks hold them as GGUF does, signed (code - 128); planes hold them unsigned."""

    block_bytes = 32

    def to_block(self, codes: np.ndarray) -> np.ndarray:
        return codes ^ np.uint8(0x80)

    def from_block(self, part: np.ndarray) -> np.ndarray:
        return part ^ np.uint8(0x80)

    def to_planes(self, vectors: np.ndarray) -> np.ndarray:
        return vectors

    def from_planes(self, planes: np.ndarray) -> np.ndarray:
        return planes

    def reader(self, offset: int) -> Callable[..., Any]:
        from .jit.piece import inline
        from .jit.simd import load_tile

        @inline
        def codes(shape, address, stride, j):
            at = address + offset + 128 * j
            return load_tile(shape, at, stride), load_tile(shape, at + 64, stride)

        return codes

    def packers(self) -> Packers:
        from .jit.piece import inline
        from .jit.simd import I32, load, store

        @inline
        def to_planes(codes, out):
            for t in range(8):
                store(out + 64 * t, load(I32, codes + 64 * t))

        @inline
        def to_words(codes, out):
            for t in range(8):
                store(out + 64 * t, load(I32, codes + 64 * t) ^ (0x80 * ALL))

        @inline
        def from_words(words, codes):
            for t in range(8):
                at = codes + 64 * t
                store(at, load(I32, at) | (load(I32, words + 64 * t) ^ (0x80 * ALL)))

        return Packers(to_planes, to_words, from_words)


class Nibbles(Part):
    """Bits 0-3. Byte i of a block holds codes i (low) and i + 16 (high); plane j of a tile vectors 2j (low) and 2j + 1 (high)."""

    block_bytes = 16

    def to_block(self, codes: np.ndarray) -> np.ndarray:
        return (codes[..., :16] & 15) | (codes[..., 16:] << 4)

    def from_block(self, part: np.ndarray) -> np.ndarray:
        return np.concatenate([part & 15, part >> 4], axis=-1)

    def to_planes(self, vectors: np.ndarray) -> np.ndarray:
        return (vectors[..., 0::2, :] & 15) | (vectors[..., 1::2, :] << 4)

    def from_planes(self, planes: np.ndarray) -> np.ndarray:
        return np.stack([planes & 15, planes >> 4], axis=-2).reshape(*planes.shape[:-2], VECTORS, VECTOR_BYTES)

    def reader(self, offset: int) -> Callable[..., Any]:
        from .jit.piece import inline
        from .jit.simd import load_tile

        @inline
        def codes(shape, address, stride, j):
            both = load_tile(shape, address + offset + 64 * j, stride)
            return both & 0x0F0F0F0F, (both >> 4) & 0x0F0F0F0F

        return codes

    def packers(self) -> Packers:
        from .jit.piece import inline
        from .jit.simd import I32, load, store

        @inline
        def pair(codes, low, high):
            return (load(I32, codes + 64 * low) & (0x0F * ALL)) | ((load(I32, codes + 64 * high) & (0x0F * ALL)) << 4)

        @inline
        def put(at, bits):
            store(at, load(I32, at) | bits)

        @inline
        def to_planes(codes, out):
            for j in range(4):
                store(out + 64 * j, pair(codes, 2 * j, 2 * j + 1))

        @inline
        def to_words(codes, out):
            for t in range(4):
                store(out + 64 * t, pair(codes, t, t + 4))

        @inline
        def from_words(words, codes):
            for t in range(4):
                word = load(I32, words + 64 * t)
                put(codes + 64 * t, word & (0x0F * ALL))
                put(codes + 64 * (t + 4), (word >> 4) & (0x0F * ALL))

        return Packers(to_planes, to_words, from_words)


class FifthBits(Part):
    """Bit 4. Bit i of a block's little-endian 32-bit word is code i's; bit t of a plane's byte is vector t's."""

    block_bytes = 4

    def to_block(self, codes: np.ndarray) -> np.ndarray:
        return np.packbits((codes >> 4) & 1, axis=-1, bitorder="little")

    def from_block(self, part: np.ndarray) -> np.ndarray:
        return np.unpackbits(part, axis=-1, bitorder="little") << 4

    def to_planes(self, vectors: np.ndarray) -> np.ndarray:
        return np.packbits((vectors >> 4) & 1, axis=-2, bitorder="little")

    def from_planes(self, planes: np.ndarray) -> np.ndarray:
        return np.unpackbits(planes, axis=-2, bitorder="little") << 4

    def reader(self, offset: int) -> Callable[..., Any]:
        from .jit.piece import inline
        from .jit.simd import load_tile

        @inline
        def codes(shape, address, stride, j):
            bits = load_tile(shape, address + offset, stride)
            return ((bits >> (2 * j)) & 0x01010101) << 4, ((bits >> (2 * j + 1)) & 0x01010101) << 4

        return codes

    def packers(self) -> Packers:
        from .jit.piece import inline
        from .jit.simd import I32, load, store, zeros

        @inline
        def to_planes(codes, out):
            plane = zeros(I32)
            for t in range(8):
                plane = plane | (((load(I32, codes + 64 * t) >> 4) & ALL) << t)
            store(out, plane)

        @inline
        def to_words(codes, out):
            word = zeros(I32)
            for t in range(8):
                bits = (load(I32, codes + 64 * t) >> 4) & ALL
                word = word | (((bits | (bits >> 7) | (bits >> 14) | (bits >> 21)) & 15) << (4 * t))
            store(out, word)

        @inline
        def from_words(words, codes):
            word = load(I32, words)
            for t in range(8):
                bits, at = (word >> (4 * t)) & 15, codes + 64 * t
                store(at, load(I32, at) | (((bits | (bits << 7) | (bits << 14) | (bits << 21)) & ALL) << 4))

        return Packers(to_planes, to_words, from_words)


class TopPairs(Part):
    """Bits 4-5, low bits first: in a block codes i, i + 8, i + 16, i + 24; in plane p vectors 4p..4p + 3."""

    block_bytes = 8

    @staticmethod
    def _pack(four: np.ndarray, axis: int) -> np.ndarray:
        pairs = np.moveaxis(four >> 4 & 3, axis, 0)
        return pairs[0] | pairs[1] << 2 | pairs[2] << 4 | pairs[3] << 6

    @staticmethod
    def _unpack(packed: np.ndarray, axis: int) -> np.ndarray:
        return np.stack([(packed << 4) & 0x30, (packed << 2) & 0x30, packed & 0x30, (packed >> 2) & 0x30], axis=axis)

    def to_block(self, codes: np.ndarray) -> np.ndarray:
        return self._pack(codes.reshape(*codes.shape[:-1], 4, 8), -2)

    def from_block(self, part: np.ndarray) -> np.ndarray:
        return self._unpack(part, -2).reshape(*part.shape[:-1], COLUMNS)

    def to_planes(self, vectors: np.ndarray) -> np.ndarray:
        return self._pack(vectors.reshape(*vectors.shape[:-2], 2, 4, VECTOR_BYTES), -2)

    def from_planes(self, planes: np.ndarray) -> np.ndarray:
        return self._unpack(planes, -2).reshape(*planes.shape[:-2], VECTORS, VECTOR_BYTES)

    def reader(self, offset: int) -> Callable[..., Any]:
        from .jit.piece import inline
        from .jit.simd import load_tile

        @inline
        def codes(shape, address, stride, j):
            pairs = load_tile(shape, address + offset + 64 * (j // 2), stride) >> (4 * (j & 1))
            return (pairs & 0x03030303) << 4, ((pairs >> 2) & 0x03030303) << 4

        return codes

    def packers(self) -> Packers:
        from .jit.piece import inline
        from .jit.simd import I32, load, store, zeros

        @inline
        def four(codes, first, step):
            packed = zeros(I32)
            for q in range(4):
                packed = packed | (((load(I32, codes + 64 * (first + step * q)) >> 4) & (3 * ALL)) << (2 * q))
            return packed

        @inline
        def to_planes(codes, out):
            store(out, four(codes, 0, 1))
            store(out + 64, four(codes, 4, 1))

        @inline
        def to_words(codes, out):
            store(out, four(codes, 0, 2))
            store(out + 64, four(codes, 1, 2))

        @inline
        def from_words(words, codes):
            for i in range(2):
                word = load(I32, words + 64 * i)
                for q in range(4):
                    at = codes + 64 * (i + 2 * q)
                    store(at, load(I32, at) | (((word >> (2 * q)) & (3 * ALL)) << 4))

        return Packers(to_planes, to_words, from_words)


BYTES, NIBBLES, FIFTH_BITS, TOP_PAIRS = Bytes(), Nibbles(), FifthBits(), TopPairs()


# ---- several parts, one after another --------------------------------------------------------------------------------


def join_parts(codes: np.ndarray, parts: tuple[Part, ...]) -> np.ndarray:
    """uint8[..., 32] -> uint8[..., bytes of the parts]: what a block holds of codes."""
    return np.concatenate([part.to_block(codes) for part in parts], axis=-1)


def split_parts(data: np.ndarray, parts: tuple[Part, ...]) -> np.ndarray:
    """The inverse of `join_parts`."""
    codes, at = np.zeros((*data.shape[:-1], COLUMNS), np.uint8), 0
    for part in parts:
        codes |= part.from_block(data[..., at : at + part.block_bytes])
        at += part.block_bytes
    return codes


def join_planes(codes: np.ndarray, parts: tuple[Part, ...]) -> np.ndarray:
    """uint8[groups, 16, blocks, 32] -> uint8[groups, blocks, bytes of the planes]: what a tile holds of codes."""
    groups, _, blocks, _ = codes.shape
    vectors = codes.reshape(groups, ROWS, blocks, VECTORS, 4).transpose(0, 2, 3, 1, 4).reshape(groups, blocks, VECTORS, VECTOR_BYTES)
    return np.concatenate([part.to_planes(vectors).reshape(groups, blocks, part.planes * VECTOR_BYTES) for part in parts], axis=-1)


def split_planes(planes: np.ndarray, parts: tuple[Part, ...]) -> np.ndarray:
    """The inverse of `join_planes`."""
    groups, blocks, _ = planes.shape
    vectors, at = np.zeros((groups, blocks, VECTORS, VECTOR_BYTES), np.uint8), 0
    for part in parts:
        size = part.planes * VECTOR_BYTES
        vectors |= part.from_planes(planes[..., at : at + size].reshape(groups, blocks, part.planes, VECTOR_BYTES))
        at += size
    return vectors.reshape(groups, blocks, VECTORS, ROWS, 4).transpose(0, 3, 1, 2, 4).reshape(groups, ROWS, blocks, COLUMNS)


def joined_reader(parts: tuple[Part, ...], offset: int) -> Callable[..., Any]:
    """One reader for planes of several parts, the first of which begin at byte `offset` of a tile. Imports numba."""
    first = parts[0].reader(offset)
    if len(parts) == 1:
        return first
    from .jit.piece import inline

    rest = joined_reader(parts[1:], offset + parts[0].planes * VECTOR_BYTES)

    @inline
    def codes(shape, address, stride, j):
        low, high = first(shape, address, stride, j)
        low_top, high_top = rest(shape, address, stride, j)
        return low | low_top, high | high_top

    return codes


def joined_packers(parts: tuple[Part, ...]) -> Packers:
    """Those of several parts. Imports numba."""
    first = parts[0].packers()
    if len(parts) == 1:
        return first
    from .jit.piece import inline

    first_to_planes, first_to_words, first_from_words = first
    rest_to_planes, rest_to_words, rest_from_words = joined_packers(parts[1:])
    size = parts[0].planes * VECTOR_BYTES

    @inline
    def to_planes(codes, out):
        first_to_planes(codes, out)
        rest_to_planes(codes, out + size)

    @inline
    def to_words(codes, out):
        first_to_words(codes, out)
        rest_to_words(codes, out + size)

    @inline
    def from_words(words, codes):
        first_from_words(words, codes)
        rest_from_words(words + size, codes)

    return Packers(to_planes, to_words, from_words)
