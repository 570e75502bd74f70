"""What a block format is, and the register where formats are found by name.

A format stores a matrix of float32 (rows x columns) as integers that share a scale along the columns. It exists in two byte
orders that hold the same bits:

* *blocks*, uint8[rows, columns / block_columns, block_bytes]: one row after another, as GGUF files have it. Where rows have a
  header of their own, uint8[rows, header_bytes + columns / block_columns · block_bytes]: the header, then the row's blocks;
* *tiles*, a flat uint8 array: 16 rows interleaved, in the order in which the matrix kernels read them (see parts.py). A group
  of 16 rows begins with its rows' headers.

`encode` and `decode` in NumPy are the specification of a format. Everything faster must give the same bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

from .errors import FormatError
from .scales import middles

ROWS = 16
"""Rows interleaved in one tile. Rows of a matrix that are not a multiple of it are padded with zeros in tiles."""


ENCODINGS = ("nearest", "search")
"""Methods of `BlockFormat.encode`."""
METHODS = (*ENCODINGS, "feedback")
"""All ways from weights to blocks (methods.py), from the fastest to the best."""


@dataclass(frozen=True)
class Scales:
    """What weights are multiplied with (and added to) in a format, as `BlockFormat.choose` chose it and `decode` will see it.

    scale    float32[rows, padded columns / scale_columns]: of each group of columns; negative where the grid is turned over
    minimum  the same for what is added, or None
    stored   the same numbers as the format keeps them: for `pack`, and nobody else's business
    """

    scale: np.ndarray
    minimum: np.ndarray | None
    stored: tuple[np.ndarray, ...]

    def __getitem__(self, rows: slice) -> Scales:
        """Those of a run of rows."""
        return Scales(self.scale[rows], None if self.minimum is None else self.minimum[rows], tuple(s[rows] for s in self.stored))


class BlockFormat(ABC):
    """One way of storing a matrix of weights. Subclasses are one file each and register themselves with `register`.

    Scales and codes are chosen apart, so that other methods than `encode` (error feedback) can choose codes. For formats of integers

        scales = form.choose(weights, importance, method)         rounded to what is stored
        codes = form.nearest_codes(weights, scales)               or any other uint8[rows, padded columns] below len(form.levels)
        blocks = form.pack(scales, codes)
        form.decode(blocks) == form.levels[codes] * scale (+ minimum), each scale for its scale_columns columns, bit for bit

    Attributes
    ----------
    name           id in files and on the command line, such as "q4_0"
    block_columns  weights per block, along the columns; columns are padded to a multiple of it with zeros
    block_bytes    bytes of one block of one row in the order of blocks
    header_bytes   bytes that one row adds before its blocks (a scale of its scales); 0 for most formats
    scale_columns  weights that share one scale as the kernels see it: 16 or 32
    gguf_type      the name of the GGUF type that holds bit for bit the same blocks, or None
    gguf_file_type what `general.file_type` is in GGUF files of mostly this type (llama.cpp's LLAMA_FTYPE), or None
    scales         how scales are stored (storage.py), for methods that move scales after `choose`; None: they stay as chosen
    integers       True if the kernels multiply integers (int8 activations); False for f32, f16 and bf16
    """

    name: ClassVar[str]
    block_columns: ClassVar[int] = 32
    block_bytes: ClassVar[int]
    header_bytes: ClassVar[int] = 0
    scale_columns: ClassVar[int] = 32
    gguf_type: ClassVar[str | None] = None
    gguf_file_type: ClassVar[int | None] = None
    scales: ClassVar[Any] = None
    integers: ClassVar[bool] = True

    @property
    def bits(self) -> int:
        """Bits of one code, or of one number where there are no codes; scales not counted."""
        return int(self.bits_per_weight())

    @property
    def tile_bytes(self) -> int:
        """Bytes of one tile: ROWS rows of one block."""
        return ROWS * self.block_bytes

    def bits_per_weight(self, columns: int | None = None) -> float:
        """Bits per weight of a long row, or of a row of `columns` weights with its padding and header, in tiles."""
        if columns is None:
            return 8 * self.tile_bytes / (ROWS * self.block_columns)
        blocks = -(-columns // self.block_columns)
        return 8 * (self.header_bytes + blocks * self.tile_bytes / ROWS) / columns

    def blocks_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Shape of a matrix in blocks: (rows, blocks, block_bytes), or (rows, bytes of a row) if rows have headers."""
        blocks = -(-columns // self.block_columns)
        if self.header_bytes:
            return rows, self.header_bytes + blocks * self.block_bytes
        return rows, blocks, self.block_bytes

    def tiles_nbytes(self, rows: int, columns: int, matrices: int = 1) -> int:
        """Bytes that matrices of that size take in tiles; each is padded to whole groups of ROWS rows."""
        groups, blocks = -(-rows // ROWS), -(-columns // self.block_columns)
        return matrices * groups * (ROWS * self.header_bytes + blocks * self.tile_bytes)

    @abstractmethod
    def encode(self, weights: np.ndarray, importance: np.ndarray | None = None, method: str | None = None) -> np.ndarray:
        """float32[rows, columns] -> uint8[blocks_shape].

        importance: float32[columns], the weight of a column's squared error (None: all alike).
        method: one of ENCODINGS: "nearest" (scale from the largest weight, GGUF's reference rounding) or "search" (least weighted
        squared error over scales), or None for the format's default. Padding columns are zero. Never gives a non-finite scale.
        """

    @abstractmethod
    def decode(self, blocks: np.ndarray, columns: int | None = None) -> np.ndarray:
        """uint8[blocks_shape] -> float32[rows, columns]; without `columns`, padding is kept."""

    @property
    def levels(self) -> np.ndarray:
        """float32[n], ascending: the value of each code before it is scaled. Two may be equal: methods choose the second of them.

        Raises FormatError if there are no codes.
        """
        raise FormatError(f"{self.name} has no codes: weights are stored as they are")

    def choose(self, weights: np.ndarray, importance: np.ndarray | None = None, method: str | None = None) -> Scales:
        """The scales that `encode` would give float32[rows, columns]; arguments and errors as there."""
        raise FormatError(f"{self.name} has no scales to choose")

    def pack(self, scales: Scales, codes: np.ndarray) -> np.ndarray:
        """Scales and uint8[rows, padded columns] -> blocks."""
        raise FormatError(f"{self.name} has no codes: weights are stored as they are")

    def unpack(self, blocks: np.ndarray) -> tuple[Scales, np.ndarray]:
        """The inverse of `pack`."""
        raise FormatError(f"{self.name} has no codes: weights are stored as they are")

    def bounds(self, blocks: np.ndarray) -> np.ndarray | None:
        """float32[rows, groups of columns]: what no weight of a group exceeds in magnitude, by its scales alone.

        Where it is finite, so are the weights, whatever file the blocks are from. None if only `decode` can tell.
        """
        return None

    def codes(self, blocks: np.ndarray) -> np.ndarray:
        """uint8[rows, padded columns]: the codes in blocks."""
        return self.unpack(blocks)[1]

    def nearest_codes(self, weights: np.ndarray, scales: Scales) -> np.ndarray:
        """uint8[rows, padded columns]: for each weight the code that comes nearest; padding columns are zero weights.

        Where a scale is zero, that is the code whose level is nearest to zero.
        """
        return nearest_codes(self.levels, weights, scales, self.scale_columns, self.block_columns)

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


def nearest_codes(levels: np.ndarray, weights: np.ndarray, scales: Scales, scale_columns: int, block_columns: int) -> np.ndarray:
    """See BlockFormat.nearest_codes: for any ascending levels, one group of columns after another in bounded memory."""
    rows, columns = weights.shape
    padded = -(-columns // block_columns) * block_columns
    between = middles(levels)
    none = np.uint8(np.abs(levels).argmin())
    codes = np.empty((rows, padded), np.uint8)
    for group in range(padded // scale_columns):
        at = slice(group * scale_columns, (group + 1) * scale_columns)
        x = np.zeros((rows, scale_columns), np.float32)
        part = weights[:, at]
        x[:, : part.shape[1]] = part
        scale = scales.scale[:, group, None]
        if scales.minimum is not None:
            x -= scales.minimum[:, group, None]
        with np.errstate(over="ignore"):
            found = np.searchsorted(between, x / np.where(scale == 0, np.float32(1), scale))
        codes[:, at] = np.where(scale == 0, none, found)
    return codes


BUILT_IN = (
    "f32", "f16", "bf16", "q8_0", "q6_0", "q6_r", "q5_1", "q5_0", "q5_r", "nl5", "q4_1", "q4_0", "iq4_nl", "nl4_16", "mxfp4", "nl4",
)  # fmt: skip
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
