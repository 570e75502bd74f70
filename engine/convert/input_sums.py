"""Sums over the inputs of matrices: Σ x² of every column, and the Gram matrix Σ x xᵀ, which error feedback needs.

Inputs come as panels (kernels/panels.py), chunk after chunk, and wait until there are some thousand tokens of them: a matrix product
of that depth is worth its overhead. It is done tile by tile of the upper triangle; tiles and depth depend on the shapes alone and every
tile is summed by one thread in the order of the text, so the sums do not depend on the number of threads. Within a depth sums are
float32, as BLAS makes them; column sums are then added in float64, Gram matrices in float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor

import numpy as np

from ..kernels.structs import BLOCK, RECORD, TOKENS

DEPTH = 2048
"""Tokens that are multiplied at once, at least one chunk."""
TILE = 512
"""Most columns of a tile: a tile of the Gram matrix and its inputs stay in the caches."""

_RECORD = RECORD["f32"] // 4


def read_panels(memory: np.ndarray, tokens: int, columns: int, out: np.ndarray) -> None:
    """Copies float panels of `tokens` tokens, uint8[n], to float32[tokens, columns in whole blocks of 32], C-contiguous."""
    blocks = -(-columns // BLOCK)
    floats = memory[: memory.size // 4 * 4].view(np.float32)
    panels, rest = divmod(tokens, TOKENS)
    full = panels * TOKENS
    source = floats[: full * blocks * _RECORD].reshape(panels, blocks, TOKENS, BLOCK)
    out[:full].reshape(panels, TOKENS, blocks, BLOCK)[...] = source.transpose(0, 2, 1, 3)
    if rest:
        width = rest if rest <= 2 else (rest + 1) // 2 * 2
        start = full * blocks * _RECORD
        source = floats[start : start + blocks * width * _RECORD].reshape(blocks, width, BLOCK)[:, :rest]
        out[full:tokens].reshape(rest, blocks, BLOCK)[...] = source.transpose(1, 0, 2)


class InputSums:
    """Sums over one input of `columns` columns.

    sums    float64[columns], Σ x²
    gram    float32[columns, columns], Σ x xᵀ, or None; whole after `finish`
    count   tokens that were added
    """

    def __init__(self, columns: int, gram: bool, chunk: int):
        """chunk: most tokens of one `space`."""
        self.columns, self.count = columns, 0
        self.sums = np.zeros(columns)
        self.gram = np.zeros((columns, columns), np.float32) if gram else None
        self._depth = max(1, DEPTH // chunk) * chunk
        self._waiting = np.empty((self._depth, -(-columns // BLOCK) * BLOCK), np.float32)
        self._filled = 0
        parts = -(-columns // TILE)
        self._edges = [columns * i // parts // BLOCK * BLOCK for i in range(parts)] + [columns]

    def space(self, tokens: int) -> np.ndarray:
        """float32[tokens, columns in whole blocks], where the next tokens are to be written. `flush` first if `full`."""
        start = self._filled
        self._filled += tokens
        return self._waiting[start : start + tokens]

    def full(self, tokens: int) -> bool:
        """True if there is no space for so many tokens."""
        return self._filled + tokens > self._depth

    def add(self, a: int, b: int) -> None:
        """Adds what waits to one tile. Tiles are independent of each other."""
        edges = self._edges
        rows, columns = slice(edges[a], edges[a + 1]), slice(edges[b], edges[b + 1])
        x = self._waiting[: self._filled]
        with np.errstate(over="ignore", invalid="ignore"):  # the sums then are not finite, which is looked at when they are used
            if self.gram is None:
                self.sums[rows] += np.einsum("ij,ij->j", x[:, rows], x[:, rows])
                return
            product = x[:, rows].T @ x[:, columns]
            if a == b:
                self.sums[rows] += product.diagonal()
            self.gram[rows, columns] += product

    def tiles(self) -> list[tuple[int, int]]:
        """The tiles that `add` takes, the expensive ones first."""
        n = len(self._edges) - 1
        above = [(a, b) for a in range(n) for b in range(a + 1, n)] if self.gram is not None else []
        return above + [(a, a) for a in range(n)]

    def flushed(self) -> None:
        """What waited has been added."""
        self.count += self._filled
        self._filled = 0

    def finish(self) -> None:
        """Completes the Gram matrix below its diagonal and gives back working memory. Nothing can be added any more."""
        self._waiting = np.empty((0, 0), np.float32)
        if self.gram is None:
            return
        for a, (start, stop) in enumerate(zip(self._edges, self._edges[1:], strict=False)):
            block = self.gram[start:stop, start:stop]
            lower = np.tril_indices(stop - start, -1)
            block[lower] = block.T[lower]
            for other in range(a):
                first, last = self._edges[other], self._edges[other + 1]
                self.gram[start:stop, first:last] = self.gram[first:last, start:stop].T


def flush(moments: Iterable[InputSums], pool: Executor) -> None:
    """Adds what waits in all of them, tiles side by side."""
    waiting = [m for m in moments if m._filled]
    for _ in pool.map(lambda task: task[0].add(*task[1]), [(m, tile) for m in waiting for tile in m.tiles()]):
        pass
    for each in waiting:
        each.flushed()
