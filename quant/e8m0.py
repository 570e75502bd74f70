"""Scales that are powers of two, one byte for 32 columns: OCP's E8M0 (Microscaling Formats specification 1.0), as ggml uses it.

The byte c means 2^(c - 128), half of what OCP says: levels are twice the values of the element type, so that all are whole (ggml's
`e8m0_to_fp32_half`; 0 and 1 give subnormal numbers, 255 is no NaN but 2^127).
"""

from __future__ import annotations

import numpy as np

from .arrays import COLUMNS
from .block import ROWS, Scales
from .scales import Affine, Grid, Symmetric, column_sum, inverse_or_zero, peaks, power_of_two
from .storage import Readers, ScaleStorage, Writers


class E8M0(ScaleStorage):
    """scale = 2^(byte - 128). `stored` is uint8[rows, blocks].

    reach: the exponent of the largest level, floor(log2(level)). `nearest` gives the largest weight that exponent, as OCP does: it falls
    between the largest power of two among the levels and twice that, and is clipped if it is larger than the largest level. ggml
    computes the same by log2f, which rounds the few float32 next below a power of two up to it; here they are as all others. `search`
    also tries twice and half of that scale. Error feedback leaves scales as they are: the best for given codes is next to never nearer to
    another power of two.
    """

    block_bytes = 1
    encoder = "encode_kernel"

    def __init__(self, reach: int):
        self.reach = reach

    @property
    def top(self) -> int:
        """The largest byte that is chosen: its scale times twice the largest power among the levels would overflow."""
        return 255 - self.reach

    # ---- numbers -------------------------------------------------------------------------------------------------------

    def _of_peaks(self, peak: np.ndarray) -> np.ndarray:
        """Largest magnitudes, float32[n] -> int32[n]: the bytes that `nearest` chooses."""
        return ((peak.view(np.uint32) >> 23).astype(np.int32) + 1 - self.reach).clip(0, self.top)

    def _near(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """float32[n, 32] -> columns near 1, float32[32, n]; one over the power of two that was divided out; bytes of `nearest`."""
        peak = np.abs(peaks(x))
        inverse_unit = power_of_two(peak)[1]
        return np.ascontiguousarray(x.T) * inverse_unit, inverse_unit, self._of_peaks(peak)

    def nearest(self, grid: Symmetric, x: np.ndarray) -> tuple[tuple[np.ndarray, ...], np.ndarray]:  # type: ignore[override]
        near, inverse_unit, codes = self._near(x.reshape(-1, COLUMNS))
        levels = grid.round(near * inverse_or_zero(_powers(codes) * inverse_unit))
        return (codes.astype(np.uint8).reshape(x.shape[0], -1),), grid.codes(levels.T).reshape(x.shape)

    def search(self, grid: Symmetric, x: np.ndarray, importance: np.ndarray) -> tuple[tuple[np.ndarray, ...], np.ndarray]:  # type: ignore[override]
        near, inverse_unit, start = self._near(x.reshape(-1, COLUMNS))
        w = np.ascontiguousarray(np.tile(importance.reshape(-1, COLUMNS), (x.shape[0], 1)).T)
        best, least, chosen = start, np.full(start.shape, np.inf, np.float32), np.zeros_like(near)
        for step in (0, 1, -1):
            tried = (start + step).clip(0, self.top)
            scale = _powers(tried) * inverse_unit
            levels = grid.round(near * inverse_or_zero(scale))
            rest = near - scale * levels
            error = column_sum(w * rest * rest)
            better = error < least
            best, least, chosen = np.where(better, tried, best), np.where(better, error, least), np.where(better, levels, chosen)
        return (best.astype(np.uint8).reshape(x.shape[0], -1),), grid.codes(chosen.T).reshape(x.shape)

    def empty(self, rows: int, blocks: int) -> tuple[np.ndarray, ...]:
        return (np.zeros((rows, blocks), np.uint8),)

    def values(self, stored: tuple[np.ndarray, ...]) -> Scales:
        return Scales(_powers(stored[0]), None, stored)

    # ---- bytes ---------------------------------------------------------------------------------------------------------

    def to_bytes(self, stored: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
        return np.empty((len(stored[0]), 0), np.uint8), stored[0][..., None]

    def from_bytes(self, header: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, ...]:
        return (numbers[..., 0],)

    def to_tile(self, numbers: np.ndarray) -> np.ndarray:
        return numbers[..., 0].swapaxes(1, 2)

    def from_tile(self, tiles: np.ndarray) -> np.ndarray:
        return tiles.reshape(*tiles.shape[:2], ROWS).swapaxes(1, 2)[..., None]

    # ---- kernels --------------------------------------------------------------------------------------------------------

    def readers(self) -> Readers:
        from .jit.piece import inline
        from .jit.simd import I8, like, load_tile, to_u32

        power = _power_lanes()

        @inline
        def scale(shape, address, stride, half):
            return power(to_u32(load_tile(like(shape, I8), address, stride)))

        return Readers(scale)

    def writers(self, grid: Grid) -> Writers:
        from .grid_kernels import absolute, choose, error_of, inverse_or_zero, peak_of, power_of_two, round_of
        from .jit.memory import load_i32, load_u8, store_i8
        from .jit.piece import inline
        from .jit.simd import F32, f32_bits, less, load, maximum, minimum, store, to_bytes, where, zeros

        assert not isinstance(grid, Affine)
        round, power, reach, top = round_of(grid), _power_lanes(), self.reach, self.top

        @inline
        def placed(x, inverse_unit, scale, levels):
            """Leaves the levels that come nearest with a scale near 1."""
            inverse = inverse_or_zero(scale)
            for k in range(32):
                store(levels + 64 * k, round((load(F32, x + 64 * k) * inverse_unit) * inverse))

        @inline
        def of_peak(peak):
            return minimum(maximum((f32_bits(peak) >> 23) + (1 - reach), 0), top)

        @inline
        def nearest(x, levels):
            peak = absolute(peak_of(x))
            _, inverse_unit = power_of_two(peak)
            scale = power(of_peak(peak))
            placed(x, inverse_unit, scale * inverse_unit, levels)
            return scale, zeros(F32)

        @inline
        def search(x, weights, candidates, count, levels, scratch):
            peak = absolute(peak_of(x))
            _, inverse_unit = power_of_two(peak)
            near, others, none = scratch, scratch + 2048, zeros(F32)
            for k in range(32):
                store(near + 64 * k, load(F32, x + 64 * k) * inverse_unit)
            start = of_peak(peak)
            scale = power(start)
            placed(x, inverse_unit, scale * inverse_unit, levels)
            least = error_of(near, weights, levels, scale * inverse_unit, none)
            for i in range(2):
                tried = power(minimum(maximum(start + (1 - 2 * i), 0), top))
                placed(x, inverse_unit, tried * inverse_unit, others)
                error = error_of(near, weights, others, tried * inverse_unit, none)
                better = less(error, least)
                scale, _ = choose(better, levels, others, scale, none, tried, none)
                least = where(better, error, least)
            return scale, none

        @inline
        def byte_of(scale):
            bits = f32_bits(scale)
            return (bits >> 23) + minimum(bits >> 22, 1)

        @inline
        def to_tile(scale, low, out):
            store(out, to_bytes(byte_of(scale)))

        @inline
        def to_rows(scale, low, scratch, out, row_bytes):
            store(scratch, byte_of(scale))
            for r in range(16):
                store_i8(out + r * row_bytes, load_i32(scratch + 4 * r))

        @inline
        def gather(source, row_bytes, out):
            for r in range(16):
                store_i8(out + r, load_u8(source + r * row_bytes))

        return Writers(nearest, search, to_tile, to_rows, gather)


def _powers(codes: np.ndarray) -> np.ndarray:
    """Bytes -> float32: 2^(byte - 128)."""
    return np.ldexp(np.float32(1), codes.astype(np.int32) - 128)


def _power_lanes():
    """power(bytes in i32 lanes) -> f32 lanes. The product gives the two subnormal numbers."""
    from .jit.piece import inline
    from .jit.simd import bits_as_f32, maximum, minimum

    @inline
    def power(codes):
        return bits_as_f32(maximum(codes - 1, 1) << 23) * bits_as_f32((minimum(codes, 2) + 125) << 23)

    return power
