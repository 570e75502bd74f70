"""tokenizer.json -> the tokenizer metadata of a GGUF file. The way there and back is in tokenizer_json.py.

What a GGUF file cannot say is either refused (a pre-tokenizer, a normalizer or a model that no GGUF name stands for) or noted
(added tokens that swallow spaces, NFC normalization). Before the keys are handed out a tokenizer is built from them and must
give the same ids as the original on a text of many kinds, so a file that would speak another language is never written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..chat_template import template_keys
from ..errors import printable
from .from_gguf import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, UNUSED, USER_DEFINED, dumps, from_gguf
from .pretokenizers import TokenizerError, name_of

LOWEST_SCORE = -1e6
"""Score of a SentencePiece token that no merge makes."""

PROBE = (
    "Hello world! It's 1234567 o'clock, WE'LL see: foo_bar(x) == [1, 2.50]; \t\ttabs\r\n\r\n   spaces    \n \n\n end…\n"
    "naïve café, Ελληνικά, русский текст, 中文字符和日本語テキスト, 한국어, עברית, العربية, हिन्दी, ไทย 👩‍👩‍👧 🚀 e\u0301 "
    "camelCase XMLHttpRequest \u00a0\u2003 ½ ² Ⅷ $£€ <html></html> #!/usr/bin/env {\"key\": null} -----------======= ''''\"\"\""
)


def gguf_keys(
    tokenizer_json: bytes,
    config: Mapping[str, Any] | None = None,
    *,
    generation: Mapping[str, Any] | None = None,
    chat_template: str | dict[str, str] | None = None,
    vocabulary_size: int | None = None,
    notes: list[str] | None = None,
) -> dict[str, Any]:
    """The `tokenizer.*` keys of a GGUF file for a tokenizer.json.

    tokenizer_json   bytes of the file
    config           tokenizer_config.json: names of special tokens, add_bos_token
    generation       generation_config.json or config.json: `bos_token_id`, `eos_token_id`, `pad_token_id`, if config is silent
    chat_template    as `TokenizerFiles.chat_template` has it
    vocabulary_size  rows of the embedding; ids without a token become unused tokens "[PAD…]" so that the counts agree
    notes            what is lost on the way is appended here

    Values have the types that GGUF readers expect: ids np.uint32, `token_type` int32[n], `scores` float32[n], the rest str, bool
    and list[str]. Raises TokenizerError.
    """
    config, notes = config or {}, notes if notes is not None else []
    try:
        source = json.loads(tokenizer_json)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"tokenizer.json: not JSON: {printable(error)}") from error
    model = source.get("model") if isinstance(source, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), (dict, list)):
        raise TokenizerError("tokenizer.json: model: missing, or without a vocabulary")
    kind = model.get("type", "BPE")
    if kind != "BPE" or not isinstance(model["vocab"], dict):
        raise TokenizerError(f"tokenizer.json: model: GGUF cannot hold a tokenizer of type {printable(kind)!r}, only BPE")
    _refuse_unless_plain(model)
    try:
        keys = _keys(source, model, config, generation or {}, vocabulary_size, notes)
    except (TypeError, AttributeError, LookupError) as error:  # JSON, but not of the kind that it should be
        raise TokenizerError(f"tokenizer.json: not understood: {printable(error)}") from error
    if chat_template:
        keys |= template_keys(chat_template)
    _check(tokenizer_json, keys)
    return keys


def _keys(
    source: Mapping[str, Any], model: Mapping[str, Any], config: Mapping[str, Any], generation: Mapping[str, Any],
    vocabulary_size: int | None, notes: list[str],
) -> dict[str, Any]:  # fmt: skip
    vocabulary, added = _vocabulary(model["vocab"], source)
    merges = _merges(model)
    sentencepiece = _is_sentencepiece(source)
    tokens, types = _tokens(vocabulary, added, model, sentencepiece, vocabulary_size, notes)
    keys: dict[str, Any] = {"tokenizer.ggml.model": "llama" if sentencepiece else "gpt2"}
    if sentencepiece:
        keys["tokenizer.ggml.pre"] = "default"
        keys["tokenizer.ggml.scores"] = _scores(tokens, merges)
        keys["tokenizer.ggml.add_space_prefix"] = _space_prefix(source)
    else:
        keys["tokenizer.ggml.pre"] = name_of(source.get("pre_tokenizer"), bool(model.get("ignore_merges")))
        # A space inside a token would be read as the one between the two; it is a byte of its own spelling, U+0120.
        keys["tokenizer.ggml.merges"] = [" ".join(part.replace(" ", "\u0120") for part in merge) for merge in merges]
        _note_normalizer(source.get("normalizer"), notes)
    keys["tokenizer.ggml.tokens"] = tokens
    keys["tokenizer.ggml.token_type"] = np.array(types, np.int32)
    keys |= _special_keys(source, config, generation, {token: i for i, token in enumerate(tokens)}, model)
    return keys


def _refuse_unless_plain(model: Mapping[str, Any]) -> None:
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(key):
            raise TokenizerError(f"tokenizer.json: model.{key}: GGUF cannot hold it (it is {printable(model[key], 40)!r})")


def _vocabulary(vocab: Mapping[str, Any], source: Mapping[str, Any]) -> tuple[dict[int, str], dict[int, Mapping[str, Any]]]:
    """Tokens by id, and added tokens by id, which have the last word."""
    tokens: dict[int, str] = {number: token for token, number in vocab.items()}
    added: dict[int, Mapping[str, Any]] = {}
    entries = source.get("added_tokens") or []
    if not isinstance(entries, list):
        raise TokenizerError(f"tokenizer.json: added_tokens: not a list: {printable(entries)}")
    for entry in entries:
        if not (isinstance(entry, dict) and isinstance(entry.get("content"), str) and isinstance(entry.get("id"), int)):
            raise TokenizerError(f"tokenizer.json: added_tokens: not understood: {printable(entry)}")
        added[entry["id"]] = entry
        tokens[entry["id"]] = entry["content"]
    for number in tokens:
        if not isinstance(number, int) or not 0 <= number < 1 << 24:
            raise TokenizerError(f"tokenizer.json: model.vocab: {printable(number)} is no token id")
    if not tokens:
        raise TokenizerError("tokenizer.json: model.vocab: empty")
    return tokens, added


def _tokens(
    vocabulary: Mapping[int, str], added: Mapping[int, Mapping[str, Any]], model: Mapping[str, Any], sentencepiece: bool,
    size: int | None, notes: list[str],
) -> tuple[list[str], list[int]]:  # fmt: skip
    """Texts and types of all ids from 0 on."""
    count = max(vocabulary) + 1
    if size is not None and size < count:
        last = printable(vocabulary[count - 1], 40)
        raise TokenizerError(f"tokenizer.json: token {count - 1} is {last!r}, but the model has only {size} rows for tokens")
    unknown = model.get("unk_token")
    tokens, types, stripping = [], [], []
    for i in range(size or count):
        token, entry = vocabulary.get(i), added.get(i)
        if token is None or (entry is None and token == f"[PAD{i}]"):
            token, kind = f"[PAD{i}]", UNUSED
        elif entry is not None:
            kind = CONTROL if entry.get("special") else USER_DEFINED
            if sentencepiece and token == unknown:
                kind = UNKNOWN
            elif sentencepiece and kind == USER_DEFINED:
                token = token.replace(SPACE, " ")  # GGUF readers look for them in text as it is typed
            if entry.get("lstrip") or entry.get("rstrip") or entry.get("single_word"):
                stripping.append(token)
        elif sentencepiece and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            kind = BYTE
        else:
            kind = UNKNOWN if sentencepiece and token == unknown else NORMAL
        tokens.append(token)
        types.append(kind)
    if len(set(tokens)) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if token in tokens[:i])
        raise TokenizerError(f"tokenizer.json: {printable(twice)!r} is the text of two tokens, which GGUF cannot hold")
    if stripping:
        names = ", ".join(printable(token, 40) for token in stripping[:4]) + (", …" if len(stripping) > 4 else "")
        notes.append(f"GGUF cannot say that {len(stripping)} added tokens take the spaces beside them or stand alone: {names}")
    return tokens, types


def _is_sentencepiece(source: Mapping[str, Any]) -> bool:
    """True for text with U+2581 for spaces and "<0x0A>" for bytes; False for byte-level tokens. Refuses anything else."""
    decoder = source.get("decoder") or {}
    kinds = [step.get("type") for step in (decoder.get("decoders") or [decoder])]
    if "ByteLevel" in kinds:
        return False
    if source["model"].get("byte_fallback"):
        return True
    raise TokenizerError("tokenizer.json: neither a byte-level tokenizer nor one with byte tokens; GGUF knows no other BPE")


def _merges(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = []
    for number, merge in enumerate(model.get("merges") or []):
        pair = tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) if isinstance(merge, list) else ()
        if len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise TokenizerError(f"tokenizer.json: model.merges: merge {number} is {printable(merge, 60)}, not a pair of tokens")
        merges.append(pair)
    return merges


def _scores(tokens: Sequence[str], merges: Sequence[tuple[str, str]]) -> np.ndarray:
    """float32[n]: the earlier a token is made by a merge, the higher its score."""
    rank: dict[str, int] = {}
    for number, (left, right) in enumerate(merges):
        rank.setdefault(left + right, number)
    return np.array([-float(rank[token]) if token in rank else LOWEST_SCORE for token in tokens], np.float32)


def _space_prefix(source: Mapping[str, Any]) -> bool:
    """Whether a space is put before a text, read from the normalizer (Prepend) or the pre_tokenizer (Metaspace)."""
    normalizer, pre = source.get("normalizer") or {}, source.get("pre_tokenizer") or {}
    steps = normalizer.get("normalizers") or ([normalizer] if normalizer else [])
    kinds = {step.get("type") for step in steps}
    if pre.get("type") == "Metaspace":
        return pre.get("prepend_scheme", "always") != "never" and pre.get("add_prefix_space", True)
    if not kinds <= {"Prepend", "Replace"} or "Replace" not in kinds:
        raise TokenizerError(f"tokenizer.json: normalizer: no GGUF tokenizer has it: {printable(normalizer)}")
    return "Prepend" in kinds


def _note_normalizer(normalizer: Mapping[str, Any] | None, notes: list[str]) -> None:
    if not normalizer:
        return
    steps = normalizer.get("normalizers", [normalizer])
    if any(step.get("type") != "NFC" for step in steps):
        raise TokenizerError(f"tokenizer.json: normalizer: GGUF cannot hold it: {printable(normalizer)}")
    if steps:
        notes.append("GGUF cannot say that text is normalized (NFC) first; readers of the file will not do it")


def _special_keys(
    source: Mapping[str, Any], config: Mapping[str, Any], generation: Mapping[str, Any], ids: Mapping[str, int],
    model: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    def named(name: str) -> int | None:
        value = config.get(name)
        content = value.get("content") if isinstance(value, Mapping) else value
        return ids.get(content) if isinstance(content, str) else None

    def generated(name: str) -> list[int]:
        value = generation.get(name)
        return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int) and 0 <= i < len(ids)]

    found: dict[str, int] = {}
    for key, name in (("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token"), ("unknown", "unk_token")):
        choices = [i for i in [named(name), *generated(name + "_id")] if i is not None]
        if choices:
            found[key] = choices[0]
    if "unknown" not in found and model.get("unk_token") in ids:
        found["unknown"] = ids[model["unk_token"]]
    # A list of end tokens: GGUF has three names for them, end of text, of a turn and of a message.
    others = [i for i in generated("eos_token_id") if i != found.get("eos")]
    found |= dict(zip(("eot", "eom"), others, strict=False))
    keys: dict[str, Any] = {f"tokenizer.ggml.{key}_token_id": np.uint32(i) for key, i in found.items()}

    first, last = _template_ends(source.get("post_processor"))
    for name, token, at in (("bos", found.get("bos"), first), ("eos", found.get("eos"), last)):
        stated = config.get(f"add_{name}_token")
        adds = stated if isinstance(stated, bool) else at is not None and ids.get(at) == token
        keys[f"tokenizer.ggml.add_{name}_token"] = bool(adds and token is not None)
    return keys


def _template_ends(processor: Any) -> tuple[str | None, str | None]:
    """The special tokens that a post_processor puts before and after a text."""
    if not isinstance(processor, dict):
        return None, None
    for step in processor.get("processors") or [processor]:
        if step.get("type") == "TemplateProcessing" and step.get("single"):
            first, last = (step["single"][at].get("SpecialToken", {}).get("id") for at in (0, -1))
            return first, last
    return None, None


def _check(tokenizer_json: bytes, keys: Mapping[str, Any]) -> None:
    """Raises TokenizerError unless the tokenizer that a reader will build from the keys reads text as the original does."""
    from unicodedata import normalize

    from .library import build_tokenizer, token_ids

    original, rebuilt = build_tokenizer(tokenizer_json), build_tokenizer(dumps(from_gguf(keys)))
    probe = normalize("NFC", PROBE)  # a GGUF file cannot ask for it, which is noted
    for text in (probe, normalize("NFC", probe.swapcase()), " ".join(reversed(probe.split(" ")))):
        ids = [token_ids(library, text) for library in (original, rebuilt)]
        if ids[0] != ids[1]:
            at = next((i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a != b), min(map(len, ids)))
            around = printable(original.decode(ids[0][max(at - 2, 0) : at + 3]), 60)
            raise TokenizerError(f"tokenizer.json: as a GGUF tokenizer it would read text otherwise, for instance {around!r}")
