"""Conversion by what matrices read: the files it makes, against statistics and methods used one by one; recipes and the command line."""

import dataclasses
import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from halfbyte.engine.convert.calibration import CalibrationError, calibrate
from halfbyte.engine.convert.feedback import convert_with_statistics, convert_with_text
from halfbyte.formats.conversion.convert import convert
from halfbyte.formats.conversion.recipe import Recipe, RecipeError
from halfbyte.formats.conversion.recipe_file import read_recipe, write_recipe
from halfbyte.formats.conversion.statistics import ColumnSums, Statistics
from halfbyte.formats.errors import FileFormatError
from halfbyte.formats.hbf.reader import NativeFile
from halfbyte.formats.opening import open_checkpoint
from halfbyte.quant.block import get_format
from halfbyte.quant.errors import FormatError, HalfbyteError
from halfbyte.quant.methods import TIED_DAMPING, Inputs, quantize
from halfbyte.tools.qcalibrate import main as qcalibrate
from halfbyte.tools.qconvert import main
from support import tiny

KV = r"attn_[kv]\.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m"
    tiny.write_folder(path)
    return path


@pytest.fixture(scope="module")
def texts():
    return np.random.default_rng(5).integers(0, 256, (3, 96))


@pytest.fixture(scope="module")
def inputs(folder, texts):
    """InputStatistics by names of matrices, with Gram matrices."""
    found = {}
    with open_checkpoint(folder) as checkpoint:
        calibrate(checkpoint, texts, lambda layer: found.update((name, each) for each in layer for name in each.names), threads=1)
    return found


def output_error(name, ours, original, inputs):
    """Mean squared error of a matrix's outputs over that of the outputs themselves."""
    gram = inputs[name].gram.astype(np.float64)
    error, whole = ours[name].float32() - original[name].float32(), original[name].float32()
    return np.einsum("ij,jk,ik->", error, gram, error) / np.einsum("ij,jk,ik->", whole, gram, whole)


def run(*arguments):
    """(status, stdout, stderr) of qconvert."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["qconvert", *map(str, arguments)])
        status = main()
    assert "Traceback" not in err.getvalue()
    return status, out.getvalue(), err.getvalue()


def test_files_hold_what_the_methods_make_of_the_inputs(tmp_path, folder, texts, inputs):
    recipe = Recipe(format="q4_0", method="feedback")
    with open_checkpoint(folder) as checkpoint:
        result = convert_with_text(checkpoint, tmp_path / "a.hbf", recipe, texts, provenance={"tokens": "288"}, threads=1)
        wanted = {}
        for name, found in inputs.items():
            known = Inputs(gram=found.gram, damping=TIED_DAMPING) if name == "token_embd.weight" else Inputs(gram=found.gram)
            form = get_format("q6_0" if name == "token_embd.weight" else "q4_0")
            wanted[name] = quantize(form, checkpoint.tensors[name].float32(), inputs=known).data
    assert [t.name for t in result.tensors] == list(checkpoint.tensors)
    with NativeFile(tmp_path / "a.hbf") as file:
        file.verify()
        assert json.loads(file.metadata["halfbyte.calibration"]) == {"tokens": "288"}
        assert json.loads(file.metadata["halfbyte.recipe"])["method"] == "feedback"
    with open_checkpoint(tmp_path / "a.hbf") as written:
        for name, tensor in written.tensors.items():
            if tensor.vector:
                continue
            assert tensor.recorded["method"] == "feedback", name
            np.testing.assert_array_equal(tensor.tiles(), wanted[name], err_msg=name)


@pytest.mark.parametrize("form", ["q4_0", "q4_1", "iq4_nl", "nl4", "nl4_16", "q5_0", "q5_1", "q5_r", "q6_0", "q6_r", "q8_0"])
def test_every_format_has_less_error_in_its_outputs(tmp_path, folder, texts, inputs, form):
    recipe = Recipe(format=form, tensors=(("token_embd", form),))
    with open_checkpoint(folder) as checkpoint:
        convert(checkpoint, tmp_path / "s.hbf", dataclasses.replace(recipe, method="search"), threads=1)
        convert_with_text(checkpoint, tmp_path / "f.hbf", recipe, texts, threads=2)
        with open_checkpoint(tmp_path / "s.hbf") as plain, open_checkpoint(tmp_path / "f.hbf") as fed:
            for name in inputs:
                assert fed.tensors[name].format == form
                before, after = (output_error(name, each.tensors, checkpoint.tensors, inputs) for each in (plain, fed))
                # Rows of an embedding are inputs as well: there, it is not outputs alone that count.
                assert after < before * (1.01 if name == "token_embd.weight" or form == "q8_0" else 0.95), (name, before, after)


def test_any_number_of_threads_gives_the_same_file(tmp_path, folder, texts):
    recipe = Recipe(4, method="feedback")
    with open_checkpoint(folder) as checkpoint:
        for threads in (1, 3):
            convert_with_text(checkpoint, tmp_path / f"{threads}.hbf", recipe, texts, threads=threads)
    assert (tmp_path / "1.hbf").read_bytes() == (tmp_path / "3.hbf").read_bytes()


def test_search_is_weighted_with_second_moments(tmp_path, folder, texts):
    with open_checkpoint(folder) as checkpoint:
        sums = {}
        calibrate(
            checkpoint, texts, lambda layer: sums.update((n, each.sums) for each in layer for n in each.names), grams=False, threads=1
        )
        convert_with_text(checkpoint, tmp_path / "a.hbf", Recipe(4, method="search"), texts, threads=1)
        name = "blk.1.ffn_down.weight"
        known = Inputs(diagonal=sums[name])
        wanted = quantize(get_format("q4_0"), checkpoint.tensors[name].float32(), inputs=known, method="search").data
        with open_checkpoint(tmp_path / "a.hbf") as written:
            assert written.tensors[name].recorded["method"] == "search"
            plain = quantize(get_format("q4_0"), checkpoint.tensors[name].float32(), method="search").data
            assert (written.tensors[name].tiles() != plain).any()
            np.testing.assert_array_equal(written.tensors[name].tiles(), wanted)


def test_what_is_not_quantized_by_inputs(tmp_path, texts):
    """An embedding beside a head of its own is no matrix of a product; kept blocks stay; formats without codes need no inputs."""
    config = tiny.llama_config(tie_word_embeddings=False)
    tiny.write_folder(tmp_path / "m", config, tiny.weights(config, head=True))
    with open_checkpoint(tmp_path / "m") as checkpoint:
        recipe = Recipe(4, method="feedback", tensors=(("blk.0.attn_q", "bf16"), ("blk.0.ffn_up", "f16")))
        convert_with_text(checkpoint, tmp_path / "a.hbf", recipe, texts, threads=1)
    with open_checkpoint(tmp_path / "a.hbf") as first:
        methods = {name: tensor.recorded.get("method") for name, tensor in first.tensors.items()}
        assert methods["token_embd.weight"] == "search" and methods["output.weight"] == "feedback"
        assert methods["blk.0.attn_q.weight"] == "kept" and methods["blk.0.attn_k.weight"] == "feedback"
        assert first.tensors["blk.0.ffn_up.weight"].format == "f16"
        convert_with_text(first, tmp_path / "b.hbf", Recipe(4, method="feedback"), texts, threads=1)
        with open_checkpoint(tmp_path / "b.hbf") as second:
            name = "blk.1.ffn_up.weight"
            np.testing.assert_array_equal(second.tensors[name].tiles(), first.tensors[name].tiles())
            assert second.tensors[name].recorded["method"] == "feedback"
            assert second.tensors["blk.0.attn_q.weight"].format == "q4_0"


def test_columns_never_active_and_matrices_of_zeros(tmp_path, texts):
    tensors = tiny.weights(tiny.llama_config())
    tensors["model.layers.0.mlp.gate_proj.weight"][:32] = 0  # 32 columns of down's input are always zero
    tensors["model.layers.1.mlp.up_proj.weight"][:] = 0  # all of them
    tensors["model.layers.1.self_attn.k_proj.weight"][:] = 0
    tiny.write_folder(tmp_path / "m", tensors=tensors)
    with open_checkpoint(tmp_path / "m") as checkpoint:
        for form in ("q4_0", "nl4_16"):
            convert_with_text(checkpoint, tmp_path / "a.hbf", Recipe(format=form), texts, threads=1)
            with open_checkpoint(tmp_path / "a.hbf") as written:
                for name, tensor in written.tensors.items():
                    assert np.isfinite(tensor.float32()).all(), name
                down = written.tensors["blk.1.ffn_down.weight"]
                assert down.recorded["method"] == "search" and down.recorded["cosine"] > 0.98
                assert not written.tensors["blk.1.attn_k.weight"].float32().any()


def test_weights_that_are_not_finite(tmp_path, texts):
    tensors = tiny.weights(tiny.llama_config())
    tensors["model.layers.1.self_attn.o_proj.weight"][3, 5] = np.nan
    tiny.write_folder(tmp_path / "m", tensors=tensors)
    with open_checkpoint(tmp_path / "m") as checkpoint, pytest.raises(HalfbyteError):
        convert_with_text(checkpoint, tmp_path / "a.hbf", Recipe(4), texts, threads=1)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_progress_only_grows_and_ends_at_its_total(tmp_path, folder, texts):
    seen = []
    with open_checkpoint(folder) as checkpoint:
        convert_with_text(
            checkpoint, tmp_path / "a.hbf", Recipe(4), texts, threads=1, progress=lambda what, done, total: seen.append((what, done, total))
        )
    layers = [(done, total) for what, done, total in seen if what == "layers"]
    assert len({total for _, total in layers}) == 1 and len(layers) > 10
    done = [each for each, _ in layers]
    assert done == sorted(done) and done[-1] == pytest.approx(layers[-1][1])


def test_statistics_instead_of_a_text(tmp_path, folder, texts, inputs):
    class Known(Statistics):
        def gram(self, name, matrix=0):
            return inputs[name].gram if name in inputs else None

        def gram_owner(self, name):
            return inputs[name].names[0]

    sums = {name: ColumnSums(found.sums[None], np.array([float(found.count)])) for name, found in inputs.items()}
    known, bare = Known(Path("x"), "calibration", sums), Statistics(Path("y"), "imatrix", sums)
    with open_checkpoint(folder) as checkpoint:
        convert_with_text(checkpoint, tmp_path / "a.hbf", Recipe(4), texts, threads=1)
        convert_with_statistics(checkpoint, tmp_path / "b.hbf", Recipe(4), known, threads=1)
        convert_with_statistics(checkpoint, tmp_path / "c.hbf", Recipe(4, method="search"), bare, threads=1)
        with pytest.raises(RecipeError, match="has no Gram matrices"):
            convert_with_statistics(checkpoint, tmp_path / "d.hbf", Recipe(4), bare, threads=1)
        with pytest.raises(RecipeError, match="another model"):
            convert_with_statistics(checkpoint, tmp_path / "d.hbf", Recipe(4), Statistics(Path("z"), "imatrix", {}), threads=1)
    with open_checkpoint(tmp_path / "a.hbf") as a, open_checkpoint(tmp_path / "b.hbf") as b, open_checkpoint(tmp_path / "c.hbf") as c:
        for name in inputs:
            np.testing.assert_array_equal(a.tensors[name].tiles(), b.tensors[name].tiles(), err_msg=name)
            assert c.tensors[name].recorded["method"] == "search"
    assert not (tmp_path / "d.hbf").exists()


def test_plain_conversion_refuses_feedback(tmp_path, folder):
    with open_checkpoint(folder) as checkpoint, pytest.raises(RecipeError, match="needs the model to be run"):
        convert(checkpoint, tmp_path / "a.hbf", Recipe(4, method="feedback"))
    with open_checkpoint(folder) as checkpoint, pytest.raises(RecipeError, match="looks at no inputs"):
        convert_with_text(checkpoint, tmp_path / "a.hbf", Recipe(4, method="nearest"), np.zeros((1, 8), int))
    with open_checkpoint(folder) as checkpoint, pytest.raises(CalibrationError):
        convert_with_text(checkpoint, tmp_path / "a.hbf", Recipe(4), np.zeros((1, 2), int))
    assert not (tmp_path / "a.hbf").exists()


# ---- recipes ---------------------------------------------------------------------------------------------------------


def test_formats_by_pattern(tmp_path, folder):
    recipe = Recipe(format="nl4", tensors=(("attn_", "q5_r"), (KV, "q6_r"), ("nothing", "q8_0"), ("norm", "q4_0")))
    with open_checkpoint(folder) as checkpoint:
        result = convert(checkpoint, tmp_path / "a.hbf", recipe, threads=1)
    formats = {t.name: t.format for t in result.tensors}
    assert formats["blk.0.attn_q.weight"] == "q5_r" and formats["blk.1.attn_v.weight"] == formats["blk.0.attn_k.weight"] == "q6_r"
    assert formats["blk.0.ffn_up.weight"] == "nl4" and formats["token_embd.weight"] == "q6_r"
    assert formats["blk.0.attn_norm.weight"] == "f32"
    assert sum("no matrix gets its format by" in note for note in result.notes) == 2
    for bad in (("attn_(", "q4_0"), ("x", "q9_9")):
        with pytest.raises((RecipeError, FormatError)):
            Recipe(tensors=(bad,))


def test_recipe_files(tmp_path):
    recipe = Recipe(format="nl4", method="feedback", tensors=((KV, "q6_r"), ("é^token", "q5_r")))
    write_recipe(tmp_path / "r.json", recipe)
    assert read_recipe(tmp_path / "r.json") == recipe
    for bad in (
        b"",
        b"[]",
        b"\xff\xfe",
        b'{"colour": 1}',
        b'{"bits": "4"}',
        b'{"bits": true}',
        b'{"bits": 5}',
        b'{"format": "x"}',
        b'{"tensors": {"a": 4}}',
        b'{"tensors": {"(": "q4_0"}}',
        b'{"tensors": {"a": "q4_0", "a": "q4_1"}}',
        b"{" * 100_000,
    ):
        (tmp_path / "bad.json").write_bytes(bad)
        with pytest.raises(HalfbyteError):
            read_recipe(tmp_path / "bad.json")
    with pytest.raises(FileFormatError):
        read_recipe(tmp_path)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_command(tmp_path, folder):
    text = tmp_path / "text.txt"
    text.write_text("".join(map(str, range(400))), encoding="utf-8")
    common = (folder, "--calibrate", text, "--tokens", 256, "--threads", 1)
    status, out, err = run(*common, "--method", "feedback", "--format", "nl4", "--tensor", f"{KV}=q6_r", "-o", tmp_path / "a.hbf",
                           "--save-recipe", tmp_path / "r.json", "--json")  # fmt: skip
    assert status == 0, err
    answer = json.loads(out)
    assert answer["formats"] == {"nl4": 10, "q6_r": 5, "f32": 5}
    assert {t["method"] for t in answer["tensors"] if t["format"] != "f32"} == {"feedback"}
    assert json.loads((tmp_path / "r.json").read_text()) == {"format": "nl4", "method": "feedback", "tensors": {KV: "q6_r"}}
    status, out, err = run(*common, "--recipe", tmp_path / "r.json", "-o", tmp_path / "b.hbf")
    assert status == 0 and "q6_r" in out, err
    assert (tmp_path / "a.hbf").read_bytes() == (tmp_path / "b.hbf").read_bytes()
    with NativeFile(tmp_path / "a.hbf") as file:
        about = json.loads(file.metadata["halfbyte.calibration"])
        assert about["text"] == "text.txt" and about["tokens"] == "256" and len(about["text_sha256"]) == 64
        assert str(tmp_path) not in str(dict(file.metadata))
    status, out, err = run(tmp_path / "a.hbf", "--to", "gguf", "-o", tmp_path / "a.gguf")
    assert status == 0, err


def test_statistics_of_qcalibrate(tmp_path, folder):
    (tmp_path / "text.txt").write_text("".join(map(str, range(400))), encoding="utf-8")
    stats, common = tmp_path / "s.safetensors", ("--text", str(tmp_path / "text.txt"), "--tokens", "256", "--gram", "-o")
    assert qcalibrate([str(folder), *common, str(stats)]) == 0
    status, _, err = run(folder, "--format", "q4_0", "--calibrate", stats, "-o", tmp_path / "a.hbf")
    assert status == 0 and err == "", err
    status, _, err = run(folder, "--format", "q4_0", "--calibrate", tmp_path / "text.txt", "--tokens", 256, "-o", tmp_path / "b.hbf")
    assert status == 0, err
    with open_checkpoint(tmp_path / "a.hbf") as by_file, open_checkpoint(tmp_path / "b.hbf") as by_text:
        for name, tensor in by_text.tensors.items():
            # Gram matrices in files are rounded to 16 bits, which now and then tips a code, and what it tips is fed back; other inputs
            # would change a third of the bytes.
            assert tensor.recorded["method"] == by_file.tensors[name].recorded["method"]
            if not tensor.vector:
                assert (tensor.tiles() != by_file.tensors[name].tiles()).mean() < 0.15, name
        assert json.loads(by_file.metadata["halfbyte.calibration"])["statistics"] == "s.safetensors"
    status, _, err = run(folder, "--method", "feedback", "--calibrate", stats, "--tokens", 5, "-o", tmp_path / "c.hbf")
    assert status == 2 and "holds statistics" in err
    tiny.write_folder(tmp_path / "other", tensors=tiny.weights(tiny.llama_config(), seed=1))
    status, _, err = run(tmp_path / "other", "--method", "search", "--calibrate", stats, "-o", tmp_path / "c.hbf")
    assert status == 0 and "other weights than these" in err
    tiny.write_folder(tmp_path / "wide", tiny.llama_config(hidden_size=96, num_attention_heads=6))
    status, out, err = run(tmp_path / "wide", "--method", "feedback", "--calibrate", stats, "-o", tmp_path / "d.hbf")
    assert status == 1 and "statistics of another model" in err and out == "" and not (tmp_path / "d.hbf").exists()


def test_command_lines_that_make_no_sense(tmp_path, folder):
    (tmp_path / "short.txt").write_text("short", encoding="utf-8")
    (tmp_path / "long.txt").write_text("long" * 100, encoding="utf-8")
    for status, words, *arguments in (
        (2, "--tokens: no text is run", "--tokens", 5, "--bits", 8),
        (2, "--tokens: no text is run", "--tokens", 5, "--bits", 4, "--fast"),
        (2, "--blend: no text is run", "--blend", 0.1, "--format", "q4_0", "--method", "search"),
        (2, "a mix of formats is written as .hbf", "--size", "1MB", "--to", "gguf"),
        (2, "REGEX=FORMAT", "--tensor", "attn"),
        (2, "looks at no text", "--method", "nearest", "--calibrate", tmp_path / "long.txt"),
        (1, "less than one chunk", "--method", "feedback", "--calibrate", tmp_path / "short.txt"),
        (1, "missing.txt", "--method", "feedback", "--calibrate", tmp_path / "missing.txt"),
        (1, "choose nearest, search, feedback", "--method", "gptq"),
    ):
        found, out, err = run(folder, "-o", tmp_path / "a.hbf", *arguments)
        assert found == status and words in err and out == "" and err.startswith("error: "), (arguments, err)
    assert not (tmp_path / "a.hbf").exists()
