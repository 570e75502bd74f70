"""One matrix of a checkpoint to the tiles of a format, run after run of rows, so that no float copy of the whole is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ...formats.conversion.stream import CHUNK, Measure
from ...formats.tensor import Tensor
from ...formats.tile_tensor import tiles_nbytes
from ...quant.block import get_format
from ...quant.errors import FormatError, NonFiniteError
from ...quant.measures import TensorMeter
from ...quant.methods import Inputs, Quantized, quantize
from ...quant.scales import check_finite, replace_nonfinite


class TensorQuantizer:
    """Quantizes a matrix by what is known of its inputs; read `measure`, `method` and `loss` when `pieces` is used up.

    format           a block format's name
    known            what is known of the matrix's inputs; of several matrices, one for each or one for all
    method           "nearest", "search" or "feedback"; where `known` does not allow it, the best that it allows
    allow_nonfinite  replace NaN and infinity instead of refusing them

    measure  errors of the weights
    method   what was used
    """

    def __init__(
        self, tensor: Tensor, format: str, known: Inputs | Sequence[Inputs], method: str, *, threads: int, allow_nonfinite: bool = False
    ):
        """Raises FormatError if `known` is of another number of matrices."""
        self._tensor, self._form, self._wanted = tensor, get_format(format), method
        self._known = [known] * tensor.matrices if isinstance(known, Inputs) else known
        if len(self._known) != tensor.matrices:
            raise FormatError(f"{tensor.name}: the inputs of {len(self._known)} matrices are known, it has {tensor.matrices}")
        self._threads, self._allow = threads, allow_nonfinite
        self._methods: set[str] = set()
        self._losses: list[np.ndarray] = []
        self.measure = Measure()

    @property
    def method(self) -> str:
        return "+".join(sorted(self._methods))

    @property
    def loss(self) -> float | None:
        """Sum over rows of d H dᵀ (quant.methods.Quantized.losses), the same for any number of threads; None for other methods.

        Of several matrices, of those for which H is known: an expert that no token chose costs nothing that was seen.
        """
        return float(np.concatenate(self._losses).sum()) if self._losses else None

    @property
    def nbytes(self) -> int:
        """Bytes of the tiles."""
        return tiles_nbytes(self._form, self._tensor.shape)

    def pieces(self, advance: Callable[[int], None] = lambda weights: None) -> Iterator[np.ndarray]:
        """uint8 arrays that follow each other. advance(weights): called as weights are done.

        Raises NonFiniteError by the tensor's row and column, FormatError for inputs that do not suit.
        """
        tensor = self._tensor
        for rows in self._runs():
            found = self._quantize(rows)
            self._methods.add(found.method)
            if found.losses is not None:
                self._losses.append(found.losses[1])
            advance((rows.stop - rows.start) * tensor.columns)
            yield found.data

    def _quantize(self, rows: slice) -> Quantized:
        tensor = self._tensor
        weights = tensor.plain(rows)
        weights = tensor.float32(rows) if weights is None else weights
        meter = TensorMeter()
        try:
            found = self._try(weights, rows, meter)
        except NonFiniteError:
            # What quantizes sees a run of rows; the error must name the row of the tensor.
            weights = tensor.float32(rows)
            if not self._allow:
                check_finite(weights, tensor.name, rows.start)
            weights, replaced = replace_nonfinite(weights)
            self.measure.replaced += replaced
            meter = TensorMeter()
            found = self._try(weights, rows, meter)
        self.measure.take(meter)
        return found

    def _try(self, weights: np.ndarray, rows: slice, meter: TensorMeter) -> Quantized:
        name, known = self._tensor.name, self._known[rows.start // self._tensor.rows_each]
        return quantize(self._form, weights, inputs=known, method=self._wanted, name=name, threads=self._threads, meter=meter)

    def _runs(self) -> list[slice]:
        """Runs of rows of one matrix: several chunks of convert.py at a time, so that all threads have work."""
        found = self._tensor.runs(CHUNK)
        each, several = len(found) // self._tensor.matrices, 4 * self._threads
        starts = [first + i for first in range(0, len(found), each) for i in range(0, each, several)]
        return [slice(found[i].start, found[min(i + several, i - i % each + each) - 1].stop) for i in starts]
