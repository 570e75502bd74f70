"""The tokenizers library at arm's length: a tokenizer.json built and looked over, and whatever the library does wrong named.

It is written in Rust. Where it meets what it did not reckon with it panics: a line of its own on stderr, and an exception that is no
`Exception`. So all that is known to make it panic, or to lose text without a word, is looked for before it is asked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ...quant.errors import HalfbyteError
from ..errors import printable
from .pretokenizers import TokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Result = TypeVar("Result")


def guarded(call: Callable[[], Result], where: str = "tokenizer.json") -> Result:
    """What a call of the library returns. Whatever it raises, panics of Rust included, becomes a TokenizerError."""
    try:
        return call()
    except (HalfbyteError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise TokenizerError(f"{where}: cannot be used: {printable(error)}") from error


def build_tokenizer(tokenizer_json: bytes) -> Tokenizer:
    """The library's object for a tokenizer.json, without truncation and padding, which are settings of training.

    Raises TokenizerError: the library cannot read it, or its post-processor would lose text.
    """
    from tokenizers import Tokenizer

    def build() -> Tokenizer:
        library: Tokenizer = Tokenizer.from_buffer(tokenizer_json)
        library.no_truncation()
        library.no_padding()
        if library.post_processor is not None:
            _check_post_processor(json.loads(library.post_processor.__getstate__()), library.id_to_token)
        return library

    return guarded(build)


def token_ids(library: Tokenizer, text: str) -> list[int]:
    """The ids of a text alone, without what the post-processor would put around it. Raises TokenizerError."""
    return guarded(lambda: library.encode(text, add_special_tokens=False).ids)


def _check_post_processor(processor: Mapping[str, Any], token: Callable[[int], str | None]) -> None:
    """Raises TokenizerError unless every template for a text holds the text once, and special tokens that there are.

    The library reads others without a word. Then it panics at a special token that the template does not define, and a template
    without the text gives no ids for any text. (Templates for pairs of texts do not matter; nobody here encodes pairs.)
    """
    for template in _templates(processor):
        texts = [piece["Sequence"]["id"] for piece in template["single"] if "Sequence" in piece]
        if texts != ["A"]:
            problem = "leaves out the text" if "A" not in texts else "holds more than the one text"
            raise TokenizerError(f"tokenizer.json: post_processor: the template 'single' {problem}; it must hold the sequence A, once")
        for piece in template["single"]:
            if "SpecialToken" not in piece:
                continue
            name = piece["SpecialToken"]["id"]
            where = f"tokenizer.json: post_processor: the template names the special token {printable(name)!r}"
            if name not in template["special_tokens"]:
                raise TokenizerError(f"{where}, which is not among its special_tokens")
            for id in template["special_tokens"][name]["ids"]:
                if token(id) is None:
                    raise TokenizerError(f"{where} with the id {id}, which is no token of the vocabulary")


def _templates(processor: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if processor["type"] == "Sequence":
        for one in processor["processors"]:
            yield from _templates(one)
    elif processor["type"] == "TemplateProcessing":
        yield processor
