"""Matrices of a file that are one tensor: the experts of a layer, which Hugging Face files hold one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .errors import TensorError
from .tensor import RowSlice, RowsTensor, Tensor


class StackedTensor(Tensor):
    """Matrices of the same shape and type as one tensor [matrices, rows, columns], which reads them where they lie."""

    def __init__(self, name: str, parts: Sequence[RowsTensor]):
        """Raises TensorError for parts that differ in shape or type, by the one that does."""
        first = parts[0]
        for number, part in enumerate(parts):
            if part.shape != first.shape or part.format != first.format or len(part.shape) != 2:
                what = f"matrix {number} is {part.format}{list(part.shape)}, matrix 0 {first.format}{list(first.shape)}"
                raise TensorError(part.path, f"cannot be stacked: {what}", where=name)
        self.name, self.shape, self.format = name, (len(parts), *first.shape), first.format
        self.nbytes = sum(part.nbytes for part in parts)
        self._parts = list(parts)

    def float32(self, rows: RowSlice = None) -> np.ndarray:
        found = self._joined(lambda part, at: part.float32(at), rows)
        assert found is not None
        return found.reshape(self.shape) if rows is None else found

    def plain(self, rows: RowSlice = None) -> np.ndarray | None:
        return self._joined(lambda part, at: part.plain(at), rows)

    def blocks(self, rows: RowSlice = None) -> np.ndarray | None:
        return self._joined(lambda part, at: part.blocks(at), rows)

    def release(self, rows: RowSlice = None) -> None:
        for part, at in self._slices(rows):
            part.release(at)

    def _joined(self, read: Callable[[RowsTensor, slice], np.ndarray | None], rows: RowSlice) -> np.ndarray | None:
        found = [read(part, at) for part, at in self._slices(rows)]
        kept = [each for each in found if each is not None]
        if len(kept) < len(found):
            return None
        joined = kept[0] if len(kept) == 1 else np.concatenate(kept)
        step = 1 if rows is None else rows.step or 1
        return joined if step == 1 else joined[::step] if step > 0 else joined[::-1][::-step]

    def _slices(self, rows: RowSlice) -> Iterator[tuple[RowsTensor, slice]]:
        """Each part with its rows between the first and the last of a slice; the first part with none if the slice is empty."""
        start, stop, step = (slice(None) if rows is None else rows).indices(self.rows)
        low, high = (start, stop) if step > 0 else (stop + 1, start + 1)
        if low >= high:
            yield self._parts[0], slice(0, 0)
        height = self.rows_each
        while low < high:
            number, first = divmod(low, height)
            last = min(height, first + high - low)
            yield self._parts[number], slice(first, last)
            low += last - first
