"""Weights that are not finite, for conversions that run the model: which they are, or the model without them.

A single NaN in the weights makes everything behind it NaN. What is seen of that in the activations says little; what the user can mend is
the weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from ...formats.checkpoint import Checkpoint
from ...formats.tensor import RowSlice, Tensor
from ...quant.scales import check_finite, replace_nonfinite
from ..measure.compare import row_slices
from ..measure.exchangeable import FloatView
from .calibration import ActivationError


class FiniteView(FloatView):
    """A tensor without its weights that are not finite, as quantization replaces them: NaN by 0, infinity by a row's largest magnitude."""

    def float32(self, rows: RowSlice = None) -> np.ndarray:
        return replace_nonfinite(super().float32(rows))[0]


def finite_checkpoint(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with weights that are not finite replaced; itself if it has none. Reads all tensors."""
    damaged = {name: FiniteView(tensor) for name, tensor in checkpoint.tensors.items() if not _finite(tensor)}
    return checkpoint.with_tensors(damaged) if damaged else checkpoint


@contextmanager
def naming_weights(checkpoint: Checkpoint) -> Iterator[None]:
    """In this block, activations that are not finite raise NonFiniteError by the weight that is to blame, if it is a weight."""
    try:
        yield
    except ActivationError:
        for tensor in checkpoint.tensors.values():
            for rows in _parts(tensor):
                check_finite(tensor.float32(rows), tensor.name, 0 if rows is None else rows.start)
            tensor.release()
        raise


def _finite(tensor: Tensor) -> bool:
    found = all(bool(np.isfinite(tensor.float32(rows)).all()) for rows in _parts(tensor))
    tensor.release()
    return found


def _parts(tensor: Tensor) -> list[slice] | list[None]:
    return [None] if tensor.vector else list(row_slices(tensor))
