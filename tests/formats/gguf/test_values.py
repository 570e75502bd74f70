"""Values and strings of GGUF files: walked, encoded and decoded; what a writer cannot hold is refused."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.formats.errors import (
    OutputError,
    TruncatedError,
)
from halfbyte.formats.gguf import string_array as strings
from halfbyte.formats.gguf.reader import GGUFFile
from halfbyte.formats.gguf.string_array import find_strings
from halfbyte.formats.gguf.values import Cursor, TypedValues, ValueType, encode_entry, encode_value, infer_type
from halfbyte.formats.gguf.writer import GGUFWriter
from support import gguf_bytes as by_hand

text = by_hand.text


def reference_walk(data: bytes, start: int, count: int) -> list[int]:
    places = [start]
    for _ in range(count):
        at = places[-1]
        places.append(at + 8 + int.from_bytes(data[at : at + 8], "little"))
    return places


ODD_STRINGS = st.one_of(
    st.binary(max_size=12),
    st.binary(min_size=250, max_size=300),
    st.builds(bytes, st.integers(0, 40)),
    st.sampled_from([b"", b"\1" + bytes(7), b"abc\5" + bytes(7) + b"hello", bytes(7), b"\0\0\0\0\0\0\0\x01"]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(ODD_STRINGS, max_size=60), st.integers(1, 3), st.binary(max_size=9), st.sampled_from([64, 200, 1 << 20]))
def test_walking_is_exact_for_any_bytes(items, repeat, lead, window):
    items = items * repeat
    data = lead + b"".join(map(text, items)) + b"tail"
    kept, strings._WINDOW = strings._WINDOW, window
    try:
        found = find_strings("f", np.frombuffer(data, np.uint8), len(lead), len(items), True, "k")
    finally:
        strings._WINDOW = kept
    assert found.tolist() == reference_walk(data, len(lead), len(items))


@settings(max_examples=200, deadline=None)
@given(st.lists(ODD_STRINGS, min_size=1, max_size=30), st.data())
def test_walking_out_of_the_data_is_an_error(items, draw):
    data = b"".join(map(text, items))
    cut = draw.draw(st.integers(0, len(data) - 1))
    with pytest.raises(TruncatedError):
        find_strings("f", np.frombuffer(data[:cut], np.uint8), 0, len(items), True, "k")


def test_a_hostile_array_of_strings_takes_bounded_time():
    # Runs just long enough to look promising, then a break, again and again.
    piece = text("ab") * 70 + text("") + text("x" * 300)
    data = np.frombuffer(piece * 8000, np.uint8)
    start = time.perf_counter()
    found = find_strings("f", data, 0, 72 * 8000, True, "k")
    assert found[-1] == len(data)
    assert time.perf_counter() - start < 3


def test_a_large_vocabulary_opens_and_decodes_fast(tmp_path):
    tokens = [f"Ġtoken{n}" for n in range(150_000)]
    path = tmp_path / "v.gguf"
    with GGUFWriter(path) as writer:
        writer.add("tokenizer.ggml.tokens", tokens)
        writer.add("tokenizer.ggml.merges", [f"a{n} b{n}" for n in range(150_000)])
    opened, decoded = [], []
    for _ in range(3):
        start = time.perf_counter()
        with GGUFFile(path) as file:
            opened.append(time.perf_counter() - start)
            start = time.perf_counter()
            found = file.metadata["tokenizer.ggml.tokens"]
            decoded.append(time.perf_counter() - start)
            assert found is file.metadata["tokenizer.ggml.tokens"]
    assert found == tokens
    # Bounds against doing it element by element in Python, which takes seconds; a busy machine stays far below them.
    assert min(opened) < 0.3 and min(decoded) < 1.0


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
        st.one_of(
            st.booleans(),
            st.integers(-(1 << 63), (1 << 64) - 1),
            st.floats(width=32, allow_nan=False),
            st.text(st.characters(codec="utf-8")),
            st.lists(st.text(st.characters(codec="utf-8"), max_size=9)),
            st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=1),
            st.lists(st.booleans(), min_size=1),
            st.lists(st.floats(width=32, allow_nan=False), min_size=1),
        ),
        max_size=8,
    )
)
def test_values_come_back(values):
    raw = b"".join(encode_entry(key, infer_type(v)[0], encode_value(infer_type(v)[0], v)) for key, v in values.items())
    parsed = TypedValues(Cursor("f", np.frombuffer(raw, np.uint8)), len(values))
    assert list(parsed) == list(values)
    for key, value in values.items():
        found = parsed[key]
        assert (found.tolist() if isinstance(found, np.ndarray) else found) == value
        assert isinstance(found, np.ndarray) or type(found) is type(value)


def test_values_that_do_not_fit_are_refused(tmp_path):
    for value, kind in [
        (300, ValueType.U8),
        (-1, ValueType.U32),
        (1.5, ValueType.I32),
        ("x", ValueType.F32),
        (3, ValueType.STRING),
    ]:
        with pytest.raises(OutputError, match="key k"), GGUFWriter(tmp_path / "x.gguf") as writer:
            writer.add("k", value, kind)
    for value in (object(), [1, "a"], {"a": 1}, "\ud800", np.array(["a"]), 1 << 70):
        with pytest.raises(OutputError, match="key k"), GGUFWriter(tmp_path / "x.gguf") as writer:
            writer.add("k", value)
    assert list(tmp_path.iterdir()) == []


def test_tensors_that_gguf_cannot_hold_are_refused(tmp_path):
    for name, shape, kind in [
        ("t" * 64, (4,), "f32"),
        ("", (4,), "f32"),
        ("t", (0,), "f32"),
        ("t", (1,) * 5, "f32"),
        ("t", (33,), "q4_0"),
        ("t", (4,), "q6_0"),
    ]:
        with pytest.raises(OutputError), GGUFWriter(tmp_path / "x.gguf") as writer:
            writer.declare(name, shape, kind)
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_is_misused_leaves_no_file(tmp_path):
    path = tmp_path / "x.gguf"
    values = np.zeros(4, np.float32)
    with pytest.raises(OutputError, match="not written: b"), GGUFWriter(path) as writer:
        writer.declare("a", (4,), "f32")
        writer.declare("b", (4,), "f32")
        writer.write("a", values)
    with pytest.raises(OutputError, match="written twice"), GGUFWriter(path) as writer:
        writer.declare("a", (4,), "f32")
        writer.write("a", values)
        writer.write("a", values)
    for wrong in (values[:3], np.zeros(5, np.float32), [values, values]):
        with pytest.raises(OutputError, match="bytes were given"), GGUFWriter(path) as writer:
            writer.declare("a", (4,), "f32")
            writer.write("a", wrong)
    with pytest.raises(OutputError, match="after the first tensor"), GGUFWriter(path) as writer:
        writer.declare("a", (4,), "f32")
        writer.write("a", values)
        writer.add("late", 1)
    with pytest.raises(OutputError, match="declared twice"), GGUFWriter(path) as writer:
        writer.declare("a", (4,), "f32")
        writer.declare("a", (4,), "f32")
    assert list(tmp_path.iterdir()) == []
