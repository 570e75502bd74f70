"""The KV cache: pages of PAGE positions, handed out to sequences, whose block tables say which page holds which positions.

Layers that keep the same of a position form a group. A page covers all layers of its group: page p of layer l lies at
`layer(l) + p * page_bytes`. A group has a free list, and every sequence a block table for each group. A group with a window takes back the
pages behind it. Memory is reserved at once and taken by the operating system as pages are first written; the page given back last is
handed out first, so a group with a window touches little of what it may use.

Pages change hands by an assignment and an operator next to each other, with no call between: a KeyboardInterrupt comes before or after.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable

import numpy as np

from ...formats.layers import ModelSpec
from ...quant.errors import HalfbyteError
from ..kernels.structs import PAGE
from ..plan.operands import LayerShape

BEHIND = 256
"""Positions kept behind a window, by which a text can be cut back and go on; a cut further back has to begin anew."""


class CacheFullError(HalfbyteError):
    """No page of the KV cache is free, or there is no memory for one of the size asked for."""


class SequenceError(HalfbyteError):
    """A sequence of another engine, or a length that it does not have."""


class BlockTable:
    """The pages of one sequence in one group. `pages`: int64 page numbers, those from `first` to `used` - 1 in use."""

    def __init__(self) -> None:
        self.pages = np.zeros(8, np.int64)
        self.first = 0
        self.used = 0


class Sequence:
    """The tokens of one text in the cache. `length`: positions written; `tables`: a BlockTable for each group of the cache.

    cache: the one whose pages these are; None before the first. A sequence that is dropped gives them back.
    """

    def __init__(self) -> None:
        self.cache: PagedCache | None = None
        self.length = 0
        self.tables: list[BlockTable] = []
        self._drop: weakref.finalize | None = None

    @property
    def used(self) -> int:
        """Pages held, of all groups."""
        return sum(table.used - table.first for table in self.tables)

    @property
    def addresses(self) -> list[int]:
        """Where the block tables lie."""
        return [table.pages.ctypes.data for table in self.tables]

    def __repr__(self) -> str:
        return f"<Sequence of {self.length} positions in {self.used} pages>"


class PageGroup:
    """Layers of one shape: their memory and the pages of it that nobody uses."""

    def __init__(self, shape: LayerShape, layers: int, pages: int):
        self.shape, self.layers, self.pages = shape, layers, pages
        self.page_bytes = shape.page_bytes
        raw = np.zeros(layers * pages * self.page_bytes + 64, np.uint8)
        self.memory = raw[-raw.ctypes.data % 64 :]
        self.free = list(range(pages - 1, -1, -1))

    def layer(self, number: int) -> int:
        """Address of the first page of the group's layer of that number."""
        return self.memory.ctypes.data + number * self.pages * self.page_bytes

    def take(self, table: BlockTable, used: int) -> None:
        """Adds pages until `used` are in use; there must be as many."""
        if used > table.pages.size:
            grown = np.zeros(max(used, 2 * table.pages.size), np.int64)
            grown[: table.used] = table.pages[: table.used]
            table.pages = grown
        free = self.free
        rest = len(free) - (used - table.used)
        if used > table.used:
            table.pages[table.used : used] = free[rest:][::-1]
            table.used = used
            del free[rest:]

    def cut(self, table: BlockTable, used: int) -> None:
        """Takes back the pages behind the first `used`."""
        if used < table.used:
            free, returned = self.free, table.pages[max(used, table.first) : table.used][::-1].tolist()
            first = min(table.first, used)
            table.first, table.used = first, used
            free += returned

    def slide(self, table: BlockTable, first: int) -> None:
        """Takes back the pages before page `first`."""
        if first > table.first:
            free, returned = self.free, table.pages[table.first : first].tolist()
            table.first = first
            free += returned


class PagedCache:
    """Pages and their use. Not thread-safe; its owner calls it between steps.

    layers: the shape of each; pages: of every group. shared: the layers of a group share their memory, for when each layer is done with
    before the next begins. Raises CacheFullError if there is no memory for it.

    Attributes: `shapes` of the layers, `groups`, `pages`.
    """

    def __init__(self, layers: Iterable[LayerShape], pages: int, shared: bool = False):
        self.shapes, self.pages = list(layers), pages
        kinds = list(dict.fromkeys(self.shapes))
        self._group = [kinds.index(shape) for shape in self.shapes]
        self._place = [0 if shared else self._group[:layer].count(group) for layer, group in enumerate(self._group)]
        counts = [1 if shared else self._group.count(group) for group in range(len(kinds))]
        try:
            self.groups = [PageGroup(shape, count, pages) for shape, count in zip(kinds, counts, strict=True)]
        except (MemoryError, ValueError, OverflowError):
            nbytes = sum(shape.page_bytes * count * pages for shape, count in zip(kinds, counts, strict=True))
            raise CacheFullError(
                f"a KV cache of {pages * PAGE} positions takes {nbytes / 1e9:.1f} GB, which are not there; ask for less context (--context)"
            ) from None
        self._dropped: deque[list[BlockTable]] = deque()

    @classmethod
    def of(cls, model: ModelSpec, layout: str, pages: int, shared: bool = False) -> PagedCache:
        """The cache of a model. layout: of kernels/cache_layouts."""
        return cls((LayerShape.of(layer.attention, layout) for layer in model.layers), pages, shared)

    def group(self, layer: int) -> int:
        """The number of a layer's group, of which every sequence has a block table."""
        return self._group[layer]

    def layer(self, layer: int) -> int:
        """Address of a layer's first page."""
        return self.groups[self._group[layer]].layer(self._place[layer])

    @property
    def free_positions(self) -> int:
        """Positions in pages that nobody uses, in the group that has fewest."""
        self._collect()
        return min(len(group.free) for group in self.groups) * PAGE

    @property
    def bytes_per_position(self) -> float:
        """Bytes that a token takes in all layers, as long as no window has passed it."""
        return sum(group.layers * group.page_bytes for group in self.groups) / PAGE

    def reserve(self, sequence: Sequence, positions: int) -> None:
        """Gives a sequence pages for `positions` positions in all. Raises CacheFullError, SequenceError, having changed nothing."""
        self._collect()
        if sequence.cache is not self:
            self._adopt(sequence)
        needed = -(-positions // PAGE)
        for group, table in zip(self.groups, sequence.tables, strict=True):
            if needed - table.used > len(group.free):
                free, wanted = len(group.free) * PAGE, (needed - table.used) * PAGE
                raise CacheFullError(
                    f"the KV cache is full: {wanted} positions are needed, {free} are free; use a smaller context or fewer sequences"
                )
        for group, table in zip(self.groups, sequence.tables, strict=True):
            group.take(table, needed)

    def truncate(self, sequence: Sequence, length: int) -> int:
        """Forgets the positions from `length` on; pages that hold none of the rest are free at once.

        Returns the length that is left: the one asked for or, if the sequence is shorter, its own; 0 if it has outgrown a window whose
        pages for that length are gone, which they are not for the last BEHIND positions. Raises SequenceError for a negative length, or a
        sequence that has pages of another cache.
        """
        if length < 0:
            raise SequenceError(f"a sequence cannot be cut to {length} tokens; 0 forgets all")
        if sequence.used and sequence.cache is not self:
            raise SequenceError("the sequence belongs to another engine: use the engine that it was opened and stepped with")
        length = min(sequence.length, length)
        for group, table in zip(self.groups, sequence.tables, strict=False):
            if table.first * PAGE > max(length - group.shape.window + 1, 0):  # the next token would see what is gone
                length = 0
        sequence.length = length
        for group, table in zip(self.groups, sequence.tables, strict=False):
            group.cut(table, -(-length // PAGE))
        return length

    def slide(self, sequence: Sequence) -> None:
        """Takes back the pages that lie more than BEHIND positions behind their group's window, which later tokens will not see."""
        for group, table in zip(self.groups, sequence.tables, strict=True):
            if group.shape.window:
                group.slide(table, max(sequence.length + 1 - group.shape.window - BEHIND, 0) // PAGE)

    def _adopt(self, sequence: Sequence) -> None:
        if sequence.used:
            raise SequenceError("the sequence belongs to another engine: use the engine that it was opened and stepped with")
        if sequence._drop is not None:
            sequence._drop.detach()
        tables = [BlockTable() for _ in self.groups]
        # Garbage is collected in any thread, in the middle of anything: the tables are only queued, until the owner is here again.
        sequence._drop = weakref.finalize(sequence, self._dropped.append, tables)
        sequence._drop.atexit = False
        sequence.cache, sequence.tables = self, tables

    def _collect(self) -> None:
        """Takes back the pages of sequences that were dropped."""
        while self._dropped:
            for group, table in zip(self.groups, self._dropped[0], strict=True):
                group.cut(table, 0)
            self._dropped.popleft()
