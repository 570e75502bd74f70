"""A Cholesky factor for error feedback, the same bits on any number of threads.

BLAS and LAPACK would do, but their sums depend on how many threads they take, and then so would the bytes of a converted model.
"""

from __future__ import annotations

import numpy as np

from .encoders import run_kernel

STRIP = 128
"""Columns that are factored at once."""
PANEL = 32
"""Columns of a panel of product_kernel.py."""


def unit_factor(matrix: np.ndarray, damping: float, order: np.ndarray, threads: int | None = None) -> np.ndarray | None:
    """U below the diagonal and D on it: U D Uᵀ = (matrix + damping · I)[order, order]. None if float32 finds that not positive definite.

    matrix: float32[n, n], symmetric, n a multiple of 32. Above the diagonal the result holds anything, and most of it takes no memory.
    threads: None = the processors of this process. Right-looking and in place, so that the only memory is the result's: n = 9000 has
    160 MB. Blocks on the diagonal are factored in float64, the rest is products in float32.
    """
    n = order.size
    pivots = np.empty(n, np.float32)
    factor = np.empty((n, n), np.float32)  # its pages are taken as they are written
    for first in range(0, n, STRIP):
        last = min(first + STRIP, n)
        factor[first:last, :last] = np.take(matrix[order[first:last]], order[:last], axis=1)
    factor[np.diag_indices(n)] += np.float32(damping)
    for first in range(0, n, STRIP):
        last = min(first + STRIP, n)
        unit, diagonal = _factor_block(factor[first:last, first:last].astype(np.float64))
        if not (diagonal > 0).all() or not np.isfinite(diagonal).all():
            return None
        factor[first:last, first:last] = unit
        pivots[first:last] = diagonal
        if last < n:
            below, old = factor[last:, first:last], factor[last:, first:last].copy()
            below[:] = 0
            _subtract_product(below, old, -(_inverse(unit).T / diagonal).astype(np.float32), False, threads)
            _subtract_product(factor[last:, last:], below, below.T * diagonal.astype(np.float32)[:, None], True, threads)
    factor[np.diag_indices(n)] = pivots
    return factor


def _factor_block(block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64[m, m], of which the lower triangle is read and changed -> U, and diag, which ends where it is not positive."""
    unit, diagonal = np.eye(len(block)), np.zeros(len(block))
    for k in range(len(block)):
        diagonal[k] = block[k, k]
        if not diagonal[k] > 0:
            break
        unit[k + 1 :, k] = block[k + 1 :, k] / diagonal[k]
        block[k + 1 :, k + 1 :] -= np.outer(unit[k + 1 :, k], block[k + 1 :, k])
    return unit, diagonal


def _inverse(unit: np.ndarray) -> np.ndarray:
    """The inverse of a lower triangle with ones on its diagonal."""
    inverse = np.eye(len(unit))
    for k in range(len(unit)):
        inverse[k + 1 :, : k + 1] -= np.outer(unit[k + 1 :, k], inverse[k, : k + 1])
    return inverse


def _subtract_product(out: np.ndarray, left: np.ndarray, right: np.ndarray, lower: bool, threads: int | None) -> None:
    """out -= left · right: float32[m, n], [m, STRIP], [STRIP, n]; with `lower` only where it matters to a lower triangle."""
    rows, columns = out.shape
    panels = np.ascontiguousarray(-right.reshape(STRIP, columns // PANEL, PANEL).transpose(1, 0, 2))
    run_kernel(
        ("product_kernel",),
        0,
        rows // PANEL,
        threads,
        out=out.ctypes.data,
        stride=out.strides[0],
        left=left.ctypes.data,
        left_stride=left.strides[0],
        panels=panels.ctypes.data,
        rows=rows,
        columns=columns,
        lower=int(lower),
    )
