"""Checkpoints of every kind seen one way: names, order of rows, metadata, and what is refused and how."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from halfbyte.formats.checkpoint import MissingKeyError, TensorListError
from halfbyte.formats.errors import FileFormatError, InputError, MissingTensorsError
from halfbyte.formats.family import UnsupportedArchitectureError, UnsupportedFeatureError
from halfbyte.formats.huggingface.weights import AlreadyQuantizedError
from halfbyte.formats.metadata import MetadataTypeError
from halfbyte.formats.opening import open_checkpoint
from halfbyte.formats.rope import UnsupportedRopeError
from halfbyte.quant.errors import HalfbyteError
from support import tiny


def refused(path, kind=HalfbyteError):
    with pytest.raises(kind) as caught:
        open_checkpoint(path).close()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_folder(tmp_path):
    stored = tiny.write_folder(tmp_path / "m")
    with open_checkpoint(tmp_path / "m") as found:
        assert (found.kind, found.architecture, found.notes) == ("safetensors", "llama", [])
        assert found.metadata["general.name"] == "m"
        assert {tiny.gguf_name(name) for name in stored} == set(found.tensors)
        for name, value in stored.items():
            tensor = found.tensors[tiny.gguf_name(name)]
            assert tensor.format == "bf16" and tensor.vector == (value.ndim == 1) and tensor.nbytes == 2 * value.size
            np.testing.assert_array_equal(tensor.float32(), value)
        matrix = found.tensors["blk.1.ffn_down.weight"]
        np.testing.assert_array_equal(matrix.float32(slice(5, 9)), stored["model.layers.1.mlp.down_proj.weight"][5:9])
        metadata = found.metadata
        assert metadata["llama.block_count"] == 2 and metadata["llama.attention.key_length"] == 16
        assert metadata["llama.rope.dimension_count"] == 16 and metadata["llama.vocab_size"] == 272
        assert metadata["tokenizer.ggml.eos_token_id"] == 257 and metadata["halfbyte.eos_token_ids"] == [257]
        assert found.tokenizer.json == tiny.tokenizer_json() and found.tokenizer.chat_template == tiny.TEMPLATE
        assert found.tokenizer.config["bos_token"] == "<|im_start|>"


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "f64"])
def test_dtypes_of_weights(tmp_path, dtype):
    stored = tiny.write_folder(tmp_path, dtype=dtype)
    with open_checkpoint(tmp_path) as found:
        tensor = found.tensors["blk.0.attn_k.weight"]
        assert tensor.format == dtype and tensor.float32().dtype == np.float32
        np.testing.assert_array_equal(tensor.float32(), stored["model.layers.0.self_attn.k_proj.weight"])


@pytest.mark.parametrize("config", [tiny.llama_config(attention_bias=True), tiny.qwen2_config()], ids=["llama", "qwen2"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_gguf_is_the_same_as_the_folder(tmp_path, config, kind):
    """Rows of q and k, and their biases, come out in Hugging Face's order from both."""
    stored = tiny.write_folder(tmp_path / "hf", config, dtype="f32")
    tiny.write_gguf(tmp_path / "m.gguf", config, stored, kind)
    with open_checkpoint(tmp_path / "hf") as ours, open_checkpoint(tmp_path / "m.gguf") as theirs:
        assert theirs.kind == "gguf" and theirs.architecture == ours.architecture == config["model_type"]
        assert list(ours.tensors) == list(theirs.tensors)
        for name, tensor in ours.tensors.items():
            other = theirs.tensors[name]
            loose = 0.01 if kind == "Q8_0" and not tensor.vector else 0
            np.testing.assert_allclose(other.float32(), tensor.float32(), atol=loose, rtol=0)
            np.testing.assert_array_equal(other.float32(slice(0, 3))[-1:], np.atleast_2d(other.float32())[:3][-1:])
        for key in ours.metadata:
            if key.startswith(config["model_type"]):
                assert ours.metadata[key] == pytest.approx(theirs.metadata[key], rel=1e-6), key


def test_blocks_of_reordered_rows_are_those_of_the_file(tmp_path):
    config = tiny.llama_config()
    stored = tiny.weights(config)
    tiny.write_gguf(tmp_path / "m.gguf", config, stored, "Q4_0")
    from gguf import GGUFReader

    raw = {tensor.name: tensor.data for tensor in GGUFReader(tmp_path / "m.gguf").tensors}["blk.0.attn_q.weight"]
    with open_checkpoint(tmp_path / "m.gguf") as found:
        blocks = found.tensors["blk.0.attn_q.weight"].blocks()
        assert blocks.shape == (64, 2, 18)
        np.testing.assert_array_equal(tiny.interleave(blocks, 4).reshape(64, 36), raw)
        np.testing.assert_array_equal(found.tensors["blk.0.attn_q.weight"].blocks(slice(3, 20)), blocks[3:20])


def test_gguf_fills_in_what_may_be_left_out(tmp_path):
    config = tiny.llama_config()
    tiny.write_gguf(tmp_path / "m.gguf", config, tiny.weights(config))
    with open_checkpoint(tmp_path / "m.gguf") as found:
        assert found.metadata["llama.attention.key_length"] == 16 and found.metadata["llama.rope.dimension_count"] == 16


@pytest.mark.parametrize(
    "key",
    [
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "rms_norm_eps",
        "vocab_size",
        "max_position_embeddings",
    ],
)
def test_a_missing_key_is_named(tmp_path, key):
    tiny.write_folder(tmp_path)
    config = tiny.llama_config()
    del config[key]
    tiny.write_json(tmp_path / "config.json", config)
    assert f"config.json lacks '{key}'" in refused(tmp_path, MissingKeyError)


def test_a_missing_key_of_gguf_is_named(tmp_path):
    config = tiny.llama_config()
    tensors = tiny.weights(config)
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_embedding_length(64)
    writer.add_tensor("token_embd.weight", tensors["model.embed_tokens.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "m.gguf lacks 'llama.attention.head_count'" in refused(tmp_path / "m.gguf", MissingKeyError)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"num_hidden_layers": "two"}, MetadataTypeError, "'num_hidden_layers' is 'two', not an integer"),
        ({"num_hidden_layers": -1}, MetadataTypeError, "'num_hidden_layers' is -1"),
        ({"num_hidden_layers": 10**12}, MetadataTypeError, "'num_hidden_layers'"),
        ({"num_attention_heads": 0}, MetadataTypeError, "'num_attention_heads' is 0"),
        ({"num_key_value_heads": 3}, MetadataTypeError, "'num_attention_heads' (4) is not a multiple of 'num_key_value_heads' (3)"),
        ({"rms_norm_eps": float("nan")}, MetadataTypeError, "'rms_norm_eps'"),
        ({"rms_norm_eps": True}, MetadataTypeError, "'rms_norm_eps' is True, not a number"),
        ({"rope_theta": "1e4"}, MetadataTypeError, "rope_theta"),
        ({"hidden_act": "relu2"}, UnsupportedFeatureError, "'relu2'"),
        ({"hidden_size": 66}, MetadataTypeError, "'head_dim'"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, UnsupportedRopeError, "'spiral'"),
        ({"rope_scaling": {"type": "linear"}}, MissingKeyError, "'rope_scaling.factor'"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
            MissingKeyError,
            "'rope_scaling.high_freq_factor'",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, UnsupportedRopeError, "'rope_parameters' differs by layer"),
        ({"sliding_window": 64}, UnsupportedFeatureError, "'sliding_window'"),
        ({"model_type": "qwen2", "use_sliding_window": True}, UnsupportedFeatureError, "'use_sliding_window'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, UnsupportedFeatureError, "'sliding_attention'"),
        ({"model_type": "mamba"}, UnsupportedArchitectureError, "'mamba' is not supported; supported are llama, mistral, mixtral, phi3"),
        ({"model_type": "a\x1b[31mb"}, UnsupportedArchitectureError, "\\x1b"),
    ],
)
def test_what_is_not_understood_is_named(tmp_path, change, kind, words):
    tiny.write_folder(tmp_path)
    tiny.write_json(tmp_path / "config.json", tiny.llama_config(**change))
    text = refused(tmp_path, kind)
    assert words in text and "\x1b" not in text


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": ' + "[" * 100_000, "\xff", '{"model_type": ' + "9" * 5000 + "}"])
def test_a_config_that_is_no_object(tmp_path, text):
    tiny.write_folder(tmp_path)
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    assert "config.json" in refused(tmp_path)


def test_text_config_head_dim_and_lists_of_end_tokens(tmp_path):
    config = tiny.llama_config(head_dim=32, eos_token_id=[257, 256, 300_000])
    stored = tiny.write_folder(tmp_path, config, tiny.weights(config, prefix="language_model.model."))
    tiny.write_json(tmp_path / "config.json", {"model_type": "some_vl", "text_config": config, "vision_config": {}})
    with open_checkpoint(tmp_path) as found:
        assert found.metadata["llama.attention.key_length"] == 32
        assert found.tensors["blk.0.attn_q.weight"].shape == (128, 64)
        assert found.metadata["halfbyte.eos_token_ids"] == [257, 256] and found.metadata["tokenizer.ggml.eos_token_id"] == 257
        name = "language_model.model.layers.0.self_attn.q_proj.weight"
        np.testing.assert_array_equal(found.tensors["blk.0.attn_q.weight"].float32(), stored[name])


def test_newer_spelling_of_rope(tmp_path):
    tiny.write_folder(tmp_path, tiny.llama_config(rope_theta=None, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}))
    with open_checkpoint(tmp_path) as found:
        assert found.metadata["llama.rope.freq_base"] == 5e5 and found.notes == []
    tiny.write_json(tmp_path / "config.json", tiny.llama_config(rope_theta=None))
    with open_checkpoint(tmp_path) as found:
        assert found.metadata["llama.rope.freq_base"] == 1e4 and "rope_theta" in found.notes[0]


@pytest.mark.parametrize("case", ["flag, no head", "flag, equal", "flag, different", "no flag, no head", "no flag, equal"])
def test_tied_embeddings(tmp_path, case):
    flag, head = case.split(", ")
    config = tiny.llama_config(tie_word_embeddings=flag == "flag" or None)
    tensors = tiny.weights(config, head=head in ("equal", "different"))
    if head == "equal":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tiny.write_folder(tmp_path, config, tensors)
    with open_checkpoint(tmp_path) as found:
        assert ("output.weight" in found.tensors) == (case in ("flag, different", "no flag, equal"))
        assert bool(found.notes) == (case == "flag, different")


def test_missing_and_unused_tensors_are_listed_together(tmp_path):
    tensors = tiny.weights(tiny.llama_config())
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.extra.weight"] = np.zeros((4, 4), np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)  # may be there
    tiny.write_folder(tmp_path, tensors=tensors)
    with pytest.raises(TensorListError) as caught:
        open_checkpoint(tmp_path)
    assert set(caught.value.missing) == {"model.layers.1.mlp.up_proj.weight", "model.norm.weight"}
    assert caught.value.unused == ["model.layers.0.mlp.extra.weight"]
    assert all(name in str(caught.value) for name in (*caught.value.missing, *caught.value.unused))


def test_a_layer_too_many_is_not_passed_over(tmp_path):
    tiny.write_folder(tmp_path)
    tiny.write_json(tmp_path / "config.json", tiny.llama_config(num_hidden_layers=1))
    with pytest.raises(TensorListError) as caught:
        open_checkpoint(tmp_path)
    assert len(caught.value.unused) == 9 and not caught.value.missing


def test_a_wrong_shape_is_named(tmp_path):
    tensors = tiny.weights(tiny.llama_config())
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((96, 32), np.float32)
    tiny.write_folder(tmp_path, tensors=tensors)
    text = refused(tmp_path, FileFormatError)
    assert "model.layers.1.mlp.up_proj.weight" in text and "[96, 32]" in text and "[96, 64]" in text


def test_the_index_is_read_first_and_consolidated_files_are_left_aside(tmp_path):
    stored = tiny.write_folder(tmp_path, shards=3)
    save_file({"tok_embeddings.weight": np.zeros((2, 2), np.float32)}, tmp_path / "consolidated.00.safetensors")
    with open_checkpoint(tmp_path) as found:
        assert len(found.files) == 3
        np.testing.assert_array_equal(found.tensors["token_embd.weight"].float32(), stored["model.embed_tokens.weight"])
    with open_checkpoint(tmp_path / "model-00002-of-00003.safetensors") as found:  # one shard stands for all
        assert len(found.files) == 3


def test_missing_shards_are_listed_at_once(tmp_path):
    tiny.write_folder(tmp_path, shards=4)
    (tmp_path / "model-00002-of-00004.safetensors").unlink()
    (tmp_path / "model-00004-of-00004.safetensors").unlink()
    text = refused(tmp_path, MissingTensorsError)
    assert "model-00002-of-00004" in text and "model-00004-of-00004" in text


@pytest.mark.parametrize(
    ("method", "name"), [("bitsandbytes", "bitsandbytes"), ("gptq", "GPTQ"), ("awq", "AWQ"), ("compressed-tensors", "compressed-tensors")]
)
def test_packed_weights_of_other_tools_are_named(tmp_path, method, name):
    tiny.write_folder(tmp_path, tiny.llama_config(quantization_config={"quant_method": method, "bits": 4}))
    text = refused(tmp_path, AlreadyQuantizedError)
    assert name in text and "config.json" in text and "original" in text


def test_packed_weights_are_known_by_their_names_too(tmp_path):
    save_file({"model.layers.0.q.qweight": np.zeros((4, 4), np.int32)}, tmp_path / "a.safetensors")
    assert "GPTQ" in refused(tmp_path / "a.safetensors", AlreadyQuantizedError)


def test_float8_with_scales_of_ragged_blocks(tmp_path):
    config = tiny.llama_config(
        hidden_size=200, num_attention_heads=2, num_key_value_heads=1, head_dim=100, quantization_config={"quant_method": "fp8"}
    )
    tensors, wanted = tiny.weights(config), {}
    rng = np.random.default_rng(1)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        eight = tensors[name].astype(ml_dtypes.float8_e4m3fn)
        if "k_proj" in name:
            scale = np.float32(1.625)  # bf16, as which the folder is written, holds it
            tensors[name.replace("weight", "weight_scale")] = np.array(scale)
            tensors[name.replace("weight", "input_scale")] = np.array(np.float32(3.0))
            spread = scale
        else:
            scale = rng.uniform(0.5, 2, (-(-rows // 128), -(-columns // 128))).astype(ml_dtypes.bfloat16).astype(np.float32)
            tensors[f"{name}_scale_inv"] = scale
            spread = np.empty((rows, columns), np.float32)
            for i in range(rows):
                for j in range(columns):
                    spread[i, j] = scale[i // 128, j // 128]
        wanted[name] = eight.astype(np.float32) * spread
        tensors[name] = eight
    tiny.write_folder(tmp_path, config, tensors)
    with open_checkpoint(tmp_path) as found:
        for name, value in wanted.items():
            tensor = found.tensors[tiny.gguf_name(name)]
            assert tensor.format == "f8_e4m3"
            np.testing.assert_array_equal(tensor.float32(), value)
            np.testing.assert_array_equal(tensor.float32(slice(60, 90)), value[60:90])
        assert not any("scale" in name for name in found.tensors)


def test_float8_without_its_scale_is_refused(tmp_path):
    config = tiny.llama_config(quantization_config={"quant_method": "fp8"})
    tensors = tiny.weights(config)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    tiny.write_folder(tmp_path, config, tensors)
    assert name in refused(tmp_path)


def test_a_lone_safetensors_is_weights_only(tmp_path):
    save_file({"a": np.ones((3, 40), np.float32), "b": np.ones(4, np.float16)}, tmp_path / "w.safetensors")
    with open_checkpoint(tmp_path / "w.safetensors") as found:
        assert found.architecture is None and found.family is None and set(found.tensors) == {"a", "b"}
        assert "not run" in found.notes[0]


def test_what_is_no_checkpoint(tmp_path):
    assert "no such file" in refused(tmp_path / "nothing.gguf", InputError)
    (tmp_path / "a.bin").write_bytes(b"\x80\x02x" * 10)
    assert "pickle" in refused(tmp_path / "a.bin", InputError)
    (tmp_path / "a.txt").write_bytes(b"hello")
    assert "not a checkpoint" in refused(tmp_path / "a.txt", InputError)
    assert "config.json" in refused(tmp_path, InputError)
    tiny.write_folder(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / "pytorch_model.bin")
    assert "pickles" in refused(tmp_path / "m", InputError)
    assert "name the folder" in refused(tmp_path / "m" / "config.json", InputError)
    (tmp_path / "e.safetensors").write_bytes(b"")
    refused(tmp_path / "e.safetensors", FileFormatError)


def test_a_file_beside_its_config_is_a_model(tmp_path):
    tiny.write_folder(tmp_path)
    with open_checkpoint(tmp_path / "model.safetensors") as found:
        assert found.architecture == "llama" and found.path == tmp_path / "model.safetensors"
        assert found.tokenizer.json is not None


def test_without_a_tokenizer_a_note_says_so(tmp_path):
    tiny.write_folder(tmp_path, tokenizer=False)
    with open_checkpoint(tmp_path) as found:
        assert "tokenizer.json" in found.notes[0] and not found.tokenizer


def test_chat_templates(tmp_path):
    tiny.write_folder(tmp_path)
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    tiny.write_json(tmp_path / "tokenizer_config.json", {"chat_template": named})
    with open_checkpoint(tmp_path) as found:
        assert found.tokenizer.chat_template == {"default": "A", "tool_use": "B"}
        assert found.metadata["tokenizer.chat_template"] == "A" and found.metadata["tokenizer.chat_template.tool_use"] == "B"
    (tmp_path / "chat_template.jinja").write_text("C", encoding="utf-8")
    tiny.write_json(tmp_path / "tokenizer_config.json", {"chat_template": "A"})
    with open_checkpoint(tmp_path) as found:
        assert found.tokenizer.chat_template == "C"
    tiny.write_json(tmp_path / "tokenizer_config.json", {"chat_template": [1]})
    assert "chat_template" in refused(tmp_path)


def test_generation_settings(tmp_path):
    tiny.write_folder(tmp_path)
    tiny.write_json(tmp_path / "generation_config.json", {"eos_token_id": [5, 257], "temperature": 0.6, "top_k": 20, "do_sample": True})
    with open_checkpoint(tmp_path) as found:
        assert found.metadata["halfbyte.eos_token_ids"] == [5, 257]
        assert found.metadata["general.sampling.temp"] == 0.6 and found.metadata["general.sampling.top_k"] == 20
    tiny.write_json(tmp_path / "generation_config.json", {"eos_token_id": "two"})
    assert "eos_token_id" in refused(tmp_path)


def test_gguf_that_is_not_a_whole_model(tmp_path):
    import gguf

    config = tiny.llama_config()
    tensors = tiny.weights(config)
    number = gguf.GGUFValueType.UINT16
    tiny.write_gguf(tmp_path / "split.gguf", config, tensors, extra={"split.count": (3, number)})
    assert "split" in refused(tmp_path / "split.gguf")
    tiny.write_gguf(tmp_path / "few.gguf", config, tensors, leave_out=("blk.1.ffn_up.weight",))
    assert "blk.1.ffn_up.weight" in refused(tmp_path / "few.gguf", TensorListError)
    tiny.write_gguf(tmp_path / "more.gguf", config, {**tensors, "blk.0.odd.weight": np.zeros((2, 32), np.float32)})
    assert "blk.0.odd.weight" in refused(tmp_path / "more.gguf", TensorListError)
    string = gguf.GGUFValueType.STRING
    tiny.write_gguf(tmp_path / "rope.gguf", config, tensors, extra={"llama.rope.scaling.type": ("spiral", string)})
    assert "'spiral'" in refused(tmp_path / "rope.gguf")
    count = gguf.GGUFValueType.UINT32
    tiny.write_gguf(tmp_path / "part.gguf", config, tensors, extra={"llama.rope.dimension_count": (8, count)})
    assert "llama.rope.dimension_count" in refused(tmp_path / "part.gguf")
    shutil.copy(tmp_path / "few.gguf", tmp_path / "cut.gguf")
    with open(tmp_path / "cut.gguf", "r+b") as file:
        file.truncate(file.seek(0, 2) - 1000)
    assert "truncated" in refused(tmp_path / "cut.gguf")


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["llama", "yarn", "gelu"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rope_type", "factor", "rope_theta", "a"]), inner, max_size=3)
    ),
    max_leaves=6,
)
MORE_KEYS = ("rope_scaling", "rope_parameters", "head_dim", "text_config", "quantization_config", "layer_types", "attention_bias")
KEYS = (*tiny.llama_config(), *MORE_KEYS)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(KEYS), value=anything, file=st.sampled_from(["config.json", "generation_config.json", "tokenizer_config.json"]))
def test_whatever_stands_in_a_config_there_is_a_named_error_or_a_model(tmp_path, key, value, file):
    if not (tmp_path / "model.safetensors").exists():
        tiny.write_folder(tmp_path)
    tiny.write_json(tmp_path / "config.json", tiny.llama_config())
    key = (
        key
        if file == "config.json"
        else {"vocab_size": "chat_template", "hidden_act": "top_k", "rms_norm_eps": "temperature"}.get(key, key)
    )
    tiny.write_json(tmp_path / file, {**(tiny.llama_config() if file == "config.json" else {}), key: value})
    try:
        with open_checkpoint(tmp_path) as found:
            assert set(found.tensors) >= {"token_embd.weight", "output_norm.weight"}
            found.family.to_huggingface(found.metadata, found.tensors)
    except HalfbyteError as error:
        assert "\n" not in str(error) and all(c.isprintable() for c in str(error))


def test_json_spelled_surrogates_do_no_harm(tmp_path):
    tiny.write_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "a\ud800b"}), encoding="ascii")
    with open_checkpoint(tmp_path) as found:
        found.metadata["tokenizer.chat_template"].encode()


def test_bytes_and_not_the_name_tell_the_kind(tmp_path):
    """A .safetensors under another name is one, and so is a GGUF."""
    for name in ("model.weights", "model.hbf", "model.gguf"):
        path = tmp_path / name
        save_file({"w": np.ones((2, 32), np.float32)}, path)
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.kind == "safetensors" and list(checkpoint.tensors) == ["w"]
