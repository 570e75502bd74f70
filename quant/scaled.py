"""Formats of integers that share scales: a grid (scales.py), a way of storing scales (storage.py), and parts (parts.py).

What such formats have in common is here; a format's own file names its three.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from .arrays import COLUMNS, check_blocks, check_codes, check_matrix, check_tiles, group_rows, pad_columns, row_chunks
from .block import ENCODINGS, ROWS, BlockFormat, Scales
from .errors import FormatError
from .parts import VECTOR_BYTES, Part, join_parts, join_planes, joined_reader, split_parts, split_planes
from .scales import Affine, Grid, check_finite, check_importance
from .storage import F16, ScaleStorage


class ScaledIntegers(BlockFormat):
    """value = scale · level of the code, or scale · code + minimum if the grid is affine. All arithmetic in float32, as in ggml.

    Attributes of a subclass
    ------------------------
    grid        the levels, and how scales and codes are chosen
    scales      how scales are stored
    parts       what a block holds after its scales, in order
    tile_parts  the same parts in the order of a tile's planes, if that differs. Where a kernel needs one part for several others, it
                comes first: the kernel then reads memory in order, which can double its speed
    order       the bits that are stored for each code, if they do not ascend with the levels as codes do: a permutation
    method      the default of `encode`
    """

    grid: ClassVar[Grid]
    scales: ClassVar[ScaleStorage] = F16
    parts: ClassVar[tuple[Part, ...]]
    tile_parts: ClassVar[tuple[Part, ...] | None] = None
    order: ClassVar[tuple[int, ...] | None] = None
    method: ClassVar[str] = "nearest"
    block_columns = COLUMNS

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "grid") and isinstance(cls.grid, Affine) != (cls.scales.numbers == 2):
            raise FormatError(f"{cls.__name__}: an affine grid needs scales with a minimum, such as F16_WITH_MINIMUM; others have none")

    @property
    def scale_columns(self) -> int:  # type: ignore[override]
        return self.scales.columns

    @property
    def header_bytes(self) -> int:  # type: ignore[override]
        return self.scales.header_bytes

    @property
    def block_bytes(self) -> int:  # type: ignore[override]
        return self.scales.block_bytes + sum(part.block_bytes for part in self.parts)

    @property
    def tile_bytes(self) -> int:
        return self.scales.tile_bytes + VECTOR_BYTES * sum(part.planes for part in self.parts)

    @property
    def bits(self) -> int:
        """See BlockFormat.bits."""
        return (len(self.levels) - 1).bit_length()

    @property
    def levels(self) -> np.ndarray:
        """See BlockFormat.levels."""
        return self.grid.values

    @cached_property
    def _ranks(self) -> np.ndarray:
        """uint8[n]: the inverse of `order`."""
        return np.argsort(self.order or np.arange(len(self.levels))).astype(np.uint8)

    def encode(self, weights: np.ndarray, importance: np.ndarray | None = None, method: str | None = None) -> np.ndarray:
        """See BlockFormat.encode. Raises NonFiniteError for NaN and infinity, FormatError for arguments that do not suit.

        Padding columns are zero weights like any other, and weigh as much as the last column.
        """
        weights = check_matrix(weights, self.name)
        out = np.empty(self.blocks_shape(*weights.shape), np.uint8)
        for chunk, stored, codes in self._coded(weights, importance, method):
            out[chunk] = self._join(stored, codes)
        return out

    def _coded(
        self, weights: np.ndarray, importance: np.ndarray | None, method: str | None
    ) -> Iterator[tuple[slice, tuple[np.ndarray, ...], np.ndarray]]:
        """Runs of rows, what is stored of their scales, and codes uint8[n, padded columns]."""
        method = method or self.method
        if method not in ENCODINGS:
            raise FormatError(f"{self.name}: unknown method {method!r}; known are {', '.join(ENCODINGS)}")
        rows, columns = weights.shape
        weigh = np.ones(columns, np.float32) if importance is None else check_importance(importance, columns, self.name)
        weigh = np.pad(weigh, (0, -columns % COLUMNS), mode="edge" if columns else "constant")
        for chunk in row_chunks(rows, columns):
            check_finite(weights[chunk], self.name, chunk.start)
            x = pad_columns(weights[chunk])
            if x.size == 0:
                yield chunk, self.scales.empty(x.shape[0], 0), np.zeros(x.shape, np.uint8)
            elif method == "nearest":
                yield chunk, *self.scales.nearest(self.grid, x)
            else:
                yield chunk, *self.scales.search(self.grid, x, weigh)

    def choose(self, weights: np.ndarray, importance: np.ndarray | None = None, method: str | None = None) -> Scales:
        """See BlockFormat.choose."""
        weights = check_matrix(weights, self.name)
        stored = self.scales.empty(weights.shape[0], -(-weights.shape[1] // COLUMNS))
        for chunk, found, _ in self._coded(weights, importance, method):
            for whole, part in zip(stored, found, strict=True):
                whole[chunk] = part
        return self.scales.values(stored)

    def pack(self, scales: Scales, codes: np.ndarray) -> np.ndarray:
        """See BlockFormat.pack."""
        rows, groups = scales.scale.shape
        check_codes(codes, (rows, groups * self.scale_columns), len(self.levels), self.name)
        out = np.empty(self.blocks_shape(*codes.shape), np.uint8)
        for chunk in row_chunks(*codes.shape):
            out[chunk] = self._join(tuple(each[chunk] for each in scales.stored), codes[chunk])
        return out

    def unpack(self, blocks: np.ndarray) -> tuple[Scales, np.ndarray]:
        """See BlockFormat.unpack."""
        self._count(blocks)
        stored, codes = self._split(blocks)
        return self.scales.values(stored), codes

    def bounds(self, blocks: np.ndarray) -> np.ndarray:
        """See BlockFormat.bounds."""
        header, inner = self._headers(blocks, self._count(blocks))
        scales = self.scales.values(self.scales.from_bytes(header, inner[..., : self.scales.block_bytes]))
        with np.errstate(invalid="ignore", over="ignore"):
            most = np.abs(scales.scale) * np.abs(self.levels).max()
            return most if scales.minimum is None else most + np.abs(scales.minimum)

    def decode(self, blocks: np.ndarray, columns: int | None = None) -> np.ndarray:
        """See BlockFormat.decode."""
        count = self._count(blocks)
        columns = count * COLUMNS if columns is None else columns
        if -(-columns // COLUMNS) != count:
            raise FormatError(f"{self.name}: {count} blocks of {COLUMNS} do not make rows of {columns} columns")
        out = np.empty((blocks.shape[0], columns), np.float32)
        for chunk in row_chunks(*out.shape):
            stored, codes = self._split(blocks[chunk])
            scales = self.scales.values(stored)
            with np.errstate(invalid="ignore", over="ignore"):  # a damaged file may hold a scale that is NaN or infinite
                values = self.levels[codes].reshape(*scales.scale.shape, self.scale_columns) * scales.scale[..., None]
                if scales.minimum is not None:
                    values += scales.minimum[..., None]
            out[chunk] = values.reshape(codes.shape)[:, :columns]
        return out

    def tile(self, blocks: np.ndarray) -> np.ndarray:
        """See BlockFormat.tile."""
        count = self._count(blocks)
        start, size = ROWS * self.header_bytes, self.scales.block_bytes
        out = np.empty((-(-blocks.shape[0] // ROWS), start + count * self.tile_bytes), np.uint8)
        for chunk in row_chunks(blocks.shape[0], count * COLUMNS):
            header, inner = self._headers(group_rows(blocks[chunk]), count)
            planes = join_planes(split_parts(inner[..., size:], self.parts), self.tile_parts or self.parts)
            tiles = np.concatenate([self.scales.to_tile(inner[..., :size]), planes], axis=-1)
            run = slice(chunk.start // ROWS, chunk.start // ROWS + len(tiles))
            out[run, :start], out[run, start:] = header.reshape(len(tiles), start), tiles.reshape(len(tiles), -1)
        return out.reshape(-1)

    def untile(self, tiles: np.ndarray, rows: int, columns: int) -> np.ndarray:
        """See BlockFormat.untile."""
        count, groups = -(-columns // COLUMNS), -(-rows // ROWS)
        grouped = check_tiles(tiles, self.tiles_nbytes(rows, columns), self.name).reshape(groups, -1 if groups else 0)
        out = np.empty(self.blocks_shape(rows, columns), np.uint8)
        start, size = ROWS * self.header_bytes, self.scales.tile_bytes
        for chunk in row_chunks(rows, columns):
            run = grouped[chunk.start // ROWS : -(-chunk.stop // ROWS)]
            inner = run[:, start:].reshape(len(run), count, self.tile_bytes)
            codes = split_planes(inner[..., size:], self.tile_parts or self.parts)
            blocks = np.concatenate([self.scales.from_tile(inner[..., :size]), join_parts(codes, self.parts)], axis=-1)
            blocks = blocks.reshape(len(run) * ROWS, count * self.block_bytes)
            if start:
                blocks = np.concatenate([run[:, :start].reshape(len(blocks), -1), blocks], axis=1)
            out[chunk] = blocks[: chunk.stop - chunk.start].reshape(out[chunk].shape)
        return out

    def piece(self) -> Any:
        """See BlockFormat.piece."""
        from .jit.piece import IntegerPiece, inline
        from .jit.simd import lookup

        stored, bias = joined_reader(self.tile_parts or self.parts, self.scales.tile_bytes), self.grid.bias
        scale, minimum, row = self.scales.readers()
        unsigned = (self.levels[self._ranks] + bias).astype(int)  # by the bits that are stored
        if (unsigned == np.arange(unsigned.size)).all():
            codes = stored
        else:
            level = lookup(tuple(unsigned.tolist()))

            @inline
            def codes(shape, address, stride, j):
                low, high = stored(shape, address, stride, j)
                return level(low), level(high)

        wide = bool(unsigned.max() > 127)
        return IntegerPiece(self.tile_bytes, bias, self.scale_columns, wide, codes, scale, minimum, self.header_bytes, row)

    # ---- bytes -----------------------------------------------------------------------------------------------------------

    def _count(self, blocks: np.ndarray) -> int:
        """Blocks of a row. Raises FormatError unless `blocks` is uint8[rows, blocks, block_bytes], or [rows, bytes of a row]."""
        if not self.header_bytes:
            check_blocks(blocks, self.block_bytes, self.name)
            return blocks.shape[1]
        if blocks.dtype == np.uint8 and blocks.ndim == 2:
            count, rest = divmod(blocks.shape[1] - self.header_bytes, self.block_bytes)
            if count >= 0 and rest == 0:
                return count
        wanted = f"uint8[rows, {self.header_bytes} + {self.block_bytes} per block]"
        raise FormatError(f"{self.name}: blocks must be {wanted}, not {blocks.dtype}{list(blocks.shape)}")

    def _headers(self, blocks: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Blocks (of groups of rows) -> uint8[..., header_bytes], uint8[..., blocks, block_bytes]."""
        shape = blocks.shape[: -1 if self.header_bytes else -2]
        flat = blocks.reshape(*shape, self.header_bytes + count * self.block_bytes)
        return flat[..., : self.header_bytes], flat[..., self.header_bytes :].reshape(*shape, count, self.block_bytes)

    def _join(self, stored: tuple[np.ndarray, ...], codes: np.ndarray) -> np.ndarray:
        """What is stored of scales, and codes uint8[rows, padded columns] -> blocks."""
        header, numbers = self.scales.to_bytes(stored)
        if self.order is not None:
            codes = np.array(self.order, np.uint8)[codes]
        rows, blocks = numbers.shape[:2]
        inner = np.concatenate([numbers, join_parts(codes.reshape(rows, blocks, COLUMNS), self.parts)], axis=-1)
        return np.concatenate([header, inner.reshape(rows, blocks * self.block_bytes)], axis=1) if self.header_bytes else inner

    def _split(self, blocks: np.ndarray) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        """The inverse of `_join`."""
        count = self._count(blocks)
        header, inner = self._headers(blocks, count)
        codes = split_parts(inner[..., self.scales.block_bytes :], self.parts).reshape(len(blocks), count * COLUMNS)
        return self.scales.from_bytes(header, inner[..., : self.scales.block_bytes]), codes if self.order is None else self._ranks[codes]
