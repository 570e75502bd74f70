"""Files written by any version must decode for ever: bytes kept from the day a format was new."""

import json
import math

import numpy as np
import pytest

from halfbyte.quant import get_format
from halfbyte.quant.block import BUILT_IN
from halfbyte.quant.encoders import tile
from support.golden_formats import COLUMNS, FOLDER, ROWS, digest, golden_weights

DIGESTS = json.loads((FOLDER / "digests.json").read_text())


def golden(name: str) -> tuple[np.ndarray, np.ndarray]:
    block_format = get_format(name)
    data = np.fromfile(FOLDER / f"{name}.bin", np.uint8)
    shape = block_format.blocks_shape(ROWS, COLUMNS)
    size = math.prod(shape)
    return data[:size].reshape(shape), data[size:]


def test_every_format_of_this_package_has_golden_bytes():
    assert set(DIGESTS) == set(BUILT_IN) == {path.stem for path in FOLDER.glob("*.bin")}


@pytest.mark.parametrize("name", sorted(DIGESTS))
def test_golden_bytes_decode(name):
    block_format, (blocks, tiles) = get_format(name), golden(name)
    assert digest(block_format.decode(blocks, COLUMNS)) == DIGESTS[name]
    np.testing.assert_array_equal(block_format.untile(tiles, ROWS, COLUMNS), blocks)
    np.testing.assert_array_equal(block_format.tile(blocks), tiles)
    np.testing.assert_array_equal(tile(block_format, blocks), tiles)


@pytest.mark.parametrize("name", sorted(DIGESTS))
def test_encoding_still_gives_the_golden_bytes(name):
    np.testing.assert_array_equal(get_format(name).encode(golden_weights(), method="nearest"), golden(name)[0])


def test_golden_weights_are_what_they_were():
    assert digest(golden_weights()) == DIGESTS["f32"]


def test_tile_layout_byte_by_byte():
    """The layout as the architecture page states it, spelled out for q4_0 and q8_0, against tiles."""
    blocks, tiles = golden("q4_0")
    group, block, row, column = 0, 1, 5, 22
    at = (group * blocks.shape[1] + block) * 288
    assert tiles[at + 2 * row : at + 2 * row + 2].tobytes() == blocks[row, block, :2].tobytes()
    code = (blocks[row, block, 2 + column % 16] >> (4 * (column // 16))) & 15
    vector, c = column // 4, column % 4
    assert (tiles[at + 32 + 64 * (vector // 2) + 4 * row + c] >> (4 * (vector % 2))) & 15 == code
    blocks, tiles = golden("q8_0")
    at = (group * blocks.shape[1] + block) * 544
    assert tiles[at + 32 + 64 * vector + 4 * row + c] == (int(blocks[row, block, 2 + column].view(np.int8)) + 128)
    rows = golden("q8_0")[0].shape[0]
    last = tiles[3 * 544 :][: 3 * 544].reshape(3, 544)  # group 1: rows 16, 17, 18 and thirteen that are padding
    assert rows == 19 and (last[:, 2 * 3 : 32] == 0).all()
    assert (last[:, 32:].reshape(3, 8, 16, 4)[:, :, 3:] == 128).all()


def test_fifth_bits_and_top_pairs_byte_by_byte():
    blocks, tiles = golden("q5_1")
    block, row, column = 2, 9, 3
    for column in range(32):
        vector, c = column // 4, column % 4
        bit = (int.from_bytes(blocks[row, block, 4:8].tobytes(), "little") >> column) & 1
        assert (tiles[block * 384 + 64 + 256 + 4 * row + c] >> vector) & 1 == bit
    assert tiles[block * 384 + 32 + 2 * row :][:2].tobytes() == blocks[row, block, 2:4].tobytes()  # the minimum
    blocks, tiles = golden("q6_0")
    for column in range(32):
        vector, c = column // 4, column % 4
        pair = (blocks[row, block, 18 + column % 8] >> (2 * (column // 8))) & 3
        plane = tiles[block * 416 + 32 + 256 + 64 * (vector // 4) + 4 * row + c]
        assert (plane >> (2 * (vector % 4))) & 3 == pair


def test_row_scaled_tiles_byte_by_byte():
    """Numbers of rows, 8-bit scales of 32 columns, 6-bit ones of 16, as docs/file-format.md states them."""
    for name in ("nl4", "nl4_16", "nl5", "q5_r", "q6_r"):
        form, (blocks, tiles) = get_format(name), golden(name)
        row, block = 5, 1
        assert tiles[2 * row : 2 * row + 2].tobytes() == blocks[row, :2].tobytes()
        at = 32 + block * form.tile_bytes
        scales = blocks[row, 2 + block * form.block_bytes :][: 32 // form.scale_columns].view(np.int8).astype(int)
        if name == "nl4_16":
            assert tiles[at + row] == (scales[0] + 32) % 16 + 16 * ((scales[1] + 32) % 16)
            for half in range(2):
                word = int.from_bytes(tiles[at + 16 + 4 * half :][:4].tobytes(), "little")
                assert word >> (2 * row) & 3 == (scales[half] + 32) // 16
        else:
            assert tiles[at + row].view(np.int8) == scales[0]
        column = 22
        before = sum(part.block_bytes for part in form.parts[:-1])
        inner = blocks[row, 2 + block * form.block_bytes + len(scales) + before :]
        vector, c = column // 4, column % 4
        code = inner[column % 16] >> (4 * (column // 16)) & 15
        assert tiles[at + form.scales.tile_bytes + 16 * before + 64 * (vector // 2) + 4 * row + c] >> (4 * (vector % 2)) & 15 == code
