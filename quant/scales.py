"""How a block of 32 weights becomes integers: the choice of its scale.

A *grid* is a family of levels that one scale (and one minimum) stretches: `SignedMax` and `AbsoluteMax` have levels s·c, `Affine`
has levels s·c + m. Each grid can choose its numbers in two ways:

* `nearest`: from the largest weight of the block, then every weight to its nearest level. This is the reference rounding of
  ggml (ggml-quants.c, quantize_row_*_ref), in the same float32 operations, so that the bytes agree with GGUF files.
* `search`: the numbers with the least sum of importance · error². Candidates start from the largest weight, stretched; each gets
  its codes, and from them the best scale in closed form (weighted least squares). The winner is rounded to the f16 that is
  stored *before* the final codes are chosen, and is kept only if it beats `nearest`. The idea is that of ggml's make_qx_quants.

A compiled encoder must give the same bytes, so the order of every sum is fixed: columns 0 to 31, one after another, in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .errors import FormatError, NonFiniteError

F16_MAX = 65504.0
F16_OVERFLOW = 65520.0
"""The least magnitude that rounds to infinity in f16."""

STRETCH_SYMMETRIC = tuple(0.75 + 0.05 * i for i in range(9))
"""Largest weight / (end of the grid · scale) of the candidates of a symmetric search: 0.75 .. 1.15."""
STRETCH_AFFINE = tuple(0.70 + 0.05 * i for i in range(8))
"""Range of the grid / range of the weights of the candidates of an affine search: 0.70 .. 1.05."""
SINGULAR = 1e-9
"""Determinant of the 2x2 least squares, relative to its diagonal, below which scale and minimum cannot be told apart."""


class Coded(NamedTuple):
    """Blocks as numbers: float16[n, numbers] (scale, then the minimum if the grid has one) and uint8[n, 32] codes."""

    numbers: np.ndarray
    codes: np.ndarray


def to_f16(values: np.ndarray) -> np.ndarray:
    """float32 -> float16, rounded to nearest even; what would overflow becomes the largest finite number of its sign."""
    values = np.where(np.abs(values) >= F16_OVERFLOW, np.copysign(np.float32(F16_MAX), values), values)
    return values.astype(np.float16)


def _finite_scale(scale: np.ndarray) -> np.ndarray:
    """float32 scales that f16 can hold; others clamped, so that the codes are chosen for the scale that will be stored."""
    return np.where(np.abs(scale) >= F16_OVERFLOW, np.copysign(np.float32(F16_MAX), scale), scale)


def _inverse(scale: np.ndarray) -> np.ndarray:
    """1 / scale, and 0 where that is not finite: such a scale is stored as 0 whatever the codes."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = 1 / scale
    return np.where(np.isfinite(inverse), inverse, scale.dtype.type(0))


def _column_sum(terms: np.ndarray) -> np.ndarray:
    """float64[32, n] -> float64[n], added from column 0 to 31. np.sum may add in another order."""
    total = terms[0].copy()
    for column in terms[1:]:
        total += column
    return total


@dataclass(frozen=True)
class SignedMax:
    """Levels scale · (code - 2^(bits-1)), the scale signed so that the largest weight falls on the grid's longer, negative end."""

    bits: int

    @property
    def bias(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def levels(self) -> tuple[int, int]:
        return -self.bias, self.bias - 1

    def nearest(self, x: np.ndarray) -> Coded:
        """float32[n, 32] -> Coded. ggml's quantize_row_q4_0_ref and q5_0_ref."""
        peak = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
        scale = _finite_scale(peak / np.float32(-self.bias))
        with np.errstate(over="ignore"):
            scaled = x * _inverse(scale) + np.float32(self.bias + 0.5)
        return Coded(to_f16(scale), np.trunc(scaled).clip(0, 2 * self.bias - 1).astype(np.uint8))

    def search(self, x: np.ndarray, importance: np.ndarray) -> Coded:
        """float32[n, 32], float32[n, 32] or [1, 32] -> Coded with the least weighted squared error found, never more than nearest's."""
        return _search_scale(x, importance, self.nearest(x), self.levels, self.bias, ends=self.levels)


@dataclass(frozen=True)
class AbsoluteMax:
    """Levels scale · (code - 128) with codes 1..255: 8 bits, the scale positive, the largest weight on level 127 or -127."""

    bits: int = 8

    @property
    def bias(self) -> int:
        return 1 << (self.bits - 1)

    def nearest(self, x: np.ndarray) -> Coded:
        """float32[n, 32] -> Coded. ggml's quantize_row_q8_0_ref: halves are rounded away from zero (roundf)."""
        top = np.float32(self.bias - 1)
        scale = _finite_scale(np.abs(x).max(axis=1, keepdims=True) / top)
        with np.errstate(over="ignore"):
            scaled = x * _inverse(scale)
        magnitude = np.abs(scaled).clip(0, top)
        whole = np.floor(magnitude)
        rounded = np.copysign(whole + np.floor(2 * (magnitude - whole)), scaled)
        return Coded(to_f16(scale), (rounded + np.float32(self.bias)).astype(np.uint8))

    def search(self, x: np.ndarray, importance: np.ndarray) -> Coded:
        """As SignedMax.search. The grid is symmetric, so only positive scales are tried."""
        top = self.bias - 1
        return _search_scale(x, importance, self.nearest(x), (-top, top), self.bias, ends=(top,))


@dataclass(frozen=True)
class Affine:
    """Levels scale · code + minimum, codes 0 .. 2^bits - 1."""

    bits: int

    @property
    def top(self) -> int:
        return (1 << self.bits) - 1

    def nearest(self, x: np.ndarray) -> Coded:
        """float32[n, 32] -> Coded. ggml's quantize_row_q4_1_ref and q5_1_ref."""
        low = _finite_scale(x.min(axis=1, keepdims=True))
        with np.errstate(over="ignore"):
            scale = _finite_scale((x.max(axis=1, keepdims=True) - low) / np.float32(self.top))
            scaled = (x - low) * _inverse(scale) + np.float32(0.5)
        codes = np.trunc(scaled).clip(0, self.top).astype(np.uint8)
        return Coded(np.concatenate([to_f16(scale), to_f16(low)], axis=1), codes)

    def search(self, x: np.ndarray, importance: np.ndarray) -> Coded:
        """float32[n, 32], float32[n, 32] or [1, 32] -> Coded with the least weighted squared error found, never more than nearest's."""
        start, top = self.nearest(x), np.float64(self.top)
        x64, w = _columns(x, importance)
        low, high = x64.min(axis=0), x64.max(axis=0)
        middle = 0.5 * (low + high)
        weight, first = _column_sum(w), _column_sum(w * x64)

        def refit(scale: np.ndarray, minimum: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            """Codes for (scale, minimum); from them the least squares scale and minimum, and the weighted energy they explain."""
            codes = np.rint((x64 - minimum) * _inverse(scale)).clip(0, top)
            wc = w * codes
            c, cc, cx = _column_sum(wc), _column_sum(wc * codes), _column_sum(wc * x64)
            determinant = weight * cc - c * c
            sound = determinant > SINGULAR * (weight * cc)
            inverse = _inverse(np.where(sound, determinant, 1.0))
            scale, minimum = (weight * cx - c * first) * inverse, (cc * first - c * cx) * inverse
            explained = scale * cx + minimum * first
            return scale, minimum, np.where(sound & (scale > 0), explained, -1.0)

        best = np.full(x.shape[0], -1.0)
        scale, minimum = np.zeros_like(best), low.copy()
        for stretch in STRETCH_AFFINE:
            tried = refit(stretch * (high - low) / top, middle - stretch * (middle - low))
            better = tried[2] > best
            scale, minimum = np.where(better, tried[0], scale), np.where(better, tried[1], minimum)
            best = np.where(better, tried[2], best)
        tried = refit(scale, minimum)
        better = tried[2] > best
        scale, minimum = np.where(better, tried[0], scale), np.where(better, tried[1], minimum)

        numbers = to_f16(_to_f32(np.stack([scale, minimum], axis=1)))
        s, m = numbers.astype(np.float64).T
        codes = np.rint((x64 - m) * _inverse(s)).clip(0, top)
        s0, m0 = start.numbers.astype(np.float64).T
        error = _column_sum(w * _square(x64 - (s * codes + m)))
        error0 = _column_sum(w * _square(x64 - (s0 * start.codes.T + m0)))
        return _keep_better(error < error0, Coded(numbers, codes.T.astype(np.uint8)), start)


Grid = SignedMax | AbsoluteMax | Affine


def _search_scale(
    x: np.ndarray, importance: np.ndarray, start: Coded, levels: tuple[int, int], bias: int, ends: tuple[int, ...]
) -> Coded:
    """The search of the grids without a minimum. `ends`: the levels that the largest weight may fall on."""
    x64, w = _columns(x, importance)
    low, high = map(float, levels)
    peak = np.take_along_axis(x64, np.abs(x64).argmax(axis=0, keepdims=True), axis=0)[0]

    def refit(inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Codes for a scale of 1 / inverse; from them the least squares scale, and the weighted energy it explains."""
        codes = np.rint(x64 * inverse).clip(low, high)
        wc = w * codes
        cc, cx = _column_sum(wc * codes), _column_sum(wc * x64)
        scale = cx * _inverse(cc)
        return scale, scale * cx

    best = np.zeros(x.shape[0])
    scale = np.zeros_like(best)
    for end in ends:
        for stretch in STRETCH_SYMMETRIC:
            inverse = _inverse(np.abs(peak) * stretch if len(ends) == 1 else peak * stretch) * float(end)
            tried, explained = refit(inverse)
            better = explained > best
            best, scale = np.where(better, explained, best), np.where(better, tried, scale)
    tried, explained = refit(_inverse(scale))
    scale = np.where(explained > best, tried, scale)

    numbers = to_f16(_to_f32(scale))[:, None]
    s = numbers[:, 0].astype(np.float64)
    codes = np.rint(x64 * _inverse(s)).clip(low, high)
    s0, codes0 = start.numbers[:, 0].astype(np.float64), start.codes.T - float(bias)
    error, error0 = _column_sum(w * _square(x64 - s * codes)), _column_sum(w * _square(x64 - s0 * codes0))
    return _keep_better(error < error0, Coded(numbers, (codes + bias).T.astype(np.uint8)), start)


def _columns(x: np.ndarray, importance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[n, 32] -> float64[32, n] twice: column after column, the order of the sums."""
    x64 = np.ascontiguousarray(x.T, np.float64)
    return x64, np.ascontiguousarray(np.broadcast_to(importance, x.shape).T, np.float64)


def _to_f32(values: np.ndarray) -> np.ndarray:
    """float64 -> float32 without overflow."""
    return values.clip(-F16_MAX, F16_MAX).astype(np.float32)


def _square(values: np.ndarray) -> np.ndarray:
    return values * values


def _keep_better(better: np.ndarray, found: Coded, start: Coded) -> Coded:
    keep = better[:, None]
    return Coded(np.where(keep, found.numbers, start.numbers), np.where(keep, found.codes, start.codes))


def check_importance(importance: np.ndarray, columns: int, name: str) -> np.ndarray:
    """float32[columns]. Raises FormatError unless every entry is finite and none is negative."""
    importance = np.asarray(importance, np.float32)
    if importance.shape != (columns,):
        raise FormatError(f"{name}: importance must have one number per column, {columns}, not shape {list(importance.shape)}")
    if not np.isfinite(importance).all() or (importance < 0).any():
        column = int(np.flatnonzero(~(importance >= 0) | ~np.isfinite(importance))[0])
        raise FormatError(f"{name}: importance of column {column} is {importance[column]}; it must be finite and not negative")
    return importance


def _finite_rows(weights: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(first row, rows, mask of the non-finite ones) for runs of rows that hold any, in bounded memory."""
    step = max(1, (1 << 20) // max(weights.shape[1], 1))
    for first in range(0, weights.shape[0], step):
        rows = weights[first : first + step]
        bad = ~np.isfinite(rows)
        if bad.any():
            yield first, rows, bad


def check_finite(weights: np.ndarray, name: str, first_row: int = 0) -> None:
    """Raises NonFiniteError, naming tensor, row, column and value, if a matrix (or a vector) holds NaN or infinity.

    first_row: the row of the whole tensor that `weights` begins with, for tensors that are read in pieces.
    """
    matrix = weights if weights.ndim == 2 else weights.reshape(1, -1)
    for first, rows, bad in _finite_rows(matrix):
        row, column = divmod(int(bad.argmax()), matrix.shape[1])
        where = f"[{column}]" if weights.ndim == 1 else f"[row {first_row + first + row}, column {column}]"
        raise NonFiniteError(
            f"{name} {where} is {float(rows[row, column])}: cannot be quantized; repair the checkpoint, or allow non-finite weights"
        )


def replace_nonfinite(weights: np.ndarray) -> tuple[np.ndarray, int]:
    """(a copy without non-finite numbers, how many were replaced); the array itself and 0 if there are none.

    NaN becomes 0; infinity the largest finite magnitude of its row, with its sign (0 in a row without finite numbers).
    """
    matrix = weights if weights.ndim == 2 else weights.reshape(1, -1)
    replaced, copy = 0, matrix
    for first, rows, bad in _finite_rows(matrix):
        if replaced == 0:
            copy = matrix.copy()
        largest = np.where(bad, 0, np.abs(rows)).max(axis=1, keepdims=True)
        fixed = np.where(np.isnan(rows), 0, np.where(bad, np.copysign(largest, rows), rows))
        copy[first : first + rows.shape[0]] = fixed
        replaced += int(bad.sum())
    return copy.reshape(weights.shape), replaced
