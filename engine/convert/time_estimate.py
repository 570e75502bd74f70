"""How long work of so many multiplications will take here, told before it begins."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ...quant.processors import logical_processors

_SIZE = 512
_ROUNDS = 4
_EFFICIENCY = 0.7
"""Of a matrix product of floats in BLAS, what the work of a calibration reaches on average."""


def expected_seconds(multiplications: float, threads: int) -> float:
    """Seconds that so many multiplications of float32 matrix products take on all threads, by trying a few (some milliseconds)."""
    threads = min(threads, logical_processors())  # more are no faster, and trying takes longer
    x = np.full((_SIZE, _SIZE), 0.5, np.float32)

    def product(_: int) -> float:
        best = np.inf
        out = np.empty_like(x)
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            np.matmul(x, x, out=out)
            best = min(best, time.perf_counter() - start)
        return float(best)

    with ThreadPoolExecutor(threads) as pool:
        rate = sum(_SIZE**3 / seconds for seconds in pool.map(product, range(threads)))
    return multiplications / (rate * _EFFICIENCY)
