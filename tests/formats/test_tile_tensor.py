"""Matrices with a matrix axis: a .hbf file, the store of candidates and what the engine makes agree, and each matrix is its own."""

import numpy as np
import pytest

from halfbyte.engine.convert.quantize_tensor import TensorQuantizer
from halfbyte.engine.run.weights import make_matrix
from halfbyte.formats.conversion.stream import Job, streams
from halfbyte.formats.conversion.tile_store import TileStore
from halfbyte.formats.hbf.reader import NativeFile
from halfbyte.formats.hbf.writer import NativeWriter
from halfbyte.formats.tensor import ArrayTensor
from halfbyte.formats.tile_tensor import ArrayTiles, tiles_nbytes
from halfbyte.quant.block import get_format
from halfbyte.quant.methods import Inputs

FORMATS = ["q4_0", "q4_1", "q8_0", "q6_0", "nl4", "nl4_16", "f16", "f32"]
SHAPES = [(3, 41, 80), (4, 7, 33), (2, 16, 64), (2, 3, 21, 40)]
SLICES = [None, slice(0, 41), slice(38, 45), slice(41, 82), slice(15, 100), slice(3, 3), slice(None, None, 5), slice(70, 2, -3)]


def stack(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def alone(form, weights):
    """(tiles, decoded weights) of matrices that were encoded one by one, by the reference."""
    blocks = [form.encode(m, method="search" if form.integers else None) for m in weights.reshape(-1, *weights.shape[-2:])]
    decoded = np.stack([form.decode(b, weights.shape[-1]) for b in blocks]).reshape(weights.shape)
    return np.concatenate([form.tile(b) for b in blocks]), decoded


def method_of(form):
    return "search" if form.integers else None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_file_store_and_engine_hold_the_same_bytes(name, shape, tmp_path):
    form, weights = get_format(name), stack(shape)
    tiles, decoded = alone(form, weights)
    assert tiles.size == tiles_nbytes(form, shape)
    source = ArrayTensor("experts", weights)
    assert (source.matrices, source.rows_each, source.rows) == (np.prod(shape[:-2]), shape[-2], np.prod(shape[:-1]))
    with NativeWriter(tmp_path / "m.hbf") as writer:
        writer.declare("experts", shape, name)
        for stream in streams([Job(source, name, method=method_of(form))], 2):
            writer.write("experts", stream.pieces)
    made = TensorQuantizer(source, name, Inputs(), "search", threads=2)
    with NativeFile(tmp_path / "m.hbf") as file, TileStore(tmp_path) as store:
        stored = store.put("experts", shape, name, made.pieces(), {})
        assert made.nbytes == tiles.size
        held = [file.tensors["experts"], stored, ArrayTiles("experts", shape, name, tiles), make_matrix(file.tensors["experts"])]
        held += [make_matrix(stored), make_matrix(BlocksTensor(held[0]))]
        for tensor in held:
            np.testing.assert_array_equal(tensor.tiles(), tiles)
            assert (tensor.shape, tensor.nbytes, tensor.matrix_nbytes) == (shape, tiles.size, form.tiles_nbytes(*shape[-2:]))
            for rows in SLICES:
                at = slice(None) if rows is None else rows
                flat = decoded.reshape(-1, shape[-1])[at]
                np.testing.assert_array_equal(tensor.float32(rows), decoded if rows is None else flat, err_msg=str(rows))
                np.testing.assert_array_equal(form.decode(tensor.blocks(rows), shape[-1]), flat, err_msg=str(rows))
            for number in range(tensor.matrices):
                one = tensor.matrix(number)
                assert one.address == tensor.address + number * tensor.matrix_nbytes and one.shape == shape[-2:]
                np.testing.assert_array_equal(one.float32(), decoded.reshape(-1, *shape[-2:])[number])
            with pytest.raises(IndexError, match="no number"):
                tensor.matrix(tensor.matrices)


class BlocksTensor(ArrayTensor):
    """A stack that has blocks and no tiles, as a GGUF file has it: the engine makes its tiles."""

    def __init__(self, tensor):
        super().__init__(tensor.name, tensor.float32())
        self._held, self.format = tensor, tensor.format

    def blocks(self, rows=None):
        return self._held.blocks(rows)


@pytest.mark.parametrize("name", ["q4_0", "nl4", "bf16"])
def test_chunks_of_a_stack_never_hold_rows_of_two_matrices(name, monkeypatch):
    """Chunks so small that every matrix is cut several times: still each is encoded as if it were alone."""
    monkeypatch.setattr("halfbyte.formats.conversion.stream.CHUNK", 16 * 80)
    monkeypatch.setattr("halfbyte.engine.convert.quantize_tensor.CHUNK", 16 * 80)
    form, weights = get_format(name), stack((3, 41, 80), 1)
    tiles, _ = alone(form, weights)
    tensor = ArrayTensor("experts", weights)
    job = Job(tensor, name, method=method_of(form))
    for threads in (1, 3):
        (pieces,) = [list(stream.pieces) for stream in streams([job], threads)]
        assert len(pieces) == 9
        np.testing.assert_array_equal(np.concatenate(pieces), tiles)
    made = np.concatenate(list(TensorQuantizer(tensor, name, Inputs(), "search", threads=1).pieces()))
    np.testing.assert_array_equal(made, tiles)


def test_runs_cover_the_rows_in_order():
    for shape in [(5,), (41, 8), (3, 41, 8), (2, 2, 16, 8), (0, 4, 8)]:
        tensor = ArrayTensor("x", np.zeros(shape, np.float32))
        for weights in (1, 128, 300, 10_000):
            runs = tensor.runs(weights)
            assert [row for run in runs for row in range(run.start, run.stop)] == list(range(tensor.rows))
            for run in runs:
                start, stop = run.start % tensor.rows_each, (run.stop - 1) % tensor.rows_each + 1
                assert start < stop and start % 16 == 0 and (stop % 16 == 0 or stop == tensor.rows_each)
