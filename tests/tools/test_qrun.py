"""qrun from the outside: one answer, command lines, processes, with an engine that recites."""

import io
import json
import os
import subprocess
import sys
import time

import pytest

import halfbyte
from halfbyte.engine.generate.params import SamplingParams
from halfbyte.tools import qrun
from support import fakes

FakeEngine, EOS = fakes.FakeEngine, fakes.EOS
child = fakes.child


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs qrun with a fake engine; gives exit status, stdout and stderr."""

    def run(*arguments, engine=None, stdin=None):
        engine = engine or FakeEngine("Hello, world")
        monkeypatch.setattr(qrun, "open_engine", lambda _: engine)
        data = io.TextIOWrapper(io.BytesIO(stdin if isinstance(stdin, bytes) else (stdin or "").encode()))
        monkeypatch.setattr(sys, "stdin", data)
        status = qrun.main(["model", *arguments])
        out = capsys.readouterr()
        return status, out.out, out.err

    return run


# --- one answer -----------------------------------------------------------------------------------------------------------------


def test_one_answer_and_nothing_else(run):
    engine = FakeEngine("Hello, world")
    assert run("Hi there", engine=engine) == (0, "Hello, world\n", "")
    assert engine.prompts[0] == b"u:Hi there\na:"
    assert engine.closed and not engine.open


def test_the_answers_own_line_end_is_enough(run):
    assert run("Hi", engine=FakeEngine("one\n")) == (0, "one\n", "")


def test_system_message_goes_first(run):
    engine = FakeEngine("x")
    run("Hi", "--system", "Be brief.", engine=engine)
    assert engine.prompts[0] == b"s:Be brief.\nu:Hi\na:"


def test_prompt_from_stdin(run):
    for arguments in ((), ("-",)):
        engine = FakeEngine("x")
        assert run(*arguments, stdin="two\nlines\n", engine=engine)[0] == 0
        assert engine.prompts[0] == b"u:two\nlines\na:"


def test_stdin_is_left_alone_when_there_is_a_prompt(run):
    engine = FakeEngine("x")
    run("Hi", stdin="not read", engine=engine)
    assert engine.prompts[0] == b"u:Hi\na:"


def test_bytes_on_stdin_that_are_no_text_do_not_matter(run):
    engine = FakeEngine("x")
    assert run(stdin=b"a\xff\x00b\r\n", engine=engine)[0] == 0
    assert engine.prompts[0].decode() == "u:a\ufffd\x00b\na:"


def test_raw_has_no_template(run):
    engine = FakeEngine("x")
    run("Hi <eos>", "--raw", engine=engine)
    assert engine.fed[0][0] == list(b"Hi <eos>")
    engine = FakeEngine("x")
    run("Hi <eos>", "--raw", "--special", engine=engine)
    assert engine.fed[0][0] == [*b"Hi ", EOS]


def test_a_model_without_a_template_continues_the_prompt_and_says_so(run):
    engine = FakeEngine("x", template=False)
    status, out, err = run("Hi", engine=engine)
    assert (status, out) == (0, "x\n") and "no chat template" in err and not err.startswith("error")
    assert engine.fed[0][0] == list(b"Hi")
    status, out, err = run("Hi", "--system", "x", engine=FakeEngine("x", template=False))
    assert status != 0 and out == "" and err.startswith("error: --system")


def test_text_is_flushed_as_it_is_made(run, monkeypatch):
    class Out(io.StringIO):
        def flush(self):
            flushed.append(self.getvalue())

    flushed = []
    monkeypatch.setattr(sys, "stdout", Out())
    run("Hi", engine=FakeEngine("abc"))
    assert flushed[:3] == ["a", "ab", "abc"]


def test_a_terminal_gets_no_control_characters_and_a_pipe_gets_all(run, monkeypatch):
    evil = "a\x1b[31mred\x07\u202eb\tc\nd é 👩\u200d🚀"
    assert run("Hi", engine=FakeEngine(evil))[1] == evil + "\n"

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    run("Hi", engine=FakeEngine(evil))
    assert out.getvalue() == "a\\x1b[31mred\\x07\\u202eb\tc\nd é 👩\u200d🚀\n"


def test_sampling_options_reach_the_sampler():
    line = (
        "m p --max-tokens 5 --temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 --repeat-penalty 1.1 --frequency-penalty 0.2 "
        "--presence-penalty -0.3 --seed 7 --stop a --stop b --logit-bias 5=-inf --logit-bias 6=1.5 --ignore-eos --logprobs 2"
    )
    arguments = qrun.parser().parse_args(line.split())
    assert qrun.sampling(arguments) == SamplingParams(
        max_tokens=5, temperature=0.5, top_k=4, top_p=0.9, min_p=0.1, repetition_penalty=1.1, repetition_window=64,
        frequency_penalty=0.2, presence_penalty=-0.3, seed=7, stop=["a", "b"], logit_bias={5: float("-inf"), 6: 1.5},
        ignore_eos=True, logprobs=2,
    )  # fmt: skip


def test_defaults_are_greedy():
    params = qrun.sampling(qrun.parser().parse_args(["m", "p"]))
    assert params.greedy and params.max_tokens == qrun.MOST_TOKENS and params.repetition_penalty == 1.0 and params.stop == ()


def test_stop_and_max_tokens(run):
    assert run("Hi", "--stop", ", ")[1] == "Hello\n"
    assert run("Hi", "--max-tokens", "4")[1] == "Hell\n"
    assert run("Hi", "--max-tokens", "0")[:2] == (0, "")


def test_an_answer_without_end_is_cut_off_and_says_so(run):
    engine = FakeEngine("x" * 3000, context=4000)
    status, out, err = run("Hi", engine=engine)
    assert (status, out) == (0, "x" * qrun.MOST_TOKENS + "\n")
    assert err.startswith("note: ") and str(qrun.MOST_TOKENS) in err and "--max-tokens" in err
    status, out, err = run("Hi", "--max-tokens", "5", engine=FakeEngine("x" * 3000))
    assert (status, out, err) == (0, "xxxxx\n", "")


def test_json(run):
    status, out, err = run("Hi", "--json", "--max-tokens", "3", "--seed", "5", engine=FakeEngine("Hé\x1b!"))
    answer = json.loads(out)
    assert (status, err) == (0, "") and out.count("\n") == 1 and out.isascii()
    assert {key: answer[key] for key in ("text", "token_ids", "prompt_token_ids", "finish_reason", "seed")} == {
        "text": "Hé", "token_ids": [0x48, 0xC3, 0xA9], "prompt_token_ids": list(b"u:Hi\na:"), "finish_reason": "length",
        "seed": 5,
    }  # fmt: skip
    timings = answer["timings"]
    assert timings["total_s"] >= timings["first_token_s"] >= timings["load_s"] >= 0
    assert timings["prefill_tok_s"] > 0 and timings["decode_tok_s"] > 0
    assert "logprobs" not in answer


def test_json_of_an_answer_without_tokens(run):
    answer = json.loads(run("Hi", "--json", engine=FakeEngine(""))[1])
    assert (answer["text"], answer["token_ids"], answer["finish_reason"]) == ("", [], "stop")
    assert answer["timings"]["decode_tok_s"] is None


def test_json_logprobs(run):
    answer = json.loads(run("Hi", "--json", "--logprobs", "2", engine=FakeEngine("ab"))[1])
    assert [entry["id"] for entry in answer["logprobs"]] == [97, 98]
    assert [alternative["id"] for alternative in answer["logprobs"][0]["top"]] == [97, 0]


# --- bad input ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--nonsense"], "--nonsense"),
        (["a", "b"], "b"),
        (["x", "--max-tokens", "many"], "--max-tokens"),
        (["x", "--max-tokens", "-1"], "--max-tokens"),
        (["x", "--temperature", "hot"], "--temperature"),
        (["x", "--temperature", "nan"], "--temperature"),
        (["x", "--top-p", "2"], "--top-p"),
        (["x", "--repeat-penalty", "0"], "--repeat-penalty"),
        (["x", "--seed", str(2**64)], "--seed"),
        (["x", "--stop", ""], "--stop"),
        (["x", "--logit-bias", "5"], "--logit-bias"),
        (["x", "--logit-bias", "-5=1"], "--logit-bias"),
        (["x", "--threads", "0"], "--threads"),
        (["x", "--context", "0"], "--context"),
        (["x", "--compute", "int3"], "--compute"),
        (["x", "--special"], "--raw"),
        (["x", "--raw", "--system", "y"], "--system"),
        (["x", "--tem", "1"], "--tem"),
        ([], "stdin"),
        (["-"], "stdin"),
    ],
)
def test_a_bad_command_line_is_one_line(run, arguments, says):
    status, out, err = run(*arguments)
    assert status == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err


def test_a_prompt_too_long_for_the_context(run):
    status, out, err = run("x" * 100, engine=FakeEngine("y", context=50))
    assert status == 1 and out == "" and err.startswith("error: ") and "105 tokens" in err and "50" in err


def test_an_empty_prompt(run):
    assert run("")[:2] == (0, "Hello, world\n")  # an empty question in a template is a prompt
    status, _, err = run("", "--raw")
    assert status == 1 and err.startswith("error: the prompt is empty")


def test_help_and_version(capsys):
    for option, text in (("--help", "MODEL"), ("--version", halfbyte.__version__)):
        with pytest.raises(SystemExit) as left:
            qrun.main([option])
        assert left.value.code in (0, None) and text in capsys.readouterr().out


def test_ctrl_c_in_one_answer_leaves_quietly(run):
    engine = FakeEngine("Hello")

    def press(sequence, ids):
        if ids == [101]:
            raise KeyboardInterrupt

    engine.hook = press
    status, out, err = run("Hi", engine=engine)
    assert status == 130 and out.startswith("He") and "Traceback" not in err and engine.closed


# --- processes ------------------------------------------------------------------------------------------------------------------


def test_nobody_reads_the_answer():
    process = subprocess.Popen(child("Hi", engine='"x" * 50, pause=0.02'), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(1) == b"x"
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(30) == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(child("Hi"), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX locales")
def test_a_locale_without_the_character():
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    command = child("Hi", engine=r"'a\u20acb'")
    done = subprocess.run(command, capture_output=True, timeout=60, env=environment, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"a?b\n", b"")


@pytest.mark.parametrize("kind", ["missing", "empty", "folder", "text"])
def test_a_bad_model_is_one_line(tmp_path, kind):
    path = tmp_path / "model\x1b[31m.hbf"
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "folder":
        path.mkdir()
    elif kind == "text":
        path.write_text("hello" * 100)
    command = [sys.executable, "-m", "halfbyte.tools.qrun", str(path), "Hi"]
    start = time.monotonic()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, env=environment)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr and "\x1b" not in done.stderr
    assert "defect" not in done.stderr
    assert time.monotonic() - start < 10
