"""Conversion: what the file holds, which format a tensor gets, exports, and outputs that are whole or not there."""

import json
import os
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from halfbyte.formats.conversion.convert import convert, native_metadata
from halfbyte.formats.conversion.recipe import Recipe, RecipeError
from halfbyte.formats.conversion.stream import Job, streams
from halfbyte.formats.conversion.to_gguf import export_gguf
from halfbyte.formats.conversion.to_huggingface import export_huggingface
from halfbyte.formats.errors import OutputError
from halfbyte.formats.expression import Pairs, Source, evaluate
from halfbyte.formats.opening import open_checkpoint
from halfbyte.quant.block import get_format
from halfbyte.quant.errors import FormatError, NonFiniteError
from support import tiny

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def to_hbf(source, out, *args, **options):
    with open_checkpoint(source) as checkpoint:
        return convert(checkpoint, out, Recipe(*args), **{"threads": 2, **options})


def to_gguf(source, out, recipe=None):
    with open_checkpoint(source) as checkpoint:
        return export_gguf(checkpoint, out, recipe, threads=2)


def to_folder(source, out, recipe=None, **options):
    with open_checkpoint(source) as checkpoint:
        return export_huggingface(checkpoint, out, recipe, threads=2, **options)


def read_gguf(path):
    """Type and values of every tensor, by the gguf package."""
    import gguf

    return {
        tensor.name: (tensor.tensor_type.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        for tensor in gguf.GGUFReader(path).tensors
    }


@pytest.mark.parametrize(("bits", "main", "top"), [(4, "q4_0", "q6_0"), (8, "q8_0", "q8_0"), (16, "bf16", "bf16")])
def test_bits(tmp_path, bits, main, top):
    stored = tiny.write_folder(tmp_path / "m")
    result = to_hbf(tmp_path / "m", tmp_path / "m.hbf", bits)
    with open_checkpoint(tmp_path / "m.hbf") as found:
        assert found.kind == "hbf" and found.architecture == "llama" and found.notes == []
        assert found.tokenizer.json is not None and json.loads(found.tokenizer.json) == json.loads(tiny.tokenizer_json())
        assert found.tokenizer.chat_template == tiny.TEMPLATE and found.tokenizer.config["eos_token"] == "<|im_end|>"
        for name, value in stored.items():
            tensor = found.tensors[tiny.gguf_name(name)]
            if value.ndim == 1:
                assert tensor.format == "f32" and tensor.tiles() is None
                np.testing.assert_array_equal(tensor.float32(), value)  # bf16 norms, bit for bit
                continue
            form = get_format(top if "embed" in name else main)
            assert tensor.format == form.name and tensor.nbytes == form.tiles_nbytes(*value.shape)
            blocks = form.encode(value)
            np.testing.assert_array_equal(tensor.tiles(), form.tile(blocks))
            after = form.decode(blocks, value.shape[1])
            np.testing.assert_array_equal(tensor.float32(), after)
            cosine = np.vdot(after, value) / np.linalg.norm(after) / np.linalg.norm(value)
            assert tensor.recorded["cosine"] == pytest.approx(cosine, abs=1e-6) and tensor.recorded["source"] == "bf16"
            assert tensor.recorded["nmse"] == pytest.approx(((after - value) ** 2).sum() / (value**2).sum(), rel=1e-3, abs=1e-9)
        assert result.bytes_after == (tmp_path / "m.hbf").stat().st_size
        assert result.bits_per_weight == pytest.approx(8 * found.nbytes / sum(t.size for t in found.tensors.values()))
        metadata = found.metadata
        assert metadata["halfbyte.source.name"] == "m" and metadata["halfbyte.source.files"] == ["model.safetensors"]
        import hashlib

        digest = hashlib.sha256((tmp_path / "m" / "model.safetensors").read_bytes()).hexdigest()
        assert metadata["halfbyte.source.sha256"] == [digest] and str(tmp_path) not in str(dict(metadata))


def test_conversion_is_the_same_for_any_number_of_threads(tmp_path):
    config = tiny.llama_config(vocab_size=3000, hidden_size=512, num_attention_heads=8, num_key_value_heads=8)
    tiny.write_folder(tmp_path / "m", config)
    for threads in (1, 3):
        to_hbf(tmp_path / "m", tmp_path / f"{threads}.hbf", 4, threads=threads)
    assert (tmp_path / "1.hbf").read_bytes() == (tmp_path / "3.hbf").read_bytes()


def test_exceptions_are_listed_with_reasons(tmp_path):
    config = tiny.llama_config(intermediate_size=86, hidden_size=80, num_attention_heads=4, num_key_value_heads=1, head_dim=6)
    tiny.write_folder(tmp_path / "m", config)
    result = to_hbf(tmp_path / "m", tmp_path / "m.hbf", 4)
    by_name = {tensor.name: tensor for tensor in result.tensors}
    assert by_name["token_embd.weight"].format == "q6_0" and "six bits" in by_name["token_embd.weight"].reason
    assert by_name["output_norm.weight"].format == "f32" and by_name["output_norm.weight"].reason
    assert by_name["blk.0.attn_output.weight"].format == "f32" and "columns" in by_name["blk.0.attn_output.weight"].reason
    down = by_name["blk.0.ffn_down.weight"]
    assert (down.format, down.reason, down.padded) == ("q4_0", "", 96)
    assert all(tensor.reason for tensor in result.exceptions()) and result.exceptions()
    with open_checkpoint(tmp_path / "m.hbf") as found:
        assert found.tensors["blk.0.ffn_down.weight"].float32().shape == (80, 86)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "MXFP4", "Q8_0"])
def test_gguf_blocks_of_the_format_are_kept(tmp_path, kind):
    config = tiny.llama_config(attention_bias=True)
    tiny.write_gguf(tmp_path / "m.gguf", config, tiny.weights(config), kind)
    to_hbf(tmp_path / "m.gguf", tmp_path / "m.hbf", None, kind.lower())
    before, after = read_gguf(tmp_path / "m.gguf"), None
    with open_checkpoint(tmp_path / "m.gguf") as source, open_checkpoint(tmp_path / "m.hbf") as found:
        for name, tensor in found.tensors.items():
            if name == "token_embd.weight" and kind != "Q8_0":
                continue
            assert tensor.format == ("f32" if tensor.vector else kind.lower())
            np.testing.assert_array_equal(tensor.float32(), source.tensors[name].float32())
            if not tensor.vector:
                np.testing.assert_array_equal(tensor.blocks(), source.tensors[name].blocks())
                assert tensor.recorded["method"] == "kept" and tensor.recorded["cosine"] == 1
    # And back: the file that the gguf package wrote, tensor by tensor.
    to_gguf(tmp_path / "m.hbf", tmp_path / "back.gguf")
    after = read_gguf(tmp_path / "back.gguf")
    for name, (type_name, values) in before.items():
        if name == "token_embd.weight" and kind != "Q8_0":
            continue
        assert after[name][0] == type_name
        np.testing.assert_array_equal(after[name][1], values)


def test_four_bits_of_another_kind_are_kept_unless_a_format_is_asked_for(tmp_path):
    config = tiny.llama_config()
    tiny.write_gguf(tmp_path / "m.gguf", config, tiny.weights(config), "Q4_1")
    result = to_hbf(tmp_path / "m.gguf", tmp_path / "a.hbf", 4)
    assert {t.format for t in result.tensors if t.name.startswith("blk") and len(t.shape) == 2} == {"q4_1"}
    assert "kept bit for bit" in next(t.reason for t in result.exceptions() if t.name == "blk.0.attn_q.weight")
    result = to_hbf(tmp_path / "m.gguf", tmp_path / "b.hbf", None, "q4_0")
    assert {t.format for t in result.tensors if t.name.startswith("blk") and len(t.shape) == 2} == {"q4_0"}
    assert any("quantized already (q4_1)" in note for note in result.notes)


@pytest.mark.parametrize("format", ["iq4_nl", "mxfp4", "nl4", "nl4_16"])
def test_four_bits_of_uneven_levels_are_kept_like_others(tmp_path, format):
    tiny.write_folder(tmp_path / "m")
    to_hbf(tmp_path / "m", tmp_path / "a.hbf", None, format)
    result = to_hbf(tmp_path / "a.hbf", tmp_path / "b.hbf", 4)
    assert {t.format for t in result.tensors if t.name.startswith("blk") and len(t.shape) == 2} == {format}
    assert all(t.kept for t in result.tensors) and not any("quantized already" in note for note in result.notes)


def test_what_was_measured_stays_with_kept_blocks(tmp_path):
    tiny.write_folder(tmp_path / "m")
    first = to_hbf(tmp_path / "m", tmp_path / "a.hbf", 4)
    second = to_hbf(tmp_path / "a.hbf", tmp_path / "b.hbf", 4)
    assert first.worst.cosine < 0.9999
    for a, b in zip(first.tensors, second.tensors, strict=True):
        assert b.kept and b.cosine == pytest.approx(a.cosine, abs=1e-6)
    with open_checkpoint(tmp_path / "a.hbf") as a, open_checkpoint(tmp_path / "b.hbf") as b:
        assert a.metadata["halfbyte.eos_token_ids"] == b.metadata["halfbyte.eos_token_ids"]
        assert a.tokenizer == b.tokenizer or (a.tokenizer.json, a.tokenizer.config) == (b.tokenizer.json, b.tokenizer.config)
        for name, tensor in a.tensors.items():
            assert tensor.recorded["checksum"] == b.tensors[name].recorded["checksum"]


@pytest.mark.parametrize(("value", "word"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_non_finite_weights_are_named(tmp_path, value, word, name):
    tensors = tiny.weights(tiny.llama_config())
    place = (77, 13) if tensors[name].ndim == 2 else (13,)
    tensors[name][place] = value
    tiny.write_folder(tmp_path / "m", tensors=tensors)
    with pytest.raises(NonFiniteError) as caught:
        to_hbf(tmp_path / "m", tmp_path / "m.hbf", 4)
    text = str(caught.value)
    assert tiny.gguf_name(name) in text and "13" in text and word in text and (len(place) == 1 or "77" in text)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]
    result = to_hbf(tmp_path / "m", tmp_path / "m.hbf", 4, allow_nonfinite=True)
    assert any(tiny.gguf_name(name) in note for note in result.notes)
    with open_checkpoint(tmp_path / "m.hbf") as found:
        assert all(np.isfinite(tensor.float32()).all() for tensor in found.tensors.values())


def test_the_row_of_a_non_finite_weight_is_that_of_the_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr("halfbyte.formats.conversion.stream.CHUNK", 32 * 64)
    tensors = tiny.weights(tiny.llama_config())
    tensors["model.embed_tokens.weight"][201, 5] = np.inf
    tiny.write_folder(tmp_path / "m", tensors=tensors)
    with pytest.raises(NonFiniteError, match=r"token_embd\.weight \[row 201, column 5\]"):
        to_hbf(tmp_path / "m", tmp_path / "m.hbf", 4)


def test_a_non_finite_scale_in_kept_blocks_is_named(tmp_path):
    config = tiny.llama_config()
    tiny.write_gguf(tmp_path / "m.gguf", config, tiny.weights(config), "Q8_0")
    import gguf

    offset = next(t.data_offset for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors if t.name == "blk.0.ffn_up.weight")
    with open(tmp_path / "m.gguf", "r+b") as file:
        file.seek(int(offset) + 34 * 3)
        file.write(np.float16(np.inf).tobytes())
    with pytest.raises(NonFiniteError, match=r"blk\.0\.ffn_up\.weight \[row 1, column 32"):
        to_hbf(tmp_path / "m.gguf", tmp_path / "m.hbf", 8)


def test_odd_weights_give_finite_blocks(tmp_path):
    """Huge and tiny weights, an all-zero row, a constant one, an outlier: no scale overflows."""
    tensors = tiny.weights(tiny.llama_config())
    odd = tensors["model.layers.0.mlp.gate_proj.weight"]
    odd[0], odd[1], odd[2], odd[3, 7], odd[4] = 0, 0.25, 1e-38, 100.0, 1e6
    tiny.write_folder(tmp_path / "m", tensors=tensors, dtype="f32")
    for name in ("q4_0", "q4_1", "q6_0", "q8_0", "f16", "iq4_nl", "nl4", "nl4_16", "q5_r"):
        to_hbf(tmp_path / "m", tmp_path / "m.hbf", None, name)
        with open_checkpoint(tmp_path / "m.hbf") as found:
            back = found.tensors["blk.0.ffn_gate.weight"].float32()
            assert np.isfinite(back).all() and (back[0] == 0).all()
            np.testing.assert_allclose(back[1], 0.25, rtol=0.01)


def test_16_bits_of_weights_beyond_f16_become_bf16(tmp_path):
    tensors = tiny.weights(tiny.llama_config())
    tensors["model.layers.0.mlp.gate_proj.weight"][3, 3] = 1e6
    tiny.write_folder(tmp_path / "m", tensors=tensors, dtype="f32")
    result = to_hbf(tmp_path / "m", tmp_path / "m.hbf", 16)
    formats = {tensor.name: tensor for tensor in result.tensors}
    assert formats["blk.0.ffn_gate.weight"].format == "bf16" and "65504" in formats["blk.0.ffn_gate.weight"].reason
    assert formats["blk.0.ffn_up.weight"].format == "f16"


def test_a_lone_file_converts_as_weights(tmp_path):
    rng = np.random.default_rng(0)
    cube = rng.standard_normal((3, 20, 70)).astype(np.float32)
    save_file(
        {
            "cube": cube,
            "matrix": cube[0].astype(ml_dtypes.bfloat16),
            "vector": cube[0, 0],
            "scalar": np.array(2.0, np.float32),
            "ids": np.arange(6).reshape(2, 3),
            "empty": np.zeros((0, 4), np.float32),
        },
        tmp_path / "w.safetensors",
    )
    result = to_hbf(tmp_path / "w.safetensors", tmp_path / "w.hbf", 8)
    assert set(result.left_out) == {"ids", "empty"} and "integers" in result.left_out["ids"]
    with open_checkpoint(tmp_path / "w.hbf") as found:
        assert found.architecture is None and "not run" in found.notes[0]
        np.testing.assert_allclose(found.tensors["cube"].float32(), cube, atol=0.02)
        np.testing.assert_array_equal(found.tensors["vector"].float32(), cube[0, 0])
        assert found.tensors["scalar"].float32() == 2
    with pytest.raises(RecipeError, match=r"w\.safetensors"):
        to_gguf(tmp_path / "w.safetensors", tmp_path / "w.gguf")


def test_recipes_that_make_no_sense():
    with pytest.raises(RecipeError, match="--bits 5"):
        Recipe(5)
    with pytest.raises(FormatError, match="q4_9"):
        Recipe(None, "q4_9")
    with pytest.raises(RecipeError, match="--method best"):
        Recipe(4, None, "best")


@pytest.mark.parametrize("config", [tiny.llama_config(), tiny.qwen2_config(tie_word_embeddings=False)], ids=["llama", "qwen2"])
@pytest.mark.parametrize("format", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "f16", "bf16", "f32", "q6_0", "iq4_nl", "mxfp4"])
def test_gguf_export_holds_the_same_values(tmp_path, config, format):
    tiny.write_folder(tmp_path / "m", config, tiny.weights(config, head=config["model_type"] == "qwen2"), dtype="f32")
    to_hbf(tmp_path / "m", tmp_path / "m.hbf", None, format)
    result = to_gguf(tmp_path / "m.hbf", tmp_path / "m.gguf")
    written = read_gguf(tmp_path / "m.gguf")
    with open_checkpoint(tmp_path / "m.hbf") as ours, open_checkpoint(tmp_path / "m.gguf") as theirs:
        for name, tensor in ours.tensors.items():
            wanted = {"q6_0": "Q8_0"}.get(tensor.format, tensor.format.upper())
            assert written[name][0] == wanted
            np.testing.assert_array_equal(theirs.tensors[name].float32(), tensor.float32())
            values = tensor.float32()
            if config["model_type"] == "llama" and name.split(".")[2:3] in (["attn_q"], ["attn_k"]):
                values = tiny.interleave(values, 4 if "attn_q" in name else 2)
            np.testing.assert_array_equal(written[name][1].reshape(values.shape), values)
        # q6_0 is listed: GGUF has no such type, and 8 bits hold its values exactly.
        assert {t.name for t in result.tensors if "q6_0" in t.reason} == {n for n, t in ours.tensors.items() if t.format == "q6_0"}
    import gguf

    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == "gpt2" and fields["tokenizer.ggml.eos_token_id"].contents() == 257
    assert len(fields["tokenizer.ggml.tokens"].contents()) == 272  # padded as the embedding is
    assert fields["tokenizer.chat_template"].contents() == tiny.TEMPLATE
    assert not any(key.startswith(("halfbyte.s", "halfbyte.t", "tokenizer.huggingface")) for key in fields)


@pytest.mark.parametrize(
    ("format", "wanted", "direct", "error"),
    [
        ("nl4", "IQ4_NL", "IQ4_NL", 4.9e-4),
        ("nl4_16", "Q8_0", "IQ4_NL", 5e-3),
        ("q5_r", "Q5_0", "Q5_0", 4.9e-4),
        ("nl5", "Q8_0", "Q8_0", 4.9e-4),
        ("q6_r", "Q8_0", "Q8_0", 4.9e-4),
    ],
)
def test_gguf_export_of_formats_that_gguf_does_not_have(tmp_path, format, wanted, direct, error):
    """The same codes with f16 scales where a type has all levels, else 8 bits; measured and listed."""
    config = tiny.llama_config()
    tiny.write_folder(tmp_path / "m", config, tiny.weights(config), dtype="f32")
    to_hbf(tmp_path / "m", tmp_path / "m.hbf", None, format)
    result = to_gguf(tmp_path / "m.hbf", tmp_path / "m.gguf")
    listed = {t.name: t for t in result.tensors if format in t.reason}
    written = read_gguf(tmp_path / "m.gguf")
    with open_checkpoint(tmp_path / "m.hbf") as ours, open_checkpoint(tmp_path / "m.gguf") as theirs:
        of_format = {name: tensor for name, tensor in ours.tensors.items() if tensor.format == format}
        assert listed.keys() == of_format.keys() != set()
        for name, tensor in of_format.items():
            assert written[name][0] == wanted
            values, found = tensor.float32(), theirs.tensors[name].float32()
            assert np.abs(found - values).max() <= error * np.abs(values).max()
            assert (found != values).any(), "if scales were not rounded, the reason should not say so"
    to_gguf(tmp_path / "m", tmp_path / "direct.gguf", Recipe(format=format))
    assert read_gguf(tmp_path / "direct.gguf")["blk.0.ffn_up.weight"][0] == direct


def test_gguf_export_of_rows_that_are_not_whole_blocks(tmp_path):
    config = tiny.llama_config(intermediate_size=86)
    stored = tiny.write_folder(tmp_path / "m", config, dtype="f32")
    result = to_gguf(tmp_path / "m", tmp_path / "m.gguf", Recipe(4))
    down = next(t for t in result.tensors if t.name == "blk.0.ffn_down.weight")
    assert down.format == "f16" and "whole blocks" in down.reason
    np.testing.assert_allclose(
        read_gguf(tmp_path / "m.gguf")["blk.0.ffn_down.weight"][1], stored["model.layers.0.mlp.down_proj.weight"], rtol=1e-3
    )


def test_gguf_export_keeps_rotary_scaling(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    tiny.write_folder(tmp_path / "m", tiny.llama_config(rope_scaling=scaling))
    to_gguf(tmp_path / "m", tmp_path / "m.gguf", Recipe(8))
    with open_checkpoint(tmp_path / "m") as folder, open_checkpoint(tmp_path / "m.gguf") as file:
        np.testing.assert_array_equal(file.tensors["rope_freqs.weight"].float32(), folder.tensors["rope_freqs.weight"].float32())


@pytest.mark.parametrize("kind", ["hbf", "gguf", "folder"])
def test_folder_export(tmp_path, kind):
    config = tiny.llama_config(attention_bias=True)
    stored = tiny.write_folder(tmp_path / "m", config)
    source = tmp_path / "m"
    if kind == "hbf":
        source = tmp_path / "m.hbf"
        to_hbf(tmp_path / "m", source, 16)
    elif kind == "gguf":
        source = tmp_path / "m.gguf"
        to_gguf(tmp_path / "m", source, Recipe(16))
    to_folder(source, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == stored.keys()
    for name, value in stored.items():
        np.testing.assert_array_equal(written[name].astype(np.float32), value)
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    for key in ("model_type", "hidden_size", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings"):
        assert made[key] == config[key], key
    assert made["torch_dtype"] == "bfloat16" and made["eos_token_id"] == 257
    with open_checkpoint(tmp_path / "out") as found:
        assert found.tokenizer.chat_template == tiny.TEMPLATE
        from tokenizers import Tokenizer

        again = Tokenizer.from_buffer(found.tokenizer.json)
        assert again.encode("Hä <|im_end|>").ids == Tokenizer.from_buffer(tiny.tokenizer_json()).encode("Hä <|im_end|>").ids


def test_folder_export_of_quantized_weights(tmp_path):
    tiny.write_folder(tmp_path / "m")
    to_hbf(tmp_path / "m", tmp_path / "m.hbf", 4)
    to_folder(tmp_path / "m.hbf", tmp_path / "exact", Recipe(None, "f32"))
    to_folder(tmp_path / "m", tmp_path / "through", Recipe(4))
    with (
        open_checkpoint(tmp_path / "m.hbf") as ours,
        open_checkpoint(tmp_path / "exact") as exact,
        open_checkpoint(tmp_path / "through") as through,
    ):
        for name, tensor in ours.tensors.items():
            np.testing.assert_array_equal(exact.tensors[name].float32(), tensor.float32())
            rounded = tensor.float32().astype(ml_dtypes.bfloat16).astype(np.float32)
            np.testing.assert_array_equal(through.tensors[name].float32(), rounded)


def test_folder_export_in_shards(tmp_path):
    stored = tiny.write_folder(tmp_path / "m")
    to_folder(tmp_path / "m", tmp_path / "out", shard_bytes=60_000)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    with open_checkpoint(tmp_path / "out") as found:
        for name, value in stored.items():
            np.testing.assert_array_equal(found.tensors[tiny.gguf_name(name)].float32(), value)


@pytest.mark.parametrize("kind", ["hbf", "gguf", "folder"])
def test_an_output_that_is_the_input_is_refused(tmp_path, kind):
    tiny.write_folder(tmp_path / "m")
    to_hbf(tmp_path / "m", tmp_path / "m.hbf", 4)
    to_gguf(tmp_path / "m.hbf", tmp_path / "m.gguf")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    (tmp_path / "link.hbf").symlink_to(tmp_path / "m.hbf")
    for source, out in {
        "hbf": [
            ("m.hbf", "m.hbf"),
            ("m.hbf", "link.hbf"),
            ("m", "m/model.safetensors"),
            ("m", "m/config.json"),
            ("m/model.safetensors", "m/tokenizer.json"),
        ],
        "gguf": [("m.gguf", "m.gguf")],
        "folder": [("m", "m"), ("m.hbf", "m")],
    }[kind]:
        with pytest.raises(OutputError):
            if kind == "hbf":
                to_hbf(tmp_path / source, tmp_path / out, 8)
            elif kind == "gguf":
                to_gguf(tmp_path / source, tmp_path / out)
            else:
                to_folder(tmp_path / source, tmp_path / out)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()}


def test_a_failure_harms_no_existing_output(tmp_path):
    tensors = tiny.weights(tiny.llama_config())
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = np.nan
    tiny.write_folder(tmp_path / "m", tensors=tensors)
    (tmp_path / "m.hbf").write_bytes(b"precious")
    with pytest.raises(NonFiniteError):
        to_hbf(tmp_path / "m", tmp_path / "m.hbf", 4)
    assert (tmp_path / "m.hbf").read_bytes() == b"precious" and len(list(tmp_path.iterdir())) == 2


def test_metadata_of_a_model_is_all_there(tmp_path):
    config = tiny.llama_config(rope_scaling={"type": "dynamic", "factor": 2.0}, eos_token_id=[257, 3])
    tiny.write_folder(tmp_path / "m", config)
    to_hbf(tmp_path / "m", tmp_path / "m.hbf", 8)
    with open_checkpoint(tmp_path / "m") as folder, open_checkpoint(tmp_path / "m.hbf") as file:
        for key, value in folder.metadata.items():
            stored = file.metadata[key]
            stored = stored.tolist() if isinstance(stored, np.ndarray) else stored
            assert stored == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key
        assert "halfbyte.tensor.cosine" not in native_metadata(file, Recipe(8))


def test_chunks_cover_a_tensor(tmp_path, monkeypatch):
    """Pieces follow each other, whatever the size of a chunk."""
    tiny.write_folder(tmp_path / "m")
    whole, cut = [], []
    with open_checkpoint(tmp_path / "m") as found:
        jobs = [Job(found.tensors[name], "q8_0") for name in ("token_embd.weight", "blk.0.ffn_up.weight", "blk.0.attn_k.weight")]
        pairs = evaluate(Pairs(Source("blk.0.attn_q.weight"), 4), "q", found.tensors.__getitem__, tmp_path)
        jobs.append(Job(pairs, "q8_0", layout="rows"))
        for into, size in ((whole, 1 << 20), (cut, 100)):
            monkeypatch.setattr("halfbyte.formats.conversion.stream.CHUNK", size)
            for stream in streams(jobs, 2):
                into.append(np.concatenate([piece.reshape(-1) for piece in stream.pieces]))
                assert stream.nbytes == into[-1].nbytes
    assert all(np.array_equal(a, b) for a, b in zip(whole, cut, strict=True))


PEER = Path(os.environ.get("HALFBYTE_PEER", Path.home() / ".cache" / "halfbyte-peer")) / "build" / "bin" / "llama-completion"


@pytest.mark.slow
@pytest.mark.skipif(not PEER.exists(), reason=f"needs llama.cpp's {PEER} (HALFBYTE_PEER)")
@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize(
    "config",
    [
        tiny.llama_config(attention_bias=True, intermediate_size=86),
        tiny.llama_config(rope_scaling={**LLAMA3, "original_max_position_embeddings": 64}),
        tiny.llama_config(rope_scaling={"type": "linear", "factor": 2.0}),
        tiny.llama_config(rope_scaling={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}),
        tiny.qwen2_config(tie_word_embeddings=False),
    ],
    ids=["biases", "llama3", "linear", "yarn", "qwen2"],
)
def test_llama_cpp_loads_what_is_exported(tmp_path, config, bits):
    tiny.write_folder(tmp_path / "m", config, tiny.weights(config, head=not config["tie_word_embeddings"]))
    to_hbf(tmp_path / "m", tmp_path / "m.hbf", bits)
    to_gguf(tmp_path / "m.hbf", tmp_path / "m.gguf")
    command = [PEER, "-m", tmp_path / "m.gguf", "-p", "Hello", "-n", "4", "--temp", "0", "-no-cnv", "-t", "1", "-c", "64"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [tiny.llama_config(attention_bias=True, rope_scaling=LLAMA3), tiny.qwen2_config()], ids=["llama", "qwen2"]
)
def test_transformers_loads_what_is_exported(tmp_path, config):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("torch", reason="torch is not installed")
    tiny.write_folder(tmp_path / "m", config)
    to_hbf(tmp_path / "m", tmp_path / "m.hbf", 4)
    to_gguf(tmp_path / "m.hbf", tmp_path / "m.gguf")
    to_folder(tmp_path / "m.gguf", tmp_path / "out", Recipe(None, "f32"))
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.encode("Hi<|im_end|>")[-1] == 257 and tokenizer.eos_token == "<|im_end|>"
    state = model.state_dict()
    with open_checkpoint(tmp_path / "m.hbf") as found:
        for name in tiny.weights(config):
            np.testing.assert_array_equal(state[name].numpy(), found.tensors[tiny.gguf_name(name)].float32())
        theirs = model.config.to_dict()
        rope = theirs.get("rope_parameters") or theirs["rope_scaling"] or {}
        if config.get("rope_scaling"):
            assert {key: rope[key] for key in LLAMA3} == LLAMA3
