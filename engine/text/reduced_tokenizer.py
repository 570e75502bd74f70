"""Short texts to ids with the few tokens that can occur in them: the ids of the whole tokenizer, without building it.

BPE joins neighbours within a word, so all it ever looks at are tokens that are parts of the word, and the merges that make them; which
other tokens there are changes nothing. The library itself normalizes, splits, finds added tokens and merges, in two rounds: first with
a model that gives every word back as it is, then with a BPE of the tokens that the table finds in these words.

One thing breaks the rule: where a tokenizer has nothing for a character, not even an unknown token, BPE drops it and joins what was
beside it. Such texts are left to the whole tokenizer.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from .token_table import TokenTable

MOST = 1 << 15
"""Characters that are encoded like this, all texts together. Who has more to encode is better off with the whole tokenizer."""


class ReducedTokenizer:
    """Knows what a TokenTable knows (attributes size, added, decoder, first; methods id, token), and encodes `MOST` characters."""

    def __init__(self, table: TokenTable) -> None:
        from tokenizers import Tokenizer, models

        self.id, self.token = table.id, table.token
        self.size, self.added, self.decoder, self.first = table.size, table.added, table.decoder, table.first
        self._table = table
        self._library = Tokenizer.from_str(table.skeleton)
        # A Unigram model without tokens takes a word for one unknown token, spelled as it is, whose id is none of the added tokens.
        self._word = next(id for id in count() if id not in table.added)
        self._words: Any = models.Unigram([("", 0.0)] * (self._word + 1), self._word, False)
        self._left = MOST

    def encode(self, text: str, special: bool) -> list[int] | None:
        """The ids of a text, special tokens in it read as such or as text; None if the whole tokenizer must be asked.

        Not from two threads at once.
        """
        if len(text) > self._left:
            return None
        self._left -= len(text)
        library = self._library
        library.encode_special_tokens = not special
        library.model = self._words
        found = library.encode(text, add_special_tokens=False)
        model = self._bpe({token for token, id in zip(found.tokens, found.ids, strict=True) if id == self._word})
        if model is None:
            return None
        library.model = model
        ids: list[int] = library.encode(text, add_special_tokens=False).ids
        return ids

    def _bpe(self, words: set[str]) -> Any:
        """A BPE model that treats these words as the whole one does; None if there is none."""
        from tokenizers import models

        table = self._table
        ids = [id for id in {*table.parts_of(words), *table.always} if id not in table.outside]
        spelled = {id: table.token(id) or "" for id in ids}
        vocabulary = {token: id for id, token in spelled.items()}
        if table.drops and not vocabulary.keys() >= set().union(*words):
            return None
        merges = [(spelled[left], spelled[right]) for left, right in table.merges_of(ids)]
        return models.BPE(vocab=vocabulary, merges=merges, **table.options)
