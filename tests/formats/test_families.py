"""Families: config.json to GGUF's keys and back, rotary scaling, the order of rotary rows, finding families."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.formats import families, rope
from halfbyte.formats.expression import halves_order, pairs_order
from halfbyte.formats.families import family, family_of_model_type
from halfbyte.formats.metadata import Metadata, MetadataTypeError, MissingKeyError
from halfbyte.formats.opening import open_checkpoint
from support import tiny

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def same(got, wanted, rel=1e-6):
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        assert got[key] == (value if isinstance(value, str) else pytest.approx(value, rel=rel)), key


def llama3_frequencies(base, size, factor, low, high, original):
    """As Meta's reference code has it, frequency by frequency."""
    out = []
    for i in range(0, size, 2):
        frequency = 1.0 / base ** (i / size)
        wave = 2 * math.pi / frequency
        if wave < original / high:
            out.append(frequency)
        elif wave > original / low:
            out.append(frequency / factor)
        else:
            smooth = (original / wave - low) / (high - low)
            out.append((1 - smooth) * frequency / factor + smooth * frequency)
    return np.array(out)


@given(
    base=st.floats(1e3, 1e7),
    size=st.sampled_from([16, 64, 80, 128]),
    factor=st.floats(1.5, 64),
    low=st.floats(0.5, 2),
    span=st.floats(0.5, 8),
    original=st.integers(64, 32768),
)
def test_llama3_factors(base, size, factor, low, span, original):
    factors = rope.llama3_factors(base, size, factor, low, low + span, original)
    assert factors.shape == (size // 2,) and factors.dtype == np.float32
    plain = base ** (-np.arange(0, size, 2) / size)
    np.testing.assert_allclose(plain / factors, llama3_frequencies(base, size, factor, low, low + span, original), rtol=1e-5)


def test_llama3_scaling_to_gguf_and_back(tmp_path):
    config = tiny.llama_config(rope_theta=5e5, head_dim=64, rope_scaling=LLAMA3)
    tiny.write_folder(tmp_path, config)
    with open_checkpoint(tmp_path) as found:
        factors = found.tensors["rope_freqs.weight"]
        assert factors.vector and factors.shape == (32,) and factors.float32()[0] == 1 and factors.float32()[-1] == 8
        assert "llama.rope.scaling.type" not in found.metadata  # llama.cpp knows the tensor, and stops at an unknown type
        assert found.family.to_huggingface(found.metadata, found.tensors)["rope_scaling"] == LLAMA3
        # A file by llama.cpp has only the tensor.
        bare = {key: value for key, value in found.metadata.items() if not key.startswith("halfbyte.")}
        again = found.family.to_huggingface(Metadata(bare, "m.gguf"), found.tensors)["rope_scaling"]
        same(again, LLAMA3, rel=1e-3)


@given(base=st.sampled_from([1e4, 5e5]), size=st.sampled_from([16, 32, 64, 128]), factor=st.sampled_from([8.0, 32.0]))
def test_llama3_numbers_from_the_factors_alone(base, size, factor):
    """However few frequencies are interpolated, the numbers that are found give the same factors."""
    factors = rope.llama3_factors(base, size, factor, 1.0, 4.0, 8192)
    metadata = Metadata({"llama.rope.freq_base": base, "llama.rope.dimension_count": size}, "m.gguf")
    found = rope.to_config(metadata, "llama", factors)["rope_scaling"]
    again = rope.llama3_factors(base, size, *(found[key] for key in list(LLAMA3)[1:]))
    np.testing.assert_allclose(again, factors, rtol=1e-5)


def test_factors_that_are_not_llama3s_are_refused(tmp_path):
    tiny.write_folder(tmp_path, tiny.llama_config(rope_theta=5e5, head_dim=64, rope_scaling=LLAMA3))
    with open_checkpoint(tmp_path) as found:
        bare = Metadata({key: value for key, value in found.metadata.items() if not key.startswith("halfbyte.")}, "m.gguf")
        odd = {"rope_freqs.weight": SimpleNamespace(float32=lambda: np.linspace(1, 9, 32, dtype=np.float32))}
        with pytest.raises(rope.UnsupportedRopeError, match=r"rope_freqs\.weight"):
            found.family.to_huggingface(bare, {**found.tensors, **odd})


@pytest.mark.parametrize(
    ("scaling", "keys"),
    [
        ({"type": "linear", "factor": 4.0}, {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16, "attention_factor": 1.5},
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
                "llama.rope.scaling.yarn_beta_slow": 1.0,
                "llama.rope.scaling.attn_factor": 1.5 / (1 + 0.1 * math.log(4.0)),
            },
        ),
        ({"rope_type": "dynamic", "factor": 2.0}, {"halfbyte.rope.dynamic_factor": 2.0}),
    ],
)
def test_other_scalings_to_gguf_and_back(tmp_path, scaling, keys):
    tiny.write_folder(tmp_path, tiny.llama_config(rope_scaling=scaling))
    with open_checkpoint(tmp_path) as found:
        got = {key: value for key, value in found.metadata.items() if ".rope.scaling." in key or key.startswith("halfbyte.rope.")}
        same(got, keys)
        back = found.family.to_huggingface(found.metadata, found.tensors)["rope_scaling"]
        for key, value in scaling.items():
            same({key: back["rope_type" if key == "type" else key]}, {key: value})


CONFIGS = [
    tiny.llama_config(), tiny.llama_config(attention_bias=True, head_dim=32), tiny.qwen2_config(),
    tiny.llama_config(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=16),
]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS)
def test_config_comes_back_as_it_was(tmp_path, config):
    tiny.write_folder(tmp_path, config)
    with open_checkpoint(tmp_path) as found:
        back = found.family.to_huggingface(found.metadata, found.tensors)
    for key, value in config.items():
        if key not in ("bos_token_id", "eos_token_id", "torch_dtype", "use_sliding_window"):
            assert back[key] == value, key


@given(heads=st.integers(1, 8), half=st.integers(1, 16))
def test_orders_are_inverses_and_pair_up(heads, half):
    rows = heads * 2 * half
    there, back = pairs_order(heads, rows), halves_order(heads, rows)
    np.testing.assert_array_equal(there[back], np.arange(rows))
    np.testing.assert_array_equal(there, tiny.interleave(np.arange(rows), heads))


def test_a_family_of_another_package(monkeypatch):
    """A new family needs an entry point, and nothing else."""
    from halfbyte.formats.families.llama import FAMILY

    other = dataclasses.replace(FAMILY, name="other", model_types=("other_model",))
    point = SimpleNamespace(name="other", load=lambda: other)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point] if group == "halfbyte.families" else [])
    families._load.cache_clear()
    try:
        assert family("other", "a.gguf").name == "other"
        assert family_of_model_type("other_model", "config.json").name == "other"
        assert family("llama", "a.gguf").name == "llama"
    finally:
        families._load.cache_clear()


def test_metadata_names_keys_as_the_source_does():
    metadata = Metadata({"a": 1, "b": None, "f": 2.0, "big": 10**400, "l": (1, 2)}, "config.json", {"x.count": "num_x"})
    with pytest.raises(MissingKeyError, match=r"config\.json lacks 'num_x', which is needed"):
        metadata.require("x.count")
    with pytest.raises(MissingKeyError, match="'b'"):
        metadata.require("b")
    assert metadata.get("b", 3) == 3 and metadata.require("f", int) == 2 and metadata.require("a", float) == 1.0
    assert metadata.require("l", list) == [1, 2]
    with pytest.raises(MetadataTypeError, match="'a' is 1, not a text"):
        metadata.require("a", str)
    with pytest.raises(MetadataTypeError, match="'big'"):
        metadata.number("big")
    with pytest.raises(MetadataTypeError):
        metadata.count("a", low=2)
    more = metadata.updated({"a": 7})
    assert more["a"] == 7 and metadata["a"] == 1 and "f" in more and len(more) == len(metadata)
