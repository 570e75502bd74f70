"""Conversions ask the safetensors library what it thinks of a header."""

import json
import struct
import sys

import numpy as np
import pytest
import safetensors.numpy

from halfbyte.formats.errors import HeaderError
from halfbyte.formats.safetensors.judge import judge_headers
from halfbyte.tools import qconvert


def test_what_the_library_writes_it_takes(tmp_path):
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({"w": np.ones((64, 64), np.float32)}, path, {"format": "pt"})
    judge_headers([path, tmp_path / "not-there.gguf"])


@pytest.mark.parametrize(
    "header",
    [
        {"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 12]}},
        {"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [4, 20]}},
        {"w": {"dtype": "F33", "shape": [2, 2], "data_offsets": [0, 16]}},
        [],
    ],
)
def test_what_it_refuses_is_refused_with_its_words(tmp_path, header):
    path = tmp_path / "a.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    with pytest.raises(HeaderError, match="the safetensors library refuses it: "):
        judge_headers([path])


@pytest.mark.parametrize("data", [b"", b"abc", struct.pack("<Q", 1 << 62) + b"{}", struct.pack("<Q", 400) + b"{}"])
def test_files_that_are_cut_short(tmp_path, data):
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    with pytest.raises(HeaderError, match="the safetensors library refuses it"):
        judge_headers([path])


def test_a_conversion_asks(tmp_path, monkeypatch, capsys):
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({"w": np.ones((64, 64), np.float32)}, path)

    def refuse(path, framework):
        raise safetensors.SafetensorError("not today")

    monkeypatch.setattr(safetensors, "safe_open", refuse)
    monkeypatch.setattr(sys, "argv", ["qconvert", str(path), "-o", str(tmp_path / "a.hbf")])
    assert qconvert.main() == 1
    assert "error: " in (said := capsys.readouterr().err) and "refuses it: not today" in said
    assert not (tmp_path / "a.hbf").exists()
