"""The ways from weights to blocks, behind one function: round-to-nearest, weighted search, error feedback.

All give the same kinds of blocks. What they know of a matrix's inputs differs: nothing, the second moment of each column, or all of
them, and so does what they cost: `nearest` about 1 ns per weight, `search` 3 to 10, `feedback` 60 + columns / 12 (see docs/methods.md).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from .block import METHODS, ROWS, BlockFormat
from .encoders import Encoded, as_float32, encode, tile
from .errors import FormatError
from .feedback import DAMPING, PASSES, ROUNDS, Hessian, checked_moments, choose_codes, prepare
from .measures import TensorErrors, TensorMeter
from .processors import logical_processors
from .scales import check_finite

TIED_DAMPING = 0.1
"""For an embedding that is also the head: its rows are not only multiplied with inputs but are inputs, where every column counts."""
RUN_WEIGHTS = 1 << 17
"""Weights of a run of rows that one thread takes at a time, about 40 bytes of memory each. The same for any number of threads, because
the sums of errors depend on it in their last digits."""


@dataclass
class Inputs:
    """What is known of a matrix's inputs x: the matrices that share them share this object, so H is factored once.

    diagonal  float[columns]: sum or mean of x², the importance of each column; None: all alike, or gram's
    gram      float[columns, columns]: sum or mean of x xᵀ, or None
    damping   share of the mean of gram's diagonal that is added to it (TIED_DAMPING for a tied embedding)
    """

    diagonal: np.ndarray | None = None
    gram: np.ndarray | None = None
    damping: float = DAMPING
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _prepared: tuple[Hessian | None] | None = field(default=None, repr=False)

    @property
    def importance(self) -> np.ndarray | None:
        """float32[columns] for a search, or None: with gram its damped diagonal. Never all zero; near 1.

        Raises FormatError for what is not finite, or negative.
        """
        if self.gram is not None and self.gram.size:
            found = checked_moments(self.gram.diagonal())
            found = found + self.damping * found.mean()
        elif self.diagonal is not None:
            found = checked_moments(self.diagonal)
        else:
            return None
        largest = found.max(initial=0.0)
        return np.ldexp(found, -np.frexp(largest)[1]).astype(np.float32) if largest > 0 else None

    @property
    def hessian(self) -> Hessian | None:
        """Made when first asked for; None if there is no gram or nothing can be made of it. Raises FormatError, see `prepare`."""
        if self.gram is None:
            return None
        with self._lock:
            if self._prepared is None:
                self._prepared = (prepare(self.gram, self.damping),)
        return self._prepared[0]


@dataclass(frozen=True)
class Quantized:
    """What `quantize` gives.

    data    uint8[tiles_nbytes], or blocks of blocks_shape
    errors  of the weights
    method  what was used: a method falls back to `search` where it knows too little
    losses  float64[2, rows], with gram: d H dᵀ of each row, the expected squared error of its output times the number of tokens
            if gram is a sum: of search, and of the result. None for other methods
    """

    data: np.ndarray
    errors: TensorErrors
    method: str
    losses: np.ndarray | None = None


def quantize(
    block_format: BlockFormat,
    weights: np.ndarray,
    order: str = "tiles",
    *,
    inputs: Inputs | None = None,
    method: str | None = None,
    name: str = "tensor",
    threads: int | None = None,
    meter: TensorMeter | None = None,
    progress: Callable[[int], None] | None = None,
    rounds: int = ROUNDS,
    passes: int = PASSES,
) -> Quantized:
    """A matrix to blocks or tiles of a format, by the best method that the inputs allow or by the one asked for.

    weights    [rows, columns] as `encoders.encode` takes them; runs of rows may be given one after another (for tiles, of whole
               16 rows but for the last), the result is the same
    inputs     what is known of the matrix's inputs
    method     "nearest", "search", "feedback", or None: feedback with gram, else search. Feedback without gram, or with one of nothing
               but zeros (an expert never hit), is search; formats that have no codes know one way only
    threads    None: the processors of this process. The result does not depend on it
    meter      as in `encode`; progress is called with the number of rows that were finished
    rounds, passes  of feedback: how long to look for better codes
    Raises FormatError for arguments that do not suit, NonFiniteError as `encode`.
    """
    if method is not None and method not in METHODS:
        raise FormatError(f"{name}: unknown method {method!r}; known are {', '.join(METHODS)}")
    if order not in ("tiles", "blocks"):
        raise FormatError(f"unknown byte order {order!r}; known are tiles, blocks")
    importance = None
    if inputs is not None and method != "nearest":
        if inputs.gram is not None and inputs.gram.shape[:1] != weights.shape[1:]:
            raise FormatError(f"{name}: second moments are of {inputs.gram.shape[0]} columns, the matrix has {weights.shape[1]}")
        hessian = inputs.hessian if method != "search" and block_format.integers else None
        if hessian is not None and weights.size:
            return _with_feedback(block_format, weights, order, hessian, name, threads, meter, progress, (rounds, passes))
        importance = inputs.importance
    used = "search" if method in (None, "feedback") else method
    if not block_format.integers:
        used = "nearest"
    found: Encoded = encode(
        block_format, weights, order, importance=importance, method=used, name=name, threads=threads, meter=meter
    )
    if progress is not None:
        progress(weights.shape[0])
    return Quantized(found.data, found.errors, used)


def _with_feedback(
    block_format: BlockFormat,
    weights: np.ndarray,
    order: str,
    hessian: Hessian,
    name: str,
    threads: int | None,
    meter: TensorMeter | None,
    progress: Callable[[int], None] | None,
    effort: tuple[int, int],
) -> Quantized:
    rows, columns = weights.shape
    workers = max(1, threads or logical_processors())
    meter = meter or TensorMeter()
    runs = _runs(rows, columns)

    def work(run: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        values = as_float32(weights[run], name)
        check_finite(values, name, run.start)
        chosen = choose_codes(block_format, values, hessian, rounds=effort[0], passes=effort[1])
        blocks = block_format.pack(chosen.scales, chosen.codes)
        return values, block_format.decode(blocks, columns), tile(block_format, blocks, 1) if order == "tiles" else blocks, chosen.loss

    shape = (block_format.tiles_nbytes(rows, columns),) if order == "tiles" else block_format.blocks_shape(rows, columns)
    data, losses, at = np.empty(shape, np.uint8), np.empty((2, rows)), 0
    for run, (values, decoded, part, loss) in zip(runs, _in_order(work, runs, workers), strict=True):
        meter.add(values, decoded)
        data[at : at + len(part)] = part
        at += len(part)
        losses[:, run] = loss
        if progress is not None:
            progress(run.stop - run.start)
    return Quantized(data, meter.result(), "feedback", losses)


def _runs(rows: int, columns: int) -> list[slice]:
    """Runs of whole 64 rows, which is what the kernel takes through H at once."""
    step = max(4 * ROWS, RUN_WEIGHTS // max(columns, 1) // (4 * ROWS) * (4 * ROWS))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _in_order(work: Callable[[slice], tuple], runs: list[slice], workers: int) -> Iterator[tuple]:
    """Results of `work` in the order of the runs; never more than a few of them wait in memory."""
    if workers == 1 or len(runs) == 1:
        yield from map(work, runs)
        return
    with ThreadPoolExecutor(workers) as pool:
        waiting: list[Future] = []
        try:
            for run in runs:
                waiting.append(pool.submit(work, run))
                if len(waiting) > 2 * workers:
                    yield waiting.pop(0).result()
            while waiting:
                yield waiting.pop(0).result()
        finally:
            for future in waiting:
                future.cancel()
