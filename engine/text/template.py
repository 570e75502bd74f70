"""Chat templates: messages -> the text, or the token ids, that a model was trained to see.

Templates are Jinja programs that come with a checkpoint. They run as transformers runs them: in Jinja's immutable sandbox, with
loop controls, the `generation` tag, `tojson` that escapes neither HTML nor non-ASCII, `raise_exception` and `strftime_now`, and
with messages whose null fields are left out. The sandbox keeps a template from reaching Python, and `sandbox` keeps it from taking
more than a little time and memory, as a checkpoint is not to be trusted.

A checkpoint without a template has none: nothing is guessed from the names of its tokens, and its user continues plain text.

`import jinja2` takes 25-45 ms, so it happens at the first use. Compiling a template takes 1 ms (SmolLM2) to 10 ms (with tools).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ...formats.errors import printable, some
from ...quant.errors import HalfbyteError
from .tokenizer import Tokenizer

MAX_SOURCE = 1 << 18
"""Most characters of a template; real ones have up to 20,000."""

Message = Mapping[str, Any]

_REASONING = ("reasoning_content", "thinking", "reasoning")
_MARKS = "\ufdd0", "\ufdd1"
"""Noncharacters that stand around user text that spells a special token while it goes through a template."""
_TAIL = "\ufdd2 "
"""Stands behind the text that the model is to continue. Its space shows whether the template trims texts."""
_PROBE = "b1c2d3"
_LOOPS_OVER_CONTENT = re.compile(r"\bfor\s+[\w\s,]+\s+in\s+[^%}]*content")


class TemplateError(HalfbyteError):
    """A chat template is not valid, cannot take these messages, or refuses them (then the text is the template's own)."""


class ChatTemplate:
    """The chat template, or templates, of a model.

    source          a template, or a mapping of names to templates ("default", "tool_use", …)
    special_tokens  what the template may name: {"bos_token": "<s>", …}
    tokenizer       for `encode`
    """

    def __init__(
        self, source: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None, tokenizer: Tokenizer | None = None
    ) -> None:
        self.sources: dict[str, str] = {"default": source} if isinstance(source, str) else dict(source)
        self._special_tokens = special_tokens
        self._tokenizer = tokenizer
        self._compiled: dict[str, _Compiled] = {}

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template that came with a tokenizer, or None. Does not wait for the tokenizer to be built."""
        source: Any = tokenizer.chat_template
        if isinstance(source, (list, tuple)):
            source = {entry["name"]: entry["template"] for entry in source}
        return cls(source, None, tokenizer) if source else None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        name: str | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation.

        messages   mappings with "role" and "content" (text, a list of {"type": "text", "text": …}, or null beside "tool_calls")
        tools      JSON schemas of functions
        name       which template; None: "tool_use" if there are tools and such a template, else "default"
        continue_final_message  the model goes on with the last message instead of beginning a new one
        variables  further values that the template may read (`enable_thinking`, …)

        Raises TemplateError.
        """
        compiled = self._get(name, tools is not None)
        conversation = _conversation(messages)
        if continue_final_message:
            _tag_last(conversation)
            add_generation_prompt = False
        special_tokens = self._special_tokens
        if special_tokens is None:
            special_tokens = self._tokenizer.ready().special_tokens if self._tokenizer is not None else {}
        values = {
            **special_tokens,
            **{key: _plain(value) for key, value in variables.items()},
            "tools": _plain(tools),
            "documents": _plain(documents),
            "add_generation_prompt": add_generation_prompt,
        }
        text = compiled.render(conversation, values)
        return _cut_at_tag(text) if continue_final_message else text

    def encode(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """The token ids of a conversation; options as for `render`.

        Special tokens that the template writes are read as such. Those that are spelled inside the messages (or tools, or
        documents) are text: nobody can end a turn by typing the mark that ends it. No BOS is added to what the template wrote.
        """
        if self._tokenizer is None:
            raise TemplateError("chat template: it was made without a tokenizer, so it can only render text")
        tokenizer = self._tokenizer.ready()
        pattern = _any_of(tokenizer.special_tokens_text())
        marked = {key: value if key == "name" else _marked(value, pattern) for key, value in options.items()}
        text = self.render(_marked(_conversation(messages), pattern), **marked)
        if not any(mark in text for mark in _MARKS):
            return tokenizer.encode(text, special=True)
        return _encode_marked(tokenizer, text, pattern)

    def _get(self, name: str | None, has_tools: bool) -> _Compiled:
        if name is None:
            name = "tool_use" if has_tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise TemplateError(f"chat template: none is called {printable(name, 60)!r}; the model has {some(self.sources)}")
        if name not in self._compiled:
            self._compiled[name] = _Compiled(self.sources[name])
        return self._compiled[name]


class _Compiled:
    """One template, and what kind of content it takes: text, lists of parts or both. Found out by trying, when it matters."""

    def __init__(self, source: str) -> None:
        from .sandbox import environment

        if len(source) > MAX_SOURCE:
            raise TemplateError(f"chat template: it has {len(source)} characters; at most {MAX_SOURCE} are read")
        made = self._environment = environment()
        made.begin()
        self._template = _guarded(lambda: made.from_string(source))
        self._takes_parts: bool | None = None
        self._takes_text: bool | None = None if _LOOPS_OVER_CONTENT.search(source) else True

    def render(self, messages: list[dict[str, Any]], values: Mapping[str, Any]) -> str:
        messages = [self._fit(message) for message in messages]
        missing = [message for message in messages if "content" not in message]
        try:
            return self._run(messages, values)
        except TemplateError:
            if not missing:
                raise
            # A template that knows nothing of tool calls reads the content of every message.
            return self._run([{"content": "", **message} for message in messages], values)

    def _run(self, messages: list[dict[str, Any]], values: Mapping[str, Any]) -> str:
        self._environment.begin()
        return _guarded(lambda: self._template.render(messages=messages, **values))

    def _fit(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with its content as the template wants it: text, or a list of parts."""
        content = message.get("content")
        if isinstance(content, list):
            if self._takes_parts is None:
                self._takes_parts = self._shows([{"type": "text", "text": _PROBE}])
            return message if self._takes_parts else {**message, "content": "\n".join(part["text"] for part in content)}
        if isinstance(content, str):
            if self._takes_text is None:
                self._takes_text = self._shows(_PROBE) or not self._shows([{"type": "text", "text": _PROBE}])
            return message if self._takes_text else {**message, "content": [{"type": "text", "text": content}]}
        return message

    def _shows(self, content: Any) -> bool:
        values = {"tools": None, "documents": None, "add_generation_prompt": False, "bos_token": "", "eos_token": ""}
        try:
            text = self._run([{"role": "user", "content": content}], values)
        except TemplateError:
            return False
        return _PROBE in text and f"'{_PROBE}'" not in text and f'"{_PROBE}"' not in text


def _guarded(run: Callable[[], Any]) -> Any:
    """Runs a template; whatever it raises becomes a TemplateError with its text and, if it is known, the line."""
    try:
        return run()
    except TemplateError:
        raise
    except Exception as error:
        line = getattr(error, "lineno", None)
        place = f"line {line}: " if line is not None else ""
        text = getattr(error, "message", None) or str(error) or type(error).__name__
        raise TemplateError(f"chat template: {place}{printable(text, 1000)}") from error


# Messages


def _conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as plain dicts, without null fields, checked for what every template takes for granted."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise TemplateError("chat: at least one message is needed, each with a role and a content")
    conversation = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TemplateError(f"chat: message {number} is {printable(repr(message), 60)}, not a mapping with a role")
        plain = {key: value for key, value in _plain(message).items() if value is not None}
        reasoning = next((plain[key] for key in _REASONING if key in plain), None)
        if reasoning is not None:
            plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
        content = plain.get("content")
        if isinstance(content, list):
            for part in content:
                if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                    kind = part.get("type") if isinstance(part, dict) else part
                    raise TemplateError(f"chat: message {number} has a part of type {printable(kind, 40)!r}; only text is read")
        elif content is not None and not isinstance(content, str):
            raise TemplateError(f"chat: the content of message {number} is neither text nor a list of parts")
        conversation.append(plain)
    return conversation


def _plain(value: Any) -> Any:
    """A copy made of JSON's types, so that a template meets no other object."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if callable(getattr(value, "model_dump", None)):
        return _plain(value.model_dump())
    raise TemplateError(f"chat: a value of type {type(value).__name__} is neither text, number, list nor mapping")


def _tag_last(conversation: list[dict[str, Any]]) -> None:
    """Puts _TAIL behind the text of the last message."""
    last = conversation[-1]
    content = last.get("content")
    if isinstance(content, list) and content:
        content[-1] = {**content[-1], "text": content[-1]["text"] + _TAIL}
    elif isinstance(content, str):
        last["content"] = content + _TAIL
    else:
        raise TemplateError("chat: the last message has no text that the model could continue")


def _cut_at_tag(text: str) -> str:
    before, tag, behind = text.rpartition(_TAIL[0])
    if not tag:
        raise TemplateError("chat template: it leaves out the last message, so the model cannot continue it")
    return before if behind.startswith(_TAIL[1]) else before.rstrip()


# Special tokens inside messages


def _any_of(tokens: Sequence[str]) -> re.Pattern[str] | None:
    """Finds any of the tokens, the longest first."""
    ordered = sorted((token for token in tokens if token), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _marked(value: Any, pattern: re.Pattern[str] | None) -> Any:
    """The value with _MARKS around every special token that is spelled in one of its texts."""
    if isinstance(value, str):
        for mark in _MARKS:
            value = value.replace(mark, "\ufffd")
        return pattern.sub(lambda found: _MARKS[0] + found[0] + _MARKS[1], value) if pattern is not None else value
    if isinstance(value, Mapping):
        return {key: item if key in ("role", "type") else _marked(item, pattern) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_marked(item, pattern) for item in value]
    return value


def _encode_marked(tokenizer: Tokenizer, text: str, pattern: re.Pattern[str] | None) -> list[int]:
    """Ids of a text in which marked special tokens are text and all others are read as such.

    The text between two real special tokens is encoded in one piece, marked ones included, so that it is cut into words as
    plain text is.
    """
    ids: list[int] = []
    strip_next = False
    for plain, special in _pieces(text, pattern):
        if strip_next:
            plain = plain.lstrip()
        id = None if special is None else tokenizer.id(special)
        strips_before, strip_next = (False, False) if id is None else tokenizer.strips_around(id)
        ids += tokenizer.encode(plain.rstrip() if strips_before else plain)
        if id is not None:
            ids.append(id)
    return ids


def _pieces(text: str, pattern: re.Pattern[str] | None) -> Iterator[tuple[str, str | None]]:
    """(plain text, the special token behind it) pairs; the last has none."""
    assert pattern is not None
    open_mark, close_mark = _MARKS
    plain = ""
    for number, part in enumerate(re.split(f"{open_mark}({pattern.pattern}){close_mark}", text)):
        if number % 2:
            plain += part
            continue
        part = part.replace(open_mark, "").replace(close_mark, "")  # a template may have cut a marked token apart
        start = 0
        for found in pattern.finditer(part):
            yield plain + part[start : found.start()], found[0]
            plain, start = "", found.end()
        plain += part[start:]
    yield plain, None
