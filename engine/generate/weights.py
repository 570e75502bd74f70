"""Weights of tokens in NumPy, bit for bit as kernels have them (kernels/sampling.py), where the processor has fused multiply-add.

A weight is e^((logit - largest) * scale) in float32 by the kernels' own exponential (quant/jit/emit.py), rounded to a multiple of 2^-34:
then float64 sums of them are exact whatever their order, which is why two programs that add them up differently choose the same token.
"""

from __future__ import annotations

import numpy as np

_ONE = np.float32
_ROUNDER = _ONE(3 * 2.0**-12)
_NEAREST = _ONE(3 << 22)
_COEFFICIENTS = [_ONE(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)]


def weights(logits: np.ndarray, largest: float | np.floating, scale: float) -> np.ndarray:
    """float64[n] in [0, 1], multiples of 2^-34, of float32[n] logits that are at most `largest`."""
    with np.errstate(over="ignore", invalid="ignore"):
        x = (logits - _ONE(largest)) * _ONE(scale)
        return ((_exp(x) + _ROUNDER) - _ROUNDER).astype(np.float64)


def _exp(x: np.ndarray) -> np.ndarray:
    """float32: e^x, exactly 0 below -87 and where x is no number."""
    counts = x >= _ONE(-87)
    x = np.where(counts, np.minimum(x, _ONE(88)), _ONE(-87))
    n = (x * _ONE(1.4426950408889634) + _NEAREST) - _NEAREST
    r = _fma(n, _ONE(-0.693359375), x)
    r = _fma(n, _ONE(2.12194440e-4), r)
    p: np.ndarray | np.float32 = _COEFFICIENTS[0]
    for coefficient in _COEFFICIENTS[1:]:
        p = _fma(p, r, coefficient)
    p = _fma(p, r * r, r) + _ONE(1)
    return np.where(counts, np.ldexp(p, n.astype(np.int32)), _ONE(0))


def _fma(x: np.ndarray | np.float32, y: np.ndarray | np.float32, z: np.ndarray | np.float32) -> np.ndarray:
    """x * y + z: the product of two float32 is exact in float64, and the sum is rounded there far below a float32's last place."""
    return (np.asarray(x, np.float64) * y + z).astype(np.float32)
