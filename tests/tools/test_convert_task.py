"""What command lines of qconvert ask for: ways, goals, names of outputs, refusals; which text is run; how long it takes."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from halfbyte.engine.convert.calibration_text import BLEND, TOKENS, blended_tokens, built_in_text, calibration_tokens
from halfbyte.engine.convert.mix import Goal
from halfbyte.engine.convert.time_estimate import expected_seconds
from halfbyte.formats.conversion.convert import convert
from halfbyte.formats.conversion.recipe import Recipe, RecipeError
from halfbyte.formats.opening import open_checkpoint
from halfbyte.quant.errors import FormatError, HalfbyteError
from halfbyte.tools.convert.calibrated import Text, duration, holds_statistics
from halfbyte.tools.convert.task import BITS, Wishes, goal_label, make_task, parse_size
from halfbyte.tools.terminal.console import UsageError
from support import tiny

MIXED = Recipe(format="nl4", tensors=((r"attn_[kv]\.weight$", "q6_r"),))
"""Four bits where nothing is measured."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder, m; a quantized file of it, q4.hbf, and one of eight bits, q8.hbf; a text; statistics; a recipe."""
    path = tmp_path_factory.mktemp("task")
    tiny.write_folder(path / "m")
    with open_checkpoint(path / "m") as checkpoint:
        convert(checkpoint, path / "q4.hbf", Recipe(format="q4_0", method="nearest"), threads=1)
        convert(checkpoint, path / "q8.hbf", Recipe(bits=8), threads=1)
    (path / "text.txt").write_text("a text " * 400, encoding="utf-8")
    save_file({"x.in_sum2": np.ones((1, 4), np.float32)}, path / "statistics.safetensors")
    tiny.write_json(path / "recipe.json", {"format": "nl4", "method": "feedback", "tensors": {"attn_v": "q6_r"}})
    tiny.write_json(path / "eight.json", {"bits": 8})
    return path


@pytest.fixture
def task(root, monkeypatch):
    """make_task from names of files in the folder."""
    monkeypatch.chdir(root)

    def make(source="m", **wishes):
        with open_checkpoint(root / source) as checkpoint:
            return make_task(checkpoint, Wishes(**{key: Path(v) if key == "recipe" else v for key, v in wishes.items()}))

    return make


# ---- ways ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wishes",
    [{}, {"bits": 4}, {"method": "feedback"}, {"bits": 4, "method": "feedback"}, {"calibrate": "text.txt"}, {"calibrate": "-"}],
)
def test_the_default_is_a_mix(task, wishes):
    found = task(**wishes)
    assert (found.way, found.goal, found.label, found.notes) == ("goal", Goal(bits_per_weight=BITS), "int4", [])
    assert found.recipe == Recipe(method="feedback")


@pytest.mark.parametrize(
    ("wishes", "way", "recipe", "label"),
    [
        ({"fast": True}, "plain", MIXED, "int4"),
        ({"fast": True, "bits": 4, "tensors": ("ffn=q5_r",)}, "plain", replace(MIXED, tensors=(*MIXED.tensors, ("ffn", "q5_r"))), "int4"),
        ({"fast": True, "bits": 8}, "plain", Recipe(bits=8), "q8_0"),
        ({"fast": True, "format": "nl4"}, "plain", Recipe(format="nl4"), "nl4"),
        ({"method": "search"}, "plain", Recipe(bits=4, method="search"), "q4_0"),
        ({"method": "nearest"}, "plain", Recipe(bits=4, method="nearest"), "q4_0"),
        ({"method": "search", "calibrate": "text.txt"}, "inputs", Recipe(bits=4, method="search"), "q4_0"),
        ({"format": "q4_1"}, "inputs", Recipe(format="q4_1", method="feedback"), "q4_1"),
        ({"format": "nl5", "calibrate": "text.txt"}, "inputs", Recipe(format="nl5", method="feedback"), "nl5"),
        ({"bits": 8}, "plain", Recipe(bits=8), "q8_0"),
        ({"bits": 8, "method": "feedback"}, "inputs", Recipe(bits=8, method="feedback"), "q8_0"),
        ({"bits": 16}, "plain", Recipe(bits=16), "f16"),
        ({"format": "f32"}, "plain", Recipe(format="f32"), "f32"),
        ({"to": "gguf"}, "inputs", Recipe(format="iq4_nl", method="feedback"), "iq4_nl"),
        ({"to": "gguf", "bits": 4}, "inputs", Recipe(format="iq4_nl", method="feedback"), "iq4_nl"),
        ({"to": "gguf", "format": "q4_0"}, "inputs", Recipe(format="q4_0", method="feedback"), "q4_0"),
        ({"to": "gguf", "method": "search"}, "plain", Recipe(bits=4, method="search"), "q4_0"),
        ({"to": "gguf", "format": "iq4_nl"}, "inputs", Recipe(format="iq4_nl", method="feedback"), "iq4_nl"),
        ({"to": "gguf", "fast": True}, "plain", Recipe(bits=4), "q4_0"),
        ({"to": "safetensors"}, "plain", None, "dequantized"),
        ({"to": "safetensors", "bits": 4}, "inputs", Recipe(bits=4, method="feedback"), "q4_0"),
        ({"recipe": "eight.json"}, "plain", Recipe(bits=8), "q8_0"),
        ({"recipe": "recipe.json"}, "inputs", Recipe(format="nl4", method="feedback", tensors=(("attn_v", "q6_r"),)), "nl4"),
        ({"recipe": "recipe.json", "bits": 8}, "inputs", Recipe(bits=8, method="feedback", tensors=(("attn_v", "q6_r"),)), "q8_0"),
        ({"recipe": "recipe.json", "method": "nearest", "tensors": ("attn_q=q5_r", "a=b=q4_0")}, "plain",
         Recipe(format="nl4", method="nearest", tensors=(("attn_v", "q6_r"), ("attn_q", "q5_r"), ("a=b", "q4_0"))), "nl4"),
    ],
)  # fmt: skip
def test_ways(task, wishes, way, recipe, label):
    found = task(**wishes)
    assert (found.way, found.recipe, found.label, found.goal) == (way, recipe, label, None)


def test_patterns_go_with_a_mix(task):
    found = task(tensors=("attn_v=q6_r",), bpw=5.0)
    assert found.way == "goal" and found.recipe == Recipe(method="feedback", tensors=(("attn_v", "q6_r"),))
    assert task(tensors=("attn_v=q6_r",)).recipe.tensors == (("attn_v", "q6_r"),)


def test_statistics_cannot_tell_what_a_matrix_is_worth(task):
    found = task(calibrate="statistics.safetensors", tensors=("attn_k=q8_0",))
    assert (found.way, found.label, found.goal) == ("inputs", "int4", None)
    recipe = found.recipe
    assert recipe.format == "nl4" and recipe.method == "feedback"
    assert [recipe.named(f"blk.0.{part}.weight")[1] for part in ("attn_v", "attn_k", "attn_q")] == ["q6_r", "q8_0", None]


@pytest.mark.parametrize(
    ("wishes", "goal", "label"),
    [
        ({"size": "90MB"}, Goal(nbytes=90_000_000), "90MB"),
        ({"size": "1.2GB"}, Goal(nbytes=1_200_000_000), "1200MB"),
        ({"size": "85MiB"}, Goal(nbytes=85 << 20), "89.129MB"),
        ({"size": "123456"}, Goal(nbytes=123456), "0.123456MB"),
        ({"bpw": 4.6}, Goal(bits_per_weight=4.6), "4.6bpw"),
        ({"bpw": 5.0, "method": "feedback"}, Goal(bits_per_weight=5.0), "5bpw"),
        ({"max_kl": 0.05, "calibrate": "text.txt"}, Goal(kl=0.05), "kl0.05"),
    ],
)
def test_goals(task, wishes, goal, label):
    found = task(**wishes)
    assert (found.way, found.goal, found.label, found.recipe) == ("goal", goal, label, Recipe(method="feedback"))
    assert goal_label(Wishes(**wishes)) == label


# ---- sources ---------------------------------------------------------------------------------------------------------


def test_quantized_sources_are_kept(task):
    found = task("q4.hbf")
    assert (found.way, found.recipe, found.label, found.notes) == ("plain", Recipe(bits=4), "q4_0", [])
    assert task("q4.hbf", method="feedback").way == "goal"  # who insists gets it, and is told by the conversion
    assert task("q8.hbf").way == "goal"  # eight bits have lost too little to matter
    as_it_is = task("q4.hbf", to="gguf")
    assert (as_it_is.way, as_it_is.recipe, as_it_is.label) == ("plain", None, "q4_0")


@pytest.mark.parametrize("wishes", [{}, {"format": "nl4"}, {"to": "gguf"}])
def test_sources_that_cannot_be_run_fall_back_with_a_note(root, tmp_path, wishes):
    save_file({"w": np.ones((32, 64), np.float32)}, tmp_path / "lone.safetensors")
    shutil.copytree(root / "m", tmp_path / "mute")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "mute" / name).unlink()
    for name, words in (("lone.safetensors", "holds weights only"), ("mute", "no tokenizer")):
        with open_checkpoint(tmp_path / name) as checkpoint:
            found = make_task(checkpoint, Wishes(**wishes))
            assert found.way == "plain" and found.recipe.method is None and found.goal is None
            assert found.label == {"{}": "int4", "{'format': 'nl4'}": "nl4", "{'to': 'gguf'}": "q4_0"}[str(wishes)]
            assert len(found.notes) == 1 and name in found.notes[0] and words in found.notes[0]
            assert "without looking at what" in found.notes[0]
            assert make_task(checkpoint, Wishes(fast=True)).notes == []


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"size": "1MB", "bpw": 4.5}, "--size and --bpw: give one of them"),
        ({"bpw": 4.5, "max_kl": 0.1}, "--bpw and --max-kl: give one of them"),
        ({"size": "1MB", "bits": 4}, "--size and --bits: give one of them"),
        ({"bpw": 4.5, "format": "nl4"}, "--bpw and --format: give one of them"),
        ({"max_kl": 0.1, "fast": True}, "--max-kl and --fast: give one of them"),
        ({"size": "1MB", "method": "search"}, "--size goes with --method feedback only"),
        ({"bpw": 5.0, "method": "nearest"}, "--bpw goes with --method feedback only"),
        ({"size": "1MB", "to": "gguf"}, "a mix of formats is written as .hbf; for --to gguf choose --format"),
        ({"max_kl": 0.1, "to": "safetensors"}, "a mix of formats is written as .hbf"),
        ({"size": "1MB", "calibrate": "statistics.safetensors"}, "statistics.safetensors holds statistics"),
        ({"fast": True, "calibrate": "text.txt"}, "--fast looks at no text"),
        ({"fast": True, "method": "feedback"}, "--fast looks at no text"),
        ({"method": "nearest", "calibrate": "text.txt"}, "--method nearest looks at no text"),
        ({"tensors": ("attn_v",)}, "--tensor attn_v: must be REGEX=FORMAT"),
        ({"tensors": ("=q4_0",)}, "must be REGEX=FORMAT"),
        ({"to": "safetensors", "method": "search"}, "--method: says how to quantize; give --bits or --format"),
        ({"to": "safetensors", "tensors": ("a=q4_0",)}, "--tensor: says how to quantize; give --bits or --format"),
        ({"size": "many"}, "--size many: must be a number of bytes"),
    ],
)
def test_options_that_do_not_go_together(task, wishes, words):
    with pytest.raises(UsageError) as caught:
        task(**wishes)
    assert words in str(caught.value)


def test_what_would_be_ignored_is_refused(task):
    for option, wishes in (("--method", {"method": "feedback"}), ("--tensor", {"tensors": ("a=q4_0",)})):
        with pytest.raises(UsageError, match=option):
            task("q4.hbf", to="gguf", **wishes)


@pytest.mark.parametrize(
    ("wishes", "kind", "words"),
    [
        ({"bits": 3}, RecipeError, "--bits 3"),
        ({"format": "q9"}, FormatError, "q9"),
        ({"method": "gptq"}, RecipeError, "choose nearest, search, feedback"),
        ({"tensors": ("(=q4_0",)}, RecipeError, "no regular expression"),
        ({"tensors": ("a=q9",)}, FormatError, "q9"),
        ({"size": "0"}, RecipeError, "more than nothing"),
        ({"bpw": -2.0}, RecipeError, "more than nothing"),
        ({"bpw": float("nan")}, RecipeError, "more than nothing"),
        ({"max_kl": float("inf")}, RecipeError, "less than that"),
        ({"size": "9" * 30}, RecipeError, "less than that"),
        ({"recipe": "missing.json"}, HalfbyteError, "missing.json"),
    ],
)
def test_what_makes_no_sense_by_itself(task, wishes, kind, words):
    with pytest.raises(kind, match=words):
        task(**wishes)


@given(st.integers(0, 10**12), st.sampled_from([("", 1), ("B", 1), ("kb", 1000), ("MB", 10**6), ("GiB", 1 << 30), ("KiB", 1024)]))
def test_sizes(number, unit):
    name, factor = unit
    for text in (f"{number}{name}", f" {number} {name} "):
        assert parse_size(text) == int(float(number) * factor)


def test_sizes_that_are_none():
    assert parse_size("1.5MB") == 1_500_000 and parse_size(".5 GB") == 500_000_000
    for text in ("", "MB", "-1MB", "1e9", "1.2.3GB", "1 TB", "1MBB", "nan", "inf", "0x10", "1,5GB", "9" * 400, "1.MB", "\x1b[31m5"):
        with pytest.raises(UsageError) as caught:
            parse_size(text)
        assert str(caught.value).isprintable() and len(str(caught.value)) < 160


def test_files_of_statistics(root):
    assert holds_statistics(str(root / "statistics.safetensors"))
    for name in ("text.txt", "recipe.json", "missing", "m"):
        assert not holds_statistics(str(root / name))
    assert not holds_statistics("-") and not holds_statistics("\0")
    (root / "imatrix.gguf").write_bytes(b"GGUF\3\0\0\0")
    (root / "old.dat").write_bytes(b"\0\0")
    assert holds_statistics(str(root / "imatrix.gguf")) and holds_statistics(str(root / "old.dat"))


# ---- texts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "own", "others"), [(0.2, 16, 4), (0.5, 10, 10), (0.9, 2, 18), (0.0, 20, 0)])
def test_a_share_of_the_built_in_text_is_spread_evenly(root, share, own, others):
    mine = "z" * 10_000  # the tokenizer knows bytes only
    with open_checkpoint(root / "m") as checkpoint:
        texts, notes = blended_tokens(checkpoint, mine, 20 * 128, share)
        plain, _ = calibration_tokens(checkpoint, mine, 20 * 128)
        built_in, _ = calibration_tokens(checkpoint, built_in_text(), max(others, 1) * 128)
    mixed = [i for i, ids in enumerate(texts) if not (ids == plain[0]).all()]
    assert texts.shape == (own + others, 128) and len(mixed) == others and notes == []
    np.testing.assert_array_equal(texts[mixed], built_in[:others])  # its beginning, in order
    if others > 1:
        gaps = np.diff(mixed)
        assert gaps.max() - gaps.min() <= 1 and abs(mixed[0] - (len(texts) - 1 - mixed[-1])) <= 1
    if share == 0:
        np.testing.assert_array_equal(texts, plain)


def test_every_chunk_begins_with_the_beginning(root, tmp_path):
    shutil.copytree(root / "m", tmp_path / "m")
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "add_bos_token": True}
    tiny.write_json(tmp_path / "m" / "tokenizer_config.json", config)
    with open_checkpoint(tmp_path / "m") as checkpoint:
        texts, _ = blended_tokens(checkpoint, "z" * 5000, 1280, 0.3)
    assert (texts[:, 0] == 256).all() and not (texts[:, 1:] == 256).any() and len(texts) == 10


def test_a_short_text_is_blended_by_its_own_length(root):
    with open_checkpoint(root / "m") as checkpoint:
        texts, notes = blended_tokens(checkpoint, "z" * 128 * 8, TOKENS, 0.2)
    assert len(texts) == 10 and len(notes) == 1 and "8 whole chunks" in notes[0]


def test_what_text_is_run_and_what_the_file_says_of_it(root):
    with open_checkpoint(root / "m") as checkpoint:
        texts, _, about = Text(None, 1000).read(checkpoint)
        assert about["text"] == "built-in" and "blend" not in about and about["tokens"] == str(texts.size) == "1024"
        texts, _, about = Text(str(root / "text.txt"), 1280).read(checkpoint)
        assert about["text"] == "text.txt" and about["blend"] == f"{BLEND:g}" and len(texts) == 10
        _, _, alone = Text(str(root / "text.txt"), 1280, 0.0).read(checkpoint)
        assert "blend" not in alone and alone["text_sha256"] == about["text_sha256"] and alone["tokens_sha256"] != about["tokens_sha256"]
        with pytest.raises(UsageError, match="--blend: the text is the built-in one already"):
            Text(None, 1280, 0.5).read(checkpoint)


# ---- time ------------------------------------------------------------------------------------------------------------


def test_expected_seconds_grow_with_the_work_and_do_not_take_long():
    assert expected_seconds(0.0, 1) == 0.0
    one = expected_seconds(1e12, 1)
    assert 0.5 < one < 3000  # 0.3 to 2000 billion multiplications a second
    assert expected_seconds(1e15, 1) > 50 * one
    assert 0 < expected_seconds(1e12, 1024) < 20 * one  # more threads than processors are not tried out one by one


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "10 s"), (44, "40 s"), (89, "90 s"), (100, "2 min"), (3000, "50 min"), (5399, "1 h 30 min"), (7900, "2 h 10 min")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@given(st.floats(0, 1e12))
def test_any_duration_has_words(seconds):
    words = duration(seconds).split()
    assert words[1::2] in (["s"], ["min"], ["h", "min"]) and all(word.isdigit() for word in words[::2])
