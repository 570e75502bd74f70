"""Valid files of every kind, damaged at random: a named error or a right answer, in little time and memory. Nothing else."""

import json
import struct
import time
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfbyte.formats.gguf.reader import GGUFFile
from halfbyte.formats.gguf.values import TypedValues
from halfbyte.formats.gguf.writer import GGUFWriter
from halfbyte.formats.hbf import structure
from halfbyte.formats.hbf.reader import NativeFile
from halfbyte.formats.hbf.writer import NativeWriter
from halfbyte.formats.safetensors.reader import SafetensorsFile, SafetensorsFolder
from halfbyte.formats.safetensors.writer import SafetensorsWriter
from halfbyte.quant.block import get_format
from halfbyte.quant.errors import HalfbyteError

MEMORY = 64 << 20
SECONDS = 3.0
HOSTILE = [
    0,
    1,
    7,
    8,
    13,
    31,
    32,
    255,
    1 << 16,
    1 << 24,
    1 << 31,
    (1 << 31) - 1,
    1 << 32,
    (1 << 32) - 1,
    1 << 40,
    1 << 62,
    (1 << 63) - 1,
]
HOSTILE += [1 << 63, (1 << 64) - 1, (1 << 64) - 8, (1 << 64) - 32, (1 << 61) + 1]

WEIGHTS = np.random.default_rng(0).standard_normal((17, 256), dtype=np.float32)


def add_metadata(writer: GGUFWriter | NativeWriter) -> None:
    writer.add("general.architecture", "llama")
    writer.add("llama.block_count", 2)
    writer.add("real", 0.5)
    writer.add("flag", True)
    writer.add("tokenizer.ggml.tokens", ["a", "", "é", "long " * 60] + ["a", "", "é"] * 400)
    writer.add("list", ["x", "y"])
    writer.add("scores", np.arange(9, dtype=np.float32))


def make_gguf(path: Path) -> None:
    rng = np.random.default_rng(1)
    with GGUFWriter(path, alignment=64) as writer:
        add_metadata(writer)
        writer.declare("f32", (17, 256), "f32")
        writer.declare("q8_0", (17, 256), "q8_0")
        others = {"q4_k": 144, "q6_k": 210, "iq4_nl": 8 * 18}
        for name in others:
            writer.declare(name, (2, 256), name)
        writer.write("f32", WEIGHTS)
        writer.write("q8_0", get_format("q8_0").encode(WEIGHTS, method="nearest"))
        for name, nbytes in others.items():
            writer.write(name, rng.integers(0, 256, 2 * nbytes, np.uint8))


def make_safetensors(path: Path) -> None:
    with SafetensorsWriter(path) as writer:
        for dtype in ("f32", "bf16", "f16", "f64"):
            writer.declare(f"w.{dtype}", (17, 256), dtype)
        writer.declare("scalar", (), "f32")
        writer.declare("empty", (0, 3), "i32")
        writer.declare("fp8", (4, 4), "f8_e4m3")
        for dtype in ("f32", "bf16", "f16", "f64"):
            writer.write(f"w.{dtype}", WEIGHTS)
        writer.write("scalar", np.float32(1))
        writer.write("empty", np.zeros((0, 3), np.int32))
        writer.write("fp8", np.arange(16, dtype=np.uint8))


def make_native(path: Path) -> None:
    with NativeWriter(path) as writer:
        add_metadata(writer)
        writer.declare("norm", (17,), "f32")
        writer.declare("three", (2, 17, 33), "q8_0")
        for name in ("q4_0", "q6_0", "bf16"):
            writer.declare(name, (17, 256), name, source="f32")
        for name in ("q4_0", "q6_0", "bf16"):
            tiles = get_format(name).tile(get_format(name).encode(WEIGHTS, method=None))
            writer.write(name, tiles, cosine=0.9, nmse=0.1, method="nearest")
        writer.write("norm", WEIGHTS[:, 0])
        eight = get_format("q8_0")
        writer.write("three", [eight.tile(eight.encode(WEIGHTS[:, :33], method=None)) for _ in range(2)])


def read_gguf(path: Path) -> None:
    with GGUFFile(path) as file:
        read_metadata(file.metadata)
        for tensor in file.tensors.values():
            attempt(lambda tensor=tensor: read_tensor(file, tensor))


def read_safetensors(path: Path) -> None:
    with SafetensorsFile(path) as file:
        for tensor in file.tensors.values():
            assert tensor.array().shape == tensor.shape
            read_tensor(file, tensor)
    with SafetensorsFolder(path) as folder:
        assert folder.tensors.keys() == file.tensors.keys()


def read_native(path: Path) -> None:
    with NativeFile(path) as file:
        read_metadata(file.metadata)
        for tensor in file.tensors.values():
            attempt(lambda tensor=tensor: read_tensor(file, tensor))
            assert tensor.vector or tensor.tiles().size == tensor.nbytes
        attempt(file.verify)


def read_metadata(metadata: TypedValues) -> None:
    for key in metadata:
        attempt(lambda key=key: (metadata[key], metadata.raw(key), metadata.length(key)))


def read_tensor(file, tensor) -> None:
    assert 0 <= tensor.offset <= tensor.offset + tensor.nbytes <= file.size
    values = tensor.float32()
    assert values.shape == tensor.shape and values.dtype == np.float32
    part = tensor.float32(slice(1, 3))
    assert np.array_equal(part, values.reshape(tensor.rows, tensor.columns)[1:3], equal_nan=True)
    if hasattr(tensor, "blocks"):
        tensor.blocks()


def attempt(action: Callable[[], object]) -> None:
    """An error by name in one part of a file is an answer, and the other parts are still tried."""
    try:
        action()
    except HalfbyteError as error:
        check_message(error)


def check_message(error: HalfbyteError) -> None:
    message = str(error)
    assert message.isprintable() and 10 < len(message) < 2000, message


KINDS = {"gguf": (make_gguf, read_gguf), "safetensors": (make_safetensors, read_safetensors), "hbf": (make_native, read_native)}


@pytest.fixture(scope="module")
def valid(tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("valid")
    for kind, (make, _) in KINDS.items():
        make(folder / f"a.{kind}")
        tracemalloc.start()
        KINDS[kind][1](folder / f"a.{kind}")
        tracemalloc.stop()
    return {kind: (folder / f"a.{kind}").read_bytes() for kind in KINDS}


def head_of(kind: str, raw: bytes) -> int:
    """Where the tensor data begin: damage before it is the interesting kind."""
    if kind == "hbf":
        return struct.unpack_from("<Q", raw, 24)[0]
    return 8 + struct.unpack_from("<Q", raw)[0] if kind == "safetensors" else raw.index(b"iq4_nl") + 40


@st.composite
def damage(draw, raw: bytes, head: int) -> bytes:
    """One to four changes, most of them in the first bytes or anywhere in the head."""
    data = bytearray(raw)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(
            st.one_of(st.integers(0, 64), st.integers(0, head), st.integers(max(0, head - 600), head), st.integers(0, len(raw)))
        )
        place = min(place, len(data))
        kind = draw(st.sampled_from(["flip", "word", "word", "half", "cut", "insert", "delete", "bytes", "copy"]))
        if kind == "flip" and place < len(data):
            data[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "word":
            number = draw(st.sampled_from([*HOSTILE, len(raw), len(raw) - 1, len(raw) + 1, len(raw) - place]))
            data[place : place + 8] = struct.pack("<Q", number)
        elif kind == "half":
            data[place : place + 4] = struct.pack("<I", draw(st.sampled_from(HOSTILE)) & 0xFFFFFFFF)
        elif kind == "cut":
            del data[place:]
        elif kind == "insert":
            data[place:place] = draw(st.binary(min_size=1, max_size=16))
        elif kind == "delete":
            del data[place : place + draw(st.integers(1, 40))]
        elif kind == "bytes":
            new = draw(st.binary(min_size=1, max_size=16))
            data[place : place + len(new)] = new
        else:
            source = draw(st.integers(0, len(data)))
            data[place : place + 32] = data[source : source + 32]
    return bytes(data)


def survive(kind: str, path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    tracemalloc.start()
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a warning would be a second line on a user's terminal
            KINDS[kind][1](path)
    except HalfbyteError as error:
        check_message(error)
    finally:
        seconds, memory = time.perf_counter() - start, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert seconds < SECONDS and memory < MEMORY, (seconds, memory)


slowly = settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.mark.parametrize("kind", KINDS)
@slowly
@given(data=st.data())
def test_damaged_files(kind, valid, tmp_path, data):
    survive(kind, tmp_path / f"a.{kind}", data.draw(damage(valid[kind], head_of(kind, valid[kind]))))


@slowly
@given(data=st.data())
def test_native_files_whose_checksum_was_made_right_again(valid, tmp_path, data):
    raw = bytearray(data.draw(damage(valid["hbf"], head_of("hbf", valid["hbf"]))))
    if len(raw) >= 64:
        begin = struct.unpack_from("<Q", raw, 32)[0]
        raw[:4] = structure.MAGIC
        struct.pack_into("<I", raw, 4, 1)
        struct.pack_into("<Q", raw, 40, len(raw))
        struct.pack_into("<I", raw, 48, structure.head_checksum(bytes(raw[:begin])))
    survive("hbf", tmp_path / "a.hbf", bytes(raw))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([*HOSTILE, -1, -(1 << 63), 1e308, 0.5])
    | st.text(max_size=5)
    | st.sampled_from(["F32", "BF16", "U8"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "t", "__metadata__"]), inner)
    ),
    max_leaves=12,
)
counts = st.lists(st.sampled_from([0, 1, 2, 3, 4, 8, 1 << 32, 1 << 62, 1 << 63, -1]), max_size=4)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F64", "BOOL", "F8_E4M3", "X"]),
        "shape": counts | json_values,
        "data_offsets": counts | json_values,
    }
)


@slowly
@given(header=st.dictionaries(st.text(max_size=4), entries | json_values, max_size=4) | json_values, size=st.integers(0, 20))
def test_safetensors_headers_of_any_json(header, size, tmp_path):
    raw = json.dumps(header).encode()
    survive("safetensors", tmp_path / "a.safetensors", struct.pack("<Q", len(raw)) + raw + bytes(size))


@slowly
@given(
    raw=st.binary(max_size=200),
    start=st.sampled_from([b"", b"GGUF\3\0\0\0", b"HBF\x1a\1\0\0\0", b"\x10\0\0\0\0\0\0\0"]),
    kind=st.sampled_from(list(KINDS)),
)
def test_any_bytes(raw, start, kind, tmp_path):
    survive(kind, tmp_path / "a", start + raw)


@pytest.mark.parametrize("kind", KINDS)
def test_files_cut_anywhere_in_the_head_are_refused(kind, valid, tmp_path):
    raw = valid[kind]
    path = tmp_path / "a"
    for length in [*range(130), *range(130, head_of(kind, raw), 97), len(raw) - 64]:
        path.write_bytes(raw[:length])
        with pytest.raises(HalfbyteError) as caught:
            KINDS[kind][1](path)
        check_message(caught.value)
