"""The two byte orders of a block format, built from parts.

A *part* is one run of bytes in a block: a nibble per code, the fifth bits, the two top bits, a whole byte. It knows how its bytes
lie in a block (one row, 32 columns) and how the same bits lie in the planes of a tile (16 rows interleaved). A format is then a
header of f16 numbers and a list of parts, and going from blocks to tiles and back is the same code for every format.

Codes of a tile are held in 8 vectors of 64 bytes: byte 4r + c of vector t is the code of row r, column 4t + c. One dot-product
instruction multiplies such a vector by 4 activations repeated 16 times, and gives 16 rows' partial sums without horizontal sums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from .block import ROWS
from .errors import FormatError

COLUMNS = 32
"""Columns of one block, and of one tile."""
VECTORS = 8
"""Vectors that hold the codes of one tile."""
VECTOR_BYTES = 64
"""Bytes of a vector and of a plane: 4 columns of 16 rows."""


def pad_columns(matrix: np.ndarray, multiple: int = COLUMNS) -> np.ndarray:
    """[rows, columns] with zero columns added up to a multiple of `multiple`; the same array if there is nothing to add."""
    missing = -matrix.shape[-1] % multiple
    return matrix if missing == 0 else np.pad(matrix, [(0, 0)] * (matrix.ndim - 1) + [(0, missing)])


def group_rows(array: np.ndarray) -> np.ndarray:
    """[rows, ...] -> [groups, 16, ...]; missing rows of the last group are zeros."""
    missing = -array.shape[0] % ROWS
    if missing:
        array = np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)])
    return array.reshape(array.shape[0] // ROWS, ROWS, *array.shape[1:])


def to_vectors(codes: np.ndarray) -> np.ndarray:
    """uint8[groups, 16, blocks, 32] -> uint8[groups, blocks, 8, 64]."""
    groups, _, blocks, _ = codes.shape
    split = codes.reshape(groups, ROWS, blocks, VECTORS, 4)
    return split.transpose(0, 2, 3, 1, 4).reshape(groups, blocks, VECTORS, VECTOR_BYTES)


def from_vectors(vectors: np.ndarray) -> np.ndarray:
    """uint8[groups, blocks, 8, 64] -> uint8[groups, 16, blocks, 32]; the inverse of `to_vectors`."""
    groups, blocks = vectors.shape[:2]
    split = vectors.reshape(groups, blocks, VECTORS, ROWS, 4)
    return split.transpose(0, 3, 1, 2, 4).reshape(groups, ROWS, blocks, COLUMNS)


class Part(ABC):
    """One run of bytes of a block, and the planes that hold the same bits in a tile. Subclasses see only their bits of a code.

    block_bytes: bytes in a block of 32 codes. A tile holds 16 rows, so it has block_bytes / 4 planes of 64 bytes for the part.
    """

    block_bytes: ClassVar[int]

    @property
    def planes(self) -> int:
        return self.block_bytes * ROWS // VECTOR_BYTES

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


BYTES, NIBBLES, FIFTH_BITS, TOP_PAIRS = Bytes(), Nibbles(), FifthBits(), TopPairs()


def join_block(numbers: np.ndarray, codes: np.ndarray, parts: tuple[Part, ...]) -> np.ndarray:
    """f16[..., n] and uint8[..., 32] -> uint8[..., 2n + the parts' bytes]: a block, its numbers first."""
    header = np.ascontiguousarray(numbers, "<f2").view(np.uint8)
    return np.concatenate([header, *(part.to_block(codes) for part in parts)], axis=-1)


def split_block(blocks: np.ndarray, numbers: int, parts: tuple[Part, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of `join_block`: (f16[..., numbers], uint8[..., 32])."""
    header = np.ascontiguousarray(blocks[..., : 2 * numbers]).view("<f2")
    codes = np.zeros((*blocks.shape[:-1], COLUMNS), np.uint8)
    at = 2 * numbers
    for part in parts:
        codes |= part.from_block(blocks[..., at : at + part.block_bytes])
        at += part.block_bytes
    return header, codes


def join_tiles(numbers: np.ndarray, codes: np.ndarray, parts: tuple[Part, ...]) -> np.ndarray:
    """f16[groups, 16, blocks, n] and uint8[groups, 16, blocks, 32] -> uint8[groups, blocks, tile bytes].

    A tile begins with the n numbers of its rows, one kind after another, 16 rows each; then come the parts' planes.
    """
    groups, _, blocks, _ = codes.shape
    header = np.ascontiguousarray(numbers.transpose(0, 2, 3, 1), "<f2").view(np.uint8)
    header = header.reshape(groups, blocks, 2 * ROWS * numbers.shape[-1])
    vectors = to_vectors(codes)
    return np.concatenate(
        [header, *(part.to_planes(vectors).reshape(groups, blocks, part.planes * VECTOR_BYTES) for part in parts)], axis=-1
    )


def split_tiles(tiles: np.ndarray, numbers: int, parts: tuple[Part, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of `join_tiles`."""
    groups, blocks, _ = tiles.shape
    at = 2 * numbers * ROWS
    header = np.ascontiguousarray(tiles[..., :at]).view("<f2").reshape(groups, blocks, numbers, ROWS).transpose(0, 3, 1, 2)
    vectors = np.zeros((groups, blocks, VECTORS, VECTOR_BYTES), np.uint8)
    for part in parts:
        size = part.planes * VECTOR_BYTES
        vectors |= part.from_planes(tiles[..., at : at + size].reshape(groups, blocks, part.planes, VECTOR_BYTES))
        at += size
    return header, from_vectors(vectors)


def check_blocks(blocks: np.ndarray, block_bytes: int, name: str) -> None:
    """Raises FormatError unless `blocks` is uint8[rows, blocks, block_bytes]."""
    if blocks.dtype != np.uint8 or blocks.ndim != 3 or blocks.shape[2] != block_bytes:
        raise FormatError(f"{name}: blocks must be uint8[rows, blocks, {block_bytes}], not {blocks.dtype}{list(blocks.shape)}")


def check_codes(codes: np.ndarray, shape: tuple[int, int], count: int, name: str) -> None:
    """Raises FormatError unless `codes` is uint8 of that shape, every code below `count`."""
    if codes.dtype != np.uint8 or codes.shape != shape:
        raise FormatError(f"{name}: codes must be uint8{list(shape)}, not {codes.dtype}{list(codes.shape)}")
    if codes.size and int(codes.max()) >= count:
        raise FormatError(f"{name}: there is no code {int(codes.max())}; codes are below {count}")


def check_tiles(tiles: np.ndarray, nbytes: int, name: str) -> np.ndarray:
    """`tiles` as a flat uint8 array. Raises FormatError unless it holds exactly `nbytes` bytes."""
    if tiles.dtype != np.uint8 or tiles.size != nbytes:
        raise FormatError(f"{name}: tiles must be {nbytes} bytes of uint8, not {tiles.size} of {tiles.dtype}")
    return tiles.reshape(-1)


def check_matrix(weights: np.ndarray, name: str) -> np.ndarray:
    """`weights` as float32. Raises FormatError unless it is a matrix of floating point numbers."""
    if weights.ndim != 2 or weights.dtype.kind != "f":
        raise FormatError(f"{name}: weights must be a float matrix [rows, columns], not {weights.dtype}{list(weights.shape)}")
    with np.errstate(over="ignore"):
        return np.asarray(weights, np.float32)


def row_chunks(rows: int, columns: int, weights: int = 1 << 20) -> list[slice]:
    """Slices of whole 16-row groups, about `weights` weights each, so that temporary arrays stay small whatever the matrix."""
    step = max(ROWS, weights // max(columns, 1) // ROWS * ROWS)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
