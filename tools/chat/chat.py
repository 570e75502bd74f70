"""The chat of qrun: a conversation, the slash commands, and the terminal around them.

`Conversation` holds the messages and makes answers; it knows no terminal. `Commands` are what begins with a slash. `chat` reads
lines with prompt_toolkit and prints.

A conversation that outgrows the context loses its oldest turns (a question and its answer), never the system message or the
question just asked, and says so. An answer that fills the context ends there, and says so too.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...engine.generate.answer import Answer
from ...engine.generate.kept_sequence import KeptSequence
from ...engine.generate.params import SamplingParams
from ...quant.errors import HalfbyteError
from ..terminal.console import print_error, safe_text

if TYPE_CHECKING:
    from ...engine.engine import Engine

Message = dict[str, str]

ROOM = 256
"""Tokens that an answer should have room for; with a small context, a quarter of it."""

LARGEST_FILE = 64 << 20


class ChatError(HalfbyteError):
    """A slash command, or a file for /load, does not make sense."""


class Stopped(Exception):
    """Ctrl-C while an answer is made."""


class Conversation:
    """Messages, and the answers of a model to them.

    messages: of the roles user and assistant in turn; system: the system message, or None for what the template has.
    forgotten: turns that the last question pushed out of the context. last: the last Answer, or None.
    asked, said: tokens of all prompts and of all answers.
    """

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None = None, name: str = ""):
        self.engine, self.params, self.system, self.name = engine, params, system, name
        self.messages: list[Message] = []
        self.forgotten = 0
        self.last: Answer | None = None
        self.asked = self.said = 0
        self._sequence = KeptSequence(engine)

    def ask(self, question: str, stop: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """The answer to a question, as it is made. `stop` is asked between tokens, and between parts of a long prompt.

        What was said until then stays in the conversation, also if the caller closes the iterator. Raises PromptError if the
        question does not fit into the context; then, and if nothing was said, the conversation is as before.
        """
        kept, ids = self._fit({"role": "user", "content": question})
        self.forgotten = (len(self.messages) + 1 - len(kept)) // 2

        def check(done: int, total: int) -> None:
            if stop():
                raise Stopped

        return self._pieces(Answer(self.engine, ids, self.params, check, kept=self._sequence), kept, stop)

    def reset(self) -> None:
        self.messages.clear()

    def close(self) -> None:
        """Frees what the conversation holds of the KV cache."""
        self._sequence.close()

    def to_json(self) -> dict[str, Any]:
        """What /save keeps."""
        sampling = self._sampling()
        return {"halfbyte_chat": 1, "model": self.name, "system": self.system, "sampling": sampling, "messages": self.messages}

    def load(self, document: object) -> None:
        """Takes over a saved chat. Raises ChatError, and changes nothing, if it is not one."""
        if not isinstance(document, dict) or document.get("halfbyte_chat") != 1:
            raise ChatError('not a chat saved by qrun: it has no "halfbyte_chat": 1')
        system, messages = document.get("system"), document.get("messages")
        if not (system is None or isinstance(system, str)):
            raise ChatError("system: must be text or null")
        if not isinstance(messages, list):
            raise ChatError("messages: must be a list")
        for i, message in enumerate(messages):
            role = ("user", "assistant")[i % 2]
            if not isinstance(message, dict) or message.get("role") != role or not isinstance(message.get("content"), str):
                raise ChatError(f"messages[{i}]: must have the role {role!r} and a text as content")
        if len(messages) % 2:
            raise ChatError("messages: the last question has no answer")
        sampling = document.get("sampling")
        if not isinstance(sampling, dict) or set(sampling) - set(self._sampling()):
            raise ChatError("sampling: must be an object of sampling parameters")
        params = replace(self.params, **sampling)
        self.system, self.params = system, params
        self.messages = [{"role": m["role"], "content": m["content"]} for m in messages]

    def _sampling(self) -> dict[str, Any]:
        values = asdict(self.params)
        for field in ("logit_bias", "stop_ids", "logprobs"):  # ids mean nothing to another model
            del values[field]
        return values

    def _fit(self, question: Message) -> tuple[list[Message], list[int]]:
        """The messages that fit, the question last, and the prompt's ids: the oldest turns go until an answer has room."""
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        context = self.engine.context
        room = min(ROOM if self.params.max_tokens is None else self.params.max_tokens, context // 4)
        kept = [*self.messages, question]
        while True:
            ids = self.engine.prompt_ids(system + kept)
            if len(ids) + room <= context or len(kept) == 1:
                return kept, ids
            del kept[:2]

    def _pieces(self, answer: Answer, kept: list[Message], stop: Callable[[], bool]) -> Iterator[str]:
        begun = False
        try:
            for piece in answer:
                begun = True
                if piece.text:
                    yield piece.text
                if stop() and piece.finish_reason is None:
                    raise Stopped
        except Stopped:
            pass
        finally:
            self.last = answer
            self.asked += len(answer.prompt_ids)
            self.said += len(answer.ids)
            if begun:
                self.messages = [*kept, {"role": "assistant", "content": answer.text}]


HELP = """\
/help                 this list
/reset                forget the conversation (the system message stays)
/system [TEXT]        show or set the system message; /system - removes it. The conversation begins anew
/set [NAME VALUE]     show or set how tokens are chosen, such as /set temperature 0.7; VALUE none is the default
/stats                tokens and speed of the last answer and of the whole chat
/save FILE            keep the conversation in a file
/load FILE            go on with a conversation from a file
/exit                 leave (so does Ctrl-D)
Enter sends. A new line: Alt-Enter, or Enter after a backslash, or while three quotation marks \"\"\" are open.
Ctrl-C stops an answer. A message that begins with a slash is written with two."""


class Commands:
    """The slash commands. `run` gives the text to show; `done` is set by /exit."""

    def __init__(self, conversation: Conversation):
        self.conversation = conversation
        self.done = False

    @classmethod
    def names(cls) -> list[str]:
        return ["/" + name.removeprefix("do_") for name in dir(cls) if name.startswith("do_")]

    def run(self, line: str) -> str:
        """Carries out a line that begins with a slash. Raises ChatError if there is no such command, or it cannot be done."""
        name, _, rest = line.strip().partition(" ")
        command = getattr(self, "do_" + name[1:], None) if name[1:].isalpha() else None
        if command is None:
            raise ChatError(f"there is no command {name}; /help lists them")
        return command(rest.strip())

    def do_help(self, rest: str) -> str:
        return HELP

    def do_exit(self, rest: str) -> str:
        self.done = True
        return ""

    do_quit = do_exit

    def do_reset(self, rest: str) -> str:
        self.conversation.reset()
        return "the conversation begins anew"

    def do_system(self, rest: str) -> str:
        if not rest:
            system = self.conversation.system
            return "there is no system message" if system is None else system
        self.conversation.system = None if rest == "-" else rest
        self.conversation.reset()
        return "system message removed" if rest == "-" else "system message set; the conversation begins anew"

    def do_set(self, rest: str) -> str:
        values = self.conversation._sampling()
        if not rest:
            return "\n".join(f"{name:20} {json.dumps(value)}" for name, value in values.items())
        name, _, text = rest.partition(" ")
        name = {"repeat_penalty": "repetition_penalty", "repeat_last_n": "repetition_window", "temp": "temperature"}.get(
            name.replace("-", "_"), name.replace("-", "_")
        )
        if name not in values:
            raise ChatError(f"/set: there is no {name}; there are {', '.join(values)}")
        if not text.strip():
            return f"{name:20} {json.dumps(values[name])}"
        self.conversation.params = replace(self.conversation.params, **{name: _value(text.strip(), name)})
        return f"{name:20} {json.dumps(self.conversation._sampling()[name])}"

    def do_stats(self, rest: str) -> str:
        talk = self.conversation
        last, turns = talk.last, len(talk.messages) // 2
        if last is None:
            return "nothing was asked yet"
        timings = last.timings
        speed = f"{timings.decode_tok_s:.1f} tokens/s" if timings.decode_tok_s else "too short to say how fast"
        return (
            f"last answer    {timings.prompt_tokens} tokens in ({timings.reused} from before), {len(last.ids)} out, {speed}\n"
            f"first token    after {timings.first_token_s:.2f} s\n"
            f"whole chat     {talk.asked} tokens in, {talk.said} out, {turns} turns kept\n"
            f"context        {timings.prompt_tokens + len(last.ids)} of {talk.engine.context} tokens"
        )

    def do_save(self, rest: str) -> str:
        path = _path("/save", rest)
        if path.exists() and not _is_chat(path):
            raise ChatError(f"/save: {safe_text(str(path))} exists and is not a chat; choose another name")
        save(path, self.conversation.to_json())
        return f"saved to {safe_text(str(path))}"

    def do_load(self, rest: str) -> str:
        path = _path("/load", rest)
        try:
            self.conversation.load(read(path))
        except ChatError as error:
            raise ChatError(f"/load: {safe_text(str(path))}: {error}") from None
        return f"{len(self.conversation.messages) // 2} turns loaded"


def _value(text: str, name: str) -> Any:
    """What /set is given: none, JSON, or (for stop) plain text."""
    if text.lower() == "none":
        return getattr(SamplingParams(), name)
    try:
        return json.loads(text)
    except ValueError:
        if name == "stop":
            return text
        raise ChatError(f"/set {name}: {text!r} is not a number") from None


def _path(command: str, rest: str) -> Path:
    if not rest:
        raise ChatError(f"{command}: give the name of a file")
    path = Path(os.path.expanduser(rest))
    try:
        path.exists()
    except (OSError, ValueError) as error:  # a name that is too long
        raise ChatError(f"{command}: {safe_text(rest[:60])}: {getattr(error, 'strerror', None) or 'not a file name'}") from None
    return path


def read(path: Path) -> object:
    """A JSON document from a file of a reasonable size. Raises ChatError."""
    try:
        if not path.is_file():
            raise ChatError("there is no such file")
        if path.stat().st_size > LARGEST_FILE:
            raise ChatError(f"too large to be a chat: {path.stat().st_size} bytes")
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise ChatError("not a chat saved by qrun: it is not JSON") from None
    except OSError as error:
        raise ChatError(f"cannot be read: {error.strerror}") from None


def _is_chat(path: Path) -> bool:
    try:
        document = read(path)
    except ChatError:
        return False
    return isinstance(document, dict) and "halfbyte_chat" in document


def save(path: Path, document: object) -> None:
    """Writes JSON whole or not at all. Raises ChatError."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "x", encoding="utf-8", errors="surrogatepass") as file:
            json.dump(document, file, ensure_ascii=False, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except ValueError:
        raise ChatError(f"/save: {safe_text(str(path))}: cannot be written: not a file name") from None
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise ChatError(f"/save: {safe_text(str(path))}: cannot be written: {error.strerror}") from None


class Interrupt:
    """While it is entered, Ctrl-C sets a flag instead of breaking in: an answer stops between two tokens, and nothing is left
    half done. A second Ctrl-C breaks in after all."""

    def __enter__(self) -> Callable[[], bool]:
        self._pressed = False
        self._before = signal.signal(signal.SIGINT, self._press)
        return lambda: self._pressed

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _press(self, number: int, frame: object) -> None:
        if self._pressed:
            raise KeyboardInterrupt
        self._pressed = True


class Quiet:
    """While it is entered, the terminal does not show what is typed: keys meant for the next message do not mix with the answer."""

    def __enter__(self) -> None:
        self._before: list[Any] | None = None
        try:
            import termios
        except ImportError:  # Windows
            return
        try:
            before = termios.tcgetattr(sys.stdin)
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, [*before[:3], before[3] & ~termios.ECHO, *before[4:]])
            self._before = before
        except (OSError, ValueError, termios.error):  # no terminal
            pass

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            import termios

            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)


def chat(engine: Engine, params: SamplingParams, system: str | None = None, name: str = "") -> int:
    """A chat in the terminal, until /exit or Ctrl-D. Returns the exit status."""
    if engine.template is None:
        raise ChatError("this model has no chat template, so it cannot chat; it can continue a text: qrun MODEL --raw PROMPT")
    conversation = Conversation(engine, params, system, name)
    commands = Commands(conversation)
    ask = _reader()
    _note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves")
    try:
        while not commands.done:
            try:
                _line(commands, ask())
            except KeyboardInterrupt:
                continue
            except EOFError:
                break
            except HalfbyteError as error:
                print_error(error)
    finally:
        conversation.close()
    return 0


def _line(commands: Commands, line: str) -> None:
    """Does what a line says: a command, or a question."""
    if line.startswith("/") and not line.startswith("//"):
        shown = commands.run(line)
        if shown:
            _note(safe_text(shown))
    elif line.strip():
        _turn(commands.conversation, line[1:] if line.startswith("//") else line)


def _turn(conversation: Conversation, question: str) -> None:
    """One question and its answer, as it is made."""
    with Quiet(), Interrupt() as stop:
        answer = conversation.ask(question, stop)
        if conversation.forgotten:
            turns = "turn was" if conversation.forgotten == 1 else f"{conversation.forgotten} turns were"
            _note(f"the oldest {turns} forgotten: the context holds {conversation.engine.context} tokens")
        try:
            for text in answer:
                sys.stdout.write(safe_text(text))
                sys.stdout.flush()
        except KeyboardInterrupt:
            pass
        finally:
            answer.close()  # type: ignore[attr-defined]
            sys.stdout.write("\n")
    last = conversation.last
    if last is None:  # broken off before the answer began
        return
    speed = f", {last.timings.decode_tok_s:.1f} tokens/s" if last.timings.decode_tok_s else ""
    end = {"stop": "", "length": _why_length(last), None: "; stopped"}[last.finish_reason]
    _note(f"{len(last.ids)} tokens{speed}, first after {last.timings.first_token_s:.2f} s{end}")


def _why_length(answer: Answer) -> str:
    most = answer.params.max_tokens
    if most is not None and len(answer.ids) >= most:
        return f"; ended at max_tokens (/set max_tokens {2 * most or 100} allows more)"
    return f"; the context of {len(answer.prompt_ids) + len(answer.ids)} tokens is full (--context N makes it larger)"


def _note(text: str) -> None:
    """What the program says, not the model: dim where the terminal can."""
    dim = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and "NO_COLOR" not in os.environ
    print(f"\x1b[2m{text}\x1b[0m" if dim else text, flush=True)


def _reader() -> Callable[[], str]:
    """A function that reads the next message, with history, completion of commands and several lines."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("enter")
    @keys.add("c-j")  # what some terminals, and programs that play one, send for Enter
    def _(event: Any) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor(1)
            buffer.insert_text("\n")
        elif buffer.text.count('"""') % 2:
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    history: History = InMemoryHistory()
    file = _history_file()
    if file is not None:
        history = FileHistory(str(file))
    session: PromptSession[str] = PromptSession(
        history=history,
        key_bindings=keys,
        multiline=True,
        prompt_continuation="… ",
        completer=WordCompleter(Commands.names(), sentence=True),
        complete_while_typing=Condition(lambda: session.default_buffer.text.startswith("/")),
    )
    return lambda: _unquoted(session.prompt("> "))


def _unquoted(text: str) -> str:
    """Without the three quotation marks around a message of several lines."""
    stripped = text.strip()
    if len(stripped) >= 6 and stripped.startswith('"""') and stripped.endswith('"""'):
        return stripped[3:-3].strip("\n")
    return text


def _history_file() -> Path | None:
    """Where typed lines are kept for the arrow keys of the next chat, readable by the user alone; None if nowhere."""
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    file = base / "halfbyte" / "chat-history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    except (OSError, RuntimeError):
        return None
    return file
