"""Text to token ids and back: the tokenizers library behind a small surface, from a tokenizer.json or from GGUF metadata.

The library takes 80 ms to build SmolLM2's tokenizer from the tokenizer.json that a .hbf holds, 300 ms for Qwen2.5's, and holds the
interpreter's lock meanwhile, so a thread would bring nothing. With `wait=False` nothing is done before it is needed, and then a
table in the cache folder answers if there is one (`tokenizer_cache`, 4 ms); the whole is built for a long text, or without a table.
GGUF's keys take twice as long as a tokenizer.json, and have no table.

Text that spells a special token is text: `encode` reads special tokens only where it is asked to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...formats.errors import printable
from ...formats.tokenizer.from_gguf import SPACE, default_add_bos, dumps, from_gguf, token_id
from ...formats.tokenizer.library import build_tokenizer, guarded
from ...formats.tokenizer.pretokenizers import TokenizerError
from .reduced_tokenizer import ReducedTokenizer
from .token_table import Added, keep_table, open_table

__all__ = ["Tokenizer", "TokenizerError"]

END_OF_TURN = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<EOT>", "_<EOT>",
    "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>", "<|return|>", "<|call|>",
)  # fmt: skip
"""Special tokens that end an answer whatever the metadata say; files that forget them are common (llama.cpp does the same)."""

EOS_IDS = "halfbyte.eos_token_ids"
"""Where `formats.checkpoint` keeps all ids that end an answer."""


class Tokenizer:
    """Token ids of text and text of token ids. Safe to use from several threads.

    json        bytes of a tokenizer.json; or None, to build it from `gguf`
    config      tokenizer_config.json, for the names of the special tokens
    gguf        metadata under GGUF keys ("tokenizer.ggml.…"), for ids of special tokens, and for everything if `json` is None
    generation  generation_config.json, for its `eos_token_id`
    chat_template  as the checkpoint has it (see `template.ChatTemplate`); None: taken from config
    wait        False: build when the tokenizer is first needed, from a table in the cache folder if possible; errors come then

    Raises TokenizerError.
    """

    def __init__(
        self,
        json: bytes | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        gguf: Mapping[str, Any] | None = None,
        generation: Mapping[str, Any] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
        wait: bool = True,
    ) -> None:
        self._json, self._config, self._gguf, self._generation = json, config or {}, gguf or {}, generation or {}
        self.chat_template = chat_template or self._config.get("chat_template") or self._gguf.get("tokenizer.chat_template")
        self._mode = threading.Lock()  # reading special tokens or not is a state of the library's object
        self._loading = threading.Lock()
        self._bytes: dict[int, bytes] = {}
        self._source: _Library | ReducedTokenizer | None = None
        if wait:
            self._load(self._build())

    @classmethod
    def from_files(cls, files: Any, generation: Mapping[str, Any] | None = None, wait: bool = True) -> Tokenizer:
        """The tokenizer of a checkpoint: `files` is its TokenizerFiles (attributes json, config, chat_template, gguf)."""
        return cls(
            files.json, config=files.config, gguf=files.gguf, generation=generation, chat_template=files.chat_template, wait=wait
        )

    # Building

    def ready(self) -> Tokenizer:
        """Builds the tokenizer if that is not done yet, and returns it. Raises TokenizerError if it cannot be built."""
        if self._source is None:
            with self._loading:
                if self._source is None:
                    self._load(self._from_cache() or self._build())
        return self

    def _load(self, source: _Library | ReducedTokenizer) -> None:
        self._added = source.added
        self._special = frozenset(i for i, token in source.added.items() if token.special)
        self._decoder = _Decoder(source.decoder)
        self._read_ids(source)
        self._source = source  # last: from here on other threads take it for ready

    def _build(self) -> _Library:
        json = self._json
        return _Library(dumps(from_gguf(self._gguf)) if json is None else bytes(json))

    def _from_cache(self) -> _Library | ReducedTokenizer | None:
        """From the table in the cache folder; where there is none, the whole tokenizer, which leaves one. None without a tokenizer.json."""
        json = self._json
        if json is None:
            return None
        table = open_table(json)
        if table is not None:
            return guarded(lambda: ReducedTokenizer(table))
        built = _Library(bytes(json))
        try:
            guarded(lambda: keep_table(json, built.library))
        except TokenizerError:
            pass  # odd enough for the library to stumble over; it may be good for what is asked of it
        return built

    def _read_ids(self, source: _Library | ReducedTokenizer) -> None:
        self.special_tokens: dict[str, str] = {}
        for key, value in self._config.items():
            if key.endswith("_token"):
                content = value.get("content") if isinstance(value, Mapping) else value
                if isinstance(content, str):
                    self.special_tokens[key] = content
        for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
            number = token_id(self._gguf, key)
            token = None if number is None else source.token(number)
            if token is not None:
                self.special_tokens.setdefault(name, token)
        named = {name: source.id(_clean(token)) for name, token in self.special_tokens.items()}
        self._bos = named.get("bos_token")
        self._eos = self._ends(named.get("eos_token"))
        self._add_bos = self._wants_bos(source)

    def _ends(self, eos: int | None) -> frozenset[int]:
        ends = {i for i in (token_id(self._gguf, name) for name in ("eos", "eot", "eom")) if i is not None}
        for stated in (self._gguf.get(EOS_IDS), self._generation.get("eos_token_id")):
            several: Any = stated if hasattr(stated, "__iter__") else [stated]
            ends |= {int(i) for i in several if i is not None}
        if eos is not None:
            ends.add(eos)
        by_name = {token.content: i for i, token in self._added.items() if token.content in END_OF_TURN}
        if "<|return|>" in by_name and "<|call|>" in by_name:
            by_name.pop("<|end|>", None)  # there it only ends a message within an answer
        elif "<|return|>" in by_name or "<|call|>" in by_name:
            by_name = {content: i for content, i in by_name.items() if content not in ("<|return|>", "<|call|>")}
        return frozenset(ends | set(by_name.values()))

    def _wants_bos(self, source: _Library | ReducedTokenizer) -> bool:
        if self._bos is None:
            return False
        stated = self._config.get("add_bos_token")
        if isinstance(stated, bool):
            return stated
        if self._json is None or "tokenizer.ggml.add_bos_token" in self._gguf:
            return default_add_bos(self._gguf)
        return source.first[:1] == [self._bos]

    @property
    def _known(self) -> _Library | ReducedTokenizer:
        source = self.ready()._source
        assert source is not None
        return source

    # What is known about tokens

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens. A model may have more logits than that: rows that pad its matrix."""
        return self._known.size

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, if there is one."""
        return self.ready()._bos

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return self.ready()._eos

    @property
    def add_bos(self) -> bool:
        """Whether a plain text (not one that a chat template made) begins with BOS."""
        return self.ready()._add_bos

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are marks and no text: control tokens of GGUF, special added tokens of a tokenizer.json."""
        return self.ready()._special

    def special_tokens_text(self) -> list[str]:
        """How the special tokens (`special_ids`) are spelled."""
        self.ready()
        return [self._added[i].content for i in self._special]

    def strips_around(self, id: int) -> tuple[bool, bool]:
        """Whether an added token takes the white space before it, and behind it, along."""
        token = self.ready()._added.get(id)
        return (False, False) if token is None else (token.lstrip, token.rstrip)

    @property
    def strips_space(self) -> bool:
        """True if the first space of a decoded text is not part of it (SentencePiece puts one before every text)."""
        return self.ready()._decoder.strips_space

    def id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it ("<|im_end|>", "Ġthe"), or None."""
        return self._known.id(_clean(token))

    def token(self, id: int) -> str | None:
        """How the vocabulary spells a token, or None."""
        return self._known.token(id) if 0 <= id < 1 << 31 else None

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token stands for: part of UTF-8, possibly not a whole character; b"" if there is no such token."""
        found = self._bytes.get(id)
        if found is None:
            token = self.token(id)
            if token is None:
                found = b""
            elif id in self._added:
                found = token.encode() if id in self._special else self._decoder.added(token)
            else:
                found = self._decoder.token(token)
            self._bytes[id] = found
        return found

    # Text

    def encode(self, text: str, special: bool = False, bos: bool = False) -> list[int]:
        """The tokens of a text.

        special  True: special tokens in the text are read as such (a text made by a chat template); False: they are text, and
                 no special token is ever in the answer. Added tokens that are not special are found either way.
        bos      True: the BOS token goes first if the model wants one (`add_bos`), unless the text begins with it already.
        Lone surrogates, which are no characters, become U+FFFD.
        """
        self.ready()
        text = _clean(text)
        ids = guarded(lambda: self._encode(text, special))
        if not special and not self._special.isdisjoint(ids):
            ids = [part for i in ids for part in (self._spelled(i) if i in self._special else (i,))]
        if bos and self._add_bos and self._bos is not None and ids[:1] != [self._bos]:
            ids.insert(0, self._bos)
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of tokens; bytes that are not UTF-8 become U+FFFD, ids that are no tokens nothing.

        `detokenizer.Detokenizer` gives the same text piece by piece.
        """
        special = self.ready()._special
        parts = [self.token_bytes(i) for i in ids if not (skip_special and i in special)]
        text = b"".join(parts).decode("utf-8", "replace")
        return text[1:] if self._decoder.strips_space and text.startswith(" ") else text

    def to_json(self) -> bytes:
        """The tokenizer as the bytes of a tokenizer.json: the original's where there is one."""
        if self._json is not None:
            return self._json
        source = self._known
        assert isinstance(source, _Library)  # tables are made of a tokenizer.json only
        return guarded(lambda: source.library.to_str(pretty=False).encode())

    def _encode(self, text: str, special: bool) -> list[int]:
        with self._mode:
            ids = self._known.encode(text, special)
            if ids is None:
                self._source = whole = self._build()
                ids = whole.encode(text, special)
            return ids

    def _spelled(self, id: int) -> list[int]:
        """The characters of a special token, each a token. For vocabularies whose merges lead to a special token."""
        ids: list[int] = []
        for character in self.token(id) or "":
            whole = self.id(character)
            if whole is not None:
                ids.append(whole)
            else:
                parts = (self.id(f"<0x{byte:02X}>") for byte in character.encode())
                ids += [part for part in parts if part is not None]
        return ids


class _Library:
    """The library's object of a whole tokenizer.json (`library`), behind the face that `ReducedTokenizer` has too."""

    def __init__(self, json: bytes) -> None:
        self.library: Any = build_tokenizer(json)
        added = self.library.get_added_tokens_decoder()
        self.added = {i: Added(token.content, token.special, token.lstrip, token.rstrip) for i, token in added.items()}
        self.id: Callable[[str], int | None] = self.library.token_to_id
        self.token: Callable[[int], str | None] = self.library.id_to_token

    @property
    def size(self) -> int:
        size: int = self.library.get_vocab_size(with_added_tokens=True)
        return size

    @property
    def decoder(self) -> dict[str, Any] | None:
        from json import loads

        decoder = self.library.decoder
        return None if decoder is None else loads(decoder.__getstate__())

    @property
    def first(self) -> list[int]:
        return guarded(lambda: self.encode("", special=True, marks=True))

    def encode(self, text: str, special: bool, marks: bool = False) -> list[int]:
        """marks: with what the post-processor puts around a text."""
        if self.library.encode_special_tokens is special:
            self.library.encode_special_tokens = not special
        ids: list[int] = self.library.encode(text, add_special_tokens=marks).ids
        return ids


class _Decoder:
    """How a token becomes bytes, read from the `decoder` part of a tokenizer.json.

    Byte-level tokens spell every byte as a character of its own; SentencePiece tokens are text with U+2581 for a space, and
    "<0x0A>" for single bytes.
    """

    def __init__(self, decoder: dict[str, Any] | None) -> None:
        steps = [] if decoder is None else decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
        kinds = [step.get("type") for step in steps]
        self.byte_level = "ByteLevel" in kinds
        self.fallback = "ByteFallback" in kinds
        self.strips_space = False
        self.space = ""
        for step in steps:
            kind = step.get("type")
            if kind == "Metaspace":
                self.space = step.get("replacement", SPACE)
                self.strips_space = step.get("prepend_scheme", "always") != "never"
            elif kind == "Replace" and step.get("content") == " " and set(step.get("pattern", {})) == {"String"}:
                self.space = step["pattern"]["String"]
            elif kind == "Strip" and step.get("content") == " " and (step.get("start"), step.get("stop")) == (1, 0):
                self.strips_space = True
            elif kind not in ("ByteLevel", "ByteFallback", "Fuse"):
                raise TokenizerError(f"tokenizer.json: decoder: a step that is not supported: {printable(step)}")
        if not (self.byte_level or self.space):
            raise TokenizerError("tokenizer.json: decoder: neither ByteLevel nor one that writes spaces, so text cannot be made")

    def token(self, token: str) -> bytes:
        if self.byte_level:
            try:
                return bytes(map(_BYTE_OF.__getitem__, token))
            except KeyError:
                return token.encode()
        if self.fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes((int(token[3:5], 16),))
            except ValueError:
                pass
        return self.added(token)

    def added(self, token: str) -> bytes:
        return (token.replace(self.space, " ") if self.space else token).encode()


def _byte_characters() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as it is, the others as characters from U+0100 on."""
    printable_bytes = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable_bytes)]
    return {chr(byte): byte for byte in printable_bytes} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_characters()


def _is_clean(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _clean(text: str) -> str:
    """Without lone surrogates; pairs of them become the character that they spell, as UTF-16 has it."""
    return text if _is_clean(text) else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
