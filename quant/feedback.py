"""Error feedback: codes chosen column after column, each making up for the errors of those before it, then improved in turn.

What counts is not the error of a weight but that of the output: for a row of errors d it is d H dᵀ, with H the second moments of the
matrix's inputs, sum of x xᵀ. Row by row:

* Scales are chosen by search, weighted with the diagonal of H, and rounded as they are stored.
* *Feedback*: GPTQ (Frantar et al. 2022, arXiv:2210.17323), columns by falling diagonal. It is written here as back-substitution
  with rounding, which GPTQ is equivalent to (Babai's nearest plane): with H = L Lᵀ, columns in reversed order, d H dᵀ = |d L|², and
  the term of a column holds only its own error and those of columns already rounded. So H needs one Cholesky factor, no inverse.
* *Descent*: block after block, each code to the level that is best while all others stay, and each scale (and minimum) to the stored
  number that is best while all codes stay, in turn; several passes over all columns. No step raises the loss.
* *Rounds*, one unless told otherwise: with the scales that descent has left, feedback finds other codes, often better ones. A row
  keeps the best it has had, the search's at the least.

Time goes into products with H and its factor: half a multiplication for each weight and column to know the loss of the search, another
half for feedback, one for each pass.

Rows do not see one another: results are the same for any number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .arrays import group_rows, pad_columns
from .block import ROWS, BlockFormat, Scales
from .cholesky import STRIP, unit_factor
from .encoders import encode, run_kernel
from .errors import FormatError
from .scales import middles, power_of_two
from .storage import ScaleStorage

BLOCK = 32
"""Columns that the kernel works on at once; matrices are padded to a multiple of it."""
BATCH = 4
"""Groups of 16 rows that go through H together, so that it is read from memory a fourth as often."""
LOSS = 3 * BLOCK * 64
LOCAL_BYTES = LOSS + 64
"""Scratch memory of one group for the block in hand: three numbers per column; and the loss so far, at LOSS."""
DAMPING = 0.03
"""What is added to the diagonal of H, as a share of its mean. More than GPTQ's 0.01: text of the calibration's kind loses nothing by it,
and text of another kind (code, after calibration on prose) gains; docs/methods.md has the figures."""
LEAST_DAMPING = 1e-6
"""Less is lost when float32 adds it."""
ROUNDS, PASSES = 1, 3
"""Of feedback and descent, each from the scales that the one before has left; and of descent in each. Five more passes or a second round
lessen the loss by 1 or 2 %; what that changes in the model's predictions is too little to be measured (docs/methods.md)."""
FIRM = (1e-9, 1e9)
"""Means of a diagonal between which float32 has room for all sums; others are brought near 1."""


@dataclass
class Hessian:
    """H ready for the kernel: padded to whole blocks, damped, ordered and factored. Shared by all matrices of the same inputs.

    columns     of the matrices, without padding
    matrix      float32[padded, padded], not damped; what calibration gave if that suits
    damping     added to the diagonal
    unit        power of two that was divided out of the matrix
    order       int64[padded]: columns by rising diagonal
    factor      float32[padded, padded]: below the diagonal, columns of the Cholesky factor over their diagonal; on it, the squares of
                that diagonal (0 for padding)
    importance  float32[columns]: the damped diagonal
    """

    columns: int
    matrix: np.ndarray
    damping: float
    unit: float
    order: np.ndarray
    factor: np.ndarray
    importance: np.ndarray
    _sums: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def dampings(self) -> np.ndarray:
        """float32[padded]: damping of each column; 0 for padding, whose errors do not count."""
        return np.where(np.arange(self.matrix.shape[0]) < self.columns, np.float32(self.damping), np.float32(0))

    def sums(self, shared: int) -> np.ndarray:
        """float32[padded / shared, 32]: damped H summed over each `shared` rows, for the columns of their block."""
        if shared not in self._sums:
            n = self.matrix.shape[0]
            blocks = np.stack([self.matrix[b : b + BLOCK, b : b + BLOCK] for b in range(0, n, BLOCK)]).astype(np.float64)
            blocks += self.dampings.reshape(-1, BLOCK, 1) * np.eye(BLOCK)
            self._sums[shared] = blocks.reshape(n // shared, shared, BLOCK).sum(axis=1).astype(np.float32)
        return self._sums[shared]


def prepare(gram: np.ndarray, damping: float = DAMPING, threads: int | None = None) -> Hessian | None:
    """float[columns, columns], symmetric: sum (or mean) of x xᵀ -> Hessian; None if it is zero, or nothing can be made of it.

    damping: share of the mean of the diagonal that is added to it, more than 0. If H cannot be factored, ten times more, up to 1.
    threads: None = the processors of this process; the result does not depend on it.
    Raises FormatError for what is no square matrix of finite numbers with a diagonal that is not negative, and for other dampings.
    """
    if not (damping > 0 and np.isfinite(damping)):
        raise FormatError(f"damping must be a finite share of H's mean diagonal above 0, not {damping}")
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1] or gram.dtype.kind != "f":
        raise FormatError(f"second moments must be a float matrix [columns, columns], not {gram.dtype}{list(gram.shape)}")
    columns = gram.shape[0]
    diagonal = checked_moments(gram.diagonal())
    for first in range(0, columns, STRIP):
        if not np.isfinite(gram[first : first + STRIP]).all():
            raise FormatError(f"second moments of columns {first} to {min(first + STRIP, columns) - 1} are not all finite: calibrate again")
    mean = float(diagonal.mean()) if columns else 0.0
    if mean == 0 or not np.isfinite(mean):
        return None
    unit = 1.0 if FIRM[0] < mean < FIRM[1] else 2.0 ** round(np.log2(mean))
    padded = -(-columns // BLOCK) * BLOCK
    if padded == columns and unit == 1.0:
        matrix = np.ascontiguousarray(gram, np.float32)
    else:
        matrix = np.zeros((padded, padded), np.float32)
        for first in range(0, columns, STRIP):  # in float64, which has the unit of any
            matrix[first : min(first + STRIP, columns), :columns] = gram[first : first + STRIP].astype(np.float64) / unit
    diagonal = np.pad(diagonal / unit, (0, padded - columns))
    mean /= unit
    order = np.argsort(diagonal, kind="stable")
    share, most = max(damping, LEAST_DAMPING), max(damping, 1.0)
    while share <= most:
        factor = unit_factor(matrix, share * mean, order, threads)
        if factor is not None:
            padding = np.flatnonzero(order >= columns)
            factor[padding, padding] = 0
            importance = (diagonal[:columns] + share * mean).astype(np.float32)
            return Hessian(columns, matrix, float(np.float32(share * mean)), unit, order, factor, importance)
        share *= 10
    return None


def checked_moments(diagonal: np.ndarray) -> np.ndarray:
    """Sums or means of x² -> the same in float64. Raises FormatError unless all are finite and none is negative."""
    diagonal = np.asarray(diagonal, np.float64)
    wrong = ~(np.isfinite(diagonal) & (diagonal >= 0))
    if wrong.any():
        column = int(wrong.argmax())
        raise FormatError(f"second moment of column {column} is {diagonal[column]}; it must be finite and not negative: calibrate again")
    return diagonal


@dataclass(frozen=True)
class Chosen:
    """scales, and codes uint8[rows, padded columns] for `BlockFormat.pack`; loss float64[2, rows]: d H dᵀ of search, and of the result."""

    scales: Scales
    codes: np.ndarray
    loss: np.ndarray


def choose_codes(
    block_format: BlockFormat, weights: np.ndarray, hessian: Hessian, *, rounds: int = ROUNDS, passes: int = PASSES
) -> Chosen:
    """float32[rows, columns] -> scales and codes with error feedback, in the calling thread.

    Memory: about 20 bytes per weight. Raises FormatError if the columns are not H's, and as BlockFormat.encode.
    """
    rows, columns = weights.shape
    if columns != hessian.columns:
        raise FormatError(f"second moments are of {hessian.columns} columns, the matrix has {columns}")
    levels, shared = block_format.levels, block_format.scale_columns
    blocks = encode(block_format, weights, "blocks", importance=hessian.importance, method="search", threads=1).data
    scales, codes = block_format.unpack(blocks)
    groups, padded = -(-rows // ROWS), hessian.matrix.shape[0]
    if rows == 0 or codes.shape[1] != padded or BLOCK % shared:
        return Chosen(scales, codes, np.zeros((2, rows)))

    unit, inverse = power_of_two(np.abs(weights).max(axis=1))
    storage: ScaleStorage | None = block_format.scales
    kind, steps, top = "fixed", np.zeros((rows, 2), np.float32), 0.0
    if storage is not None:
        kind, (steps, top) = storage.rounding, storage.steps(scales, unit, inverse)
    x = _to_lanes(pad_columns(weights * inverse[:, None]))
    scale = _to_lanes(scales.scale * inverse[:, None])
    minimum = scale if scales.minimum is None else _to_lanes(scales.minimum * inverse[:, None])
    even = bool((np.diff(levels) == 1).all())
    between = middles(levels)
    steps = _to_lanes(steps)
    out, losses = np.empty((groups, padded, ROWS), np.uint8), np.empty((groups, 2, ROWS), np.float32)
    sums, dampings = hessian.sums(shared), hessian.dampings
    run_kernel(
        ("feedback_kernel", "even" if even else "table", "scale" if scales.minimum is None else "affine", kind, str(shared)),
        scratch_bytes(padded, shared),
        1,
        1,
        weights=x.ctypes.data,
        scales=scale.ctypes.data,
        minima=minimum.ctypes.data,
        storage=steps.ctypes.data,
        codes=out.ctypes.data,
        losses=losses.ctypes.data,
        groups=groups,
        columns=padded,
        hessian=hessian.matrix.ctypes.data,
        damping=dampings.ctypes.data,
        factor=hessian.factor.ctypes.data,
        order=hessian.order.ctypes.data,
        sums=sums.ctypes.data,
        levels=levels.ctypes.data,
        middles=between.ctypes.data,
        level_count=levels.size,
        first=float(levels[0]),
        last=float(levels[-1]),
        top=top,
        rounds=rounds,
        passes=passes,
    )
    minima = None if scales.minimum is None else _from_lanes(minimum, rows) * unit[:, None]
    if storage is not None:
        scales = storage.moved(scales, _from_lanes(scale, rows) * unit[:, None], minima)
    loss = _from_lanes(losses, rows).T.astype(np.float64) * (hessian.unit * unit.astype(np.float64) ** 2)
    return Chosen(scales, _from_lanes(out, rows), loss)


def _to_lanes(array: np.ndarray) -> np.ndarray:
    """[rows, n] -> [groups, n, 16]: rows side by side, as the kernel has them; missing rows are zeros."""
    return np.ascontiguousarray(group_rows(array).swapaxes(1, 2))


def _from_lanes(array: np.ndarray, rows: int) -> np.ndarray:
    """The inverse of `_to_lanes`."""
    return np.ascontiguousarray(array.swapaxes(1, 2)).reshape(-1, array.shape[1])[:rows]


def scratch_bytes(columns: int, shared: int) -> int:
    """Scratch memory of the kernel: for each group 4 numbers per column and 2 per scale, times 16 rows, and those of a block."""
    return BATCH * (64 * (4 * columns + 2 * (columns // shared)) + LOCAL_BYTES)
