"""Matrices of a streamed plan whose weights can be exchanged for others, to see what that does to what comes after."""

from __future__ import annotations

import numpy as np

from ...formats.checkpoint import Checkpoint
from ...formats.decoder import EMBEDDING, HEAD
from ...formats.tensor import RowSlice, Tensor
from ..run.weights import Matrix, make_matrix
from .streaming import StreamedMatrix, StreamedWeights

_FLOATS = ("f32", "f16", "bf16")


class FloatView(Tensor):
    """A tensor seen as nothing but float32, whatever blocks or tiles it has: what is made of it then is made of its values."""

    format = "f32"

    def __init__(self, tensor: Tensor):
        self._tensor = tensor
        self.name, self.shape, self.nbytes = tensor.name, tensor.shape, 4 * tensor.size

    def float32(self, rows: RowSlice = None) -> np.ndarray:
        return self._tensor.float32(rows)

    def release(self, rows: RowSlice = None) -> None:
        self._tensor.release(rows)


class ReplaceableMatrix(StreamedMatrix):
    """A StreamedMatrix that is run in a float type whatever it is stored in, so that any weights can stand in its place.

    The type is float32; for embedding and head, often the largest matrices, the one that they are stored in, or bf16.
    """

    def __init__(self, tensor: Tensor):
        super().__init__(tensor, exact=True)
        large = tensor.name in (EMBEDDING, HEAD)
        self.format = "f32" if not large else tensor.format if tensor.format in _FLOATS else "bf16"
        self._original: Matrix | None = None

    def load(self) -> None:
        if self._loaded is None:
            if self.format != self._tensor.format:
                self._loaded = make_matrix(FloatView(self._tensor), self.format)
            else:
                super().load()

    def replace(self, tensor: Tensor) -> None:
        """Runs other weights of the same shape from now on, until `restore` or `release`. Relink the section afterwards."""
        if tensor.shape != self.shape:
            ours, theirs = (" x ".join(map(str, shape)) for shape in (self.shape, tensor.shape))
            raise ValueError(f"{self.name} is {ours}; it cannot be replaced by {theirs}")
        if self._original is None:
            self._original = self._loaded
        self._loaded = None  # its memory is free again where nothing else holds it
        self._loaded = make_matrix(FloatView(tensor), self.format)

    def restore(self) -> None:
        """Puts the original weights back, if they were loaded before."""
        if self._original is not None:
            self._loaded, self._original = self._original, None

    def release(self) -> None:
        self._original = None
        super().release()


class ReplaceableWeights(StreamedWeights):
    """The weights of a checkpoint as ReplaceableMatrix.

    ends: embedding and head as well; otherwise they stay as they are, which is exact whatever they are stored in.
    """

    def __init__(self, checkpoint: Checkpoint, threads: int, ends: bool = True):
        super().__init__(checkpoint, threads, exact=True)
        self._ends = ends

    def matrix(self, name: str) -> StreamedMatrix:  # type: ignore[override]
        """The matrix of that name, not loaded; it must exist."""
        if name not in self._streamed and (self._ends or name not in (EMBEDDING, HEAD)):
            self._streamed[name] = ReplaceableMatrix(self._tensors[name])
        return super().matrix(name)
