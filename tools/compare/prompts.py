"""The prompts that models are compared on: from the command line, from a file, or the few that come along."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...formats.errors import InputError, printable
from ..terminal.text_file import read_text

LARGEST_FILE = 1 << 24
"""Bytes of a file of prompts: several million tokens."""

_JSON_LINES = (".jsonl", ".ndjson", ".json")

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Prompt:
    """A text, or the messages of a conversation (each with "role" and "content") whose next turn the models are to write."""

    text: str | None = None
    messages: Messages | None = None

    def conversation(self, system: str | None = None) -> Messages:
        """The messages for a chat template. A text is a message of the user; `system` goes first unless there is such a message."""
        messages = self.messages if self.messages is not None else [{"role": "user", "content": self.text}]
        if system is not None and messages[0]["role"] != "system":
            return [{"role": "system", "content": system}, *messages]
        return messages

    @property
    def shown(self) -> str:
        """What to show of it: the text, or that of the last message."""
        if self.messages is None:
            return self.text or ""
        content = self.messages[-1].get("content")
        if isinstance(content, list):  # parts: {"type": "text", "text": …}
            content = " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        return str(content or "")


BUILT_IN = tuple(
    Prompt(text)
    for text in (
        "What is the capital of Australia, and how many people live there?",
        "A train leaves at 9:40 and arrives at 13:05. How long does the journey take?",
        "Write a Python function that returns the n-th Fibonacci number.",
        "Summarize in one sentence: The harbour froze in the first week of January. Ferries stopped, shops on the islands ran out of "
        "bread, and the mail came over the ice by sledge. When the thaw came in March, the first ship was met by half the town.",
        "List five things to pack for a week of hiking.",
        "Réponds en français : pourquoi le ciel est-il bleu ?",
        "Rewrite this politely: Send me the file now, I have waited long enough.",
        "Explain to a child why the moon seems to change its shape.",
    )
)
"""Used unless others are given: facts, arithmetic, code, a summary, a list, another language, rewriting, an explanation."""


def read_prompts(name: str) -> list[Prompt]:
    """The prompts in a file (or "-": stdin), in UTF-8; lines that are blank do not count.

    One prompt a line, or JSON lines, objects with "messages" or "prompt" (other keys are passed over): if the file's name ends in .jsonl,
    .ndjson or .json, or if its first line is a JSON object. A last message of the assistant is what the models are to write
    themselves, and is left out. Raises InputError that names the line.
    """
    text = _read(name)
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        where = "stdin" if name == "-" else name
        raise InputError(where, 'holds no prompts: give one per line, or JSON lines with "messages" or "prompt"')
    if name.lower().endswith(_JSON_LINES) or _is_object(lines[0][1]):
        return [_from_json(name, number, line) for number, line in lines]
    return [Prompt(line.removesuffix("\r")) for _, line in lines]


def _read(name: str) -> str:
    text = read_text(name, LARGEST_FILE // 64 + 1)  # of longer files it gives the beginning, which is longer than LARGEST_FILE still
    if len(text.encode()) > LARGEST_FILE:
        raise InputError(name, f"is larger than {LARGEST_FILE >> 20} MiB: split it")
    return text


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _from_json(name: str, number: int, line: str) -> Prompt:
    def refuse(problem: str) -> InputError:
        return InputError(name, f"line {number}: {problem}")

    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise refuse(f"is not JSON: {error.msg} in column {error.colno}; a prompt is one line") from None
    except (ValueError, RecursionError) as error:
        raise refuse(f"is not readable as JSON: {printable(error, 80)}") from None
    if not isinstance(value, dict):
        raise refuse(f"must hold a JSON object with \"messages\" or \"prompt\", holds {type(value).__name__}")
    if "messages" in value:
        messages = value["messages"]
        if not isinstance(messages, list) or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
            raise refuse('"messages" must be a list of objects with "role" and "content"')
        messages = list(_without_answer(messages))
        if not messages:
            raise refuse('"messages" holds nothing to answer')
        return Prompt(messages=messages)
    if not isinstance(value.get("prompt"), str):
        raise refuse('has neither "messages" nor a text as "prompt"')
    return Prompt(value["prompt"])


def _without_answer(messages: Messages) -> Iterator[dict[str, Any]]:
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    yield from messages[:end]


def gather(texts: Sequence[str], file: str | None) -> list[Prompt]:
    """The prompts of a command line: those given one by one, then those of the file; the built-in ones if there are none."""
    prompts = [Prompt(text) for text in texts]
    if file is not None:
        prompts += read_prompts(file)
    return prompts or list(BUILT_IN)
