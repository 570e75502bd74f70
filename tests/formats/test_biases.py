"""Biases of q, k, v and o: config.json and the tensors must agree, and every layer must be like the others."""


import pytest

from halfbyte.formats.checkpoint import TensorListError
from halfbyte.formats.conversion.convert import convert
from halfbyte.formats.conversion.recipe import Recipe
from halfbyte.formats.family import UnsupportedFeatureError
from halfbyte.formats.metadata import MetadataTypeError
from halfbyte.formats.opening import open_checkpoint
from support import tiny

BIASED = tiny.weights(tiny.llama_config(attention_bias=True))
PLAIN = tiny.weights(tiny.llama_config())
BIASES = [name for name in BIASED if name.endswith(".bias")]


def without(*names):
    return {name: value for name, value in BIASED.items() if name not in names}


def tensor_lists(path):
    """(missing, unused) as the refusal of a checkpoint names them."""
    with pytest.raises(TensorListError) as caught:
        open_checkpoint(path)
    return caught.value.missing, caught.value.unused


def test_biases_that_config_json_promises_are_needed(tmp_path):
    tiny.write_folder(tmp_path / "a", tiny.llama_config(attention_bias=True), PLAIN)
    assert tensor_lists(tmp_path / "a") == (BIASES, []) and len(BIASES) == 8
    one = "model.layers.1.self_attn.o_proj.bias"
    tiny.write_folder(tmp_path / "b", tiny.llama_config(attention_bias=True), without(one))
    assert tensor_lists(tmp_path / "b") == ([one], [])
    tiny.write_folder(tmp_path / "c", tiny.llama_config(mlp_bias=True), PLAIN)
    assert tensor_lists(tmp_path / "c")[0] == [f"model.layers.{i}.mlp.{n}_proj.bias" for i in (0, 1) for n in ("gate", "up", "down")]
    with open_checkpoint(_folder(tmp_path / "d", attention_bias=True, mlp_bias=False)) as found:
        assert {tiny.gguf_name(name) for name in BIASES} < set(found.tensors)


def test_biases_that_config_json_denies_are_too_many(tmp_path):
    missing, unused = tensor_lists(_folder(tmp_path, attention_bias=False))
    assert (missing, sorted(unused)) == ([], sorted(BIASES))


def test_a_config_json_that_says_nothing_leaves_it_to_the_tensors(tmp_path):
    with open_checkpoint(_folder(tmp_path / "a")) as found:
        assert {tiny.gguf_name(name) for name in BIASES} < set(found.tensors)
    tiny.write_folder(tmp_path / "b", tiny.llama_config(), PLAIN)
    with open_checkpoint(tmp_path / "b") as found:
        assert not any(name.endswith(".bias") for name in found.tensors)


def test_a_flag_that_is_none_is_refused_by_name(tmp_path):
    with pytest.raises(MetadataTypeError, match="'attention_bias'"):
        open_checkpoint(_folder(tmp_path, attention_bias="yes"))


def test_a_bias_of_some_layers_only_is_refused(tmp_path):
    one = "model.layers.0.self_attn.k_proj.bias"
    tiny.write_folder(tmp_path / "a", tiny.llama_config(), without(one))
    assert tensor_lists(tmp_path / "a") == ([one], [])
    tiny.write_gguf(tmp_path / "m.gguf", tiny.llama_config(), without(one))
    assert tensor_lists(tmp_path / "m.gguf") == ([tiny.gguf_name(one)], [])


def test_gguf_says_it_by_its_tensors_alone(tmp_path):
    """There is no key for biases. Some converters leave out that of o."""
    of_o = [name for name in BIASES if ".o_proj." in name]
    for number, tensors in enumerate((PLAIN, BIASED, without(*of_o))):
        path = tmp_path / f"{number}.gguf"
        tiny.write_gguf(path, tiny.llama_config(), tensors)
        with open_checkpoint(path) as found:
            assert set(found.tensors) == {tiny.gguf_name(name) for name in tensors}
            convert(found, tmp_path / f"{number}.hbf", Recipe(8))
        with open_checkpoint(tmp_path / f"{number}.hbf") as found:
            assert set(found.tensors) == {tiny.gguf_name(name) for name in tensors}


def test_biases_that_a_config_json_cannot_say_are_not_written(tmp_path):
    tiny.write_gguf(tmp_path / "m.gguf", tiny.llama_config(), without(*[name for name in BIASES if ".o_proj." in name]))
    with open_checkpoint(tmp_path / "m.gguf") as found, pytest.raises(UnsupportedFeatureError, match=r"attn_output.*'attention_bias'"):
        found.family.to_huggingface(found.metadata, found.tensors)


def _folder(path, **changes):
    """A folder whose tensors have biases on q, k, v and o."""
    tiny.write_folder(path, tiny.llama_config(**changes), BIASED)
    return path
