"""Tables of cosines and sines for rotary position embeddings, with the scalings that checkpoints ask for.

Frequencies and angles are rounded to float32 where transformers rounds them; cosines and sines are then computed in float64. Linear scaling
(Chen et al. 2023, kaiokendev), yarn (Peng et al. 2023, arXiv 2309.00071), and per-frequency factors (Llama 3, GGUF's rope_freqs.weight).
"""

from __future__ import annotations

import math

import numpy as np

from ...formats.metadata import CheckpointError, Metadata
from ...formats.rope import DYNAMIC_FACTOR, FACTORS, yarn_attention


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


def longest_context(metadata: Metadata, arch: str) -> int:
    """Positions a model can be run with as its checkpoint says."""
    return metadata.count(f"{arch}.context_length")


def rope_table(metadata: Metadata, arch: str, factors: np.ndarray | None, context: int) -> RopeTable:
    """The table of a model. factors: float32[half] that frequencies are divided by, or None."""
    dimensions = metadata.count(f"{arch}.rope.dimension_count")
    base = metadata.number(f"{arch}.rope.freq_base")
    frequencies = 1.0 / base ** (np.arange(0, dimensions, 2, dtype=np.float64) / dimensions)
    amplitude = 1.0
    if factors is not None:
        if not ((factors > 1e-6) & (factors < 1e9)).all():  # false for NaN as well
            raise CheckpointError(f"{metadata.source}: {FACTORS}: frequencies cannot be divided by what it holds; convert the model anew")
        frequencies = frequencies / np.asarray(factors, np.float64)
    kind = metadata.get(f"{arch}.rope.scaling.type", "none", str)
    if kind == "linear":
        frequencies = frequencies / metadata.number(f"{arch}.rope.scaling.factor")
    elif kind == "yarn":
        frequencies, amplitude = _yarn(metadata, f"{arch}.rope.scaling", frequencies, dimensions, base)
    elif metadata.has(DYNAMIC_FACTOR):
        # Dynamic scaling changes every frequency once a text outgrows the trained context, which would change what is cached already.
        # Within that context it changes nothing.
        context = min(context, longest_context(metadata, arch))
    return RopeTable(frequencies.astype(np.float32), amplitude, context)


def _yarn(metadata: Metadata, prefix: str, frequencies: np.ndarray, dimensions: int, base: float) -> tuple[np.ndarray, float]:
    """Slow frequencies interpolated, fast ones kept, a linear ramp between (arXiv 2309.00071, section 3.2)."""
    factor = metadata.number(f"{prefix}.factor")
    original = metadata.number(f"{prefix}.original_context_length")

    def dimension(rotations: float) -> float:
        """The dimension whose wave turns so often within the original context."""
        return dimensions * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dimension(metadata.number(f"{prefix}.yarn_beta_fast", default=32.0))), 0)
    high = min(math.ceil(dimension(metadata.number(f"{prefix}.yarn_beta_slow", default=1.0))), dimensions - 1)
    ramp = np.clip((np.arange(dimensions // 2) - low) / max(high - low, 0.001), 0, 1)
    amplitude = metadata.number(f"{prefix}.attn_factor", default=1.0) * yarn_attention(factor)
    return frequencies / factor * ramp + frequencies * (1 - ramp), amplitude
