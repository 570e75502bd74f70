"""The chat of qrun: conversations, slash commands, the terminal, with an engine that recites."""

import json
import os
import signal
import sys

import pytest

from halfbyte.engine.generate.answer import PromptError
from halfbyte.engine.generate.params import SamplingError, SamplingParams
from halfbyte.tools.chat import chat
from halfbyte.tools.chat.chat import ChatError, Commands, Conversation
from support import fakes

FakeEngine = fakes.FakeEngine
child = fakes.child


def conversation(*scripts, context=400, system=None, **params):
    return Conversation(FakeEngine(*scripts, context=context), SamplingParams(**params), system)


def ask(talk, question, **options):
    return "".join(talk.ask(question, **options))


def test_a_conversation_remembers():
    talk = conversation("one", "two", system="S")
    assert (ask(talk, "1?"), ask(talk, "2?")) == ("one", "two")
    assert talk.engine.prompts[1] == b"s:S\nu:1?\na:one\nu:2?\na:"
    assert len(talk.last.ids) == 3 and talk.last.finish_reason == "stop" and talk.said == 6
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
    assert talk.last.finish_reason == "length" and len(said) == 60 - len(b"u:1?\na:")


def test_stopping_keeps_what_was_said():
    talk = conversation("abcdef", "x")
    shown = []
    for text in talk.ask("1?", lambda: len(shown) >= 3):
        shown.append(text)
    assert talk.messages[-1] == {"role": "assistant", "content": "abc"} and talk.last.finish_reason is None
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
