"""qcompare from the outside, on tiny models: answers, measures checked against the engine's own logits, and every way to be refused."""

import errno
import gc
import html
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

from halfbyte import Engine
from halfbyte.engine import engine as engine_module
from halfbyte.engine.generate.answer import Timings
from halfbyte.engine.generate.params import SamplingParams
from halfbyte.formats.conversion.convert import convert
from halfbyte.formats.conversion.recipe import Recipe
from halfbyte.formats.errors import InputError
from halfbyte.formats.opening import open_checkpoint
from halfbyte.tools import qcompare
from halfbyte.tools.compare import answers as compare_answers
from halfbyte.tools.compare.answers import LogitFile, ModelAnswer
from halfbyte.tools.compare.data import prompt_data, summary
from halfbyte.tools.compare.html import compare_html
from halfbyte.tools.compare.models import Candidate, CompareError
from halfbyte.tools.compare.prompts import BUILT_IN, LARGEST_FILE, Prompt, gather, read_prompts
from halfbyte.tools.compare.text import answer_facts, mark_of, print_prompt
from support import fakes, tiny

SMALL = ("--threads", "2", "--max-tokens", "6")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """model, its q4_0; short: a context of 64; other: more tokens; plain: without a template."""
    path = tmp_path_factory.mktemp("qcompare")
    tiny.write_folder(path / "model")
    tiny.write_folder(path / "short", tiny.llama_config(max_position_embeddings=64))
    tiny.write_folder(path / "other", tiny.llama_config(vocab_size=288))
    tiny.write_folder(path / "plain")
    tiny.write_json(path / "plain" / "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    with open_checkpoint(path / "model") as checkpoint:
        convert(checkpoint, path / "model.q4_0.hbf", Recipe(None, "q4_0", "nearest"))
    return path


@pytest.fixture
def run(root, monkeypatch, capsys):
    """Runs qcompare in the folder of the models; gives exit status, stdout and stderr."""
    monkeypatch.chdir(root)

    def run(*arguments, models=("model", "model.q4_0.hbf"), small=True):
        status = qcompare.main([*models, *(SMALL if small else ()), *map(str, arguments)])
        out = capsys.readouterr()
        return status, out.out, out.err

    return run


def compared(run, *arguments, **options):
    status, out, err = run("--json", *arguments, **options)
    assert status == 0, err
    return json.loads(out), err


# --- what it measures -----------------------------------------------------------------------------------------------------------


def probabilities(logits):
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def test_answers_and_measures_are_those_of_the_engine(run, root):
    """More tokens than are held at once, and two prompts whose answers differ in length (the second meets the context)."""
    texts = ["Hello", "x" * 100]
    data, err = compared(run, "--raw", "-p", texts[0], "-p", texts[1], "--max-tokens", 70, "--threads", 2, small=False)
    assert err == "" and [p["prompt"] for p in data["prompts"]] == texts
    with Engine(root / "model", threads=2) as first, Engine(root / "model.q4_0.hbf", threads=2) as second:
        total_same, total_kl = [], []
        for text, prompt in zip(texts, data["prompts"], strict=True):
            ids = first.tokenizer.encode(text, bos=True)
            answers = [[i for piece in e.generate(ids, max_tokens=70) for i in piece.ids] for e in (first, second)]
            assert [a["token_ids"] for a in prompt["answers"]] == answers
            p, q = (probabilities(e.logits([*ids, *answers[0][:-1]])[len(ids) - 1 :]) for e in (first, second))
            same, kl = q.argmax(axis=1) == answers[0], (p * np.log(p / q)).sum(axis=1)
            assert kl.mean() > 0 and same.mean() < 1
            got = prompt["answers"][1]
            assert got["scored_tokens"] == len(answers[0]) == kl.size
            assert got["agreement"] == pytest.approx(same.mean()) and got["kl_mean"] == pytest.approx(kl.mean(), rel=1e-6)
            equal = next((i for i, (a, b) in enumerate(zip(*answers, strict=True)) if a != b), len(answers[0]))
            assert got["equal_tokens"] == equal
            total_same += list(same)
            total_kl += list(kl)
    lengths = [len(p["answers"][0]["token_ids"]) for p in data["prompts"]]
    assert lengths == [70, 28], "the mean over tokens is not the mean over prompts"
    model = data["models"][1]
    assert model["agreement"] == pytest.approx(np.mean(total_same)) and model["kl_mean"] == pytest.approx(np.mean(total_kl), rel=1e-6)
    assert model["scored_tokens"] == 98 and model["answer_tokens"] == 98 and model["decode_tok_s"] > 0
    assert model["bytes"] == os.path.getsize(root / "model.q4_0.hbf")
    assert data["models"][0]["agreement"] is None and data["models"][0]["equal_tokens_mean"] is None


def test_a_model_agrees_with_itself(run):
    data, _ = compared(run, "-p", "Hi", "-p", "Ho", models=("model", "model", "model.q4_0.hbf"))
    assert len(data["prompts"]) == 2
    assert [m["model"] for m in data["models"]] == ["model", "model (2)", "model.q4_0.hbf"]
    for prompt in data["prompts"]:
        first, again, other = prompt["answers"]
        assert (again["same"], again["differs_at"], again["equal_tokens"]) == (True, None, 6)
        assert again["agreement"] == 1 and again["kl_mean"] == 0 and again["text"] == first["text"]
        assert other["kl_mean"] > 0
    assert data["models"][1]["same_answers"] == 2 and data["models"][1]["equal_tokens_mean"] == 6


def test_a_template_and_none(run, root):
    with Engine(root / "model", threads=2) as engine:
        messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]
        with_template, plain = len(engine.prompt_ids(messages)), len(engine.prompt_ids("Hi"))
    data, _ = compared(run, "-p", "Hi", "--system", "S")
    assert data["prompts"][0]["answers"][0]["prompt_tokens"] == with_template
    data, _ = compared(run, "-p", "Hi", "--raw")
    assert data["prompts"][0]["answers"][0]["prompt_tokens"] == plain == 2


def test_a_model_without_a_template_continues_and_is_judged_on_the_tokens_of_the_first(run):
    data, err = compared(run, "-p", "Hi", models=("model", "plain"))
    assert "plain has no chat template" in err and "read a prompt as different tokens" in err
    first, second = data["prompts"][0]["answers"]
    assert second["prompt_tokens"] == 2 < first["prompt_tokens"]
    assert second["agreement"] == 1 and second["kl_mean"] == 0, "the same weights"


def test_what_does_not_fit_a_context_is_not_scored(run):
    data, _ = compared(run, "--raw", "-p", "x" * 40, "-n", 60, "-t", 2, models=("model", "short"), small=False)
    first, second = data["prompts"][0]["answers"]
    assert len(first["token_ids"]) == 60 and len(second["token_ids"]) == 24
    assert second["scored_tokens"] == 25, "the logits after token 64 judge one more"
    assert second["agreement"] == 1 and second["kl_mean"] == 0 and not second["same"] and second["equal_tokens"] == 24


def test_other_tokens_are_compared_as_text(run):
    data, err = compared(run, "-p", "Hi", models=("model", "other"))
    assert "different tokens" in err and err.count("\n") == 1 and data["notes"] == [err.removeprefix("note: ").rstrip()]
    answer = data["prompts"][0]["answers"][1]
    assert answer["agreement"] is None and answer["scored_tokens"] == 0 and answer["differs_at"] is not None
    assert data["models"][1]["kl_mean"] is None
    assert re.search(r"^other .* - +-$", run("-p", "Hi", models=("model", "other"))[1], re.M)


def test_temperature_has_one_seed_and_no_agreement(run):
    data, _ = compared(run, "-p", "Hi", "--temperature", 5, models=("model", "model"))
    first, second = data["prompts"][0]["answers"]
    assert first["token_ids"] == second["token_ids"] and second["agreement"] is None and second["same"]
    again, _ = compared(run, "-p", "Hi", "--temperature", 5, "--seed", data["settings"]["seed"])
    assert again["prompts"][0]["answers"][0]["token_ids"] == first["token_ids"]
    greedy, _ = compared(run, "-p", "Hi")
    assert greedy["prompts"][0]["answers"][0]["token_ids"] != first["token_ids"]


def test_one_model_is_in_memory_at_a_time(run, monkeypatch):
    gone, known = [], []

    class Watched(Engine):
        def __init__(self, *arguments, **options):
            gone.append([engine() is None and weights() is None for engine, weights in known])
            super().__init__(*arguments, **options)
            known.append((weakref.ref(self), weakref.ref(self.model.weights)))

    monkeypatch.setattr(engine_module, "Engine", Watched)
    gc.disable()
    try:
        compared(run, "-p", "Hi", "-p", "Ho", models=("model", "model.q4_0.hbf", "model"))
    finally:
        gc.enable()
    assert gone == [[], [True], [True, True]]


def test_the_token_that_ends_an_answer_counts_as_chosen():
    engine = fakes.FakeEngine("Hé")
    with LogitFile(fakes.VOCABULARY) as kept:
        kept.append(np.zeros(fakes.VOCABULARY, np.float32))  # of an answer before
        found = compare_answers.answer(engine, [1, 2, 3], SamplingParams(max_tokens=9), keep=kept)
        assert (found.text, found.end, found.finish_reason, found.row) == ("Hé", fakes.EOS, "stop", 1)
        assert found.ids == [0x48, 0xC3, 0xA9] and found.ends == [1, 1, 2] and found.chosen == [*found.ids, fakes.EOS]
        assert kept.read(1, 4).argmax(axis=1).tolist() == found.chosen and kept.rows == 5
    assert not engine.open


def candidate(name="m", same_tokens=True):
    return Candidate(Path(name), name, 1, 64, 260, [[1]], False, same_tokens)


def said(*tokens, end=None):
    text, ends = "", []
    for token in tokens:
        text += token
        ends.append(len(text))
    return ModelAnswer(Timings(1), [sum(token.encode()) for token in tokens], end, text, ends, "length" if end is None else "stop")


@pytest.mark.parametrize(
    ("first", "second", "same_tokens", "expected"),
    [
        (said("a", "bc", "d"), said("a", "bc", "x"), True, (2, 3, False)),
        (said("a"), said("b"), True, (0, 0, False)),
        (said("a", "b", end=7), said("a", "b", "c"), True, (2, 2, False)),  # it went on
        (said("a", "b", "c"), said("a", "b", end=7), True, (2, 2, False)),  # it ended earlier
        (said("a", "b", end=7), said("a", "b", end=7), True, (2, None, True)),
        (said("ab", "c"), said("a", "bx"), False, (1, 2, False)),
        (said("ab", "c"), said("a", "bc"), False, (2, None, True)),
    ],
)
def test_where_answers_part(first, second, same_tokens, expected):
    models = [candidate("a"), candidate("b", same_tokens)]
    data = prompt_data(Prompt("?"), models, [first, second])["answers"]
    assert tuple(data[1][key] for key in ("equal_tokens", "differs_at", "same")) == expected
    assert data[0]["same"] is None


# --- prompts --------------------------------------------------------------------------------------------------------------------


def test_prompts_one_per_line(tmp_path, monkeypatch):
    data = "\ufeffone\r\n\n  \n{two}\nthrée ".encode()
    (tmp_path / "p.txt").write_bytes(data)
    assert [p.text for p in read_prompts(str(tmp_path / "p.txt"))] == ["one", "{two}", "thrée "]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert len(read_prompts("-")) == 3


def test_prompts_as_json_lines(tmp_path):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    answered = [*messages, {"role": "assistant", "content": "A"}]
    lines = [{"prompt": "one", "id": 5}, {"messages": messages}, {"messages": answered, "prompt": "Q"}]
    (tmp_path / "p").write_text("\n".join(map(json.dumps, lines)))
    one, two, three = read_prompts(str(tmp_path / "p"))
    assert one.conversation("T") == [{"role": "system", "content": "T"}, {"role": "user", "content": "one"}]
    assert two.conversation("T") == messages and two.shown == "Q"
    assert three == two, "the answer that is there is not shown to the models"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("p.jsonl", b"hello", "line 1"),
        ("p.txt", b'{"prompt": "x"}\nhello', "line 2"),
        ("p.jsonl", b'{"prompt": "x"}\n\n[1]', "line 3"),
        ("p.jsonl", b'{"prompt": 5}', "line 1"),
        ("p.jsonl", b'{"messages": {"role": "user"}}', '"role"'),
        ("p.jsonl", b'{"messages": [{"content": "x"}]}', '"role"'),
        ("p.jsonl", b'{"messages": [{"role": "assistant", "content": "x"}]}', "nothing to answer"),
        ("p.jsonl", b'{"a":' + b"[" * 100_000, "line 1"),
        ("p.txt", b"\n \n", "no prompts"),
        ("p.txt", b"a\xff", "UTF-8"),
    ],
)
def test_bad_files_of_prompts(tmp_path, name, text, says):
    (tmp_path / name).write_bytes(text)
    with pytest.raises(InputError, match=says) as refused:
        read_prompts(str(tmp_path / name))
    assert name in str(refused.value) and len(str(refused.value)) < 400


def test_a_file_that_is_too_large_is_not_cut(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes(b"a" * LARGEST_FILE)
    assert len(read_prompts(str(path))[0].text) == LARGEST_FILE
    path.write_bytes("aä\n".encode() * (LARGEST_FILE // 2))
    with pytest.raises(InputError, match="larger than 16 MiB"):
        read_prompts(str(path))


def test_built_in_prompts_differ_and_are_used_unless_others_are_given():
    assert gather([], None) == list(BUILT_IN) and gather(["x"], None) == [Prompt("x")]
    texts = [prompt.text for prompt in BUILT_IN]
    assert len(set(texts)) == len(texts) >= 6 and not all(text.isascii() for text in texts)


def test_prompts_of_the_command_line_and_of_a_file(run, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"messages": [{"role": "user", "content": "file"}]}\n')
    data, _ = compared(run, "-p", "one", "model.q4_0.hbf", "-p", "two", "--prompts", tmp_path / "p.jsonl", models=("model",))
    assert [p["prompt"] for p in data["prompts"]] == ["one", "two", None]
    assert data["prompts"][2]["messages"] == [{"role": "user", "content": "file"}]


# --- what it shows --------------------------------------------------------------------------------------------------------------

EVIL = "a\x1b[31mb\x07\u202e<script>alert(1)</script>&\x9b2J"


def shown(first, second, width=100, encoding="utf-8"):
    from rich.console import Console

    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace", write_through=True)
    console = Console(file=file, width=width, highlight=False, markup=False, emoji=False)
    models = [candidate("one"), candidate("t\x1bwo")]
    print_prompt(prompt_data(Prompt("What\n\x1b[2J?"), models, [first, second]), 2, 3, console)
    return file.buffer.getvalue().decode(encoding)


def test_columns_and_the_mark():
    out = shown(said("same ", "old"), said("same ", "new [red]"))
    assert out.startswith("2 of 3  What \\x1b[2J?\n")
    assert re.search(r"^one +│ t\\x1bwo *$", out, re.M)
    assert re.search(r"^same old +│ same ▶new \[red\] *$", out, re.M)
    assert "first 1 equal" in out
    assert "▶" not in shown(said("same", end=3), said("same", end=3))


def test_one_below_the_other_where_it_is_narrow():
    out = shown(said("same ", "old"), said("same ", "new"), width=60)
    lines = [line.rstrip() for line in out.splitlines()]
    assert "│" not in out and lines.index("  same old") < lines.index("t\\x1bwo") < lines.index("  same ▶new")


def test_nothing_that_a_terminal_would_obey():
    for width in (40, 120):
        out = shown(said("x"), said(EVIL, "\t|\n  indented"), width)
        assert all(c.isprintable() or c == "\n" for c in out)
        assert "a\\x1b[31mb\\x07\\u202e" in out.replace("\n  ", "")
    assert shown(said("x"), said("yé"), encoding="ascii").isascii() and mark_of("ascii") == ">>"


def test_the_page_shows_everything_as_text():
    models = [candidate("one"), candidate("<b>two")]
    prompts = [prompt_data(Prompt(EVIL), models, [said("\nsame ", "old"), said("\nsame ", EVIL)])]
    settings = {"temperature": 0, "seed": None, "raw": False, "max_tokens": 5, "compute": "int8"}
    page = compare_html({"models": summary(models, prompts), "prompts": prompts, "settings": settings, "notes": [EVIL], "seconds": 1.0})
    assert "<script" not in page and "<b>two" not in page and page.count("&lt;script&gt;") == 3
    assert all(c.isprintable() or c == "\n" for c in page) and "default-src &#x27;none&#x27;" in page
    assert '<pre>\n\nsame <span class="other">a\\x1b[31mb' in page


def test_facts_in_words():
    data = prompt_data(Prompt("?"), [candidate("a"), candidate("b")], [said("a"), said("b", "c", end=1)])
    first, second = data["answers"]
    second |= {"decode_tok_s": 12.34, "scored_tokens": 4, "agreement": 0.75, "kl_mean": float("nan")}
    assert answer_facts(first) == "1 token, cut off"
    assert answer_facts(second) == "2 tokens, 12.3 tokens/s; none equal; agreement 75.0%, KL nan"


def test_text_and_page(run, tmp_path):
    page = tmp_path / "out.html"
    status, out, err = run("-p", "Hello & <you>", "--html", page)
    assert status == 0 and err == f"note: the page is {page}\n"
    assert out.startswith("1 of 1  Hello & <you>\n")
    assert re.search(r"^model\.q4_0\.hbf +\d+\.\d kB +\d+\.\d +\d\.\d +[01] of 1 +\d+\.\d% +\d\.\d{4}$", out, re.M)
    text = page.read_text("utf-8")
    assert "Hello &amp; &lt;you&gt;" in text and html.unescape(text).count("model.q4_0.hbf") >= 3


# --- bad input ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["model"], 2, "two models"),
        (["model", "model", "--nonsense"], 2, "--nonsense"),
        (["model", "model", "--max-tokens", "0"], 2, "--max-tokens"),
        (["model", "model", "--threads", "0"], 2, "--threads"),
        (["model", "model", "--temperature", "-1"], 2, "--temperature"),
        (["model", "model", "--seed", str(2**64)], 2, "--seed"),
        (["model", "model", "--raw", "--system", "x"], 2, "--system"),
        (["model", "plain", "-p", "Hi", "--system", "x"], 2, "plain has no chat template"),
        (["model", "model.q4_0.hbf", "missing.hbf"], 1, "missing.hbf"),
        (["model", "lone.safetensors", "-p", "Hi"], 1, "weights only"),
        (["model", "model", "--raw", "-p", ""], 1, "prompt 1 with model: is empty"),
        (["model", "short", "-p", "a", "-p", "x" * 70], 1, "prompt 2 with short: has 78 tokens"),
        (["model", "model", "--prompts", "missing.txt"], 1, "missing.txt"),
        (["model", "model", "--prompts", "."], 1, "is a folder"),
        (["model", "model", "--prompts", os.devnull], 1, "holds no prompts"),
        (["model", "model", "-p", "Hi", "--html", "no/where.html"], 1, "where.html"),
        (["model", "model", "-p", "Hi", "--html", "model/config.json"], 1, "is also the input"),
        (["model", "model", "--raw", "--prompts", "chat.jsonl"], 1, "prompt 1 with model: is a conversation"),
    ],
)
def test_refused_before_anything_runs(run, root, monkeypatch, arguments, status, says):
    def never(*_, **__):
        raise AssertionError("a model was run")

    (root / "lone.safetensors").write_bytes((root / "model" / "model.safetensors").read_bytes())
    (root / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    monkeypatch.setattr(engine_module, "Engine", never)
    got, out, err = run(*arguments, models=(), small=False)
    assert (got, out) == (status, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err and "defect" not in err


def test_logits_that_nothing_can_be_drawn_from_name_the_model(run, root, tmp_path):
    weights = tiny.weights(tiny.llama_config())
    weights["model.norm.weight"][:] = np.nan
    tiny.write_folder(tmp_path / "broken", tensors=weights)
    status, out, err = run("-p", "Hi", "--html", tmp_path / "out.html", models=("model", str(tmp_path / "broken")))
    assert status == 1 and out == "" and err.startswith("error: prompt 1 with broken: ") and err.count("\n") == 1
    assert not (tmp_path / "out.html").exists()


def test_a_full_disk_says_what_to_do(monkeypatch):
    with LogitFile(4) as kept:

        class Full:
            def seek(self, position):
                pass

            def write(self, data):
                raise OSError(errno.ENOSPC, "No space left on device")

            def close(self):
                pass

        kept._file.close()
        kept._file = Full()
        with pytest.raises(CompareError, match=r"16 bytes of logits .*No space left.*TMPDIR"):
            kept.append(np.zeros(4, np.float32))


# --- processes ------------------------------------------------------------------------------------------------------------------


def spawn(root, *arguments, **options):
    command = [sys.executable, "-m", "halfbyte.tools.qcompare", "model", "model.q4_0.hbf", "-t", "2", *arguments]
    return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def test_nobody_reads_the_answers(root):
    process = spawn(root, "-n", "3", "-p", "Hi")
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 141


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_leaves_nothing_behind(root, tmp_path):
    (tmp_path / "many.txt").write_text("Hello\n" * 3000)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    out = tmp_path / "out.html"
    process = spawn(
        root, "--prompts", str(tmp_path / "many.txt"), "--html", str(out), env={**os.environ, "TMPDIR": str(temporary)}
    )
    end = time.monotonic() + 60
    while not list(tmp_path.glob(".out.html.*")) and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and b"Traceback" not in stderr and stdout == b""
    assert not out.exists() and not list(tmp_path.glob(".out.html.*")) and not list(temporary.iterdir())


# --- real models ----------------------------------------------------------------------------------------------------------------

MODELS = Path(os.environ.get("HALFBYTE_MODELS", Path.home() / ".cache" / "halfbyte-models"))


def command(tool, *arguments):
    line = [sys.executable, "-m", f"halfbyte.tools.{tool}", *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_smollm2_in_eight_and_in_four_bits(tmp_path):
    """More bits agree better; the answers are those of qrun."""
    folder = MODELS / "smollm2-135m-instruct"
    if not folder.is_dir():
        pytest.skip(f"needs SmolLM2 at {folder} (HALFBYTE_MODELS)")
    paths = [folder]
    for format in ("q8_0", "q4_0"):
        paths.append(tmp_path / f"{format}.hbf")
        command("qconvert", folder, "--format", format, "--method", "nearest", "-o", paths[-1])
    data = json.loads(command("qcompare", *paths, "-n", 24, "--json"))
    _, eight, four = data["models"]
    assert eight["agreement"] > 0.9 and eight["kl_mean"] < 0.02
    assert four["agreement"] < eight["agreement"] and four["kl_mean"] > 5 * eight["kl_mean"]
    assert eight["scored_tokens"] == four["scored_tokens"] > 100
    question, answers = data["prompts"][0]["prompt"], data["prompts"][0]["answers"]
    for path, answer in zip(paths, answers, strict=True):
        assert json.loads(command("qrun", path, question, "-n", 24, "--json"))["token_ids"] == answer["token_ids"]
