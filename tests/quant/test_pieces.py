"""Kernel pieces read from tiles what decode reads from blocks, for all formats, and for several row groups at once."""

import re

import numpy as np
import pytest
from numba import njit

from halfbyte.quant import block as registry
from halfbyte.quant import get_format
from halfbyte.quant.block import BUILT_IN
from halfbyte.quant.jit.piece import FloatPiece, IntegerPiece
from halfbyte.quant.jit.simd import F16, F32, I32, Vector, store_tile, tile
from support import ROOT

GROUPS = 2


def read_integers(piece: IntegerPiece, tiles: np.ndarray, stride: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [groups * 16, 32], scales and minima [2, groups * 16] of the first tile of each row group, through the piece."""
    ints, halves = tile(I32, GROUPS, 1), tile(F16, GROUPS, 1)
    codes_of, scale_of = piece.codes, piece.scale
    minimum_of, has_minimum = piece.minimum or piece.scale, piece.minimum is not None

    @njit
    def read(address, stride, codes, scales, minima):
        for j in range(4):
            low, high = codes_of(ints, address, stride, j)
            store_tile(codes + 128 * j, low, 512, 0)
            store_tile(codes + 128 * j + 64, high, 512, 0)
        for half in range(2):
            store_tile(scales + 64 * GROUPS * half, scale_of(halves, address, stride, half), 64, 0)
            if has_minimum:
                store_tile(minima + 64 * GROUPS * half, minimum_of(halves, address, stride, half), 64, 0)

    codes = np.zeros((GROUPS, 8, 16, 4), np.uint8)
    scales, minima = np.zeros((2, 2, GROUPS, 16), np.float32)
    read(tiles.ctypes.data, stride, codes.ctypes.data, scales.ctypes.data, minima.ctypes.data)
    return codes.transpose(0, 2, 1, 3).reshape(GROUPS * 16, 32), scales.reshape(2, -1), minima.reshape(2, -1)


def read_rows(piece: IntegerPiece, tiles: np.ndarray, stride: int) -> np.ndarray:
    """The numbers of rows, [groups * 16], through the piece."""
    floats, row_of = tile(F32, GROUPS, 1), piece.row

    @njit
    def read(address, stride, out):
        store_tile(out, row_of(floats, address, stride), 64, 0)

    out = np.zeros((GROUPS, 16), np.float32)
    read(tiles.ctypes.data, stride, out.ctypes.data)
    return out.reshape(-1)


def check(block_format, piece: IntegerPiece) -> None:
    header = 16 * piece.header_bytes
    tiles = np.random.default_rng(0).integers(0, 256, block_format.tiles_nbytes(16 * GROUPS, 96), dtype=np.uint8)
    stride = tiles.size // GROUPS
    for group in tiles.reshape(GROUPS, stride):
        if header:
            group[1:header:2] = 0x3F  # finite bf16
        else:
            for t in group.reshape(3, -1):
                t[1 : 64 if piece.minimum is not None else 32 : 2] &= 0x3F  # finite f16
    assert piece.tile_bytes == block_format.tile_bytes and piece.scale_columns == block_format.scale_columns
    assert piece.header_bytes == block_format.header_bytes and (piece.row is not None) == (header > 0)
    expected = block_format.decode(block_format.untile(tiles, 16 * GROUPS, 96))
    rows = read_rows(piece, tiles, stride) if piece.row is not None else np.ones(16 * GROUPS, np.float32)
    for i in range(3):
        codes, scales, minima = read_integers(piece, tiles[header + i * piece.tile_bytes :], stride)
        assert piece.wide or codes.max() < 128
        scales, minima = (np.repeat(each.T, 16, axis=1) for each in (scales * rows, minima))
        np.testing.assert_array_equal(scales * (codes.astype(np.float32) - piece.bias) + minima, expected[:, 32 * i : 32 * i + 32])


@pytest.mark.parametrize("name", [name for name in BUILT_IN if get_format(name).integers])
def test_integer_pieces(name):
    check(get_format(name), get_format(name).piece())


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_float_pieces(name):
    block_format = get_format(name)
    piece = block_format.piece()
    assert isinstance(piece, FloatPiece) and piece.tile_bytes == block_format.tile_bytes
    words, values_of = tile(Vector(piece.element), GROUPS, 1), piece.values

    @njit
    def read(address, stride, out):
        for k in range(32):
            store_tile(out + 64 * k, values_of(words, address, stride, k), 2048, 0)

    w = np.random.default_rng(0).standard_normal((16 * GROUPS, 96)).astype(np.float32)
    blocks = block_format.encode(w)
    tiles, out = block_format.tile(blocks), np.zeros((GROUPS, 32, 16), np.float32)
    for i in range(3):
        read(tiles[i * piece.tile_bytes :].ctypes.data, 3 * piece.tile_bytes, out.ctypes.data)
        got = out.transpose(0, 2, 1).reshape(-1, 32)
        np.testing.assert_array_equal(got, block_format.decode(blocks)[:, 32 * i : 32 * i + 32])


def test_the_piece_of_the_page(monkeypatch):
    """The worked example of docs/adding-a-block-format.md has a piece of its own."""
    page = (ROOT / "docs" / "adding-a-block-format.md").read_text()
    monkeypatch.setattr(registry, "_formats", dict(registry._formats))
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1), {"__name__": "my_formats"})
    check(get_format("q2_0"), get_format("q2_0").piece())
