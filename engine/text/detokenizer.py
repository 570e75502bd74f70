"""Tokens to text while they are made: every character as soon as its bytes are there, none twice, none lost.

A character may be split over several tokens, so bytes that only begin one are held back. Whatever comes out, joined, is what
`Tokenizer.decode` gives for all the ids at once. Bytes that are not UTF-8 become U+FFFD once it is clear that they are not, in
`finish` at the latest. A token costs the same however long the text is.
"""

from __future__ import annotations

import codecs
from typing import Any

_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Text of one sequence of tokens, piece by piece.

    tokenizer     a `Tokenizer`
    skip_special  False: special tokens appear in the text as they are spelled
    continues     True: the tokens go on a text that stands before them, so their first space is part of it. False: they are a
                  text of their own, whose first space is dropped where the tokenizer puts one there (SentencePiece)
    """

    def __init__(self, tokenizer: Any, skip_special: bool = True, continues: bool = False) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._utf8 = _decoder("replace")
        self._strip = tokenizer.strips_space and not continues

    def push(self, id: int) -> str:
        """Takes the next token; the text that is now certain, often "" within a character."""
        if id in self._skipped:
            return ""
        return self._stripped(self._utf8.decode(self._bytes_of(id)))

    def finish(self) -> str:
        """The rest: U+FFFD if the tokens ended within a character. Afterwards a new text begins."""
        text = self._stripped(self._utf8.decode(b"", final=True))
        self._utf8.reset()
        return text

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
