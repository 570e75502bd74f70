"""docs/adding-an-architecture.md, followed to the letter: its code is run, and a checkpoint of its family with it."""

import json
import re
import shutil

import numpy as np

from halfbyte import Engine
from halfbyte.formats import families
from halfbyte.formats.conversion.to_gguf import export_gguf
from halfbyte.formats.opening import open_checkpoint
from support import ORACLES, ROOT


def test_the_page_adds_a_family(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "adding-an-architecture.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    (tmp_path / "nova_family.py").write_text(code, "utf-8")  # a package as pip would install it
    (tmp_path / "nova-1.0.dist-info").mkdir()
    (tmp_path / "nova-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: nova\nVersion: 1.0\n")
    (tmp_path / "nova-1.0.dist-info" / "entry_points.txt").write_text("[halfbyte.families]\nnova = nova_family:FAMILY\n")
    monkeypatch.syspath_prepend(tmp_path)
    families._load.cache_clear()
    try:
        folder = tmp_path / "nova"
        shutil.copytree(ORACLES / "phi3", folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "nova", "architectures": ["NovaForCausalLM"]}))
        with np.load(ORACLES / "phi3" / "ref.npz") as reference:
            ids, at, expected = reference["ids"], reference["at"], reference["logits"]
        with open_checkpoint(folder) as checkpoint:
            export_gguf(checkpoint, tmp_path / "nova.gguf")
        for path in (folder, tmp_path / "nova.gguf"):
            with Engine(path, compute="f32", threads=1) as engine:
                logits = engine.logits(ids)
            assert np.abs(logits[at] - expected).max() < 1e-4 * expected.std()
    finally:
        families._load.cache_clear()


def test_the_layer_on_the_page_is_the_engines():
    page = (ROOT / "docs" / "adding-an-architecture.md").read_text("utf-8")
    source = (ROOT / "engine" / "plan" / "layers.py").read_text("utf-8")
    (lines,) = re.findall(r"```\nnormed = (.*?)```", page, re.S)
    for line in lines.strip().splitlines():
        assert line.strip() in source
