"""Text to token ids and back: the tokenizers library behind a small surface, from a tokenizer.json or from GGUF metadata.

Building SmolLM2's tokenizer takes 51 ms from the tokenizer.json that a .hbf holds (no white space, merges as texts), 79 ms from
its own file, 150 ms from GGUF's keys; with `wait=False` a thread does it, nearly all in Rust without the GIL, and adds 15 ms to a
program that imports numpy meanwhile. Pickled tokenizers, a sorted vocabulary and from_str load no faster; `models.BPE` made from
Python's dicts does, but holds the GIL.

Text that spells a special token is text: `encode` reads special tokens only where it is asked to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..formats.errors import printable
from ..formats.pretokenizers import TokenizerError
from ..formats.tokenizer_json import SPACE, default_add_bos, dumps, from_gguf, token_id

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
    wait        False: build in a thread; errors then come when the tokenizer is first needed

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
        self._bytes: dict[int, bytes] = {}
        self._error: TokenizerError | None = None
        self._thread: threading.Thread | None = None
        if wait:
            self._load()
        else:
            self._thread = threading.Thread(target=self._load_later, name="tokenizer", daemon=True)
            self._thread.start()

    @classmethod
    def from_files(cls, files: Any, generation: Mapping[str, Any] | None = None, wait: bool = True) -> Tokenizer:
        """The tokenizer of a checkpoint: `files` is its TokenizerFiles (attributes json, config, chat_template, gguf)."""
        return cls(
            files.json, config=files.config, gguf=files.gguf, generation=generation, chat_template=files.chat_template, wait=wait
        )

    # Building

    def _load_later(self) -> None:
        try:
            self._load()
        except TokenizerError as error:
            self._error = error

    def _load(self) -> None:
        library = self._build()
        library.no_truncation()  # settings of training that a tokenizer.json may have kept
        library.no_padding()
        self._library = library
        added = library.get_added_tokens_decoder()
        self._marks = added
        self._added = {i: token.content for i, token in added.items()}
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._decoder = _Decoder(library.decoder)
        self._read_ids()

    def _build(self) -> Any:
        json = self._json
        if json is None:
            json = dumps(from_gguf(self._gguf))
        from tokenizers import Tokenizer as Library

        return _guarded("tokenizer.json", lambda: Library.from_buffer(bytes(json)))

    def _read_ids(self) -> None:
        self.special_tokens: dict[str, str] = {}
        for key, value in self._config.items():
            if key.endswith("_token"):
                content = value.get("content") if isinstance(value, Mapping) else value
                if isinstance(content, str):
                    self.special_tokens[key] = content
        for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
            number = token_id(self._gguf, key)
            token = None if number is None else self._library.id_to_token(number)
            if token is not None:
                self.special_tokens.setdefault(name, token)
        self._bos = self._named("bos_token")
        self._pad = self._named("pad_token")
        self._eos = self._ends()
        self._add_bos = self._wants_bos()

    def _named(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._library.token_to_id(token)

    def _ends(self) -> frozenset[int]:
        ends = {i for i in (token_id(self._gguf, name) for name in ("eos", "eot", "eom")) if i is not None}
        for stated in (self._gguf.get(EOS_IDS), self._generation.get("eos_token_id")):
            several: Any = stated if hasattr(stated, "__iter__") else [stated]
            ends |= {int(i) for i in several if i is not None}
        eos = self._named("eos_token")
        if eos is not None:
            ends.add(eos)
        by_name = {content: i for i, content in self._added.items() if content in END_OF_TURN}
        if "<|return|>" in by_name and "<|call|>" in by_name:
            by_name.pop("<|end|>", None)  # there it only ends a message within an answer
        elif "<|return|>" in by_name or "<|call|>" in by_name:
            by_name = {content: i for content, i in by_name.items() if content not in ("<|return|>", "<|call|>")}
        return frozenset(ends | set(by_name.values()))

    def _wants_bos(self) -> bool:
        if self._bos is None:
            return False
        stated = self._config.get("add_bos_token")
        if isinstance(stated, bool):
            return stated
        if self._json is None or "tokenizer.ggml.add_bos_token" in self._gguf:
            return default_add_bos(self._gguf)
        return self._library.encode("", add_special_tokens=True).ids[:1] == [self._bos]

    def ready(self) -> Tokenizer:
        """Waits until the tokenizer is built, and returns it. Raises TokenizerError if it could not be."""
        thread = self._thread
        if thread is not None:
            thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error
        return self

    # What is known about tokens

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens. A model may have more logits than that: rows that pad its matrix."""
        return self.ready()._library.get_vocab_size(with_added_tokens=True)

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, if there is one."""
        return self.ready()._bos

    @property
    def pad_id(self) -> int | None:
        """The token that fills up a batch, if there is one."""
        return self.ready()._pad

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
        return [self._added[i] for i in self._special]

    def strips_around(self, id: int) -> tuple[bool, bool]:
        """Whether an added token takes the white space before it, and behind it, along."""
        token = self.ready()._marks.get(id)
        return (False, False) if token is None else (token.lstrip, token.rstrip)

    @property
    def strips_space(self) -> bool:
        """True if the first space of a decoded text is not part of it (SentencePiece puts one before every text)."""
        return self.ready()._decoder.strips_space

    def id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it ("<|im_end|>", "Ġthe"), or None."""
        return self.ready()._library.token_to_id(_clean(token))

    def token(self, id: int) -> str | None:
        """How the vocabulary spells a token, or None."""
        return self.ready()._library.id_to_token(id) if 0 <= id < 1 << 31 else None

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
        library = self.ready()._library
        if not _is_clean(text):
            text = _clean(text)
        ids = _guarded("tokenizer.json", lambda: self._encode(library, text, special))
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
        return self._json if self._json is not None else self.ready()._library.to_str(pretty=False).encode()

    def _encode(self, library: Any, text: str, special: bool) -> list[int]:
        with self._mode:
            if library.encode_special_tokens is special:
                library.encode_special_tokens = not special
            return library.encode(text, add_special_tokens=False).ids

    def _spelled(self, id: int) -> list[int]:
        """The characters of a special token, each a token. For vocabularies whose merges lead to a special token."""
        ids: list[int] = []
        for character in self._library.id_to_token(id):
            whole = self._library.token_to_id(character)
            if whole is not None:
                ids.append(whole)
            else:
                parts = (self._library.token_to_id(f"<0x{byte:02X}>") for byte in character.encode())
                ids += [part for part in parts if part is not None]
        return ids


class _Decoder:
    """How a token becomes bytes, read from the `decoder` part of a tokenizer.json.

    Byte-level tokens spell every byte as a character of its own; SentencePiece tokens are text with U+2581 for a space, and
    "<0x0A>" for single bytes.
    """

    def __init__(self, decoder: Any) -> None:
        steps = _steps(decoder)
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


def _steps(decoder: Any) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    from json import loads

    state = loads(decoder.__getstate__())
    return state["decoders"] if state.get("type") == "Sequence" else [state]


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
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _guarded(where: str, build: Callable[[], Any]) -> Any:
    """Runs code of the library; whatever it raises, panics of Rust included, becomes a TokenizerError."""
    try:
        return build()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise TokenizerError(f"{where}: cannot be used: {printable(error)}") from error
