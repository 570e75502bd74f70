"""The KV cache: pages of PAGE positions, handed out to sequences, whose block tables say which page holds which positions.

A page covers all layers: page p of layer l lies at `layer(l) + p * page_bytes`. Memory is reserved at once and taken by the
operating system as pages are first written. Keys and values are f16, or f32 where accuracy is measured.
"""

from __future__ import annotations

import numpy as np

from ...formats.layers import ModelSpec
from ...quant.errors import HalfbyteError
from ..kernels.structs import PAGE, head_bytes


class CacheFullError(HalfbyteError):
    """No page of the KV cache is free, or there is no memory for one of the size asked for."""


class SequenceError(HalfbyteError):
    """A sequence of another engine, or a length that it does not have."""


class Sequence:
    """The tokens of one text in the cache. `length`: positions written; `pages`: int64 block table, `used` of it in use.

    cache: the one whose pages these are; None before the first.
    """

    def __init__(self) -> None:
        self.cache: PagedCache | None = None
        self.length = 0
        self.used = 0
        self.pages = np.zeros(8, np.int64)

    def __repr__(self) -> str:
        return f"<Sequence of {self.length} positions in {self.used} pages>"


class PagedCache:
    """Pages and their use. Not thread-safe; its owner calls it between steps."""

    def __init__(self, layers: int, kv_heads: int, head_size: int, cache_type: str, pages: int):
        self.page_bytes = kv_heads * head_bytes(head_size, cache_type)[1]
        self.layers, self.pages = layers, pages
        nbytes = layers * pages * self.page_bytes
        try:
            raw = np.zeros(nbytes + 64, np.uint8)
        except (MemoryError, ValueError, OverflowError):
            raise CacheFullError(
                f"a KV cache of {pages * PAGE} positions takes {nbytes / 1e9:.1f} GB, which are not there; ask for less context (--context)"
            ) from None
        self._memory = raw[-raw.ctypes.data % 64 :]
        self._free = list(range(pages - 1, -1, -1))

    def layer(self, layer: int) -> int:
        """Address of a layer's first page."""
        return self._memory.ctypes.data + layer * self.pages * self.page_bytes

    @property
    def free_positions(self) -> int:
        """Positions in pages that nobody uses."""
        return len(self._free) * PAGE

    @property
    def bytes_per_position(self) -> float:
        """Bytes that a token takes in all layers."""
        return self.layers * self.page_bytes / PAGE

    def reserve(self, sequence: Sequence, positions: int) -> None:
        """Gives a sequence pages for `positions` positions in all. Raises CacheFullError, having changed nothing."""
        if sequence.cache is not self:
            if sequence.used:
                raise SequenceError("the sequence belongs to another engine: use the engine that it was opened and stepped with")
            sequence.cache = self
        needed = -(-positions // PAGE)
        if needed - sequence.used > len(self._free):
            free, wanted = self.free_positions, (needed - sequence.used) * PAGE
            raise CacheFullError(
                f"the KV cache is full: {wanted} positions are needed, {free} are free; use a smaller context or fewer sequences"
            )
        if needed > sequence.pages.size:
            grown = np.zeros(max(needed, 2 * sequence.pages.size), np.int64)
            grown[: sequence.used] = sequence.pages[: sequence.used]
            sequence.pages = grown
        while sequence.used < needed:
            sequence.pages[sequence.used] = self._free.pop()
            sequence.used += 1

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Forgets the positions from `length` on; pages that hold none of the rest are free at once.

        Raises SequenceError for a negative length, or a sequence that has pages of another cache.
        """
        if length < 0:
            raise SequenceError(f"a sequence cannot be cut to {length} tokens; 0 forgets all")
        if sequence.used and sequence.cache is not self:
            raise SequenceError("the sequence belongs to another engine: use the engine that it was opened and stepped with")
        keep = -(-length // PAGE)
        while sequence.used > keep:
            sequence.used -= 1
            self._free.append(int(sequence.pages[sequence.used]))
        sequence.length = min(sequence.length, length)


def cache_of(model: ModelSpec, cache_type: str, pages: int) -> PagedCache:
    """The cache of a model. Raises CacheFullError where there is no memory, SequenceError for layers of different heads."""
    sizes = {(layer.attention.kv_heads, layer.attention.key_size) for layer in model.layers}
    if len(sizes) > 1:
        raise SequenceError("layers with different heads do not share pages yet: the model cannot be run")
    ((kv_heads, head_size),) = sizes
    return PagedCache(len(model.layers), kv_heads, head_size, cache_type, pages)
