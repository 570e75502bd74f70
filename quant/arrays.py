"""Matrices as formats take them: whole blocks of columns, groups of 16 rows, runs of rows in bounded memory, and their checks."""

from __future__ import annotations

import numpy as np

from .block import ROWS
from .errors import FormatError

COLUMNS = 32
"""Columns of one block, and of one tile."""


def pad_columns(matrix: np.ndarray, multiple: int = COLUMNS) -> np.ndarray:
    """[rows, columns] with zero columns added up to a multiple of `multiple`; the same array if there is nothing to add."""
    missing = -matrix.shape[-1] % multiple
    return matrix if missing == 0 else np.pad(matrix, [(0, 0)] * (matrix.ndim - 1) + [(0, missing)])


def group_rows(array: np.ndarray) -> np.ndarray:
    """[rows, ...] -> [groups, 16, ...]; missing rows of the last group are zeros."""
    missing = -array.shape[0] % ROWS
    if missing:
        array = np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)])
    return array.reshape(array.shape[0] // ROWS, ROWS, *array.shape[1:])


def row_chunks(rows: int, columns: int, weights: int = 1 << 20) -> list[slice]:
    """Slices of whole 16-row groups, about `weights` weights each, so that temporary arrays stay small whatever the matrix."""
    step = max(ROWS, weights // max(columns, 1) // ROWS * ROWS)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def check_matrix(weights: np.ndarray, name: str) -> np.ndarray:
    """`weights` as float32. Raises FormatError unless it is a matrix of floating point numbers."""
    if weights.ndim != 2 or weights.dtype.kind != "f":
        raise FormatError(f"{name}: weights must be a float matrix [rows, columns], not {weights.dtype}{list(weights.shape)}")
    with np.errstate(over="ignore"):
        return np.asarray(weights, np.float32)


def check_blocks(blocks: np.ndarray, block_bytes: int, name: str) -> None:
    """Raises FormatError unless `blocks` is uint8[rows, blocks, block_bytes]."""
    if blocks.dtype != np.uint8 or blocks.ndim != 3 or blocks.shape[2] != block_bytes:
        raise FormatError(f"{name}: blocks must be uint8[rows, blocks, {block_bytes}], not {blocks.dtype}{list(blocks.shape)}")


def check_codes(codes: np.ndarray, shape: tuple[int, int], count: int, name: str) -> None:
    """Raises FormatError unless `codes` is uint8 of that shape, every code below `count`."""
    if codes.dtype != np.uint8 or codes.shape != shape:
        raise FormatError(f"{name}: codes must be uint8{list(shape)}, not {codes.dtype}{list(codes.shape)}")
    if codes.size and int(codes.max()) >= count:
        raise FormatError(f"{name}: there is no code {int(codes.max())}; codes are below {count}")


def check_tiles(tiles: np.ndarray, nbytes: int, name: str) -> np.ndarray:
    """`tiles` as a flat uint8 array. Raises FormatError unless it holds exactly `nbytes` bytes."""
    if tiles.dtype != np.uint8 or tiles.size != nbytes:
        raise FormatError(f"{name}: tiles must be {nbytes} bytes of uint8, not {tiles.size} of {tiles.dtype}")
    return tiles.reshape(-1)
