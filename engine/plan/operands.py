"""What the rows of a plan refer to: matrices, vectors, the KV cache and rotary tables, as shapes and addresses.

A plan does not know who holds them: weights in memory, weights that come and go while a model streams (measure/streaming.py), or one
that stands in for another.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...formats.layers import AttentionSpec
from ..kernels.cache_layouts import get_layout


class Matrix(Protocol):
    """Weights of a matrix product, or of one for each of several matrices (experts): tiles of a block format at `address`."""

    @property
    def name(self) -> str: ...
    @property
    def format(self) -> str: ...
    @property
    def matrices(self) -> int: ...
    @property
    def rows_each(self) -> int:
        """Rows of a matrix, as in the checkpoint."""
        ...

    @property
    def rows(self) -> int:
        """Rows of all matrices."""
        ...

    @property
    def matrix_nbytes(self) -> int:
        """Bytes of the tiles from one matrix to the next."""
        ...

    @property
    def columns(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def integers(self) -> bool:
        """True if the format is multiplied as integers."""
        ...


class WeightsByName(Protocol):
    """The weights of a model by GGUF's names."""

    def __contains__(self, name: str) -> bool: ...
    def matrix(self, name: str) -> Matrix: ...
    def vector(self, name: str, pad: int = 32) -> np.ndarray:
        """float32, padded with zeros to a multiple of `pad`."""
        ...


@dataclass(frozen=True)
class LayerShape:
    """What a layer keeps of a position; layers of one shape form a group. layout: of kernels/cache_layouts; window: 0 for none."""

    layout: str
    kv_heads: int
    key_size: int
    value_size: int
    window: int = 0

    @classmethod
    def of(cls, attention: AttentionSpec, layout: str) -> LayerShape:
        return cls(layout, attention.kv_heads, attention.key_size, attention.value_size, attention.window)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of one layer."""
        return self.kv_heads * get_layout(self.layout).head_bytes(self.key_size, self.value_size)


class LayerPages(Protocol):
    """Where the keys and values of layers lie."""

    @property
    def shapes(self) -> List[LayerShape]:
        """Of each layer."""
        ...

    @property
    def groups(self) -> List[object]:
        """Of layers of one shape; a sequence has a block table for each."""
        ...

    def group(self, layer: int) -> int:
        """The number of a layer's group."""
        ...

    def layer(self, layer: int) -> int:
        """Address of a layer's first page."""
        ...


class RotaryTable(Protocol):
    """float32[positions][cosines of half | sines of half] at `address`, for the first `dimensions` of each head."""

    @property
    def address(self) -> int: ...
    @property
    def dimensions(self) -> int: ...
