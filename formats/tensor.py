"""A tensor of a checkpoint, whatever file holds it: rows that can be read as float32, as blocks, or as kernel tiles."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from ..quant.block import BlockFormat, format_names, get_format

RowSlice = slice | None


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
    def rows(self) -> int:
        """Rows of `columns` weights; a vector is one row, and further leading dimensions count as more rows."""
        return 1 if self.vector else int(np.prod(self.shape[:-1], dtype=np.int64))

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

    @abstractmethod
    def float32(self, rows: RowSlice = None) -> np.ndarray:
        """The weights as float32: of the tensor's shape, or float32[len(rows), columns] for a slice of its rows."""

    def blocks(self, rows: RowSlice = None) -> np.ndarray | None:
        """uint8[rows, blocks, block_bytes] if `format` is one of ours and holds blocks, else None."""
        return None

    def tiles(self) -> np.ndarray | None:
        """The flat uint8 view of the mapped file where it holds tiles (.hbf), else None."""
        return None

    def release(self, rows: RowSlice = None) -> None:
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

    raw      uint8[rows, bytes of a row], a view of the mapped file
    decode   uint8[n, bytes of a row], columns -> float32[n, columns]
    order    int array: canonical row i is row order[i] of the file; None if they are the same
    offset   added to every weight (norms that a family stores as w - 1)
    scale    called with a slice of the file's rows, gives float32 that the weights are multiplied by (fp8 checkpoints)
    release  called with the view of rows that are done with
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        format: str,
        raw: np.ndarray,
        *,
        decode: Callable[[np.ndarray, int], np.ndarray],
        order: np.ndarray | None = None,
        offset: float = 0.0,
        scale: Callable[[np.ndarray | slice], np.ndarray] | None = None,
        release: Callable[[np.ndarray], None] | None = None,
    ) -> None:
        self.name, self.shape, self.format = name, shape, format
        self.nbytes = raw.size
        self._raw, self._decode, self._order = raw, decode, order
        self._offset, self._scale, self._release = np.float32(offset), scale, release

    @property
    def source_rows(self) -> np.ndarray:
        """The bytes as the file has them, uint8[rows, bytes of a row], before any reordering of rows."""
        return self._raw

    def _index(self, rows: RowSlice) -> slice | np.ndarray:
        if self._order is None:
            return slice(None) if rows is None else rows
        return self._order if rows is None else self._order[rows]

    def float32(self, rows: RowSlice = None) -> np.ndarray:
        index = self._index(rows)
        values = self._decode(self._raw[index], self.columns)
        if self._scale is not None:
            values = values * self._scale(index)
        if self._offset:
            values = values + self._offset
        return values.reshape(self.shape) if rows is None else values

    def blocks(self, rows: RowSlice = None) -> np.ndarray | None:
        if self.vector or self._offset or self._scale is not None:
            return None
        form = block_format(self.format)
        if form is None or form.header_bytes:
            return None
        raw = self._raw[self._index(rows)]
        return raw.reshape(raw.shape[0], -1, form.block_bytes)

    def release(self, rows: RowSlice = None) -> None:
        if self._release is not None and self._order is None:
            self._release(self._raw if rows is None else self._raw[rows])
        elif self._release is not None and rows is None:
            self._release(self._raw)


def block_format(name: str) -> BlockFormat | None:
    """The block format of that name, or None if it is a type that only a source has."""
    return get_format(name) if name in format_names() else None
