"""Logits against those of transformers, for tiny random models in tests/oracles (made by tests/make_oracles.py)."""


import numpy as np
import pytest

from halfbyte.engine.model import Model, Work
from halfbyte.engine.run.cache import Sequence
from halfbyte.formats.conversion.convert import convert
from halfbyte.formats.conversion.recipe import Recipe
from halfbyte.formats.opening import open_checkpoint
from support import ORACLES

NAMES = sorted(p.name for p in ORACLES.iterdir() if (p / "ref.npz").exists())


def logits_of(path, ids, **options):
    with open_checkpoint(path) as checkpoint:
        model = Model(checkpoint, **options)
        try:
            return model.step([Work(Sequence(), ids, "all")]).copy()
        finally:
            model.close()


def reference(name):
    with np.load(ORACLES / name / "ref.npz") as ref:
        return ref["ids"], ref["at"], ref["logits"]


def test_there_are_oracles():
    assert {"llama", "llama3rope", "qwen2", "long", "yarn"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_f32_agrees_with_transformers(name):
    ids, at, expected = reference(name)
    logits = logits_of(ORACLES / name, ids, compute="f32", threads=2)
    assert logits.shape == (len(ids), expected.shape[1]) and logits.dtype == np.float32
    assert np.abs(logits[at] - expected).max() < 1e-4 * expected.std()


@pytest.mark.parametrize("name", ["llama", "head24", "long"])
def test_int8_activations_cost_little(name):
    """With float weights nothing is quantized but the f16 cache; with 8-bit weights the error is small and not zero."""
    ids, at, expected = reference(name)
    with_cache = logits_of(ORACLES / name, ids, compute="int8", threads=2)[at]
    assert np.abs(with_cache - expected).max() < 0.01 * expected.std()


@pytest.mark.parametrize("name", NAMES)
def test_a_converted_file_gives_the_same_logits(name, tmp_path):
    """--bits 16 keeps every bit of bf16 and f16 weights, so a .hbf in f32 compute agrees as well as the checkpoint itself."""
    ids, at, expected = reference(name)
    with open_checkpoint(ORACLES / name) as checkpoint:
        convert(checkpoint, tmp_path / "m.hbf", Recipe(bits=16))
    logits = logits_of(tmp_path / "m.hbf", ids, compute="f32", threads=1)
    if name in ("llama", "llama3rope", "qwen2"):  # float32 sources lose bits in 16
        assert np.abs(logits[at] - expected).max() < 0.05 * expected.std()
    else:
        assert np.abs(logits[at] - expected).max() < 1e-4 * expected.std()


def test_q8_0_is_close_and_q4_0_is_not_far(tmp_path):
    ids, at, expected = reference("qwen2")
    for bits, most in ((8, 0.05), (4, 0.6)):
        with open_checkpoint(ORACLES / "qwen2") as checkpoint:
            convert(checkpoint, tmp_path / f"{bits}.hbf", Recipe(bits=bits))
        logits = logits_of(tmp_path / f"{bits}.hbf", ids, threads=2)[at]
        error = np.sqrt(np.mean((logits - expected) ** 2)) / expected.std()
        assert 1e-4 < error < most, (bits, error)
