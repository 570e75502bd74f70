"""Error measures of tensors: cosine, normalized error, worst block.

They are accumulated piece by piece, so that a tensor need not be in memory at once. All sums are float64.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np

from .errors import FormatError

BLOCK = 32
"""Columns over which the worst block is looked for, whatever the format."""


@dataclass(frozen=True)
class TensorErrors:
    """How far a tensor is from its reference.

    cosine             dot product over the norms; 1 for two zero tensors, 0 if one of them is zero
    nmse               sum of squared errors / sum of squared reference values; inf if only the reference is zero
    max_error          largest absolute error of one value
    worst_block        (row, block) of 32 columns with the largest squared error; (0, 0) for an empty tensor
    worst_block_error  root mean square error of that block / root mean square of the reference's values
    """

    cosine: float
    nmse: float
    max_error: float
    worst_block: tuple[int, int]
    worst_block_error: float

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON. A measure that is not finite becomes a string, "nan" or "inf"."""
        return {**plain_numbers(asdict(self)), "worst_block": list(self.worst_block)}


class TensorMeter:
    """Accumulates the errors of a tensor that comes in runs of rows. A NaN makes the measures NaN, and its block the worst."""

    def __init__(self) -> None:
        self.count = 0
        self.dot = self.reference_energy = self.energy = self.error_energy = 0.0
        self.max_error = 0.0
        self.worst_block = (0, 0)
        self._worst = -1.0
        self._worst_count = 1
        self._rows = 0

    def add(self, reference: np.ndarray, values: np.ndarray) -> None:
        """Both float[rows, columns] (or a vector, as one row): the next rows. Raises FormatError if the shapes differ."""
        if reference.shape != values.shape:
            raise FormatError(f"cannot compare shapes {list(reference.shape)} and {list(values.shape)}")
        reference, values = np.atleast_2d(reference), np.atleast_2d(values)
        step = max(1, (1 << 13) // max(reference.shape[1], 1))  # temporary arrays that need no fresh pages
        for first in range(0, reference.shape[0], step):
            self._add(reference[first : first + step], values[first : first + step])

    def _add(self, reference: np.ndarray, values: np.ndarray) -> None:
        r, v = reference.astype(np.float64), values.astype(np.float64)
        rows, columns = r.shape
        first, self._rows = self._rows, self._rows + rows
        if r.size == 0:
            return
        with np.errstate(invalid="ignore", over="ignore"):
            error = v - r
            self.dot += _dot(r, v)
            self.reference_energy += _dot(r, r)
            self.energy += _dot(v, v)
            blocks = np.add.reduceat(error * error, np.arange(0, columns, BLOCK), axis=1)
        self.error_energy += float(blocks.sum())
        self.count += r.size
        self.max_error = max(self.max_error, float(np.abs(error).max()), key=lambda e: (math.isnan(e), e))
        row, block = divmod(int(np.where(np.isnan(blocks), np.inf, blocks).argmax()), blocks.shape[1])
        self.note_worst(first + row, block, float(blocks[row, block]), min(BLOCK, columns - block * BLOCK))

    def add_sums(self, rows: int, columns: int, sums: np.ndarray) -> None:
        """The next rows by sums that a kernel made: float64[groups, 8] over groups of rows, see encode_kernel.FIELDS."""
        groups = sums.shape[0]
        first, self._rows, self.count = self._rows, self._rows + rows, self.count + rows * columns
        if groups == 0:
            return
        # From the error, not from the values: a cosine of 0.99998 needs more digits than float32 sums of products have.
        energy, cross, error_energy = (float(v) for v in sums[:, :3].sum(axis=0))
        self.reference_energy, self.error_energy = self.reference_energy + energy, self.error_energy + error_energy
        self.dot, self.energy = self.dot + energy + cross, self.energy + energy + 2 * cross + error_energy
        self.max_error = max(self.max_error, float(sums[:, 4].max()))
        group = int(sums[:, 5].argmax())
        row, block = first + rows // groups * group + int(sums[group, 6]), int(sums[group, 7])
        self.note_worst(row, block, float(sums[group, 5]), min(BLOCK, columns - block * BLOCK))

    def note_worst(self, row: int, block: int, error_energy: float, columns: int) -> None:
        """Takes a block as the worst so far if its sum of squared errors is larger than that of the one before."""
        if math.isnan(self._worst) or not (error_energy > self._worst or math.isnan(error_energy)):
            return
        self.worst_block, self._worst, self._worst_count = (row, block), error_energy, columns

    def result(self) -> TensorErrors:
        """The measures of everything added so far."""
        if math.isnan(self.error_energy):
            return TensorErrors(math.nan, math.nan, math.nan, self.worst_block, math.nan)
        norms = math.sqrt(self.reference_energy) * math.sqrt(self.energy)
        same = 1.0 if self.reference_energy == self.energy else 0.0
        cosine = min(1.0, max(-1.0, self.dot / norms)) if norms > 0 else same
        mean_square = self.reference_energy / max(self.count, 1)
        worst = math.sqrt(max(self._worst, 0.0) / self._worst_count)
        return TensorErrors(
            cosine,
            _ratio(self.error_energy, self.reference_energy),
            self.max_error,
            self.worst_block,
            _ratio(worst, math.sqrt(mean_square)),
        )


def tensor_errors(reference: np.ndarray, values: np.ndarray) -> TensorErrors:
    """The measures of one whole tensor, float[rows, columns] or a vector."""
    meter = TensorMeter()
    meter.add(reference, values)
    return meter.result()


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """float[..., n] twice -> float64[...]: cosine similarity along the last axis; 1 for two zero vectors, 0 if one is zero."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    aa, bb, ab = (np.einsum("...i,...i->...", x, y) for x, y in ((a, a), (b, b), (a, b)))
    norms = np.sqrt(aa) * np.sqrt(bb)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(norms > 0, np.clip(ab / norms, -1, 1), np.where(aa == bb, 1.0, np.where(np.isnan(norms), np.nan, 0.0)))


def _dot(a: np.ndarray, b: np.ndarray) -> float:
    """Sum of products. Not through BLAS: its threads would spin beside those of the caller."""
    return float(np.einsum("i,i->", a.reshape(-1), b.reshape(-1)))


def plain_numbers(values: dict[str, object]) -> dict[str, object]:
    """For JSON: a number that is not finite becomes a string, "nan" or "inf"."""
    return {key: str(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}


def _ratio(error: float, reference: float) -> float:
    if reference > 0:
        return error / reference
    return 0.0 if error == 0 else math.inf
