"""Tokenizers as GGUF metadata, there and back, and named pre-tokenizers."""

import json

import numpy as np
import pytest
import tokenizers

from halfbyte.engine.text.tokenizer import Tokenizer, TokenizerError
from halfbyte.formats.tokenizer.from_gguf import dumps, from_gguf
from halfbyte.formats.tokenizer.pretokenizers import PRE_TOKENIZERS, get_pre_tokenizer, name_of, to_json
from halfbyte.formats.tokenizer.to_gguf import gguf_keys
from support import DATA
from support import small_tokenizers as small

FOLDER = DATA / "tokenizers"
TEXTS = small.TEXTS.TEXTS

CONFIG = {
    "bos_token": "<|im_start|>",
    "eos_token": {"content": "<|im_end|>"},
    "pad_token": "<|endoftext|>",
    "add_bos_token": False,
}


@pytest.fixture(scope="module")
def spm():
    return Tokenizer(gguf=small.sentencepiece_keys())


def library(json_bytes):
    return tokenizers.Tokenizer.from_str(json_bytes.decode())


def edited(**parts):
    """The byte-level tokenizer.json with parts replaced."""
    return json.dumps({**json.loads(small.byte_level()), **parts}).encode()


def test_byte_level_there_and_back():
    notes = []
    keys = gguf_keys(small.byte_level(), CONFIG, notes=notes)
    assert keys["tokenizer.ggml.model"] == "gpt2" and keys["tokenizer.ggml.pre"] == "qwen2"
    assert keys["tokenizer.ggml.token_type"].dtype == np.int32
    assert list(keys["tokenizer.ggml.token_type"][-9:]) == [1, 3, 3, 3, 4, 4, 4, 4, 4]
    assert keys["tokenizer.ggml.tokens"][680:683] == small.SPECIAL
    assert (keys["tokenizer.ggml.bos_token_id"], keys["tokenizer.ggml.eos_token_id"]) == (681, 682)
    assert type(keys["tokenizer.ggml.bos_token_id"]) is np.uint32
    assert keys["tokenizer.ggml.add_bos_token"] is False
    assert len(notes) == 1 and "<left>" in notes[0] and "whole" in notes[0]
    original, back = Tokenizer(small.byte_level()), Tokenizer(gguf=keys)
    for text in TEXTS:
        for special in (False, True):
            assert back.encode(text, special=special) == original.encode(text, special=special), text
    assert back.eos_ids == original.eos_ids and back.special_ids == original.special_ids
    reread = Tokenizer(back.to_json())
    assert reread.encode(TEXTS[50]) == original.encode(TEXTS[50]) and reread.special_ids == original.special_ids


def test_sentencepiece_there_and_back(spm):
    keys = gguf_keys(spm.to_json(), {"bos_token": "<s>", "eos_token": "</s>"})
    assert keys["tokenizer.ggml.model"] == "llama" and keys["tokenizer.ggml.add_space_prefix"] is True
    assert keys["tokenizer.ggml.add_bos_token"] is True, "read from the post_processor"
    assert keys["tokenizer.ggml.unknown_token_id"] == 0
    assert list(keys["tokenizer.ggml.token_type"]) == small.sentencepiece()["types"]
    assert keys["tokenizer.ggml.tokens"] == small.sentencepiece()["tokens"]
    assert keys["tokenizer.ggml.scores"].dtype == np.float32
    back = Tokenizer(gguf=keys)
    for text, ids in small.sentencepiece()["ids"].items():
        assert back.encode(text) == ids, text


def test_vocabulary_is_padded_to_the_models_rows():
    keys = gguf_keys(small.byte_level(), CONFIG, vocabulary_size=720)
    assert len(keys["tokenizer.ggml.tokens"]) == len(keys["tokenizer.ggml.token_type"]) == 720
    assert keys["tokenizer.ggml.tokens"][-1] == "[PAD719]" and keys["tokenizer.ggml.token_type"][-1] == 5
    assert Tokenizer(gguf=keys).encode("Hello [PAD719]") == Tokenizer(small.byte_level()).encode("Hello [PAD719]")
    with pytest.raises(TokenizerError, match="680 rows"):
        gguf_keys(small.byte_level(), CONFIG, vocabulary_size=680)


def test_end_ids_of_the_generation_config():
    keys = gguf_keys(small.byte_level(), {}, generation={"eos_token_id": [682, 680], "bos_token_id": 681, "pad_token_id": 10**9})
    assert (keys["tokenizer.ggml.eos_token_id"], keys["tokenizer.ggml.eot_token_id"]) == (682, 680)
    assert keys["tokenizer.ggml.bos_token_id"] == 681 and "tokenizer.ggml.padding_token_id" not in keys


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("pre_tokenizer", {"type": "Whitespace"}, "pre_tokenizer.*Whitespace"),
        ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "odd|one"}, "behavior": "Isolated", "invert": False}, "odd|one"),
        ("pre_tokenizer", None, "pre_tokenizer"),
        ("normalizer", {"type": "Lowercase"}, "normalizer.*Lowercase"),
        ("model", {"type": "WordPiece", "vocab": {"a": 0}}, "WordPiece"),
        ("model", {"type": "Unigram", "vocab": [["a", 0.0]]}, "Unigram"),
        ("model", {"type": "BPE", "vocab": {"a": -1}, "merges": []}, "-1"),
        ("decoder", {"type": "WordPiece"}, "neither a byte-level"),
    ],
)
def test_what_gguf_cannot_hold_is_refused_by_name(part, value, message):
    with pytest.raises(TokenizerError, match=message):
        gguf_keys(edited(**{part: value}))


def test_nfc_is_noted_when_it_is_lost():
    notes = []
    gguf_keys(edited(normalizer={"type": "NFC"}), notes=notes)
    assert any("NFC" in note for note in notes)


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_named_pre_tokenizer_cuts_all_text_and_is_recognised(name):
    entry = get_pre_tokenizer(name)
    assert PRE_TOKENIZERS[name_of(to_json(entry), entry.ignore_merges)][:2] == entry[:2]
    cut = tokenizers.Tokenizer.from_str(
        json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}, "pre_tokenizer": to_json(entry)})
    ).pre_tokenizer
    alphabet = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    for text in TEXTS:
        words = [word for word, _ in cut.pre_tokenize_str(text)]
        assert all(c in alphabet for word in words for c in word)
        assert tokenizers.decoders.ByteLevel().decode(words) == text, name


# Words by hand, from the meaning of each pattern.
@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "I'm 1234, ok  x", ["I", "'m", " 1234", ",", " ok", " ", " x"]),
        ("smollm", "a 12 b", ["a", " ", "1", "2", " b"]),
        ("llama-bpe", "I'M 12345 (x)\n\n y", ["I", "'M", " ", "123", "45", " (", "x", ")\n\n", " y"]),
        ("qwen2", "I'M 123 (x)", ["I", "'M", " ", "1", "2", "3", " (", "x", ")"]),
        ("tekken", "fooBar I'm 12", ["foo", "Bar", " I", "'m", " ", "1", "2"]),
        ("gpt-4o", "fooBar I'm 1234", ["foo", "Bar", " I'm", " ", "123", "4"]),
        ("falcon", "a,b 1234", ["a", ",", "b", " ", "123", "4"]),
        ("deepseek-llm", "ab 中文 12", ["ab", " ", "中文", " ", "12"]),
        ("deepseek-v3", "ab 中文12345", ["ab", " ", "中文", "123", "45"]),
        ("deepseek-coder", "ab 12", ["ab", " ", "1", "2"]),
        ("default", "a=b 1234", ["a", "=", "b", " ", "123", "4"]),
        ("viking", "ab 12.x", ["ab", " ", "1", "2", ".", "x"]),
    ],
)
def test_words_of_named_pre_tokenizers(name, text, words):
    cut = tokenizers.Tokenizer.from_str(
        json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}, "pre_tokenizer": to_json(get_pre_tokenizer(name))})
    ).pre_tokenizer
    decode = tokenizers.decoders.ByteLevel().decode
    assert [decode([word]) for word, _ in cut.pre_tokenize_str(text)] == words


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("pre", "klingon", "klingon"),
        ("pre", 7, "7"),
        ("model", "bert", "bert"),
        ("model", None, "no tokenizer"),
        ("tokens", None, "tokenizer.ggml.tokens: missing"),
        ("tokens", [], "empty"),
        ("tokens", "abc", "array"),
        ("tokens", ["a", 3], "token 1"),
        ("tokens", ["a", "b", "a"], "tokens 0 and 2"),
        ("token_type", [1, 1], "2 entries for 688 tokens"),
        ("merges", None, "tokenizer.ggml.merges: missing"),
        ("merges", ["ab"], "merge 0"),
        ("merges", [3], "merge 0"),
        ("bos_token_id", "one", "bos_token_id"),
    ],
)
def test_broken_metadata_is_refused_by_key(key, value, message):
    keys = {**gguf_keys(small.byte_level(), CONFIG), f"tokenizer.ggml.{key}": value}
    if key == "tokens" and isinstance(value, list):
        keys.pop("tokenizer.ggml.token_type")
    with pytest.raises(TokenizerError, match=message):
        Tokenizer(gguf=keys)


def test_sentencepiece_without_scores_is_refused():
    for scores, message in ((None, "scores: missing"), ([0.0], "1 entries"), ([float("nan")] * 700, "entry 0")):
        with pytest.raises(TokenizerError, match=message):
            Tokenizer(gguf=small.sentencepiece_keys(**{"tokenizer.ggml.scores": scores}))


def test_sentencepiece_without_a_space_in_front():
    tokenizer = Tokenizer(gguf=small.sentencepiece_keys(**{"tokenizer.ggml.add_space_prefix": False}))
    assert not tokenizer.strips_space
    for text in ("the dog", " the dog", "  "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("the dog") != Tokenizer(gguf=small.sentencepiece_keys()).encode("the dog")


def test_sentencepiece_user_defined_tokens_are_found_in_any_text(spm):
    tool = spm.id("<tool>")
    assert spm.encode("x<tool>y").count(tool) == 1 and spm.decode(spm.encode("<tool>")) == "<tool>"


def test_merges_that_name_no_token_and_empty_tokens_are_passed_over():
    keys = gguf_keys(small.byte_level(), CONFIG)
    keys["tokenizer.ggml.merges"] = ["zz qqq", *keys["tokenizer.ggml.merges"], *keys["tokenizer.ggml.merges"][:3][::-1]]
    keys["tokenizer.ggml.tokens"] = [*keys["tokenizer.ggml.tokens"], "", ""]
    keys["tokenizer.ggml.token_type"] = [*keys["tokenizer.ggml.token_type"], 1, 1]
    tokenizer = Tokenizer(gguf=keys)
    for text in TEXTS[20:40]:
        assert tokenizer.encode(text) == Tokenizer(small.byte_level()).encode(text)


def test_the_file_says_whether_bos_goes_first():
    keys = gguf_keys(small.byte_level(), CONFIG)
    del keys["tokenizer.ggml.add_bos_token"]
    for pre, expected in (("qwen2", False), ("llama-bpe", True), ("tekken", True)):
        assert Tokenizer(gguf={**keys, "tokenizer.ggml.pre": pre}).add_bos is expected
    assert Tokenizer(gguf=small.sentencepiece_keys()).add_bos is True
    assert Tokenizer(gguf=small.sentencepiece_keys(**{"tokenizer.ggml.add_bos_token": False})).add_bos is False
    source = from_gguf(small.sentencepiece_keys())
    assert library(dumps(source)).encode("x").ids[0] == 1, "other readers of the tokenizer.json put BOS first"
