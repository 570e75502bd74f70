"""qinspect: files of every kind, also those that cannot be run; damage is named."""

import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from halfbyte.formats.conversion.convert import convert
from halfbyte.formats.conversion.recipe import Recipe
from halfbyte.formats.hbf.reader import NativeFile
from halfbyte.formats.opening import open_checkpoint
from halfbyte.tools.qinspect import main
from support import tiny


@pytest.fixture
def qinspect(monkeypatch, capsys):
    def run(*arguments, status=0):
        monkeypatch.setattr(sys, "argv", ["qinspect", *map(str, arguments)])
        assert main() == status
        return capsys.readouterr()

    return run


@pytest.fixture
def hbf(tmp_path):
    tiny.write_folder(tmp_path / "m")
    with open_checkpoint(tmp_path / "m") as checkpoint:
        convert(checkpoint, tmp_path / "m.hbf", Recipe(4), threads=1)
    return tmp_path / "m.hbf"


def test_native_file(hbf, qinspect):
    answer = json.loads(qinspect(hbf, "--json").out)
    assert answer["kind"] == "hbf" and answer["architecture"] == "llama" and answer["runs"] and answer["bytes"] == hbf.stat().st_size
    assert answer["metadata"]["llama.block_count"] == 2
    with NativeFile(hbf) as file:
        assert len(answer["tensors"]) == len(file.tensors)
        for entry in answer["tensors"]:
            tensor = file.tensors[entry["name"]]
            assert (tuple(entry["shape"]), entry["format"], entry["bytes"], entry["offset"]) == (
                tensor.shape,
                tensor.format,
                tensor.nbytes,
                tensor.offset,
            )
            assert entry["checksum"] == tensor.recorded["checksum"] and entry["cosine"] == pytest.approx(tensor.recorded["cosine"])
        weights = sum(np.prod(tensor.shape) for tensor in file.tensors.values())
        assert answer["bits_per_weight"] == pytest.approx(8 * sum(t.nbytes for t in file.tensors.values()) / weights)
    text = qinspect(hbf).out
    for words in ("blk.1.ffn_down.weight", "64 x 96", "q6_0", "bits per weight", "llama.block_count: 2", "version: 1"):
        assert words in text, words


def test_verify(hbf, qinspect):
    assert "verified: every checksum" in qinspect(hbf, "--verify").out
    with NativeFile(hbf) as file:
        offset = file.tensors["blk.1.ffn_up.weight"].offset
    with open(hbf, "r+b") as stream:
        stream.seek(offset + 100)
        byte = stream.read(1)[0]
        stream.seek(offset + 100)
        stream.write(bytes([byte ^ 4]))
    out = qinspect(hbf, "--verify", status=1)
    assert out.err.startswith("error: ") and "blk.1.ffn_up.weight" in out.err and len(out.err.splitlines()) == 1
    qinspect(hbf)  # without --verify nobody looks


def test_other_kinds(tmp_path, qinspect):
    config = tiny.llama_config()
    stored = tiny.write_folder(tmp_path / "m", config, shards=2)
    tiny.write_gguf(tmp_path / "m.gguf", config, stored, "Q4_0")
    folder = json.loads(qinspect(tmp_path / "m", "--json").out)
    assert folder["kind"] == "safetensors" and folder["runs"] and folder["metadata"]["hidden_size"] == 64
    assert {entry["name"] for entry in folder["tensors"]} == set(stored) and folder["bits_per_weight"] == 16
    file = json.loads(qinspect(tmp_path / "m.gguf", "--json", "--verify").out)
    assert file["kind"] == "gguf" and file["header"]["version"] == 3 and file["formats"]["q4_0"]["tensors"] == 15
    save_file({"w": np.ones((4, 8), np.float32)}, tmp_path / "w.safetensors")
    lone = qinspect(tmp_path / "w.safetensors")
    assert "w " in lone.out and "not run" in lone.err


def test_what_cannot_be_run_can_be_inspected(tmp_path, qinspect):
    tiny.write_folder(tmp_path / "m")
    tiny.write_json(tmp_path / "m" / "config.json", tiny.llama_config(model_type="mamba"))
    out = qinspect(tmp_path / "m")
    assert "model.norm.weight" in out.out and "cannot be run" in out.err and "mamba" in out.err


def test_non_finite_weights_are_found(tmp_path, qinspect):
    weights = np.ones((4, 8), np.float32)
    weights[2, 3] = np.inf
    save_file({"w": weights}, tmp_path / "w.safetensors")
    out = qinspect(tmp_path / "w.safetensors", "--verify", status=1)
    assert "w [row 2, column 3] is inf" in out.err


def test_control_characters_do_not_reach_the_terminal(tmp_path, qinspect):
    save_file({"w\x1b[2J\u202e": np.ones((4, 8), np.float32)}, tmp_path / "w.safetensors", metadata={"a\x07": "b\x1b]0;c\x07"})
    out = qinspect(tmp_path / "w.safetensors")
    assert not any(c in out.out + out.err for c in "\x1b\x07\u202e") and "\\x1b[2J" in out.out


def test_errors(tmp_path, qinspect):
    (tmp_path / "a.gguf").write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 16)
    for arguments, status in (((tmp_path / "a.gguf",), 1), ((tmp_path / "none.hbf",), 1), ((), 2), ((tmp_path / "a.gguf", "--what"), 2)):
        out = qinspect(*arguments, status=status)
        assert out.out == "" and out.err.splitlines()[0].startswith("error: ") and "Traceback" not in out.err


def test_a_reader_that_goes_away_is_no_error(hbf):
    command = f"{sys.executable} -m halfbyte.tools.qinspect {hbf} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, timeout=60)
    assert "hbf" in done.stdout and done.stderr == ""
