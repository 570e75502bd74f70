"""qrun from the outside, and its chat, with an engine that recites. What needs a model is in the slow tests at the end."""

import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import halfbyte
from halfbyte.engine.generation import PromptError
from halfbyte.engine.sampler import SamplingError, SamplingParams
from halfbyte.tools import chat, qrun
from halfbyte.tools.chat import ChatError, Commands, Conversation

FAKES = Path(__file__).with_name("fakes.py")
_spec = importlib.util.spec_from_file_location("halfbyte_test_fakes", FAKES)
fakes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fakes)
FakeEngine, EOS = fakes.FakeEngine, fakes.EOS


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

CHILD = """
import importlib.util, os, sys
from halfbyte.tools import qrun
def fake(arguments):
    spec = importlib.util.spec_from_file_location("halfbyte_test_fakes", {fakes!r})
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FakeEngine({engine})
qrun.open_engine = fake
status = qrun.main({arguments!r})
{after}
sys.exit(status)
"""


def child(*arguments, engine='"Hello, world"', after=""):
    return [sys.executable, "-c", CHILD.format(fakes=str(FAKES), engine=engine, arguments=["model", *arguments], after=after)]


HEAVY = {
    "typer", "click", "rich", "jinja2", "prompt_toolkit", "numba", "llvmlite", "gguf", "huggingface_hub", "ml_dtypes", "requests",
    "urllib.request", "http.client", "ssl", "asyncio", "logging", "multiprocessing", "concurrent.futures", "tempfile",
    "subprocess", "json", "unittest", "numpy.random", "numpy.fft", "numpy.polynomial", "numpy.ctypeslib", "numpy.testing", "numpy.ma",
    "yaml", "importlib.metadata", "pydantic", "email",
}  # fmt: skip
"""Imports that cost milliseconds, none of which an answer needs before its first token."""


def test_nothing_heavy_is_imported_on_the_way_to_the_first_token():
    after = f"print('loaded', sorted(set(sys.modules) & {HEAVY!r}))"
    done = subprocess.run(child("Hi", after=after), capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.stdout == "Hello, world\nloaded []\n", done.stdout + done.stderr


def test_numpy_starts_no_blas_threads():
    after = "print(os.environ['OPENBLAS_NUM_THREADS'], 'numpy' in sys.modules)"
    done = subprocess.run(child("Hi", after=after), capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.stdout.endswith("1 True\n")


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


# --- the conversation -----------------------------------------------------------------------------------------------------------


def conversation(*scripts, context=400, system=None, **params):
    return Conversation(FakeEngine(*scripts, context=context), SamplingParams(**params), system)


def ask(talk, question, **options):
    return "".join(talk.ask(question, **options))


def test_a_conversation_remembers():
    talk = conversation("one", "two", system="S")
    assert (ask(talk, "1?"), ask(talk, "2?")) == ("one", "two")
    assert talk.engine.prompts[1] == b"s:S\nu:1?\na:one\nu:2?\na:"
    assert talk.last.tokens == 3 and talk.last.reason == "stop" and talk.total.tokens == 6
    assert talk.engine.fed[1][0] == list(b"\nu:2?\na:"), "only what is new is computed"
    assert len(talk.engine.open) == 1
    talk.close()
    assert not talk.engine.open


def test_the_oldest_turns_go_when_the_context_fills():
    talk = conversation("a" * 20, context=100, system="S")
    for n in range(6):
        assert ask(talk, f"question {n}") == "a" * 20
        prompt = talk.engine.prompts[n]
        assert prompt.startswith(b"s:S\nu:question ") and prompt.endswith(f"u:question {n}\na:".encode())
        assert len(prompt) + 25 <= 100, "a quarter of the context is kept for the answer"
    assert talk.forgotten == 1
    assert [m["role"] for m in talk.messages] == ["user", "assistant"] * (len(talk.messages) // 2)


def test_a_question_that_cannot_fit_changes_nothing():
    talk = conversation("one", context=100)
    ask(talk, "1?")
    before = list(talk.messages)
    with pytest.raises(PromptError, match="100"):
        ask(talk, "x" * 200)
    assert talk.messages == before
    assert ask(talk, "2?") == "one"


def test_an_answer_that_fills_the_context_ends_with_length():
    talk = conversation("a" * 500, context=60)
    said = ask(talk, "1?")
    assert talk.last.reason == "length" and len(said) == 60 - len(b"u:1?\na:")


def test_stopping_keeps_what_was_said():
    talk = conversation("abcdef", "x")
    shown = []
    for text in talk.ask("1?", lambda: len(shown) >= 3):
        shown.append(text)
    assert talk.messages[-1] == {"role": "assistant", "content": "abc"} and talk.last.reason is None
    ask(talk, "2?")
    assert talk.engine.prompts[1] == b"u:1?\na:abc\nu:2?\na:"


def test_closing_keeps_what_was_said():
    talk = conversation("abcdef")
    pieces = talk.ask("1?")
    next(pieces), next(pieces)
    pieces.close()
    assert talk.messages[-1]["content"] == "ab"


def test_stopping_before_anything_was_said_takes_the_question_back():
    talk = conversation("abc")
    assert ask(talk, "1?", stop=lambda: True) == ""
    assert talk.messages == []


# --- slash commands -------------------------------------------------------------------------------------------------------------


def test_every_command_is_in_the_help_and_the_other_way_round():
    listed = {word.split()[0] for word in chat.HELP.splitlines() if word.startswith("/")}
    assert listed == set(Commands.names()) - {"/quit"}


def test_reset_and_system():
    commands = Commands(conversation("one", system="S"))
    talk = commands.conversation
    assert commands.run("/system") == "S"
    ask(talk, "1?")
    commands.run("/reset")
    assert talk.messages == [] and talk.system == "S"
    ask(talk, "2?")
    commands.run("/system  Be kind. ")
    assert talk.messages == [] and talk.system == "Be kind."
    commands.run("/system -")
    assert talk.system is None and "no system" in commands.run("/system")


def test_set():
    commands = Commands(conversation("one"))
    commands.run("/set temperature 0.7")
    commands.run("/set top-k 40")
    commands.run("/set repeat-penalty 1.1")
    commands.run('/set stop ["a", "b"]')
    params = commands.conversation.params
    assert (params.temperature, params.top_k, params.repetition_penalty, params.stop) == (0.7, 40, 1.1, ("a", "b"))
    commands.run("/set stop END")
    assert commands.conversation.params.stop == ("END",)
    commands.run("/set stop none")
    commands.run("/set temperature none")
    assert commands.conversation.params.stop == () and commands.conversation.params.temperature == 0
    assert "40" in commands.run("/set top_k") and "temperature" in commands.run("/set")


@pytest.mark.parametrize(
    "line, says",
    [
        ("/nonsense", "/nonsense"), ("/", "/help"), ("/__init__", "no command"), ("/set nonsense 1", "nonsense"),
        ("/set temperature hot", "temperature"), ("/set temperature -1", "temperature"), ("/set top_k 1.5", "top_k"),
        ("/set temperature [1]", "temperature"), ("/save", "file"), ("/load", "file"), ("/load /nowhere/at/all", "no such file"),
        ("/save /nowhere/at/all", "cannot be written"), ("/load /", "no such file"),
    ],
)  # fmt: skip
def test_bad_commands_say_what_is_wrong_and_change_nothing(line, says):
    commands = Commands(conversation("one"))
    before = commands.conversation.to_json()
    with pytest.raises((ChatError, SamplingError), match="(?i)" + says):
        commands.run(line)
    assert commands.conversation.to_json() == before


def test_stats_and_exit():
    commands = Commands(conversation("one"))
    assert "nothing" in commands.run("/stats")
    ask(commands.conversation, "1?")
    assert "7 tokens in (0 from before), 3 out" in commands.run("/stats")
    assert not commands.done
    commands.run("/exit")
    assert commands.done


def test_save_and_load(tmp_path):
    first = Commands(conversation("one", system="S", temperature=0.5, seed=3))
    ask(first.conversation, "1? é")
    file = tmp_path / "chat.json"
    first.run(f"/save {file}")
    second = Commands(conversation("two"))
    assert "1 turn" in second.run(f"/load {file}")
    assert second.conversation.to_json() == first.conversation.to_json() | {"model": ""}
    ask(second.conversation, "2?")
    assert second.conversation.engine.prompts[0].decode() == "s:S\nu:1? é\na:one\nu:2?\na:"
    second.run(f"/save {file}")  # a chat may be saved over a chat
    assert len(json.loads(file.read_text("utf-8"))["messages"]) == 4
    assert os.listdir(tmp_path) == ["chat.json"], "nothing is left beside it"


def test_save_never_harms_another_file(tmp_path):
    commands = Commands(conversation("one"))
    for content in (b"GGUF....", b"{}", b"", b"[1]"):
        file = tmp_path / "model.gguf"
        file.write_bytes(content)
        with pytest.raises(ChatError, match="not a chat"):
            commands.run(f"/save {file}")
        assert file.read_bytes() == content


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff\xfe", b"[]", b"{}", b'{"halfbyte_chat": 2}', b"[" * 100_000, b'{"halfbyte_chat": 1}',
        b'{"halfbyte_chat": 1, "system": 5, "messages": [], "sampling": {}}',
        b'{"halfbyte_chat": 1, "system": null, "messages": 5, "sampling": {}}',
        b'{"halfbyte_chat": 1, "system": null, "messages": [5], "sampling": {}}',
        b'{"halfbyte_chat": 1, "system": null, "messages": [{"role": "assistant", "content": "x"}], "sampling": {}}',
        b'{"halfbyte_chat": 1, "system": null, "messages": [{"role": "user", "content": "x"}], "sampling": {}}',
        b'{"halfbyte_chat": 1, "system": null, "messages": [{"role": "user", "content": null}], "sampling": {}}',
        b'{"halfbyte_chat": 1, "system": null, "messages": [], "sampling": {"temperature": -1}}',
        b'{"halfbyte_chat": 1, "system": null, "messages": [], "sampling": {"nonsense": 1}}',
        b'{"halfbyte_chat": 1, "system": null, "messages": [], "sampling": []}',
    ],
)  # fmt: skip
def test_load_takes_only_whole_chats(tmp_path, content):
    commands = Commands(conversation("one", system="S"))
    ask(commands.conversation, "1?")
    before = commands.conversation.to_json()
    (tmp_path / "chat.json").write_bytes(content)
    with pytest.raises((ChatError, SamplingError)):
        commands.run(f"/load {tmp_path / 'chat.json'}")
    assert commands.conversation.to_json() == before


# --- the terminal ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def terminal(tmp_path):
    pexpect = pytest.importorskip("pexpect")
    if sys.platform == "win32":
        pytest.skip("needs a pseudo-terminal")
    children = []

    def start(engine='"Hello, world"', *arguments):
        command = child(*arguments, engine=engine)
        environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        options = {"env": environment, "cwd": str(tmp_path), "encoding": "utf-8", "timeout": 20, "dimensions": (40, 120)}
        process = pexpect.spawn(command[0], command[1:], **options)
        children.append(process)
        ready(process)
        return process

    yield start
    for process in children:
        process.close(force=True)


def ready(process):
    """Waits until the prompt does: it shows the cursor last."""
    process.expect(r"\x1b\[\?2004h.*?\x1b\[\?25h")


def left(process):
    """Waits until the program has left; its exit status."""
    process.read()
    return process.wait()


def test_a_chat_in_a_terminal(terminal):
    talk = terminal('"Hello, world", "second answer"')
    talk.send("Hi\r")
    talk.expect("Hello, world")
    talk.expect(r"12 tokens, [\d.]+ tokens/s, first after [\d.]+ s")
    talk.send("and\r")
    talk.expect("second answer")
    talk.send("/stats\r")
    talk.expect("2 turns kept")
    talk.send("/nonsense\r")
    talk.expect("error: there is no command /nonsense")
    talk.send("/exit\r")
    assert left(talk) == 0


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(terminal):
    talk = terminal('"abcdefghij" * 30, "again", context=4096, pause=0.05')
    talk.send("Hi\r")
    talk.expect("abcdefghij")
    talk.sendintr()
    talk.expect("; stopped")
    talk.send("more\r")
    talk.expect("again")
    ready(talk)
    talk.send("half a line")
    talk.sendintr()  # at the prompt it clears the line
    ready(talk)
    talk.sendeof()
    assert left(talk) == 0


def test_a_message_of_several_lines(terminal, tmp_path):
    talk = terminal('"x"')
    for keys in ("one\x1b\rtwo\r", "one\\\rtwo\r", '"""one\rtwo"""\r'):
        talk.send(keys)
        talk.expect("1 tokens")
    talk.send("/save lines.json\r")
    talk.expect("saved")
    messages = json.loads((tmp_path / "lines.json").read_text("utf-8"))["messages"]
    assert [m["content"] for m in messages[::2]] == ["one\ntwo"] * 3


def test_a_chat_that_outgrows_the_context_says_so(terminal):
    talk = terminal('"abcdefghijklmnopqrst", context=60')
    talk.send("a longer question\r")
    talk.expect("20 tokens")
    talk.send("two\r")
    talk.expect("the oldest turn was forgotten: the context holds 60 tokens")
    talk.send("x" * 80 + "\r")
    talk.expect("error: the prompt has .* tokens and the context holds 60")
    talk.send("three\r")
    talk.expect("abcdefghijklmnopqrst")


def test_a_model_without_a_template_cannot_chat():
    pexpect = pytest.importorskip("pexpect")
    if sys.platform == "win32":
        pytest.skip("needs a pseudo-terminal")
    command = child(engine='"x", template=False')
    talk = pexpect.spawn(command[0], command[1:], encoding="utf-8", timeout=20)
    talk.expect("error: this model has no chat template")
    assert left(talk) == 1


def test_keys_typed_during_an_answer_wait_for_the_next_message(terminal):
    talk = terminal('"abcdefghij" * 4, "again", context=400, pause=0.02')
    talk.send("Hi\r")
    talk.expect("abc")
    talk.send("/stats\r")
    talk.expect(r"defghij(abcdefghij){3}\r\n")  # nothing of it within the answer
    talk.expect("1 turns kept")


def test_interrupt_restores_the_handler():
    before = signal.getsignal(signal.SIGINT)
    with chat.Interrupt() as stop:
        assert not stop()
        signal.raise_signal(signal.SIGINT)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


# --- with a model ---------------------------------------------------------------------------------------------------------------

_tiny = importlib.util.spec_from_file_location("halfbyte_test_tiny", Path(__file__).with_name("tiny.py"))
tiny = importlib.util.module_from_spec(_tiny)
_tiny.loader.exec_module(tiny)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny random model as .hbf, so that a second start finds all its kernels ready."""
    from halfbyte.formats.checkpoint import open_checkpoint
    from halfbyte.formats.convert import convert
    from halfbyte.formats.recipe import Recipe

    folder = tmp_path_factory.mktemp("qrun")
    tiny.write_folder(folder / "model", tiny.llama_config(max_position_embeddings=256))
    with open_checkpoint(folder / "model") as checkpoint:
        convert(checkpoint, folder / "model.hbf", Recipe(bits=8))
    return folder / "model.hbf"


def real(model, *arguments, code=None):
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "halfbyte.tools.qrun"]
    done = subprocess.run([*command, str(model), *arguments], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_conversation_is_what_it_would_be_without_a_memory(model):
    """Each turn reuses what the turns before left in the cache; the answers are those of a cache that is empty."""
    with halfbyte.Engine(model, threads=2) as engine:
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=9)
        free = engine.model.cache.free_positions
        talk = Conversation(engine, params)
        for question in ("Hello there", "And again", "Why?"):
            before = [*talk.messages, {"role": "user", "content": question}]
            said = ask(talk, question)
            assert said == "".join(p.text for p in engine.generate(before, params))
        assert talk.last.reused > 30
        talk.close()
        assert engine.model.cache.free_positions == free


def test_same_seed_same_text_whatever_the_threads(model):
    options = ("--raw", "--json", "--temperature", "1", "--top-k", "50", "--seed", "11", "--max-tokens", "20", "--ignore-eos")
    first, second, other = (json.loads(real(model, "Hello", *options, "--threads", n)) for n in ("1", "2", "2"))
    assert len(first["token_ids"]) == 20
    assert first["text"] == second["text"] == other["text"] and first["token_ids"] == second["token_ids"]
    assert json.loads(real(model, "Hello", *options, "--seed", "12"))["token_ids"] != first["token_ids"]


def test_nothing_heavy_is_imported_with_a_model_either(model):
    code = (
        "import gc, sys; from halfbyte.tools.qrun import main; main(); "
        f"print('\\nloaded', sorted(set(sys.modules) & {HEAVY!r}), gc.isenabled())"
    )
    real(model, "Hello", "--raw", "--max-tokens", "3")  # the first start on a machine compiles
    assert real(model, "Hello", "--raw", "--max-tokens", "3", code=code).endswith("\nloaded ['json'] True\n")  # for the tokenizer
    with_template = real(model, "Hello", "--max-tokens", "3", code=code).splitlines()[-1]
    assert "jinja2" in with_template
    for name in HEAVY - {"json", "jinja2", "tempfile"}:  # jinja2 imports json and tempfile
        assert f"'{name}'" not in with_template
