"""What a layout of the KV cache tells the kernels: bytes of a page, how a position is written, how keys and values are read.

A page holds PAGE positions of one layer, one KV head after another. Whatever belongs to a position and head (codes, scales) is written
when its token is, and never again: nothing that is in a page depends on what comes into it later.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CacheWriter:
    """Inlined functions of rope_store.py. head: address of a KV head in a page; slot: the position's place in the page.

    key(x, head, slot, room)    writes a rotated key, float32[key size] at x
    value(x, head, slot, room)  writes a value, float32[value size] at x
    room: address of WRITER_ROOM bytes that are the worker's own
    """

    key: Callable[..., Any]
    value: Callable[..., Any]


@dataclass(frozen=True)
class CacheReader:
    """Inlined functions of attention.py over SIMD values. head: address of a KV head in a page.

    keys(head, d)               f32 tile (PAGE / 16, 1): dimension d of the keys of all positions of the page, up to the factor in `scores`
    scores(head, sums)          what sums over the dimensions, a tile (PAGE / 16, rows), are multiplied by to become scores
    weights(head, half, e)      weights of 16 positions from 16 * half on, ready to be multiplied by `values`; None: they are as they are
    values(width)               a function (head, slot, c): f32 tile (1, width), dimensions 16 * c and on of the value of one position
    """

    keys: Callable[..., Any]
    scores: Callable[..., Any]
    weights: Callable[..., Any] | None
    values: Callable[[int], Callable[..., Any]]


class CacheLayout(ABC):
    """A way of keeping keys and values. `name`: what it is called in options and in parameters of kernels."""

    name: str

    @abstractmethod
    def keys_bytes(self, key_size: int) -> int:
        """Bytes of the keys of one KV head in a page; the values follow."""

    @abstractmethod
    def values_bytes(self, value_size: int) -> int:
        """Bytes of the values of one KV head in a page."""

    def head_bytes(self, key_size: int, value_size: int) -> int:
        """Bytes of one KV head in a page."""
        return self.keys_bytes(key_size) + self.values_bytes(value_size)

    @abstractmethod
    def writer(self, key_size: int, value_size: int) -> CacheWriter:
        """How rope_store writes a position. Imports numba."""

    @abstractmethod
    def reader(self, key_size: int, value_size: int) -> CacheReader:
        """How attention reads a page. Imports numba."""
