"""How a block of 32 weights becomes integers: the choice of its scale.

A *grid* is a family of levels that one scale (and one minimum) stretches: `SignedMax` and `AbsoluteMax` have levels s·c, `Table`
levels s·t[c] that are not evenly spaced, `Affine` levels s·c + m. Each grid can choose its numbers in two ways:

* `nearest`: from the largest weight of the block, then every weight to its nearest level. This is the reference rounding of
  ggml (ggml-quants.c, quantize_row_*_ref), in the same float32 operations, so that the bytes agree with GGUF files.
* `search`: the numbers with the least sum of importance · error². Candidates start from the largest weight, stretched; each gets
  its codes, and from them the best scale in closed form (weighted least squares). The winner is rounded to the f16 that is
  stored *before* the final codes are chosen, and is kept only if it beats `nearest`. The idea is that of ggml's make_qx_quants.

Compiled encoders give the same bytes, so every operation and the order of every sum (columns 0 to 31, one after another) is
fixed, all in float32. Three things keep that sound. Blocks are first brought near 1 by a power of two, which is exact, so squares
neither overflow nor vanish. The fit works on the residuals of a candidate, not on the weights, so nothing cancels. And an inverse
that would be infinite is 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .errors import FormatError, NonFiniteError

F16_MAX = 65504.0
F16_OVERFLOW = 65520.0
"""The least magnitude that rounds to infinity in f16."""

REACH = tuple(2.0 - 0.4 * i for i in range(9))
"""Candidates of a search on even levels: how many levels beyond the end of the grid the largest weight would fall, if not clipped."""
STRETCH = tuple(0.85 + 0.06 * i for i in range(9))
"""Candidates of a search on uneven levels: where the largest weight would fall, as a share of the end of the grid, if not clipped."""
REACH_AFFINE = tuple((below, above) for below in (-0.5, 0.1, 0.7, 1.3) for above in (-0.5, 0.1, 0.7, 1.3))
"""Candidates of an affine search: how many levels the least and the greatest weight would fall off the grid, if not clipped."""
SINGULAR = 1e-4
"""Determinant of the 2x2 least squares, relative to its diagonal, below which float32 cannot tell scale from minimum."""
SMALLEST = np.float32(2.0**-126)
"""The smallest normal float32. The inverse of anything smaller counts as 0: such a scale is stored as 0 whatever the codes."""


class Coded(NamedTuple):
    """Blocks as numbers: float16[n, numbers] (scale, then the minimum if the grid has one) and uint8[n, 32] codes."""

    numbers: np.ndarray
    codes: np.ndarray


def finite_f16(values: np.ndarray) -> np.ndarray:
    """float32 values that f16 can hold: what would round to infinity becomes the largest finite number of its sign."""
    return np.where(np.abs(values) >= np.float32(F16_OVERFLOW), np.copysign(np.float32(F16_MAX), values), values)


def inverse_or_zero(values: np.ndarray) -> np.ndarray:
    """1 / values in float32, 0 for zeros and subnormals."""
    tiny = np.abs(values) < SMALLEST
    return np.where(tiny, np.float32(0), np.float32(1) / np.where(tiny, np.float32(1), values))


def middles(levels: np.ndarray) -> np.ndarray:
    """float32[n], ascending -> float32[n - 1]: halfway between two levels; what lies on one belongs to the lower level.

    Of two equal levels the second is taken: the first begins where it ends.
    """
    found = (levels[1:] + levels[:-1]) / 2
    return np.where(np.diff(levels) == 0, np.concatenate([levels[:1], found[:-1]]), found)


def power_of_two(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For float32 values >= 0: the power of two at or below each, and its inverse; both normal whatever the value."""
    exponent = ((np.ascontiguousarray(values).view(np.uint32) >> 23) & np.uint32(0xFF)).clip(1, 253).astype(np.uint32)
    return (exponent << 23).view(np.float32), ((254 - exponent) << 23).astype(np.uint32).view(np.float32)


def column_sum(terms: np.ndarray) -> np.ndarray:
    """float32[32, n] -> float32[n], added from column 0 to 31. np.sum may add in another order."""
    total = terms[0].copy()
    for column in terms[1:]:
        total += column
    return total


@dataclass(frozen=True)
class SignedMax:
    """Levels scale · (code - 2^(bits-1)), the scale signed so that the largest weight falls on the longer, negative end."""

    bits: int

    @property
    def bias(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def levels(self) -> tuple[int, int]:
        """Lowest and highest level, in units of the scale."""
        return -self.bias, self.bias - 1

    @cached_property
    def values(self) -> np.ndarray:
        """float32[2^bits]: the level of each code."""
        return np.arange(-self.bias, self.bias, dtype=np.float32)

    @property
    def ends(self) -> tuple[int, ...]:
        """The levels that a search lets the largest weight fall on."""
        return self.levels

    @property
    def candidates(self) -> np.ndarray:
        """float32[n, 2]: what a search tries first, 1 / level and level on which the largest weight would fall."""
        return _levels_tried(self.ends)

    def round(self, scaled: np.ndarray) -> np.ndarray:
        """float32 weights over their scale -> the levels that are nearest, as float32; halves to even."""
        return np.rint(np.clip(scaled, np.float32(self.levels[0]), np.float32(self.levels[1])))

    def codes(self, levels: np.ndarray) -> np.ndarray:
        """Levels as `round` gives them -> uint8 codes."""
        return (levels + np.float32(self.bias)).astype(np.uint8)

    def nearest(self, x: np.ndarray) -> Coded:
        """float32[n, 32] -> Coded. ggml's quantize_row_q4_0_ref and q5_0_ref."""
        peak = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
        scale = finite_f16(peak / np.float32(-self.bias))
        with np.errstate(over="ignore"):
            scaled = x * inverse_or_zero(scale) + np.float32(self.bias + 0.5)
        return Coded(scale.astype(np.float16), scaled.clip(0, 2 * self.bias - 1).astype(np.uint8))

    def search(self, x: np.ndarray, importance: np.ndarray) -> Coded:
        """float32[n, 32] twice -> Coded with the least weighted squared error found, never more than nearest's."""
        return _search_scale(self, x, importance)


@dataclass(frozen=True)
class AbsoluteMax:
    """Levels scale · (code - 128) with codes 1..255: 8 bits, the scale positive, the largest weight on level 127 or -127."""

    bits: int = 8

    @property
    def bias(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def levels(self) -> tuple[int, int]:
        """Lowest and highest level, in units of the scale."""
        return 1 - self.bias, self.bias - 1

    @cached_property
    def values(self) -> np.ndarray:
        """float32[2^bits]: the level of each code. `nearest` and `search` leave the first one, -128, unused, as ggml does."""
        return np.arange(-self.bias, self.bias, dtype=np.float32)

    @property
    def ends(self) -> tuple[int, ...]:
        """The grid is symmetric: a search needs to try positive scales only."""
        return (self.bias - 1,)

    @property
    def candidates(self) -> np.ndarray:
        """As SignedMax.candidates."""
        return _levels_tried(self.ends)

    def round(self, scaled: np.ndarray) -> np.ndarray:
        """As SignedMax.round."""
        return np.rint(np.clip(scaled, np.float32(self.levels[0]), np.float32(self.levels[1])))

    def codes(self, levels: np.ndarray) -> np.ndarray:
        """As SignedMax.codes."""
        return (levels + np.float32(self.bias)).astype(np.uint8)

    def nearest(self, x: np.ndarray) -> Coded:
        """float32[n, 32] -> Coded. ggml's quantize_row_q8_0_ref: halves are rounded away from zero (roundf)."""
        top = np.float32(self.bias - 1)
        scale = finite_f16(np.abs(x).max(axis=1, keepdims=True) / top)
        with np.errstate(over="ignore"):
            scaled = x * inverse_or_zero(scale)
        magnitude = np.abs(scaled).clip(0, top)
        whole = np.trunc(magnitude)
        rounded = whole + np.trunc((magnitude - whole) * np.float32(2))
        codes = np.copysign(rounded, scaled) + np.float32(self.bias)
        return Coded(scale.astype(np.float16), codes.astype(np.uint8))

    def search(self, x: np.ndarray, importance: np.ndarray) -> Coded:
        """float32[n, 32] twice -> Coded with the least weighted squared error found, never more than nearest's."""
        return _search_scale(self, x, importance)


NL4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The levels of GGUF's IQ4_NL: dense where weights are, asymmetric, so that the sign of a scale is worth a choice."""


NL5_LEVELS = (
    -127, -112, -99, -87, -77, -68, -59, -51, -44, -37, -30, -24, -18, -12, -6, 0,
    5, 10, 15, 20, 26, 31, 37, 43, 50, 57, 65, 74, 84, 95, 108, 122,
)  # fmt: skip
"""The same for 32 levels, with a zero: 0.65 v + 0.2 v³ + 0.15 v⁵ of evenly spaced v, each side up to its end. In blocks of 32 weights
they leave three quarters of the squared error of even levels, 2 % more than levels fitted to the very weights.
"""


E2M1_LEVELS = (-12, -8, -6, -4, -3, -2, -1, 0, 0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the values of OCP's 4-bit float: one sign bit, two of exponent, one of significand. There is a negative zero."""


@dataclass(frozen=True)
class Table:
    """Levels scale · table[code]: 16 or 32 signed bytes, ascending; the scale signed so that the largest weight falls on the first.

    halves_to_zero: of two levels that are as near, the one of smaller magnitude is taken, not the lower; for tables that are their own
    mirror image.
    """

    table: tuple[int, ...] = NL4_LEVELS
    halves_to_zero: bool = False

    @property
    def levels(self) -> tuple[int, int]:
        """Lowest and highest level, in units of the scale."""
        return self.table[0], self.table[-1]

    @cached_property
    def values(self) -> np.ndarray:
        """float32[16 or 32]: the level of each code."""
        return np.array(self.table, np.float32)

    @property
    def upper(self) -> np.ndarray:
        """float32: levels from 0 on."""
        return np.unique(self.values[self.values >= 0])

    @cached_property
    def middles(self) -> np.ndarray:
        """float32, one less than levels: see `middles`."""
        return middles(self.values)

    @property
    def bias(self) -> int:
        """What kernels add to levels to have unsigned bytes, of 7 bits if that is enough."""
        return -self.table[0] if self.table[-1] - self.table[0] < 128 else 128

    @property
    def candidates(self) -> np.ndarray:
        """As SignedMax.candidates: the largest weight may fall short of or beyond either end by a share of it."""
        levels = np.array([end * stretch for end in self.levels for stretch in STRETCH])
        return np.stack([1 / levels, levels], axis=1).astype(np.float32)

    def round(self, scaled: np.ndarray) -> np.ndarray:
        """As SignedMax.round, but for halves."""
        if self.halves_to_zero:
            upper = self.upper
            return np.copysign(upper[np.searchsorted(middles(upper), np.abs(scaled))], scaled)
        return self.values[np.searchsorted(self.middles, scaled)]

    def codes(self, levels: np.ndarray) -> np.ndarray:
        """As SignedMax.codes."""
        return np.searchsorted(self.middles, levels).astype(np.uint8)

    def nearest(self, x: np.ndarray) -> Coded:
        """float32[n, 32] -> Coded. ggml has no reference rounding for such types: its quantize_row_iq4_nl_ref searches."""
        scale = finite_f16(peaks(x) / self.values[0]).astype(np.float16)
        levels = self.round(x * inverse_or_zero(scale.astype(np.float32))[:, None])
        return Coded(scale[:, None], self.codes(levels))

    def search(self, x: np.ndarray, importance: np.ndarray) -> Coded:
        """float32[n, 32] twice -> Coded with the least weighted squared error found, never more than nearest's."""
        return _search_scale(self, x, importance)


Symmetric = SignedMax | AbsoluteMax | Table


def _levels_tried(ends: tuple[int, ...]) -> np.ndarray:
    levels = np.array([end + reach if end > 0 else end - reach for end in ends for reach in REACH])
    return np.stack([1 / levels, levels], axis=1).astype(np.float32)


def peaks(x: np.ndarray) -> np.ndarray:
    """float32[n, k] -> float32[n]: the weight of largest magnitude of each row, the first of equals, with its sign."""
    return np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)[:, 0]


def fit_scale(grid: Symmetric, x: np.ndarray, w: np.ndarray, peak: np.ndarray) -> np.ndarray:
    """The scale with the least weighted squared error found, before it is rounded: float32[n].

    x, w: float32[k, n], weights brought near 1, and importance, column after column; peak: float32[n], the largest weight of each.
    """

    def refit(scale: np.ndarray, inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(the least squares scale for the codes that `scale` gives, the weighted squared error with it)."""
        c = grid.round(x * inverse)
        rest = x - scale * c
        wr, wc = w * rest, w * c
        rr, rc, cc = column_sum(wr * rest), column_sum(wr * c), column_sum(wc * c)
        change = rc * inverse_or_zero(cc)
        return scale + change, rr - rc * change

    least, scale = np.full_like(peak, np.inf), np.zeros_like(peak)
    inverse_peak = inverse_or_zero(peak)
    for share, level in grid.candidates:
        tried, error = refit(peak * share, inverse_peak * level)
        better = error < least
        least, scale = np.where(better, error, least), np.where(better, tried, scale)
    tried, error = refit(scale, inverse_or_zero(scale))
    return np.where(error < least, tried, scale)


def _search_scale(grid: Symmetric, x: np.ndarray, importance: np.ndarray) -> Coded:
    """The search of the grids without a minimum."""
    start, w = grid.nearest(x), np.ascontiguousarray(importance.T)
    peak = peaks(x)
    unit, inverse_unit = power_of_two(np.abs(peak))
    x, peak = np.ascontiguousarray(x.T) * inverse_unit, peak * inverse_unit
    if isinstance(grid, AbsoluteMax):
        peak = np.abs(peak)
    scale = fit_scale(grid, x, w, peak)
    with np.errstate(over="ignore"):
        numbers = finite_f16(scale * unit).astype(np.float16)

    def error_of(numbers: np.ndarray, levels: np.ndarray) -> np.ndarray:
        rest = x - (numbers.astype(np.float32) * inverse_unit) * levels
        return column_sum(w * rest * rest)

    levels = grid.round(x * inverse_or_zero(numbers.astype(np.float32) * inverse_unit))
    better = error_of(numbers, levels) < error_of(start.numbers[:, 0], grid.values[start.codes.T])
    return _choose(better, Coded(numbers[:, None], grid.codes(levels).T), start)


@dataclass(frozen=True)
class Affine:
    """Levels scale · code + minimum, codes 0 .. 2^bits - 1."""

    bits: int

    @property
    def bias(self) -> int:
        """What a kernel takes from codes before it multiplies: nothing, the minimum does that."""
        return 0

    @property
    def top(self) -> int:
        return (1 << self.bits) - 1

    @cached_property
    def values(self) -> np.ndarray:
        """float32[2^bits]: the level of each code."""
        return np.arange(self.top + 1, dtype=np.float32)

    @property
    def candidates(self) -> np.ndarray:
        """float32[n, 2]: what a search tries first, 2 / levels that the weights would span, and how many of them lie below 0."""
        return np.array([(2 / (self.top + below + above), below) for below, above in REACH_AFFINE], np.float32)

    def nearest(self, x: np.ndarray) -> Coded:
        """float32[n, 32] -> Coded. ggml's quantize_row_q4_1_ref and q5_1_ref."""
        low = finite_f16(x.min(axis=1, keepdims=True))
        with np.errstate(over="ignore"):
            scale = finite_f16((x.max(axis=1, keepdims=True) - low) / np.float32(self.top))
            scaled = (x - low) * inverse_or_zero(scale) + np.float32(0.5)
        numbers = np.concatenate([scale, low], axis=1).astype(np.float16)
        return Coded(numbers, scaled.clip(0, self.top).astype(np.uint8))

    def search(self, x: np.ndarray, importance: np.ndarray) -> Coded:
        """float32[n, 32] twice -> Coded with the least weighted squared error found, never more than nearest's."""
        start, w = self.nearest(x), np.ascontiguousarray(importance.T)
        top, half = np.float32(self.top), np.float32(0.5)
        lowest, highest = x.min(axis=1) * half, x.max(axis=1) * half
        middle, width = highest + lowest, highest - lowest
        # Digits of the width that lie below the last digit of the weights are noise, and the unit need not be smaller than that.
        unit, inverse_unit = power_of_two(np.maximum(width, np.abs(middle) * np.float32(2.0**-24)))
        x, width = (np.ascontiguousarray(x.T) - middle) * inverse_unit, width * inverse_unit
        weight = column_sum(w)

        def refit(scale: np.ndarray, low: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            """(the least squares scale and minimum for the codes that these give, the weighted squared error with them)."""
            c = np.rint(((x - low) * inverse_or_zero(scale)).clip(0, top))
            rest = x - (scale * c + low)
            wr, wc = w * rest, w * c
            rr, r, rc = column_sum(wr * rest), column_sum(wr), column_sum(wr * c)
            c1, cc = column_sum(wc), column_sum(wc * c)
            determinant = weight * cc - c1 * c1
            inverse = inverse_or_zero(determinant)
            d_scale, d_low = (weight * rc - c1 * r) * inverse, (cc * r - c1 * rc) * inverse
            sound = (determinant > np.float32(SINGULAR) * (weight * cc)) & (scale + d_scale > 0)
            d_scale, d_low = np.where(sound, d_scale, np.float32(0)), np.where(sound, d_low, np.float32(0))
            return scale + d_scale, low + d_low, rr - (d_scale * rc + d_low * r)

        least, scale, low = np.full_like(width, np.inf), np.zeros_like(width), np.zeros_like(width)
        for share, below in self.candidates:
            tried = width * share
            found = refit(tried, tried * below - width)
            better = found[2] < least
            scale, low, least = (np.where(better, new, old) for new, old in zip(found, (scale, low, least), strict=True))
        found = refit(scale, low)
        better = found[2] < least
        scale, low = np.where(better, found[0], scale), np.where(better, found[1], low)

        with np.errstate(over="ignore"):
            numbers = finite_f16(np.stack([scale * unit, low * unit + middle], axis=1)).astype(np.float16)

        def placed(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            """Stored scale and minimum in the units of x."""
            scale, low = numbers.astype(np.float32).T
            return scale * inverse_unit, (low - middle) * inverse_unit

        def error_of(numbers: np.ndarray, codes: np.ndarray) -> np.ndarray:
            scale, low = placed(numbers)
            rest = x - (scale * codes + low)
            return column_sum(w * rest * rest)

        scale, low = placed(numbers)
        codes = np.rint(((x - low) * inverse_or_zero(scale)).clip(0, top))
        better = error_of(numbers, codes) < error_of(start.numbers, start.codes.T.astype(np.float32))
        return _choose(better, Coded(numbers, codes.T.astype(np.uint8)), start)


Grid = SignedMax | AbsoluteMax | Table | Affine


def _choose(better: np.ndarray, found: Coded, start: Coded) -> Coded:
    keep = better[:, None]
    return Coded(np.where(keep, found.numbers, start.numbers), np.where(keep, found.codes, start.codes))


def check_importance(importance: np.ndarray, columns: int, name: str) -> np.ndarray:
    """float32[columns], brought near 1 by a power of two. Raises FormatError unless all are finite and none is negative."""
    importance = np.asarray(importance, np.float32)
    if importance.shape != (columns,):
        raise FormatError(f"{name}: importance must have one number per column, {columns}, not shape {list(importance.shape)}")
    if not np.isfinite(importance).all() or (importance < 0).any():
        column = int(np.flatnonzero(~(importance >= 0) | ~np.isfinite(importance))[0])
        raise FormatError(f"{name}: importance of column {column} is {importance[column]}; it must be finite and not negative")
    return importance * power_of_two(importance.max(initial=0))[1]


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
        value = float(rows[row, column])
        raise NonFiniteError(f"{name} {where} is {value}; repair the checkpoint, or allow non-finite weights")


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
