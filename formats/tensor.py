"""A tensor of a checkpoint, whatever file holds it: rows that can be read as float32, as blocks, or as kernel tiles."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np

from ..quant.block import ROWS, BlockFormat, get_format
from ..quant.errors import FormatError
from .dequantize import to_float32
from .errors import UnknownTypeError
from .mapped import MappedFile

RowSlice = slice | None
RowIndex = slice | np.ndarray


SOURCE_TYPES = frozenset({"f64", "f8_e4m3", "f8_e5m2", "f8_e8m0", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "bool"})
"""Element types that are never a block format, so that looking one up does not read the entry points of other packages."""


_PLAIN: dict[str, np.dtype[Any]] = {"f32": np.dtype("<f4"), "f16": np.dtype("<f2"), "bf16": np.dtype("<u2")}


class Tensor(ABC):
    """One tensor in canonical form (see docs/architecture.md).

    name    GGUF's name
    shape   numpy order; the last one is the columns, along which blocks run
    format  a block format's name, or the source's type: "bf16", "f8_e4m3", "q4_k"
    nbytes  bytes in the file
    """

    name: str
    shape: tuple[int, ...]
    format: str
    nbytes: int

    @property
    def vector(self) -> bool:
        """True for a tensor of at most one dimension: plain float32 in files and in memory, never tiled."""
        return len(self.shape) <= 1

    @property
    def matrices(self) -> int:
        """Matrices of `rows_each` x `columns` (experts): the product of all dimensions before the last two, 1 if there are none."""
        return math.prod(self.shape[:-2])

    @property
    def rows_each(self) -> int:
        """Rows of one matrix; a vector is one row."""
        return 1 if self.vector else self.shape[-2]

    @property
    def rows(self) -> int:
        """Rows of all matrices, one matrix after another: what slices of rows count."""
        return self.matrices * self.rows_each

    @property
    def columns(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def size(self) -> int:
        """Number of weights."""
        return self.rows * self.columns

    @property
    def recorded(self) -> dict[str, Any]:
        """What was measured when the tensor was quantized (cosine, nmse, method, checksum…); {} if the file has no such record."""
        return {}

    def runs(self, weights: int, unit: int = ROWS) -> list[slice]:
        """Slices that cover the rows in order, each of about `weights` weights and of one matrix: whole `unit`s of rows but at its end."""
        height = self.rows_each
        step = max(unit, weights // max(self.columns, 1) // unit * unit)
        starts = range(0, self.rows, height) if height else ()
        return [slice(first + at, first + min(at + step, height)) for first in starts for at in range(0, height, step)]

    @abstractmethod
    def float32(self, rows: RowSlice = None) -> np.ndarray:
        """The weights as float32: of the tensor's shape, or float32[len(rows), columns] for a slice of its rows."""

    def plain(self, rows: RowSlice = None) -> np.ndarray | None:
        """[rows, columns] of float32, float16 or uint16 (the bits of bf16) as they lie in the file; None if that is not possible."""
        return None

    def blocks(self, rows: RowSlice = None) -> np.ndarray | None:
        """uint8[rows, blocks, block_bytes] if `format` is one of ours and holds blocks, else None."""
        return None

    def tiles(self) -> np.ndarray | None:
        """The flat uint8 view of the mapped file where it holds tiles (.hbf), else None."""
        return None

    def raw_rows(self, rows: slice) -> np.ndarray | None:
        """uint8[rows, bytes of a row] as the file has them, in canonical order; None where rows do not lie in one piece."""
        return None

    def renamed(self, name: str) -> Self:
        """The same tensor under another name."""
        if name == self.name:
            return self
        other = copy.copy(self)
        other.name = name
        return other

    def release(self, rows: RowSlice = None) -> None:  # noqa: B027 - most tensors have nothing to release
        """Say that these rows will not be read again soon, so that their pages need not stay in memory."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {'x'.join(map(str, self.shape))} {self.format}>"


class ArrayTensor(Tensor):
    """A tensor that a reader computed: float32 in memory, such as the factors of a scaled rotary embedding."""

    format = "f32"

    def __init__(self, name: str, values: np.ndarray) -> None:
        self.name = name
        self._values = np.ascontiguousarray(values, np.float32)
        self.shape = self._values.shape
        self.nbytes = self._values.nbytes

    def float32(self, rows: RowSlice = None) -> np.ndarray:
        return self._values if rows is None else self._values.reshape(self.rows, self.columns)[rows]


class RowsTensor(Tensor):
    """A tensor whose file holds it row after row, each row in whole bytes: safetensors and GGUF.

    file     the mapped file; its path is named in errors, its pages are released
    raw      uint8[rows, bytes of a row], a view of the mapping
    order    int array: row i is row order[i] of the file; None if they are the same
    scale    called with rows of the file (slice or int array), gives float32 that the weights are multiplied by (fp8 checkpoints)
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        format: str,
        file: MappedFile,
        raw: np.ndarray,
        *,
        order: np.ndarray | None = None,
        scale: Callable[[RowIndex], np.ndarray] | None = None,
    ) -> None:
        self.name, self.shape, self.format = name, shape, format
        self.nbytes = raw.size
        self._file, self._raw, self._order, self._scale = file, raw, order, scale

    @property
    def path(self) -> Path:
        """Of the file."""
        return self._file.path

    def taken(self, name: str, index: slice | np.ndarray, shape: tuple[int, ...]) -> RowsTensor:
        """Rows of this tensor as another one: those of a slice, or row i is row index[i] of this one. Of vectors, elements."""
        raw, scale = self._raw, self._scale
        if self.vector:
            width = raw.size // max(self.size, 1)
            if width * self.size != raw.size:
                raise UnknownTypeError(self.path, f"a vector of type {self.format}, of which no part can be taken", where=name)
            raw = raw.reshape(self.size, width)
        rows = np.arange(len(raw))[index]
        if self._order is not None:
            rows = self._order[index]
            order = None if np.array_equal(rows, np.arange(len(raw))) else rows  # put in order and back
            return RowsTensor(name, shape, self.format, self._file, raw, order=order, scale=scale)
        if isinstance(index, np.ndarray):
            return RowsTensor(name, shape, self.format, self._file, raw, order=rows, scale=scale)
        shifted = None if scale is None else lambda some: scale(rows[some])
        return RowsTensor(name, shape, self.format, self._file, raw[index], scale=shifted)

    def _index(self, rows: RowSlice) -> RowIndex:
        if self._order is None:
            return slice(None) if rows is None else rows
        return self._order if rows is None else self._order[rows]

    def float32(self, rows: RowSlice = None) -> np.ndarray:
        if rows is not None and self.vector:
            return self.float32().reshape(1, -1)[rows]
        index = self._index(rows)
        values = to_float32(np.ascontiguousarray(self._raw[index]), self.format, self._file.path, self.name)
        if self._scale is not None:
            values *= self._scale(index)
        return values.reshape(self.shape) if rows is None else values

    def plain(self, rows: RowSlice = None) -> np.ndarray | None:
        dtype = _PLAIN.get(self.format)
        if dtype is None or self.vector or self._scale is not None:
            return None
        raw = self._raw[self._index(rows)]
        # safetensors promises no alignment; an odd address is worth a copy.
        if raw.ctypes.data % dtype.itemsize or not raw.flags.c_contiguous:
            raw = raw.copy()
        return raw.view(dtype)

    def blocks(self, rows: RowSlice = None) -> np.ndarray | None:
        if self.vector or self._scale is not None:
            return None
        form = block_format(self.format)
        if form is None or form.header_bytes:
            return None
        raw = self._raw[self._index(rows)]
        # Only f32, f16 and bf16 files can have rows that end inside a block.
        missing = -raw.shape[1] % form.block_bytes
        if missing:
            raw = np.pad(raw, ((0, 0), (0, missing)))
        return raw.reshape(raw.shape[0], -1, form.block_bytes)

    def raw_rows(self, rows: slice) -> np.ndarray:
        return self._raw[self._index(rows)]

    def same_as(self, other: RowsTensor) -> bool:
        """True if both hold the same weights in the same bytes."""
        if self.shape != other.shape or self.format != other.format or self._scale is not None or other._scale is not None:
            return False
        step = max(1, (1 << 24) // max(1, self._raw.shape[1]))
        return all(
            np.array_equal(self._raw[start : start + step], other._raw[start : start + step]) for start in range(0, len(self._raw), step)
        )

    def release(self, rows: RowSlice = None) -> None:
        if self._order is not None and rows is not None:
            return  # the rows of a slice may lie anywhere in their heads
        row_bytes = self._raw.shape[1]
        start, stop, _ = (slice(None) if rows is None else rows).indices(len(self._raw))
        offset = self._raw.ctypes.data - self._file.address
        self._file.release(offset + start * row_bytes, (stop - start) * row_bytes)


def block_format(name: str) -> BlockFormat | None:
    """The block format of that name, or None if it is a type that only a source has."""
    if name in SOURCE_TYPES:
        return None
    try:
        return get_format(name)
    except FormatError:
        return None
