"""The native file: what is written comes back, and a writer that is misused leaves nothing."""

import threading
import time
import zlib

import numpy as np
import pytest

from halfbyte.formats import file_keys
from halfbyte.formats.atomic import OutputFile
from halfbyte.formats.errors import (
    OutputError,
)
from halfbyte.formats.hbf import structure
from halfbyte.formats.hbf.reader import NativeFile
from halfbyte.formats.hbf.writer import NativeWriter
from halfbyte.quant.block import get_format
from halfbyte.quant.errors import FormatError
from support import native_samples as samples

TOKENS, JSON = samples.TOKENS, samples.JSON
matrices, encode, decoded, write = samples.matrices, samples.encode, samples.decoded, samples.write


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    path = tmp_path_factory.mktemp("native") / "a.hbf"
    write(path)
    return path


def test_what_is_written_comes_back(sample):
    arrays = matrices()
    with NativeFile(sample) as file:
        assert file.version == 1 and file.size % 4096 == 0
        assert file.metadata["general.architecture"] == "llama" and file.metadata["llama.block_count"] == 30
        assert file.metadata["tokenizer.ggml.tokens"] == TOKENS and file.metadata[structure.TOKENIZER] == JSON
        assert file.metadata["halfbyte.note"] == "known only at the end"
        assert file.metadata["tokenizer.ggml.scores"].shape == (50,)
        assert "halfbyte.packed.tokenizer.ggml.tokens" not in file.metadata
        assert list(file.tensors) == ["norm", *arrays]
        norm = file.tensors["norm"]
        assert norm.vector and norm.tiles() is None and norm.blocks() is None and norm.format == "f32"
        assert norm.recorded == {"checksum": zlib.crc32(norm.raw()), "source": "bf16", "method": "", "cosine": None, "nmse": None}
        np.testing.assert_array_equal(norm.float32(), np.arange(7))
        for number, (name, (array, kind)) in enumerate(reversed(arrays.items())):
            tensor = file.tensors[name]
            assert tensor.shape == array.shape and tensor.format == kind and not tensor.vector and tensor.offset % 4096 == 0
            assert tensor.recorded["cosine"] == np.float32(1 - number / 100) and tensor.recorded["nmse"] == np.float32(
                number / 50
            )
            assert tensor.recorded["method"] == "search" and tensor.recorded["source"] == "bf16"
            tiles = tensor.tiles()
            assert tiles.dtype == np.uint8 and tiles.ndim == 1 and not tiles.flags.writeable
            assert tiles.__array_interface__["data"][0] == tensor.address, "tiles are the mapped file"
            np.testing.assert_array_equal(tiles, encode(array, kind))
            np.testing.assert_array_equal(tensor.float32(), decoded(array, kind))
        file.verify()
        file.populate()
        file.populate(file.tensors["experts"].offset, 10)
        file.release()
        kept = file.tensors["single"].tiles()
    np.testing.assert_array_equal(kept, encode(*arrays["single"]))


@pytest.mark.parametrize(
    "rows",
    [
        slice(0, 1),
        slice(3, 40),
        slice(16, 32),
        slice(15, 17),
        slice(None, None, 3),
        slice(30, 2, -4),
        slice(9, 9),
        slice(50, None),
    ],
)
@pytest.mark.parametrize("name", ["m.q4_0", "experts", "m.bf16"])
def test_slices_of_rows(sample, name, rows):
    with NativeFile(sample) as file:
        tensor = file.tensors[name]
        whole = tensor.float32().reshape(tensor.rows, tensor.columns)
        np.testing.assert_array_equal(tensor.float32(rows), whole[rows])
        np.testing.assert_array_equal(tensor.blocks(rows), tensor.blocks()[rows])
        assert get_format(tensor.format).decode(tensor.blocks(rows), tensor.columns).tobytes() == whole[rows].tobytes()


def test_large_matrices_are_decoded_piece_by_piece(tmp_path, monkeypatch):
    monkeypatch.setattr("halfbyte.formats.tile_tensor._DECODE", 1)
    write(tmp_path / "a.hbf")
    with NativeFile(tmp_path / "a.hbf") as file:
        for name, (array, kind) in matrices().items():
            np.testing.assert_array_equal(file.tensors[name].float32(), decoded(array, kind))
            rows = file.tensors[name].rows
            np.testing.assert_array_equal(
                file.tensors[name].blocks(slice(5, rows - 2)), file.tensors[name].blocks()[5 : rows - 2]
            )


def test_tensors_may_be_written_from_threads(tmp_path):
    arrays = matrices(3)
    with NativeWriter(tmp_path / "t.hbf") as writer:
        for name, (array, kind) in arrays.items():
            writer.declare(name, array.shape, kind)
        threads = [threading.Thread(target=writer.write, args=(n, encode(a, k))) for n, (a, k) in arrays.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with NativeFile(tmp_path / "t.hbf") as file:
        file.verify()
        for name, (array, kind) in arrays.items():
            np.testing.assert_array_equal(file.tensors[name].float32(), decoded(array, kind))


def test_metadata_goes_from_file_to_file(sample, tmp_path):
    with NativeFile(sample) as source, NativeWriter(tmp_path / "c.hbf") as writer:
        writer.copy(source.metadata)
    with NativeFile(sample) as source, NativeFile(tmp_path / "c.hbf") as copy:
        own = file_keys.LAYOUT
        assert {k for k in source.metadata if k not in own} == {k for k in copy.metadata if k not in own}
        assert (
            copy.metadata["tokenizer.ggml.tokens"] == TOKENS
            and copy.metadata["halfbyte.note"] == source.metadata["halfbyte.note"]
        )
        assert copy.tensors == {}
        copy.verify()


def test_a_writer_that_is_misused_leaves_no_file(tmp_path):
    path = tmp_path / "x.hbf"
    for name, shape, kind, error in [
        ("t", (4,), "q8_0", OutputError),
        ("t", (4, 0), "q8_0", OutputError),
        ("t", (4, 4), "none", FormatError),
        ("", (4,), "f32", OutputError),
    ]:
        with pytest.raises(error), NativeWriter(path) as writer:
            writer.declare(name, shape, kind)
    for key in (file_keys.FORMATS, file_keys.CHECKSUM, "halfbyte.packed.x"):
        with pytest.raises(OutputError, match="makes itself"), NativeWriter(path) as writer:
            writer.add(key, ["x"])
    with pytest.raises(OutputError, match="metadata too many"), NativeWriter(path) as writer:
        writer.declare("v", (2,), "f32")
        writer.write("v", np.zeros(2, np.float32))
        writer.add("late", "x" * 40_000)
    with pytest.raises(OutputError, match="not written"), NativeWriter(path) as writer:
        writer.declare("v", (2,), "f32")
    with pytest.raises(OutputError, match="bytes were given"), NativeWriter(path) as writer:
        writer.declare("m", (4, 4), "q8_0")
        writer.write("m", np.zeros(10, np.uint8))
    assert list(tmp_path.iterdir()) == []


def test_opening_a_large_file_is_quick(tmp_path, monkeypatch):
    """A file of a gigabyte (a sparse one) with a large vocabulary: opening reads neither tensors nor strings."""
    monkeypatch.setattr(OutputFile, "reserve", lambda self, size: None)
    path = tmp_path / "big.hbf"
    shape, piece = (32768, 4096), np.zeros(1 << 20, np.uint8)
    nbytes = get_format("q8_0").tiles_nbytes(*shape)
    with NativeWriter(path) as writer:
        writer.add("tokenizer.ggml.tokens", [f"token{n}" for n in range(150_000)])
        writer.add(structure.TOKENIZER, "x" * 8_000_000)
        for number in range(7):
            writer.declare(f"t{number}", shape, "q8_0")
        writer._begin()
        for tensor in writer._tensors.values():  # the bytes of a fresh file are zeros: nothing needs to be written
            tensor.written = True
            writer._records[tensor.name] = {"checksum": 0}
        end = writer._data_offset + writer._data_bytes
        writer._output.write_at(end - len(piece), piece)
    assert path.stat().st_size > 1_000_000_000 and nbytes % 4096 == 0
    times = []
    for _ in range(5):
        start = time.perf_counter()
        with NativeFile(path):
            times.append(time.perf_counter() - start)
    path.unlink()
    assert min(times) < 0.05
