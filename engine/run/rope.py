"""Tables of cosines and sines for rotary position embeddings, with the scalings that checkpoints ask for.

Frequencies and angles are rounded to float32 where transformers rounds them; cosines and sines are then computed in float64. Linear scaling
(Chen et al. 2023, kaiokendev), yarn (Peng et al. 2023, arXiv 2309.00071), and per-frequency factors (Llama 3, GGUF's rope_freqs.weight).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from ...formats.checkpoint import Checkpoint, CheckpointError
from ...formats.layers import RopeSpec


class RopeTable:
    """float32[positions][cosines of half | sines of half], filled as far as positions are used.

    Attributes: `address`; `context`, the most positions there is room for.
    """

    _STEP = 512

    def __init__(self, frequencies: np.ndarray, amplitude: float, context: int):
        """frequencies: float32[half], radians per position. amplitude: factor of cosines and sines (yarn's attention factor)."""
        self.context = context
        self._frequencies = np.asarray(frequencies, np.float32)
        self._amplitude = amplitude
        self._table = np.zeros((context, 2 * self._frequencies.size), np.float32)
        self._filled = 0

    @property
    def address(self) -> int:
        return self._table.ctypes.data

    @property
    def dimensions(self) -> int:
        """Dimensions of a head that are rotated, the first ones."""
        return 2 * self._frequencies.size

    def reach(self, position: int) -> None:
        """Makes the table good for positions below `position`."""
        if position <= self._filled:
            return
        stop = min(self.context, -(-position // self._STEP) * self._STEP)
        angles = (np.arange(self._filled, stop, dtype=np.float32)[:, None] * self._frequencies).astype(np.float64)
        half = self._frequencies.size
        self._table[self._filled : stop, :half] = np.cos(angles) * self._amplitude
        self._table[self._filled : stop, half:] = np.sin(angles) * self._amplitude
        self._filled = stop


def rope_tables(checkpoint: Checkpoint, context: int) -> RopeTables:
    """The tables of a model, with room for `context` positions."""
    return RopeTables({name: rope_table(spec, checkpoint, context) for name, spec in checkpoint.model.ropes.items()}, context)


class RopeTables(Mapping[str, RopeTable]):
    """Tables by the names that layers call them by.

    Attribute: `context`, the most positions that all of them have room for.
    """

    def __init__(self, tables: dict[str, RopeTable], context: int):
        self._tables = tables
        self.context = min([context, *(table.context for table in tables.values())])

    def __getitem__(self, name: str) -> RopeTable:
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def reach(self, position: int) -> None:
        """Makes all tables good for positions below `position`."""
        for table in self._tables.values():
            table.reach(position)


def rope_table(spec: RopeSpec, checkpoint: Checkpoint, context: int) -> RopeTable:
    """One table. Raises CheckpointError for factors that frequencies cannot be divided by."""
    frequencies = 1.0 / spec.base ** (np.arange(0, spec.dimensions, 2, dtype=np.float64) / spec.dimensions)
    if spec.factors in checkpoint.tensors:
        factors = checkpoint.tensors[spec.factors].float32()
        if not ((factors > 1e-6) & (factors < 1e9)).all():  # false for NaN as well
            problem = "frequencies cannot be divided by what it holds; convert the model anew"
            raise CheckpointError(f"{checkpoint.metadata.source}: {spec.factors}: {problem}")
        frequencies = frequencies / np.asarray(factors, np.float64)
    if spec.scaling == "linear":
        frequencies = frequencies / spec.factor
    elif spec.scaling == "yarn":
        frequencies = _yarn(spec, frequencies)
    elif spec.scaling == "dynamic":
        # Dynamic scaling changes every frequency once a text outgrows the trained context, which would change what is cached already.
        # Within that context it changes nothing.
        context = min(context, checkpoint.model.context)
    return RopeTable(frequencies.astype(np.float32), spec.amplitude, context)


def _yarn(spec: RopeSpec, frequencies: np.ndarray) -> np.ndarray:
    """Slow frequencies interpolated, fast ones kept, a linear ramp between (arXiv 2309.00071, section 3.2)."""

    def dimension(rotations: float) -> float:
        """The dimension whose wave turns so often within the original context."""
        return spec.dimensions * math.log(spec.original / (rotations * 2 * math.pi)) / (2 * math.log(spec.base))

    low = max(math.floor(dimension(spec.beta_fast)), 0)
    high = min(math.ceil(dimension(spec.beta_slow)), spec.dimensions - 1)
    ramp = np.clip((np.arange(spec.dimensions // 2) - low) / max(high - low, 0.001), 0, 1)
    return frequencies / spec.factor * ramp + frequencies * (1 - ramp)
