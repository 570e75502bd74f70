"""What a block format is, and the register where formats are found by name.

A format stores a matrix of float32 (rows x columns) as integers that share a scale along the columns. It exists in two byte
orders that hold the same bits:

* *blocks*, uint8[rows, columns / block_columns, block_bytes]: one row after another, as GGUF files have it;
* *tiles*, a flat uint8 array: 16 rows interleaved, in the order in which the matrix kernels read them (see layout.py).

`encode` and `decode` in NumPy are the specification of a format. Everything faster must give the same bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

from .errors import FormatError

ROWS = 16
"""Rows interleaved in one tile. Rows of a matrix that are not a multiple of it are padded with zeros in tiles."""


class BlockFormat(ABC):
    """One way of storing a matrix of weights. Subclasses are one file each and register themselves with `register`.

    Attributes
    ----------
    name           id in files and on the command line, such as "q4_0"
    block_columns  weights per block, along the columns; columns are padded to a multiple of it with zeros
    block_bytes    bytes of one block of one row
    header_bytes   bytes that one row adds before its blocks (second-level scales); 0 for most formats
    scale_columns  weights that share one scale as the kernels see it: 16 or 32
    gguf_type      the name of the GGUF type that holds bit for bit the same blocks, or None
    integers       True if the kernels multiply integers (int8 activations); False for f32, f16 and bf16
    """

    name: ClassVar[str]
    block_columns: ClassVar[int] = 32
    block_bytes: ClassVar[int]
    header_bytes: ClassVar[int] = 0
    scale_columns: ClassVar[int] = 32
    gguf_type: ClassVar[str | None] = None
    integers: ClassVar[bool] = True

    @property
    def tile_bytes(self) -> int:
        """Bytes of one tile: ROWS rows of one block."""
        return ROWS * self.block_bytes

    def bits_per_weight(self, columns: int | None = None) -> float:
        """Bits per weight of a long row, or of a row of `columns` weights with its padding and header."""
        if columns is None:
            return 8 * self.block_bytes / self.block_columns
        blocks = -(-columns // self.block_columns)
        return 8 * (self.header_bytes + blocks * self.block_bytes) / columns

    def tiles_nbytes(self, rows: int, columns: int) -> int:
        """Bytes that a matrix takes in tiles, padding included."""
        groups, blocks = -(-rows // ROWS), -(-columns // self.block_columns)
        return groups * (ROWS * self.header_bytes + blocks * self.tile_bytes)

    @abstractmethod
    def encode(self, weights: np.ndarray, importance: np.ndarray | None = None, method: str | None = None) -> np.ndarray:
        """float32[rows, columns] -> uint8[rows, blocks, block_bytes].

        importance: float32[columns], the weight of a column's squared error (None: all alike).
        method: "nearest" (scale from the largest weight, GGUF's reference rounding), "search" (least weighted squared
        error over scales), or None for the format's default. Padding columns are zero. Never gives a non-finite scale.
        """

    @abstractmethod
    def decode(self, blocks: np.ndarray, columns: int | None = None) -> np.ndarray:
        """uint8[rows, blocks, block_bytes] -> float32[rows, columns]; without `columns`, padding is kept."""

    @abstractmethod
    def tile(self, blocks: np.ndarray) -> np.ndarray:
        """Blocks -> tiles: uint8[tiles_nbytes]. Rows are padded to a multiple of ROWS with zero blocks. Loses nothing."""

    @abstractmethod
    def untile(self, tiles: np.ndarray, rows: int, columns: int) -> np.ndarray:
        """The inverse of `tile`; row padding is dropped, column padding (part of the last block) is kept."""

    @abstractmethod
    def piece(self) -> Any:
        """The kernel piece: how a tile becomes integers and scales in registers (see quant/jit/piece.py). Imports numba."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {self.bits_per_weight():.4g} bits per weight>"


BUILT_IN = ("f32", "f16", "bf16", "q8_0", "q6_0", "q5_1", "q5_0", "q4_1", "q4_0")
"""Formats of this package: the module of that name registers the format. Imported when first asked for."""

_formats: dict[str, BlockFormat] = {}
_entry_points_read = False


def register(cls: type[BlockFormat]) -> type[BlockFormat]:
    """Class decorator: makes one instance of a format known under its name."""
    if cls.name in _formats and type(_formats[cls.name]).__qualname__ != cls.__qualname__:
        raise FormatError(f"two block formats are called {cls.name!r}: {type(_formats[cls.name])!r} and {cls!r}")
    _formats[cls.name] = cls()
    return cls


def get_format(name: str) -> BlockFormat:
    """The format of that name. Formats of other packages are found through the entry point group `halfbyte.formats`.

    Raises FormatError, which lists the known names.
    """
    if name not in _formats:
        if name in BUILT_IN:
            import_module(f".{name}", __package__)
        else:
            _read_entry_points()
    if name not in _formats:
        raise FormatError(f"unknown block format {name!r}; known are {', '.join(format_names())}")
    return _formats[name]


def format_names() -> list[str]:
    """Names of all known formats: those of this package from the widest to the narrowest, then others by name."""
    for name in BUILT_IN:
        get_format(name)
    _read_entry_points()
    return [*BUILT_IN, *sorted(_formats.keys() - set(BUILT_IN))]


def foreign_sources(names: Iterable[str]) -> list[str]:
    """Source files of those named formats that other packages registered; compiled code depends on them."""
    import inspect

    package = __name__.split(".", 1)[0] + "."
    classes = [type(_formats[n]) for n in names if n in _formats]
    return [inspect.getsourcefile(c) or "" for c in classes if not c.__module__.startswith(package)]


def _read_entry_points() -> None:
    global _entry_points_read
    if not _entry_points_read:
        _entry_points_read = True
        from importlib.metadata import entry_points  # 30 ms, so not before a name is asked for that is not ours

        for point in entry_points(group="halfbyte.formats"):
            try:
                register(point.load())
            except Exception as error:
                where = f"entry point {point.name!r} of halfbyte.formats ({point.value})"
                raise FormatError(f"{where} cannot be loaded: {error}") from error
