"""Calibration: sums equal those that hooks in transformers' models see and llama-imatrix's, whatever threads and chunks; qcalibrate."""

import io
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from halfbyte.engine.convert.calibration import Calibration, CalibrationError, calibrate, token_counts
from halfbyte.engine.convert.calibration_text import TOKENS, built_in_text, calibration_tokens
from halfbyte.engine.convert.input_sums import InputSums, flush, read_panels
from halfbyte.engine.kernels.structs import panel_bytes
from halfbyte.engine.measure import streaming
from halfbyte.formats.conversion.convert import convert
from halfbyte.formats.conversion.open_statistics import open_statistics
from halfbyte.formats.conversion.recipe import Recipe
from halfbyte.formats.opening import open_checkpoint
from halfbyte.tools import qcalibrate
from support import DATA, ORACLES, ROOT, tiny

IMATRIX_CONFIG = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1
}  # fmt: skip
IMATRIX_TEXT = "The quick brown fox jumps over the lazy dog, again and again.\n" * 4 + "\n"
PARTS = {"self_attn.q_proj": "attn_q", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.down_proj": "ffn_down"}
IDS = np.random.default_rng(3).integers(0, 256, (3, 32))


def collect(path, texts, **options):
    """All InputStatistics of a run."""
    found = []
    with open_checkpoint(path) as checkpoint:
        calibrate(checkpoint, texts, found.extend, **{"threads": 2, **options})
    return found


def by_name(statistics):
    return {name: each for each in statistics for name in each.names}


def ours(name, head):
    """Hugging Face's module name -> GGUF's tensor name."""
    if name == "lm_head":
        return head
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{PARTS[part]}.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("calibrate") / "model"
    tiny.write_folder(path)
    return path


# --- what is measured -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["biases", "linear"])
def test_gram_matrices_are_those_of_transformers(name):
    with np.load(ORACLES / name / "inputs.npz") as reference, open_checkpoint(ORACLES / name) as checkpoint:
        head = "output.weight" if "output.weight" in checkpoint.tensors else "token_embd.weight"
        found = by_name(collect(ORACLES / name, reference["ids"]))
        keys = [key for key in reference.files if key != "ids"]
        assert len(keys) == 9
        for key in keys:
            each = found[ours(key, head)]
            expected = np.zeros((each.columns, each.columns))
            expected[np.triu_indices(each.columns)] = reference[key]
            expected = np.triu(expected) + np.triu(expected, 1).T
            assert each.count == reference["ids"].size
            np.testing.assert_allclose(each.gram, expected, atol=1e-4 * expected.diagonal().max())
            np.testing.assert_allclose(each.sums, expected.diagonal(), rtol=1e-4)
            assert (each.gram == each.gram.T).all()


def test_who_shares_an_input(folder):
    with open_checkpoint(folder) as checkpoint, Calibration(checkpoint, IDS, threads=1) as calibration:
        names = [i.names for i in calibration.inputs]
        sections = [i.section for i in calibration.inputs]
    layer = [("attn_q", "attn_k", "attn_v"), ("attn_output",), ("ffn_gate", "ffn_up"), ("ffn_down",)]
    assert names == [tuple(f"blk.{n}.{part}.weight" for part in parts) for n in (0, 1) for parts in layer] + [("token_embd.weight",)]
    assert sections == ["layer.0"] * 4 + ["layer.1"] * 4 + ["head"]


def test_sums_do_not_depend_on_threads_or_on_grams(folder):
    one, three = (collect(folder, IDS, threads=n) for n in (1, 3))
    some = by_name(collect(folder, IDS, grams=lambda i: "ffn_down" in i.names[0]))
    for a, b in zip(one, three, strict=True):
        assert a.names == b.names
        np.testing.assert_array_equal(a.gram, b.gram)
        np.testing.assert_array_equal(a.sums, b.sums)
        other = some[a.names[0]]
        assert (other.gram is not None) == ("ffn_down" in a.names[0])
        np.testing.assert_allclose(other.sums, a.sums, rtol=1e-6)


def test_the_order_of_chunks_changes_nothing_but_rounding(folder):
    for a, b in zip(collect(folder, IDS), collect(folder, IDS[::-1]), strict=True):
        np.testing.assert_allclose(a.gram, b.gram, rtol=1e-4, atol=1e-5 * a.sums.max())


@pytest.mark.parametrize("columns", [32, 40, 576, 1100])
@pytest.mark.parametrize("tokens", [4, 37, 60])
def test_moments_are_numpys(columns, tokens):
    """Panels are laid out by the kernels' rule; more tokens than wait at once; tiles that do not divide the columns."""
    from concurrent.futures import ThreadPoolExecutor

    rng = np.random.default_rng(columns + tokens)
    blocks = -(-columns // 32)
    chunks = rng.standard_normal((5, tokens, columns)).astype(np.float32)
    moments = InputSums(columns, True, tokens)
    moments._depth = 2 * tokens
    with ThreadPoolExecutor(2) as pool:
        for x in chunks:
            memory = np.full(panel_bytes("f32", tokens, columns) // 4 + 16, np.nan, np.float32)
            for t in range(tokens):
                full = tokens // 6 * 6
                width = 6 if t < full else {0: 0, 1: 1, 2: 2, 3: 4, 4: 4, 5: 6}[tokens - full]
                start = t // 6 * 6 * blocks * 32
                for b in range(blocks):
                    row = np.zeros(32, np.float32)
                    part = x[t, 32 * b : 32 * b + 32]
                    row[: part.size] = part
                    at = start + (b * width + t % 6) * 32
                    memory[at : at + 32] = row
            if moments.full(tokens):
                flush([moments], pool)
            read_panels(memory.view(np.uint8), tokens, columns, moments.space(tokens))
        flush([moments], pool)
    moments.finish()
    x = chunks.reshape(-1, columns).astype(np.float64)
    np.testing.assert_allclose(moments.gram, x.T @ x, atol=1e-3)
    np.testing.assert_allclose(moments.sums, (x * x).sum(0), rtol=1e-5)
    assert moments.count == 5 * tokens and (moments.gram == moments.gram.T).all()


def test_one_layer_is_in_memory(folder, monkeypatch):
    held, most = set(), []
    load_one, release = streaming.StreamedMatrix.load, streaming.StreamedMatrix.release

    def loading(self):
        load_one(self)
        held.add(self.name)
        most.append(len({name.rsplit(".", 2)[0] for name in held}))

    monkeypatch.setattr(streaming.StreamedMatrix, "load", loading)
    monkeypatch.setattr(streaming.StreamedMatrix, "release", lambda self: (release(self), held.discard(self.name)))
    layers = []
    with open_checkpoint(folder) as checkpoint:
        calibrate(checkpoint, IDS, lambda inputs: layers.append((inputs[0].section, len(inputs))), threads=1)
    assert layers == [("layer.0", 4), ("layer.1", 4), ("head", 1)]
    assert not held and max(most) == 1


def test_llama_imatrix_sums_the_same(tmp_path):
    """tests/data/imatrix/tiny.*: llama-imatrix -c 32 -b 32 -ub 32 on this model and text, with --process-output in the GGUF."""
    tiny.write_folder(tmp_path / "m", tiny.llama_config(**IMATRIX_CONFIG), dtype="f32")
    with open_checkpoint(tmp_path / "m") as checkpoint:
        texts, _ = calibration_tokens(checkpoint, IMATRIX_TEXT, 7 * 32, 32)
    found = by_name(collect(tmp_path / "m", texts, grams=False))
    with open_statistics(DATA / "imatrix/tiny.gguf") as theirs, open_statistics(DATA / "imatrix/tiny.dat") as older:
        assert set(found) == set(theirs.sums) and set(theirs.sums) - set(older.sums) == {"token_embd.weight"}
        for name, sums in theirs.sums.items():
            assert sums.counts.tolist() == [224] and found[name].count == 224
            np.testing.assert_allclose(found[name].sums, sums.sums[0], rtol=5e-3)
            if name in older:
                np.testing.assert_allclose(older.sums[name].mean_squares, sums.mean_squares, rtol=1e-5)


# --- replacing weights on the way -----------------------------------------------------------------------------------------------


def test_sequential_without_replacing_is_the_same(folder):
    plain = collect(folder, IDS)
    found = collect(folder, IDS, sequential=True)
    assert [f.names for f in found] == [p.names for p in plain]
    for a, b in zip(plain, found, strict=True):
        np.testing.assert_allclose(b.gram, a.gram, rtol=1e-4, atol=1e-5 * a.sums.max())


@pytest.mark.parametrize("source", ["folder", "hbf"])
def test_replaced_weights_make_what_comes_after(folder, tmp_path, source):
    """Replacing as we go gives, input by input, the sums of a model whose weights were those from the beginning."""
    path = folder
    if source == "hbf":
        path = tmp_path / "model.hbf"
        with open_checkpoint(folder) as checkpoint:
            convert(checkpoint, path, Recipe(bits=8))
    with open_checkpoint(path) as checkpoint:
        new = {n: t.float32() for n, t in checkpoint.tensors.items() if not t.vector and n.startswith("blk.")}
    new = {n: (np.round(8 * v) / 8).astype(np.float32) for n, v in new.items()}
    given, calls = [], []

    def consumer(inputs):
        assert len(inputs) == 1
        calls.append(inputs[0].names)
        given.extend(inputs)
        return {n: new[n] for n in inputs[0].names if n in new}

    with open_checkpoint(path) as checkpoint:
        calibrate(checkpoint, IDS, consumer, sequential=True, threads=2)
        stored = {n: t.float32() for n, t in checkpoint.tensors.items()}
    back = {tiny.gguf_name(n): n for n in tiny.weights(tiny.llama_config())}
    tiny.write_folder(tmp_path / "replaced", None, {back[n]: new.get(n, v) for n, v in stored.items()}, dtype="f32")
    expected = collect(tmp_path / "replaced", IDS)
    assert calls == [e.names for e in expected]
    before = collect(path, IDS)
    for a, b, old in zip(expected, given, before, strict=True):
        np.testing.assert_allclose(b.gram, a.gram, rtol=1e-3, atol=1e-4 * a.sums.max())
        if a.names != before[0].names:
            assert np.abs(old.sums - a.sums).max() > 1e-2 * a.sums.max()  # it does change something


def test_replacements_that_do_not_fit(folder):
    def refused(match, replacement):
        with open_checkpoint(folder) as checkpoint, pytest.raises(CalibrationError, match=match):
            calibrate(checkpoint, IDS, lambda inputs: replacement, sequential=True, threads=1)

    q = np.zeros((64, 64), np.float32)
    refused("blk.0.ffn_up.weight cannot be replaced now: the matrices are blk.0.attn_q.weight, ", {"blk.0.ffn_up.weight": q})
    refused(r"blk.0.attn_q.weight is 64 x 64; it cannot be replaced by \(32, 64\)", {"blk.0.attn_q.weight": q[:32]})
    refused("blk.0.attn_q.weight cannot be replaced by weights that are not finite", {"blk.0.attn_q.weight": q + np.inf})


# --- refusals -------------------------------------------------------------------------------------------------------------------


def test_bad_texts_and_models(folder, tmp_path):
    from safetensors.numpy import save_file

    def refused(match, texts, path=folder):
        with open_checkpoint(path) as checkpoint, pytest.raises(CalibrationError, match=match):
            calibrate(checkpoint, texts, lambda inputs: None, threads=1)

    refused("token 272, but the model has only 272", np.full((1, 32), 272))
    refused("at least one chunk of at least 4", np.zeros((0, 32), int))
    refused("at least one chunk of at least 4", np.zeros((1, 3), int))
    refused("at least one chunk of at least 4", np.zeros(32, int))
    refused("at least one chunk of at least 4", np.zeros((1, 32)))
    save_file({"x": np.zeros((4, 4), np.float32)}, tmp_path / "lone.safetensors")
    refused("lone.safetensors holds weights only", IDS, tmp_path / "lone.safetensors")
    tensors = tiny.weights(tiny.llama_config())
    tensors["model.layers.0.mlp.up_proj.weight"] *= 1e30
    tensors["model.layers.0.mlp.gate_proj.weight"] *= 1e30
    tiny.write_folder(tmp_path / "overflow", None, tensors, dtype="f32")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refused("what blk.0.ffn_down.weight reads is not finite", IDS, tmp_path / "overflow")


def test_an_input_that_is_never_active(tmp_path):
    tensors = tiny.weights(tiny.llama_config())
    tensors["model.layers.1.post_attention_layernorm.weight"][5] = 0
    tiny.write_folder(tmp_path / "m", None, tensors, dtype="f32")
    up = by_name(collect(tmp_path / "m", IDS))["blk.1.ffn_up.weight"]
    assert up.sums[5] == 0 and (up.gram[5] == 0).all() and (np.delete(up.sums, 5) > 0).all()


# --- text -----------------------------------------------------------------------------------------------------------------------


def test_the_built_in_text():
    text = built_in_text()
    assert 100_000 < len(text.encode()) < 200_000 and "�" not in text
    words = " ".join(text.split())
    report = " ".join((ROOT / "engine/measure/data/austen.txt").read_text("utf-8").split())
    windows = {report[i : i + 30] for i in range(len(report) - 30)}
    assert not any(words[i : i + 30] in windows for i in range(len(words) - 30))
    for kind in ("Alice", "ORLANDO", "def ", "User: ", "disobedience"):
        assert kind in text
    assert all(kind in text[:12_000] for kind in ("Alice", "def ", "User: "))  # any beginning is a mixture


def test_chunks_of_a_text(folder, tmp_path):
    with open_checkpoint(folder) as checkpoint:
        texts, notes = calibration_tokens(checkpoint, "abcdefgh" * 20, 33, 16)
        assert texts.shape == (3, 16) and not notes
        texts, notes = calibration_tokens(checkpoint, "abcdefgh" * 20 + "xyz")
        assert texts.shape == (1, 128)  # the model's context
        assert notes == ["the text has 163 tokens; its 1 whole chunks of 128 are used"]
        with pytest.raises(CalibrationError, match="the text has 3 tokens, which is less than one chunk of 16"):
            calibration_tokens(checkpoint, "abc", 100, 16)
        with pytest.raises(CalibrationError, match="at least 4 tokens, not 3"):
            calibration_tokens(checkpoint, "abc", 100, 3)
        assert token_counts(checkpoint, texts).tolist() == np.bincount(texts.ravel(), minlength=272).tolist()
    at = tmp_path / "bos"
    tiny.write_folder(at)
    config = json.loads((at / "tokenizer_config.json").read_text())
    (at / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": True}))
    with open_checkpoint(at) as checkpoint:
        with_bos, _ = calibration_tokens(checkpoint, "abcdefgh" * 20, 48, 16)
    assert (with_bos[:, 0] == 256).all() and (with_bos[:, 1:] != 256).all()
    tiny.write_folder(tmp_path / "bare", tokenizer=False)
    with open_checkpoint(tmp_path / "bare") as checkpoint, pytest.raises(CalibrationError, match="bare has no tokenizer"):
        calibration_tokens(checkpoint, "abc")


# --- the command ----------------------------------------------------------------------------------------------------------------


def command(capsys, *arguments):
    status = qcalibrate.main([*map(str, arguments), "--threads", "2"])
    out = capsys.readouterr()
    return status, out.out, out.err


def test_qcalibrate(folder, capsys, monkeypatch):
    status, out, err = command(capsys, folder, "--tokens", "300", "--chunk", "64", "--gram", "--json")
    assert (status, err) == (0, "")
    data = json.loads(out)
    path = folder.parent / "model.calibration.safetensors"
    assert data["output"] == str(path) and data["bytes"] == path.stat().st_size
    assert (data["tokens"], data["chunk"], data["inputs"], data["matrices"], data["text"]) == (320, 64, 9, 15, "built-in")
    with open_checkpoint(folder) as checkpoint, open_statistics(path) as statistics:
        texts, _ = calibration_tokens(checkpoint, built_in_text(), 300, 64)
        expected = by_name(collect(folder, texts))
        assert set(statistics.sums) == set(expected)
        for name, each in expected.items():
            np.testing.assert_allclose(statistics.sums[name].sums[0], each.sums, rtol=1e-6)
            scale = np.sqrt(np.outer(each.sums, each.sums))
            assert np.abs(statistics.gram(name) - each.gram).max() <= 2e-5 * scale.max()
        assert statistics.token_counts().tolist() == token_counts(checkpoint, texts).tolist()
        assert statistics.metadata["model"] == "model" and statistics.metadata["tokens"] == "320"
    first = path.read_bytes()
    assert qcalibrate.main([str(folder), "--tokens", "300", "--chunk", "64", "--gram", "--threads", "1"]) == 0
    assert path.read_bytes() == first
    assert "9 inputs of 15 matrices over 320 tokens" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"abcdefgh" * 40)))
    status, out, _ = command(capsys, folder, "--text", "-", "--chunk", "64", "-o", folder.parent / "o.st", "--json")
    assert status == 0 and json.loads(out)["text"] == "stdin" and json.loads(out)["tokens"] == 320


def test_qcalibrate_refuses_in_one_line(folder, tmp_path, capsys):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    (tmp_path / "short.txt").write_text("abc")
    for arguments, status, message in (
        ([folder, "--tokens", "0"], 2, "--tokens must be between 1"),
        ([folder, "--chunk", "3"], 2, "--chunk must be between 4"),
        ([folder, "--chunk", "200"], 1, "takes at most 128 tokens"),
        ([tmp_path / "none"], 1, "no such file"),
        ([folder, "--text", tmp_path / "none.txt"], 1, "no such file"),
        ([folder, "--text", tmp_path / "latin.txt"], 1, "is not UTF-8"),
        ([folder, "--text", tmp_path / "short.txt"], 1, "less than one chunk"),
        ([folder, "-o", folder / "model.safetensors"], 1, "model.safetensors"),
        ([folder, "-o", tmp_path / "no" / "s.safetensors"], 1, "s.safetensors"),
        ([folder, "--nonsense"], 2, "--nonsense"),
    ):
        code, out, err = command(capsys, *arguments)
        assert (code, out) == (status, "") and err.startswith("error: ") and err.count("\n") == 1 and message in err, err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latin.txt", "short.txt"]


def test_an_interrupted_run_leaves_nothing(folder, tmp_path, monkeypatch, capsys):
    def interrupted(self, consumer, grams):
        raise KeyboardInterrupt

    monkeypatch.setattr(Calibration, "run", interrupted)
    assert qcalibrate.main([str(folder), "-o", str(tmp_path / "s.safetensors"), "--tokens", "64"]) == 130
    assert not list(tmp_path.iterdir()) and capsys.readouterr().out == ""


# --- real models ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_smollm2_as_llama_imatrix_sees_it(tmp_path):
    models = Path(os.environ.get("HALFBYTE_MODELS") or Path.home() / ".cache/halfbyte-models")
    tool = Path(os.environ.get("HALFBYTE_PEER") or Path.home() / ".cache/halfbyte-peer") / "build/bin/llama-imatrix"
    model = models / "smollm2-135m-instruct"
    for path in (model, tool):
        if not path.exists():
            pytest.skip(f"{path} is not there")
    text = tmp_path / "text.txt"
    text.write_text(built_in_text()[:5000], "utf-8")
    gguf = tmp_path / "m.gguf"
    # float32, because llama.cpp rounds activations to bf16 where the weights are that, and single columns then differ by several percent.
    convert_command = [sys.executable, "-m", "halfbyte.tools.qconvert", str(model), "--format", "f32", "--to", "gguf", "-o", str(gguf)]
    subprocess.run(convert_command, check=True, capture_output=True)
    for ending in ("gguf", "dat"):
        command = [tool, "-m", gguf, "-f", text, "-o", tmp_path / f"im.{ending}", "--output-format", ending, "--no-ppl", "-t", "2"]
        subprocess.run(list(map(str, command)), check=True, capture_output=True)
    with open_checkpoint(model) as checkpoint:
        texts, _ = calibration_tokens(checkpoint, text.read_text("utf-8"), TOKENS)
    found = by_name(collect(model, texts, grams=False))
    for ending in ("gguf", "dat"):
        with open_statistics(tmp_path / f"im.{ending}") as theirs:
            assert set(found) - set(theirs.sums) == {"token_embd.weight"}
            for name, sums in theirs.sums.items():
                mine, expected = found[name].sums / found[name].count, sums.mean_squares[0]
                np.testing.assert_allclose(mine, expected, rtol=0.01, err_msg=name)
                assert np.abs(mine - expected).sum() < 1e-3 * expected.sum(), name
