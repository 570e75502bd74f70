"""Quantized matrices that wait on disk: what is read is what was put, and nothing is left behind."""

import errno
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from halfbyte.formats.conversion.tile_store import TileStore
from halfbyte.formats.errors import OutputError
from halfbyte.formats.tile_tensor import ArrayTiles
from halfbyte.quant.block import get_format
from halfbyte.quant.encoders import encode

posix = pytest.mark.skipif(os.name != "posix", reason="files without a name, signals and limits of POSIX")
SLICES = [None, slice(0, 16), slice(3, 5), slice(15, 17), slice(17, 40), slice(16, 41), slice(40, 41), slice(5, 5), slice(None)]


def matrix(rows, columns, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


@pytest.mark.parametrize("name", ["q4_0", "nl4", "nl5", "q6_r", "q8_0", "bf16"])
@pytest.mark.parametrize("columns", [96, 80])
def test_what_is_read_is_what_was_put(tmp_path, name, columns):
    form, weights = get_format(name), matrix(41, columns)
    blocks, tiles = encode(form, weights, "blocks").data, encode(form, weights, "tiles").data
    decoded = form.decode(blocks, columns)
    with TileStore(tmp_path) as store:
        cut = form.tiles_nbytes(16, columns)
        stored = store.put("blk.0.x.weight", (41, columns), name, [tiles[:cut], tiles[cut:]], {})
        assert (stored.name, stored.shape, stored.format, stored.nbytes) == ("blk.0.x.weight", (41, columns), name, tiles.size)
        assert (stored.rows, stored.columns, stored.vector) == (41, columns, False)
        for tensor in (stored, ArrayTiles("memory", (41, columns), name, tiles)):
            np.testing.assert_array_equal(tensor.tiles(), tiles)
            for rows in SLICES:
                at = slice(None) if rows is None else rows
                np.testing.assert_array_equal(tensor.blocks(rows), blocks[at], err_msg=str(rows))
                np.testing.assert_array_equal(tensor.float32(rows), decoded[at], err_msg=str(rows))


def test_a_long_matrix_is_decoded_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("halfbyte.formats.tile_tensor._DECODE", 2048)
    form, weights = get_format("q4_0"), matrix(150, 64)
    with TileStore(tmp_path) as store:
        tensor = store.put("x", (150, 64), "q4_0", [encode(form, weights, "tiles").data], {})
        decoded = form.decode(encode(form, weights, "blocks").data, 64)
        np.testing.assert_array_equal(tensor.float32(), decoded)
        np.testing.assert_array_equal(tensor.float32(slice(7, 149)), decoded[7:149])


def test_several_tensors_in_one_file(tmp_path):
    form, made = get_format("q8_0"), {}
    with TileStore(tmp_path) as store:
        for i, rows in enumerate((3, 200, 16, 64)):
            tiles = encode(form, matrix(rows, 64, i), "tiles").data
            recorded = {"source": "bf16"}

            def pieces(tiles=tiles, recorded=recorded):
                yield tiles
                recorded["cosine"] = 0.5

            made[i] = tiles, store.put(f"m{i}", (rows, 64), "q8_0", pieces(), recorded)
            made[i][1].release()  # it comes back when it is read
        for tiles, tensor in made.values():
            np.testing.assert_array_equal(tensor.tiles(), tiles)
            assert tensor.recorded == {"source": "bf16", "cosine": 0.5}
    for tiles, tensor in made.values():  # what is held outlives the store
        np.testing.assert_array_equal(tensor.tiles(), tiles)
        with pytest.raises(ValueError, match="read-only"):
            tensor.tiles()[0] = 1


@posix
def test_the_file_has_no_name(tmp_path):
    with TileStore(tmp_path) as store:
        store.put("x", (16, 32), "q4_0", [encode(get_format("q4_0"), matrix(16, 32), "tiles").data], {})
        assert list(tmp_path.iterdir()) == []


@posix
def test_nothing_is_left_of_a_process_that_was_killed(tmp_path):
    code = """
        import sys, time, numpy as np
        from halfbyte.formats.conversion.tile_store import TileStore
        store = TileStore(sys.argv[1])
        store.put("x", (1 << 12, 256), "q8_0", [np.zeros(1 << 20, np.uint8)], {})
        print("put", flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline() == "put\n"
        finally:
            child.kill()
    assert child.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_what_making_the_pieces_raises_goes_through(tmp_path):
    def pieces():
        yield np.zeros(100, np.uint8)
        raise RuntimeError("broken")

    with TileStore(tmp_path) as store:
        with pytest.raises(RuntimeError, match="broken"):
            store.put("x", (16, 32), "q4_0", pieces(), {})
        tiles = encode(get_format("q4_0"), matrix(16, 32), "tiles").data
        np.testing.assert_array_equal(store.put("y", (16, 32), "q4_0", [tiles], {}).tiles(), tiles)


class _Full:
    """A file on a disk with no more room."""

    def __init__(self, file, number):
        self._file, self._number = file, number

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write(self, data):
        raise OSError(self._number, os.strerror(self._number))

    def close(self):
        self._file.close()
        raise OSError(self._number, os.strerror(self._number))  # as buffered files do, which try once more


@pytest.mark.parametrize(("number", "words"), [(errno.ENOSPC, "is full"), (errno.EIO, "cannot be written to")])
def test_a_full_disk_is_named_by_its_folder(tmp_path, number, words):
    with pytest.raises(OutputError, match=words) as caught, TileStore(tmp_path) as store:
        store._file = _Full(store._file, number)
        store.put("blk.3.ffn_up.weight", (16, 32), "q4_0", [np.zeros(288, np.uint8)], {})
    assert str(tmp_path) in str(caught.value)
    assert number != errno.ENOSPC or "blk.3.ffn_up.weight" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@posix
def test_a_limit_on_files_is_an_output_error(tmp_path):
    """A real one: what the file's buffer still holds is tried again when it is closed, which must not hide the error."""
    code = """
        import resource, sys, numpy as np
        from halfbyte.formats.errors import OutputError
        from halfbyte.formats.conversion.tile_store import TileStore
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        for nbytes in (1 << 20, 100_100):
            try:
                with TileStore(sys.argv[1]) as store:
                    store.put("x", (nbytes // 256, 256), "q8_0", [np.zeros(1000, np.uint8)] * (nbytes // 1000), {})
            except OutputError as error:
                print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0 and done.stdout.count("cannot be written to") == 2 and str(tmp_path) in done.stdout, done
    assert list(tmp_path.iterdir()) == []


@posix
def test_more_matrices_than_a_process_may_have_files_open(tmp_path):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = len(os.listdir("/dev/fd")) + 16
    tiles = encode(get_format("q4_0"), matrix(16, 32), "tiles").data
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    try:
        with TileStore(tmp_path) as store:
            stored = [store.put(f"x{i}", (16, 32), "q4_0", [np.full_like(tiles, i % 251)], {}) for i in range(3 * count)]
            for _ in range(2):
                for i, tensor in enumerate(stored):
                    assert tensor.tiles()[0] == i % 251
                    tensor.release()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(OutputError, match="cannot hold a temporary file") as caught:
        TileStore(tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in str(caught.value)
