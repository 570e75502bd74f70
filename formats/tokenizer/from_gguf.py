"""Tokenizer metadata of a GGUF file -> the tokenizer.json that means the same. The way back is in tokenizer_gguf.py.

Two kinds of GGUF tokenizer are known:

* `tokenizer.ggml.model` = "gpt2": byte-level BPE. Tokens and merges are there; how text is cut into words is a name.
* `tokenizer.ggml.model` = "llama": SentencePiece BPE. Tokens have scores instead of merges: of two neighbours whose join is a
  token, the pair with the highest score joins first. A tokenizer.json wants the pairs, so they are made here: every way of
  cutting a token in two that leaves two tokens, ordered by the token's score (as transformers converts SentencePiece models).

Text is not normalized (NFC), as a GGUF file does not say that it should be; llama.cpp does not either.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import printable, some
from .pretokenizers import TokenizerError, get_pre_tokenizer, to_json

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Values of `tokenizer.ggml.token_type`."""

SPACE = "\u2581"
"""The character that stands for a space in SentencePiece tokens."""

MODELS = ("gpt2", "llama")


def from_gguf(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer.json, as a dict, for GGUF metadata `keys` (those that begin with "tokenizer.ggml." are read).

    Raises TokenizerError, which names the key: one that is missing, of a wrong type, of a wrong length, or that holds a model
    or pre-tokenizer that is not known.
    """
    model = keys.get("tokenizer.ggml.model")
    if model is None:
        raise TokenizerError("tokenizer.ggml.model: missing, so the file has no tokenizer; use a file or folder that has one")
    if model not in MODELS:
        raise TokenizerError(
            f"tokenizer.ggml.model: {printable(model)!r} is a kind of tokenizer that is not supported (only {some(MODELS)} are)"
        )
    tokens = _tokens(keys)
    types = _numbers(keys, "tokenizer.ggml.token_type", len(tokens), default=NORMAL)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        token, i = next((token, i) for i, token in enumerate(tokens) if vocabulary[token] != i)
        other = vocabulary[token]
        raise TokenizerError(f"tokenizer.ggml.tokens: {printable(token)!r} stands there twice, as tokens {i} and {other}")
    build = _byte_level if model == "gpt2" else _sentencepiece
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(i, token, kind) for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
                         if kind in (UNKNOWN, CONTROL, USER_DEFINED)],
        **build(keys, tokens, types, vocabulary),
    }


def dumps(tokenizer: Mapping[str, Any]) -> bytes:
    """A tokenizer.json as bytes, in the form that loads fastest: without white space, merges as texts "a b" if possible.

    With pairs the library takes half as long again: SmolLM2 loads in 51 ms of processor time like this, in 79 from its own file.
    """
    model = tokenizer.get("model")
    if isinstance(model, Mapping) and isinstance(model.get("merges"), list):
        tokenizer = {**tokenizer, "model": {**model, "merges": _as_texts(model["merges"])}}
    return json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def compact(tokenizer_json: bytes) -> bytes:
    """The same tokenizer.json in the form that loads fastest (see `dumps`); as it is if it is not a JSON object."""
    try:
        tokenizer = json.loads(tokenizer_json)
        return dumps(tokenizer) if isinstance(tokenizer, dict) else tokenizer_json
    except (ValueError, RecursionError):
        return tokenizer_json


def checked(tokenizer_json: bytes) -> bytes:
    """The same tokenizer.json, which the library was able to read. Raises TokenizerError otherwise."""
    from .library import build_tokenizer

    build_tokenizer(tokenizer_json)
    return tokenizer_json


def _as_texts(merges: list[Any]) -> list[Any]:
    """Pairs as texts with a space between them, unless one cannot be told apart then (or would be taken for a comment)."""
    if any(isinstance(merge, str) for merge in merges):
        return merges
    if not all(isinstance(merge, (list, tuple)) and len(merge) == 2 for merge in merges):
        return merges
    texts = [f"{left} {right}" for left, right in merges]
    plain = all(text.count(" ") == 1 for text in texts) and not any(text.startswith("#version") for text in texts)
    return texts if plain else merges


def token_id(keys: Mapping[str, Any], name: str, count: int = 1 << 31) -> int | None:
    """The id under `tokenizer.ggml.<name>_token_id`; None if it is missing, or no token of a vocabulary of `count`."""
    value = keys.get(f"tokenizer.ggml.{name}_token_id")
    try:
        number = -1 if value is None else int(value)
    except (TypeError, ValueError):
        raise TokenizerError(f"tokenizer.ggml.{name}_token_id: {printable(value, 60)} is no token id") from None
    return number if 0 <= number < count else None


def default_add_bos(keys: Mapping[str, Any]) -> bool:
    """Whether texts begin with BOS: `tokenizer.ggml.add_bos_token`, or what llama.cpp takes it to be where it is missing."""
    stated = keys.get("tokenizer.ggml.add_bos_token")
    if stated is not None:
        return bool(stated)
    if keys.get("tokenizer.ggml.model") == "llama":
        return True
    return get_pre_tokenizer(keys.get("tokenizer.ggml.pre", "default")).add_bos


def _byte_level(keys: Mapping[str, Any], tokens: list[str], types: list[int], vocabulary: dict[str, int]) -> dict[str, Any]:
    entry = get_pre_tokenizer(keys.get("tokenizer.ggml.pre", "default"))
    merges = _merges(_array(keys, "tokenizer.ggml.merges"), vocabulary)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": None,
        "pre_tokenizer": to_json(entry),
        "post_processor": _bos_first(keys, tokens),
        "decoder": byte_level,
        "model": _bpe(vocabulary, merges, ignore_merges=entry.ignore_merges),
    }


def _merges(merges: Sequence[Any], vocabulary: Mapping[str, int]) -> Sequence[Any]:
    """Merges, each two tokens with a space between them, the first of which may begin with a space of its own.

    As they are if nothing is odd about any of them, else as pairs. Of two alike the first counts. Merges that mention no token
    cannot apply; llama.cpp carries them along, the tokenizers library refuses them.
    """
    known = vocabulary.keys()
    if set(map(type, merges)) == {str} and len(set(merges)) == len(merges):
        lines = "\n".join(merges)  # looked at as a whole: a step of Python for each of 50,000 to 500,000 takes too long
        if lines.count(" ") == len(merges) == lines.count("\n") + 1 and "#version" not in lines:
            parts = lines.replace(" ", "\n").split("\n")
            if known >= set(parts) and known >= set(lines.replace(" ", "").split("\n")) and len(parts) == 2 * len(merges):
                return merges
    pairs: dict[tuple[str, str], None] = {}
    for number, merge in enumerate(merges):
        cut = merge.find(" ", 1) if isinstance(merge, str) else -1
        if cut < 0:
            raise TokenizerError(f"tokenizer.ggml.merges: merge {number} is {printable(merge)!r}, not two tokens and a space")
        left, right = merge[:cut], merge[cut + 1 :]
        if left in vocabulary and right in vocabulary and left + right in vocabulary:
            pairs[left, right] = None
    return [list(pair) for pair in pairs]


def _sentencepiece(keys: Mapping[str, Any], tokens: list[str], types: list[int], vocabulary: dict[str, int]) -> dict[str, Any]:
    scores = _numbers(keys, "tokenizer.ggml.scores", len(tokens))
    unknown = token_id(keys, "unknown", len(tokens))
    if unknown is None:
        unknown = next((i for i, kind in enumerate(types) if kind == UNKNOWN), None)
    prefix = bool(keys.get("tokenizer.ggml.add_space_prefix", True))
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    normalizers = [{"type": "Prepend", "prepend": SPACE}, replace] if prefix else [replace]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    has_bytes = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": _bos_first(keys, tokens),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            vocabulary,
            merges_of_scores(tokens, scores, types),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=has_bytes,
        ),
    }


def merges_of_scores(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[list[str]]:
    """Merges, first to last, that join text as SentencePiece does with these scores: pairs of tokens whose join is a token.

    Control, unknown and byte tokens are never the result, so text that spells one stays text.
    """
    joinable = {token: i for i, token in enumerate(tokens) if types[i] in (NORMAL, USER_DEFINED, UNUSED)}
    found = []
    for token, i in joinable.items():
        pairs = []
        for cut in range(1, len(token)):
            left, right = joinable.get(token[:cut]), joinable.get(token[cut:])
            if left is not None and right is not None:
                pairs.append((left, right))
        pairs.sort()
        found += [(-scores[i], -len(tokens[left]), -len(tokens[right]), left, right) for left, right in pairs]
    found.sort(key=lambda merge: merge[:3])  # stable: pairs of one token stay in the order of their ids
    return [[tokens[left], tokens[right]] for *_, left, right in found]


def _bpe(vocabulary: dict[str, int], merges: Sequence[Any], *, unk_token: str | None = None, fuse_unk: bool = False,
         byte_fallback: bool = False, ignore_merges: bool = False) -> dict[str, Any]:  # fmt: skip
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk_token,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": fuse_unk,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary,
        "merges": merges,
    }


def _added(number: int, token: str, kind: int) -> dict[str, Any]:
    return {
        "id": number,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": kind != USER_DEFINED,
    }


def _bos_first(keys: Mapping[str, Any], tokens: list[str]) -> dict[str, Any] | None:
    """The post-processor that puts BOS first, where the file wants it: other readers of tokenizer.json go by it."""
    bos = token_id(keys, "bos", len(tokens))
    if bos is None or not default_add_bos(keys):
        return None
    token = tokens[bos]
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    text_a, text_b = ({"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [first, text_a],
        "pair": [first, text_a, {"SpecialToken": {"id": token, "type_id": 1}}, text_b],
        "special_tokens": {token: {"id": token, "ids": [bos], "tokens": [token]}},
    }


def _array(keys: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = keys.get(key)
    if value is None:
        raise TokenizerError(f"{key}: missing, and the tokenizer cannot be built without it")
    if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
        raise TokenizerError(f"{key}: an array is needed, but it is {printable(value, 60)}")
    return value


def _tokens(keys: Mapping[str, Any]) -> list[str]:
    """The tokens as text. An empty one gets a name by which it cannot be typed by chance, as in llama.cpp."""
    given = _array(keys, "tokenizer.ggml.tokens")
    if set(map(type, given)) == {str} and "" not in given:
        return list(given)
    tokens = []
    for i, token in enumerate(given):
        if isinstance(token, (bytes, bytearray)):
            token = bytes(token).decode("utf-8", "replace")
        if not isinstance(token, str):
            raise TokenizerError(f"tokenizer.ggml.tokens: token {i} is {printable(token, 60)}, not text")
        tokens.append(token or f"[EMPTY_{i}]")
    if not tokens:
        raise TokenizerError("tokenizer.ggml.tokens: empty")
    return tokens


def _numbers(keys: Mapping[str, Any], key: str, count: int, default: int | None = None) -> list[Any]:
    if default is not None and keys.get(key) is None:
        return [default] * count
    values = _array(keys, key)
    if len(values) != count:
        raise TokenizerError(f"{key}: has {len(values)} entries for {count} tokens")
    numbers = values.tolist() if hasattr(values, "tolist") else [v.item() if hasattr(v, "item") else v for v in values]
    if set(map(type, numbers)) <= {int}:
        return numbers
    for i, number in enumerate(numbers):
        if not isinstance(number, (int, float)) or number != number:
            raise TokenizerError(f"{key}: entry {i} is {printable(number, 60)}, not a number")
    return numbers
