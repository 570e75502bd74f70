"""Tensors made of other tensors without a copy: rows taken, matrices joined, columns and rows exchanged, something added.

A view reads what it is asked for and no more, so a model need not be in memory at once. Blocks pass through bit for bit wherever
whole rows are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .dequantize import to_float32
from .tensor import RowSlice, RowsTensor, Tensor

_SLAB = 1 << 22
"""Weights that a transposed view reads at a time: temporaries stay in the tens of megabytes."""


def _run(rows: RowSlice, count: int) -> tuple[int, int, slice]:
    """A slice of `count` rows as one run from `first` to `last`, and which of these rows it takes."""
    start, stop, step = (slice(None) if rows is None else rows).indices(count)
    numbers = range(start, stop, step)
    if not numbers:
        return 0, 0, slice(None)
    if step > 0:
        return start, numbers[-1] + 1, slice(None, None, step)
    return numbers[-1], start + 1, slice(None, None, step)


class RowsView(Tensor):
    """Some rows of a tensor, in an order of their own, or elements of a vector.

    index: a slice, or int array: row i of the view is row index[i] of `base`
    """

    def __init__(self, name: str, base: Tensor, index: slice | np.ndarray, shape: tuple[int, ...]) -> None:
        self.name, self.shape, self.format = name, shape, base.format
        self._base, self._index = base, index
        self.nbytes = base.nbytes * self.size // max(base.size, 1)

    @property
    def recorded(self) -> dict[str, Any]:
        return self._base.recorded if self.size == self._base.size else {}  # the same rows in another order

    def _read(self, rows: RowSlice, read: Callable[[slice], np.ndarray | None]) -> np.ndarray | None:
        """What `read` gives for the rows, which are read as one run from the first to the last of them."""
        if isinstance(self._index, slice):
            start = self._index.start
            first, last, which = _run(rows, self.rows)
            found = read(slice(start + first, start + last))
            return found if found is None or which.step in (None, 1) else found[which]
        index = self._index if rows is None else self._index[rows]
        if index.size == 0:
            return read(slice(0, 0))
        low = int(index.min())
        found = read(slice(low, int(index.max()) + 1))
        return None if found is None else found[index - low]

    def float32(self, rows: RowSlice = None) -> np.ndarray:
        if self.vector:
            values = self._base.float32()[self._index]
            return values if rows is None else values.reshape(1, -1)[rows]
        found = self._read(rows, self._base.float32)
        assert found is not None
        return found.reshape(self.shape) if rows is None else found

    def plain(self, rows: RowSlice = None) -> np.ndarray | None:
        return None if self.vector else self._read(rows, self._base.plain)

    def blocks(self, rows: RowSlice = None) -> np.ndarray | None:
        return None if self.vector else self._read(rows, self._base.blocks)

    def raw_rows(self, rows: slice) -> np.ndarray | None:
        return None if self.vector else self._read(rows, self._base.raw_rows)

    def release(self, rows: RowSlice = None) -> None:
        if isinstance(self._index, slice) and not self.vector:
            first, last, _ = (slice(None) if rows is None else rows).indices(self.rows)
            self._base.release(slice(self._index.start + first, self._index.start + last))


class JoinedView(Tensor):
    """Tensors one after another along their rows (of vectors: their elements), or as the matrices of one tensor."""

    def __init__(self, name: str, parts: Sequence[Tensor], shape: tuple[int, ...]) -> None:
        formats = {part.format for part in parts}
        self.name, self.shape = name, shape
        self.format = formats.pop() if len(formats) == 1 else "f32"  # parts of several types have only their values in common
        self._parts = list(parts)
        self._starts = np.cumsum([0, *(part.rows for part in parts)])
        self.nbytes = sum(part.nbytes for part in parts)

    @property
    def recorded(self) -> dict[str, Any]:
        """Of its parts the worst; {} if nothing is known of one of them."""
        records = [part.recorded for part in self._parts]
        if any(record.get("cosine") is None for record in records):
            return {}
        worst = min(records, key=lambda record: record["cosine"])
        return {**worst, "nmse": max(record.get("nmse") or 0.0 for record in records)}

    def _read(self, rows: RowSlice, read: Callable[[Tensor, slice], np.ndarray | None]) -> np.ndarray | None:
        first, last, which = _run(rows, self.rows)
        found = []
        for part, start in zip(self._parts, self._starts, strict=False):
            a, b = max(first - start, 0), min(last - start, part.rows)
            if a < b:
                piece = read(part, slice(int(a), int(b)))
                if piece is None:
                    return None
                found.append(piece)
        if not found:
            return read(self._parts[0], slice(0, 0))
        joined = found[0] if len(found) == 1 else np.concatenate(found)
        return joined if which.step in (None, 1) else joined[which]

    def _same_format(self) -> bool:
        return not self.vector and all(part.format == self.format for part in self._parts)

    def float32(self, rows: RowSlice = None) -> np.ndarray:
        if self.vector:
            values = np.concatenate([np.atleast_1d(part.float32()) for part in self._parts])
            return values if rows is None else values.reshape(1, -1)[rows]
        found = self._read(rows, lambda part, run: part.float32(run))
        assert found is not None
        return found.reshape(self.shape) if rows is None else found

    def plain(self, rows: RowSlice = None) -> np.ndarray | None:
        return self._read(rows, lambda part, run: part.plain(run)) if self._same_format() else None

    def blocks(self, rows: RowSlice = None) -> np.ndarray | None:
        return self._read(rows, lambda part, run: part.blocks(run)) if self._same_format() else None

    def raw_rows(self, rows: slice) -> np.ndarray | None:
        return self._read(rows, lambda part, run: part.raw_rows(run)) if self._same_format() else None

    def release(self, rows: RowSlice = None) -> None:
        first, last, _ = (slice(None) if rows is None else rows).indices(self.rows)
        for part, start in zip(self._parts, self._starts, strict=False):
            a, b = max(first - start, 0), min(last - start, part.rows)
            if a < b:
                part.release(None if (a, b) == (0, part.rows) else slice(int(a), int(b)))


class TransposedView(Tensor):
    """A matrix with rows and columns exchanged. Blocks run along the columns, so only values pass."""

    def __init__(self, name: str, base: Tensor) -> None:
        self.name, self.shape, self.nbytes = name, base.shape[::-1], base.nbytes
        self.format = base.format if base.format in ("f16", "bf16", "f32") else "f32"
        self._base = base

    def _read(self, rows: RowSlice, read: Callable[[slice], np.ndarray | None]) -> np.ndarray | None:
        first, last, _ = (slice(None) if rows is None else rows).indices(self.rows)
        step = max(1, _SLAB // max(self._base.columns, 1))
        slabs = []
        for start in range(0, self._base.rows, step):
            slab = read(slice(start, min(start + step, self._base.rows)))
            if slab is None:
                return None
            slabs.append(slab[:, first:last].T)
        return np.ascontiguousarray(np.concatenate(slabs, axis=1))

    def float32(self, rows: RowSlice = None) -> np.ndarray:
        values = self._read(rows, self._base.float32)
        assert values is not None
        return values

    def plain(self, rows: RowSlice = None) -> np.ndarray | None:
        return self._read(rows, self._base.plain)


class OffsetView(Tensor):
    """A tensor with a number added to every weight, in float32."""

    def __init__(self, name: str, base: Tensor, amount: float) -> None:
        self.name, self.shape, self.nbytes = name, base.shape, base.nbytes
        self.format = base.format if base.vector else "f32"
        self._base, self._amount = base, np.float32(amount)

    def float32(self, rows: RowSlice = None) -> np.ndarray:
        return self._base.float32(rows) + self._amount

    def release(self, rows: RowSlice = None) -> None:
        self._base.release(rows)


class MicroscalingView(Tensor):
    """MXFP4 whose codes and scales lie in two tensors (OCP Microscaling formats 1.0; gpt-oss checkpoints), as GGUF's mxfp4.

    codes   uint8[..., rows, groups, 16]: byte j of a group holds weight 2j in its low half and weight 2j + 1 in the high one
    scales  uint8[..., rows, groups]: exponents, biased by 127
    A block is the scale, then 16 bytes, of which byte j holds weight j in the low half and weight j + 16 in the high one.
    """

    format = "mxfp4"

    def __init__(self, name: str, codes: RowsTensor, scales: RowsTensor) -> None:
        *leading, groups, _ = codes.shape
        self.name, self.shape = name, (*leading, 32 * groups)
        self._codes, self._scales, self._groups = codes, scales, groups
        self.nbytes = codes.nbytes + scales.nbytes

    def blocks(self, rows: RowSlice = None) -> np.ndarray | None:
        first, last, _ = (slice(None) if rows is None else rows).indices(self.rows)
        groups = self._groups
        codes = self._codes.raw_rows(slice(first * groups, last * groups)).reshape(-1, groups, 16)
        scales = self._scales.raw_rows(slice(first, last)).reshape(-1, groups, 1)
        weights = np.stack((codes & 15, codes >> 4), axis=-1).reshape(-1, groups, 32)
        return np.concatenate((scales, weights[..., :16] | weights[..., 16:] << 4), axis=-1)

    def raw_rows(self, rows: slice) -> np.ndarray | None:
        blocks = self.blocks(rows)
        assert blocks is not None
        return blocks.reshape(len(blocks), -1)

    def float32(self, rows: RowSlice = None) -> np.ndarray:
        raw = self.raw_rows(slice(None) if rows is None else rows)
        assert raw is not None
        values = to_float32(raw, self.format, self._codes.path, self.name)
        return values.reshape(self.shape) if rows is None else values

    def release(self, rows: RowSlice = None) -> None:
        first, last, _ = (slice(None) if rows is None else rows).indices(self.rows)
        self._codes.release(slice(first * self._groups, last * self._groups))
        self._scales.release(slice(first, last))
