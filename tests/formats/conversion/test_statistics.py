"""The calibration file and imatrix readers: what is written is read, others' libraries agree, and every broken file is named as that."""

import json
import struct

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from halfbyte.formats.conversion.open_statistics import open_statistics
from halfbyte.formats.conversion.statistics import StatisticsError, StatisticsWriter, pack_gram, unpack_gram
from halfbyte.formats.errors import FileFormatError, OutputError
from halfbyte.quant.errors import HalfbyteError
from support import DATA as TEST_DATA

DATA = TEST_DATA / "imatrix"
Q, K, DOWN = (f"blk.0.{part}.weight" for part in ("attn_q", "attn_k", "ffn_down"))


def sample(columns, tokens=50, seed=0):
    x = np.random.default_rng(seed).standard_normal((tokens, columns)) * np.exp(np.random.default_rng(1).normal(0, 2, columns))
    return (x * x).sum(0), (x.T @ x).astype(np.float32)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "s.safetensors"
    with StatisticsWriter(path, [((Q, K), 1, 8, True), ((DOWN,), 1, 12, False)], {"tokens": "50"}, vocabulary=5) as writer:
        writer.write((DOWN,), [sample(12)[0]], [50], None)
        writer.write((Q, K), [sample(8)[0]], [50], [sample(8)[1]])
        writer.write_token_counts(np.arange(5))
    return path


# --- our own file ---------------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(file):
    sums, gram = sample(8)
    with open_statistics(file) as found:
        assert found.kind == "calibration" and set(found.sums) == {Q, K, DOWN} and Q in found and "x" not in found
        for name in (Q, K):
            np.testing.assert_allclose(found.sums[name].sums[0], sums, rtol=1e-6)
            np.testing.assert_allclose(found.sums[name].mean_squares[0], sums / 50, rtol=1e-6)
            again = found.gram(name)
            assert np.abs(again - gram).max() <= (1.1 * 0.5 / 32767) * np.sqrt(np.outer(sums, sums)).max() and (again == again.T).all()
        assert found.gram(DOWN) is None and found.gram("x") is None
        assert found.token_counts().tolist() == [0, 1, 2, 3, 4]
        assert found.metadata == {"kind": "halfbyte.calibration", "version": "1", "tokens": "50"}


def test_the_safetensors_package_reads_it(file):
    with safe_open(file, "numpy") as f:
        assert f.get_tensor(f"{Q}.in_sum2").dtype == np.float32 and f.get_tensor(f"{Q}.in_sum2").shape == (1, 8)
        assert f.get_tensor(f"{Q}.gram").dtype == np.int16 and f.get_tensor(f"{Q}.gram").shape == (36,)
        assert json.loads(f.metadata()["shared"]) == {K: Q}


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 1 << 30), st.sampled_from(["plain", "dead", "one", "huge", "tiny"]))
def test_packed_gram_matrices_lose_little(columns, tokens, seed, kind):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, columns))
    x = {"plain": x, "dead": x * (rng.random(columns) < 0.5), "one": x[:, :1] * np.ones(columns), "huge": x * 1e12, "tiny": x * 1e-12}[kind]
    sums, gram = (x * x).sum(0), (x.T @ x).astype(np.float32)
    again = unpack_gram(pack_gram(gram, sums), sums)
    scale = np.sqrt(np.outer(sums, sums))
    assert np.isfinite(again).all() and (again == again.T).all()
    assert (np.abs(again - gram) <= 2e-5 * scale + 1e-30).all()
    np.testing.assert_allclose(again.diagonal(), sums, rtol=1e-6)
    live = sums > 0
    if live.any():  # with the damping of error feedback the matrix is positive definite
        damped = (again + 0.01 * sums[live].mean() * np.eye(columns))[np.ix_(live, live)]
        np.linalg.cholesky(damped.astype(np.float64))


def test_weights(file):
    sums, _ = sample(8)
    with open_statistics(file) as found:
        weights = found.weights(Q, 8)
        assert weights.dtype == np.float32 and weights.shape == (1, 8)
        np.testing.assert_allclose(weights[0], np.maximum(sums / sums.mean(), 1e-6), rtol=1e-5)
        assert found.weights("x", 8) is None
        with pytest.raises(StatisticsError, match=r"attn_q.weight: is 1x8, the model's is 1x16: these are statistics of another model"):
            found.weights(Q, 16)


def test_columns_and_matrices_that_were_never_used_get_weights(tmp_path):
    path = tmp_path / "s.safetensors"
    with StatisticsWriter(path, [(("a",), 1, 3, True), (("b",), 1, 3, False)], {}) as writer:
        writer.write(("a",), [np.array([0.0, 2, 4])], [5], [np.diag([0, 2, 4]).astype(np.float32)])
        writer.write(("b",), [np.zeros(3)], [0], None)
    with open_statistics(path) as found:
        np.testing.assert_allclose(found.weights("a", 3), [[1e-6, 1, 2]])
        np.testing.assert_allclose(found.weights("b", 3), [[1, 1, 1]])
        np.testing.assert_allclose(found.gram("a"), np.diag([0, 2, 4]), atol=1e-6)


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    inputs = [(("a",), 1, 3, False)]
    with pytest.raises(OutputError, match="declared tensors were not written"), StatisticsWriter(tmp_path / "s", inputs, {}):
        pass
    with pytest.raises(ZeroDivisionError), StatisticsWriter(tmp_path / "s", inputs, {}) as writer:
        writer.write(("a",), [np.ones(3)], [1], None)
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def changed(file, path, metadata=None, **tensors):
    """A copy with other tensors or metadata; None leaves a tensor out."""
    with safe_open(file, "numpy") as f:
        held, about = {k: f.get_tensor(k) for k in f.keys()}, f.metadata()  # noqa: SIM118
    for name, value in tensors.items():
        key = {"sums": f"{Q}.in_sum2", "counts": f"{Q}.counts", "gram": f"{Q}.gram", "tokens": "token_embd.weight.token_counts"}[name]
        held.pop(key)
        if value is not None:
            held[key] = value
    save_file(held, path, metadata={**about, **(metadata or {})})
    return path


def test_broken_files_are_named_as_that(file, tmp_path):
    f32, f64 = np.float32, np.float64
    for i, (match, metadata, tensors) in enumerate(
        (
            ("not one that qcalibrate has written", {"kind": "x"}, {}),
            ("version 2 are not read", {"version": "2"}, {}),
            ("shared", {"shared": "["}, {}),
            ("shared: must be an object of names", {"shared": '{"a": 1}'}, {}),
            ("has .in_sum2 but no .counts", {}, {"counts": None}),
            ("must be f32", {}, {"counts": np.ones(1, f64)}),
            ("must be f32", {}, {"sums": np.ones((1, 8), f64)}),
            ("sums must be finite and not negative", {}, {"sums": np.full((1, 8), np.nan, f32)}),
            ("sums must be finite and not negative", {}, {"sums": np.full((1, 8), -1, f32)}),
            ("counts must be finite", {}, {"counts": np.full(1, np.inf, f32)}),
            ("8 sums do not belong to 3 counts", {}, {"counts": np.ones(3, f32)}),
            ("2 counts for 1 matrices", {}, {"counts": np.ones(2, f32)}),
            ("0 sums", {}, {"sums": np.ones((1, 0), f32)}),
            (r"gram: is i16\[35\]; 8 columns need i16\[36\]", {}, {"gram": np.zeros(35, np.int16)}),
            (r"gram: is f32\[36\]", {}, {"gram": np.zeros(36, f32)}),
            ("shares the Gram matrix of .*attn_q.weight, which has 8", {"shared": json.dumps({DOWN: Q})}, {}),
            (r"must be i64\[vocabulary\]", {}, {"tokens": np.zeros(3, np.int32)}),
        )
    ):
        path = changed(file, tmp_path / f"{i}.safetensors", metadata, **tensors)
        with pytest.raises(FileFormatError, match=match), open_statistics(path) as found:
            for name in (Q, DOWN):
                found.gram(name)
            found.token_counts()


# --- imatrix files --------------------------------------------------------------------------------------------------------------


def test_files_of_llama_imatrix():
    """Sums of the GGUF are read as the gguf package reads them; the older file holds the same means."""
    reader = gguf.GGUFReader(DATA / "tiny.gguf")
    theirs = {t.name: t.data for t in reader.tensors}
    with open_statistics(DATA / "tiny.gguf") as new, open_statistics(DATA / "tiny.dat") as old:
        assert new.kind == "imatrix" and new.metadata == {"chunks": "7", "chunk": "32", "text": "t.txt"}
        assert old.kind == "imatrix.dat" and old.metadata == {"chunks": "7", "text": "t.txt"}
        assert len(new.sums) == 8 and len(old.sums) == 7 and DOWN in old
        for name in new.sums:
            np.testing.assert_array_equal(new.sums[name].sums.ravel(), theirs[f"{name}.in_sum2"].ravel())
            np.testing.assert_array_equal(new.sums[name].counts, theirs[f"{name}.counts"].ravel())
        for name in old.sums:
            np.testing.assert_allclose(old.weights(name, new.sums[name].columns), new.weights(name, new.sums[name].columns), rtol=1e-5)
        assert new.gram(Q) is None and new.token_counts() is None


def write_gguf(path, tensors, general="imatrix"):
    writer = gguf.GGUFWriter(path, "x")
    writer.add_type(general)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_experts(tmp_path):
    """Several matrices in one tensor, one of them never used."""
    sums = np.arange(12, dtype=np.float32).reshape(3, 4)
    sums[1] = 0
    with open_statistics(
        write_gguf(tmp_path / "e.gguf", {"e.in_sum2": sums, "e.counts": np.array([[2], [0], [4]], np.float32)})
    ) as found:
        means = found.sums["e"].mean_squares
        np.testing.assert_array_equal(means, [[0, 0.5, 1, 1.5], [1, 1, 1, 1], [2, 2.25, 2.5, 2.75]])
        np.testing.assert_allclose(found.weights("e", 4, 3)[1], 1)
        with pytest.raises(StatisticsError, match="is 3x4, the model's is 1x12"):
            found.weights("e", 12)
    dat = tmp_path / "e.dat"
    dat.write_bytes(struct.pack("<ii1sii12f", 1, 1, b"e", 2, 12, *range(12)))
    with open_statistics(dat) as found:
        assert found.weights("e", 4, 3).shape == (3, 4) and found.weights("e", 12).shape == (1, 12)
        with pytest.raises(StatisticsError, match="is 1x12, the model's is 1x4"):
            found.weights("e", 4)


def test_imatrix_files_that_are_none(tmp_path):
    ones = np.ones((1, 4), np.float32)
    for match, general, tensors in (
        ("not an imatrix: its general.type is 'model'", "model", {"a.in_sum2": ones}),
        ("has .in_sum2 but no .counts", "imatrix", {"a.in_sum2": ones}),
        ("without any .in_sum2", "imatrix", {"a.counts": ones}),
        ("must be f32", "imatrix", {"a.in_sum2": ones.astype(np.float16), "a.counts": ones[:, :1]}),
        ("not negative", "imatrix", {"a.in_sum2": -ones, "a.counts": ones[:, :1]}),
    ):
        with pytest.raises(FileFormatError, match=match):
            open_statistics(write_gguf(tmp_path / "x.gguf", tensors, general))
    whole = (DATA / "tiny.dat").read_bytes()
    for match, data in (
        ("truncated", whole[:40]),
        ("truncated", b"\1\0\0"),
        ("0 is not between 1 and .*number of entries|number of entries.*0 is not between 1", struct.pack("<i", 0)),
        ("neither an imatrix of llama.cpp nor a calibration file", b"hello, this is a text"),
        ("length of the name of entry 0.*-1 is not between 1 and 1024", struct.pack("<ii", 1, -1)),
        ("is not UTF-8", struct.pack("<ii1sii1f", 1, 1, b"\xff", 1, 1, 1.0)),
        ("the tensor appears twice", struct.pack("<i", 2) + 2 * struct.pack("<i1sii1f", 1, b"a", 1, 1, 1.0)),
        ("truncated", struct.pack("<ii1sii", 1, 1, b"a", 1, (1 << 31) - 1)),
        ("finite", struct.pack("<ii1sii1f", 1, 1, b"a", 1, 1, np.nan)),
    ):
        path = tmp_path / "x.dat"
        path.write_bytes(data)
        with pytest.raises(FileFormatError, match=match) as caught:
            open_statistics(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(FileFormatError, match="no such file"):
        open_statistics(tmp_path / "none")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_files_are_refused_or_read(tmp_path_factory, data):
    """Cuts and flipped bytes anywhere: a named error or numbers, never anything else."""
    source = (DATA / data.draw(st.sampled_from(["tiny.gguf", "tiny.dat"]))).read_bytes()
    raw = bytearray(source[: data.draw(st.integers(1, len(source)))])
    for _ in range(data.draw(st.integers(0, 4))):
        raw[data.draw(st.integers(0, min(len(raw), 600) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(raw)
    try:
        with open_statistics(path) as found:
            for name, sums in found.sums.items():
                assert np.isfinite(found.weights(name, sums.columns, len(sums.sums))).all()
    except HalfbyteError as error:
        assert "\n" not in str(error)
