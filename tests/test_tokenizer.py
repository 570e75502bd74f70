"""Tokenizers: ids equal to the libraries', special tokens only where asked for, GGUF metadata there and back."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.engine.tokenizer import Tokenizer, TokenizerError
from halfbyte.formats.pretokenizers import PRE_TOKENIZERS, get_pre_tokenizer, name_of, to_json
from halfbyte.formats.tokenizer_gguf import gguf_keys
from halfbyte.formats.tokenizer_json import compact, dumps, from_gguf
from halfbyte.quant.errors import HalfbyteError

FOLDER = Path(__file__).parent / "data" / "tokenizers"
_spec = importlib.util.spec_from_file_location("small", FOLDER / "small.py")
small = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(small)
TEXTS, LONE_SURROGATES = small.TEXTS.TEXTS, small.TEXTS.LONE_SURROGATES

CONFIG = {
    "bos_token": "<|im_start|>",
    "eos_token": {"content": "<|im_end|>"},
    "pad_token": "<|endoftext|>",
    "add_bos_token": False,
}


@pytest.fixture(scope="module")
def byte_level():
    return Tokenizer(small.byte_level(), config=CONFIG)


@pytest.fixture(scope="module")
def spm():
    return Tokenizer(gguf=small.sentencepiece_keys())


def library(json_bytes):
    return tokenizers.Tokenizer.from_str(json_bytes.decode())


def edited(**parts):
    """The byte-level tokenizer.json with parts replaced."""
    return json.dumps({**json.loads(small.byte_level()), **parts}).encode()


# Text -> ids -> text


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_ids_are_the_librarys_and_decode_to_the_text(byte_level, text):
    plain = library(small.byte_level())
    plain.encode_special_tokens = True
    assert byte_level.encode(text) == plain.encode(text, add_special_tokens=False).ids
    assert byte_level.encode(text, special=True) == library(small.byte_level()).encode(text, add_special_tokens=False).ids
    assert byte_level.decode(byte_level.encode(text)) == text


@pytest.mark.parametrize("text", list(small.sentencepiece()["ids"]))
def test_sentencepiece_ids_are_the_sentencepiece_librarys(spm, text):
    assert spm.encode(text) == small.sentencepiece()["ids"][text]
    assert spm.decode(spm.encode(text)) == text.replace("\u2581", " "), "U+2581 stands for a space"


@pytest.mark.parametrize("text", LONE_SURROGATES)
def test_lone_surrogates_become_replacement_characters(byte_level, spm, text):
    clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert "\ufffd" in clean or "🚀" in clean
    for tokenizer in (byte_level, spm):
        for special in (False, True):
            assert tokenizer.decode(tokenizer.encode(text, special=special)) == clean
    assert byte_level.id(text) is None


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_any_text_survives(byte_level, spm, text):
    ids = byte_level.encode(text)
    assert byte_level.decode(ids) == text
    assert byte_level.special_ids.isdisjoint(ids)
    assert spm.decode(spm.encode(text)) == text.replace("\u2581", " ")


def test_invalid_bytes_decode_to_replacement_characters(byte_level, spm):
    euro = byte_level.encode("€")
    assert len(euro) == 3, "the test needs a character of several tokens"
    assert byte_level.decode(euro) == "€"
    assert byte_level.decode(euro[:2]) == "\ufffd"
    assert byte_level.decode([euro[0], euro[0], *euro]) == "\ufffd\ufffd€"
    byte = {value: spm.id(f"<0x{value:02X}>") for value in range(256)}
    assert spm.decode([byte[0xE2], byte[0x82], byte[0xAC], byte[0xFF], byte[0x41]]) == "€\ufffdA"


def test_token_bytes(byte_level, spm):
    for tokenizer in (byte_level, spm):
        text = "Hello, naïve 🚀 world\n"
        joined = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)))
        assert joined.removeprefix(b" ") == text.encode()
        assert tokenizer.token_bytes(10**6) == tokenizer.token_bytes(-1) == b""
        assert tokenizer.decode([10**6]) == ""
    assert byte_level.token_bytes(byte_level.id("<|im_end|>")) == b"<|im_end|>"
    assert spm.token_bytes(spm.id("<0x0A>")) == b"\n"
    assert {byte_level.token_bytes(byte_level.id(c)) for c in byte_characters()} == {bytes((i,)) for i in range(256)}


def byte_characters():
    return tokenizers.pre_tokenizers.ByteLevel.alphabet()


# Special and added tokens


@pytest.mark.parametrize("text", ["<|im_end|>", "a<|im_end|>b", "<|im_start|>user\nHi<|im_end|>\n", "<|im_end|>" * 3])
def test_text_that_spells_a_special_token_is_text_unless_asked(byte_level, text):
    ids = byte_level.encode(text)
    assert byte_level.special_ids.isdisjoint(ids) and byte_level.decode(ids) == text
    read = byte_level.encode(text, special=True)
    assert sum(i in byte_level.special_ids for i in read) == text.count("<|")
    assert byte_level.decode(read, skip_special=False) == text
    assert "<|" not in byte_level.decode(read)


def test_sentencepiece_control_tokens_are_text_unless_asked(spm):
    ids = spm.encode("<s>x</s>")
    assert not {0, 1, 2} & set(ids) and spm.decode(ids) == "<s>x</s>"
    assert spm.encode("<s>x</s>", special=True)[0] == 1 and spm.encode("<s>x</s>", special=True)[-1] == 2


def test_a_special_token_that_merges_lead_to_is_still_text():
    """ignore_merges gives a word that is a token as a whole, special or not; the answer must spell it instead."""
    source = json.loads(small.byte_level())
    source["model"]["ignore_merges"] = True
    source["model"]["vocab"]["stop"] = 800
    source["added_tokens"].append({**source["added_tokens"][0], "id": 800, "content": "stop", "special": True})
    raw = json.dumps(source).encode()
    naive = library(raw)
    naive.encode_special_tokens = True
    assert naive.encode("stop").ids == [800], "the library alone reads it as special"
    tokenizer = Tokenizer(raw)
    assert 800 not in tokenizer.encode("stop") and tokenizer.decode(tokenizer.encode("stop")) == "stop"
    assert tokenizer.encode("stop", special=True) == [800]


def test_added_tokens_longest_match_and_spaces_beside_them(byte_level):
    tool_call, tool, left, right, whole = map(byte_level.id, ["<tool_call>", "<tool", "<left>", "<right>", "whole"])
    x = byte_level.encode("x")
    assert byte_level.encode("<tool_call>") == [tool_call]
    assert byte_level.encode("<tool_x") == [tool, *byte_level.encode("_x")]
    assert byte_level.encode("x  <left>x") == [*x, left, *x]
    assert byte_level.encode("x<right>  x") == [*x, right, *x]
    assert byte_level.encode("x <right>x")[:2] == [*x, byte_level.id("Ġ")]
    assert whole in byte_level.encode("the whole thing") and whole not in byte_level.encode("the wholething")
    assert byte_level.decode([tool_call]) == "<tool_call>", "an added token that is not special is text"


def test_modes_do_not_mix_between_threads(byte_level):
    text = "<|im_start|>x<|im_end|>" * 20
    wanted = {special: byte_level.encode(text, special=special) for special in (False, True)}
    wrong = []

    def work(special):
        for _ in range(200):
            if byte_level.encode(text, special=special) != wanted[special]:
                wrong.append(special)

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_bos_once():
    tokenizer = Tokenizer(small.byte_level(), config={**CONFIG, "add_bos_token": True})
    bos, x = tokenizer.id("<|im_start|>"), tokenizer.encode("x")
    assert tokenizer.add_bos and tokenizer.bos_id == bos
    assert tokenizer.encode("x") == x
    assert tokenizer.encode("x", bos=True) == [bos, *x]
    assert tokenizer.encode("<|im_start|>x", special=True, bos=True) == [bos, *x]
    assert tokenizer.encode("", bos=True) == [bos]
    silent = Tokenizer(small.byte_level(), config=CONFIG)
    assert not silent.add_bos and silent.encode("x", bos=True) == x


@pytest.mark.parametrize(
    ("stated", "gguf", "expected"),
    [(None, {}, True), (False, {}, False), (None, {"tokenizer.ggml.add_bos_token": False}, False)],
)
def test_bos_is_wanted_where_the_post_processor_says_so(stated, gguf, expected):
    post = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [681], "tokens": ["<|im_start|>"]}},
    }
    config = {"bos_token": "<|im_start|>"} | ({} if stated is None else {"add_bos_token": stated})
    tokenizer = Tokenizer(edited(post_processor=post), config=config, gguf=gguf)
    assert tokenizer.bos_id == 681 and tokenizer.add_bos is expected
    assert tokenizer.encode("x") == Tokenizer(small.byte_level()).encode("x"), "encode itself adds nothing"


def test_ids_that_end_an_answer():
    def ends(names=(), drop=(), **options):
        added = [token for token in json.loads(small.byte_level())["added_tokens"] if token["content"] not in drop]
        added += [{**added[0], "id": 800 + i, "content": name, "special": True} for i, name in enumerate(names)]
        source = json.loads(edited(added_tokens=added))
        source["model"]["vocab"] |= {name: 800 + i for i, name in enumerate(names)}
        tokenizer = Tokenizer(json.dumps(source).encode(), **options)
        return {tokenizer.token(i) for i in tokenizer.eos_ids}

    marks = small.SPECIAL
    assert ends(drop=marks) == set()
    assert ends() == {"<|im_end|>", "<|endoftext|>"}, "known by name"
    assert ends(["</s>"], marks, config={"eos_token": "</s>"}) == {"</s>"}
    assert ends(["A", "B"], marks, generation={"eos_token_id": [800, 801]}) == {"A", "B"}
    assert ends(["A"], marks, generation={"eos_token_id": 800}) == {"A"}
    ids = {"tokenizer.ggml.eos_token_id": 800, "tokenizer.ggml.eot_token_id": 802}
    assert ends(["A", "B", "C"], marks, gguf=ids) == {"A", "C"}
    assert ends(["A", "B"], marks, gguf={"halfbyte.eos_token_ids": np.array([800, 801])}) == {"A", "B"}
    assert ends(["<|end|>"], marks) == {"<|end|>"}
    assert ends(["<|end|>", "<|return|>", "<|call|>"], marks) == {"<|return|>", "<|call|>"}


def test_names_of_special_tokens(byte_level, spm):
    assert byte_level.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert spm.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert (byte_level.pad_id, spm.pad_id) == (byte_level.id("<|endoftext|>"), None)
    assert byte_level.vocabulary_size == 688 and spm.vocabulary_size == 700


# Reading


def test_truncation_and_padding_of_the_file_are_ignored():
    raw = edited(
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 9},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "!",
        },
    )
    text = "a b c d e f g h i j k"
    expected = Tokenizer(small.byte_level()).encode(text)
    assert len(expected) > 9 and library(raw).encode(text).ids != expected
    assert Tokenizer(raw).encode(text) == expected
    assert Tokenizer(raw).encode("a") == expected[:1]


def test_built_when_it_is_needed(monkeypatch, tmp_path):
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path))
    text = "Hello <|im_end|>"
    later = Tokenizer(small.byte_level(), config=CONFIG, wait=False)
    assert later._source is None
    assert later.encode(text, special=True) == Tokenizer(small.byte_level(), config=CONFIG).encode(text, special=True)
    assert later.ready() is later and later.eos_ids
    broken = Tokenizer(b"{", wait=False)
    for _ in range(2):
        with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
            broken.encode("x")
    with pytest.raises(TokenizerError):
        _ = broken.eos_ids


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"{}", b'{"model": 3}', b'{"version": ""}', small.byte_level()[:5000], b"[" * 999],
)
def test_broken_files_are_refused_in_one_line(raw):
    with pytest.raises(HalfbyteError) as caught:
        Tokenizer(raw)
    assert str(caught.value).startswith("tokenizer.json: ") and "\n" not in str(caught.value)
    with pytest.raises(HalfbyteError) as caught:
        gguf_keys(raw)
    assert str(caught.value).startswith("tokenizer.json: ") and "\n" not in str(caught.value)


def test_what_the_library_raises_while_encoding_is_named():
    source = json.loads(dumps(from_gguf(small.sentencepiece_keys())))
    source["model"] |= {"byte_fallback": False, "unk_token": "<nowhere>"}
    tokenizer = Tokenizer(json.dumps(source).encode())
    assert tokenizer.encode("the dog")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: .*<nowhere>"):
        tokenizer.encode("the \U0010ffff")


def test_a_decoder_that_is_not_understood_is_refused():
    for decoder in (None, {"type": "WordPiece", "prefix": "##", "cleanup": True}, {"type": "Fuse"}):
        with pytest.raises(TokenizerError, match="decoder"):
            Tokenizer(edited(decoder=decoder))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_corrupted_files_are_refused_or_work(data):
    raw = bytearray(small.byte_level())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert isinstance(Tokenizer(bytes(raw)).encode("Hello world"), list)
    except HalfbyteError as error:
        assert "\n" not in str(error)


def test_the_compact_form_is_the_same_tokenizer():
    for raw in (small.byte_level(), dumps(from_gguf(small.sentencepiece_keys()))):
        assert library(compact(raw)).to_str() == library(raw).to_str()
        assert len(compact(raw)) <= len(raw)
    assert isinstance(json.loads(compact(small.byte_level()))["model"]["merges"][0], str)
    # Merges that a text could not tell apart, or that would be taken for a comment, stay pairs.
    for pairs in ([["a ", "b"], ["c", "d"]], [["#version", "x"]]):
        tokens = {token: i for i, token in enumerate(dict.fromkeys(part for a, b in pairs for part in (a, b, a + b)))}
        raw = edited(model={"type": "BPE", "vocab": tokens, "merges": pairs})
        assert json.loads(compact(raw))["model"]["merges"] == pairs
        assert library(compact(raw)).to_str() == library(raw).to_str()
    for raw in (b"", b"{", b"[1]", b"\xff"):
        assert compact(raw) == raw


# GGUF metadata


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
    byte_of = {c: i for i, c in enumerate(sorted(byte_characters()))}
    for text in TEXTS:
        words = [word for word, _ in cut.pre_tokenize_str(text)]
        assert all(c in byte_of for word in words for c in word)
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


def test_importing_it_brings_in_nothing_heavy():
    code = (
        "import sys, halfbyte.engine.tokenizer, halfbyte.engine.detokenizer, halfbyte.engine.template; "
        "print(sorted({'numba', 'llvmlite', 'gguf', 'jinja2', 'transformers', 'torch', 'tokenizers', 'rich'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


# Real models and real peers

MODELS = Path(os.environ.get("HALFBYTE_MODELS", Path.home() / ".cache" / "halfbyte-models"))
PEER = Path(os.environ.get("HALFBYTE_PEER", Path.home() / ".cache" / "halfbyte-peer"))
REAL = [
    ("smollm2-135m-instruct", "smollm2-135m-instruct.q4_1.gguf"),
    ("qwen2.5-coder-1.5b-instruct", "qwen2.5-coder-1.5b-instruct.q4_k_m.gguf"),
]


def real(folder, file):
    from halfbyte.formats.gguf_reader import GGUFFile

    if not (MODELS / folder / "tokenizer.json").is_file() or not (MODELS / file).is_file():
        pytest.skip(f"needs {folder} and {file} in {MODELS} (HALFBYTE_MODELS)")
    with GGUFFile(MODELS / file) as opened:
        keys = {key: opened.metadata[key] for key in opened.metadata if key.startswith("tokenizer.")}
    config = json.loads((MODELS / folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    return Tokenizer((MODELS / folder / "tokenizer.json").read_bytes(), config=config), Tokenizer(gguf=keys), keys


def normalized(text):
    """What a tokenizer.json that asks for NFC makes of a text; GGUF readers do not."""
    from unicodedata import normalize

    return normalize("NFC", text)


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "file"), REAL)
def test_real_gguf_reads_text_as_the_original_tokenizer_json(folder, file):
    original, from_file, _ = real(folder, file)
    for text in map(normalized, TEXTS):
        for special in (False, True):
            assert from_file.encode(text, special=special) == original.encode(text, special=special), text
    for name in ("bos_id", "eos_ids", "pad_id", "add_bos", "vocabulary_size", "special_ids"):
        assert getattr(from_file, name) == getattr(original, name), name


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "file"), REAL)
def test_real_tokenizer_json_gives_the_keys_of_the_gguf(folder, file):
    original, _, keys = real(folder, file)
    made = gguf_keys((MODELS / folder / "tokenizer.json").read_bytes(), original._config)
    names = "model pre tokens merges token_type bos_token_id eos_token_id padding_token_id add_bos_token"
    for key in (f"tokenizer.ggml.{name}" for name in names.split()):
        if key in keys:
            assert np.array_equal(np.asarray(made[key]), np.asarray(keys[key])), key


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "file"), REAL)
def test_real_ids_are_llama_cpps(folder, file, tmp_path):
    program = PEER / "build" / "bin" / "llama-tokenize"
    if not program.is_file():
        pytest.skip(f"needs llama.cpp's llama-tokenize at {program} (HALFBYTE_PEER)")
    _, tokenizer, _ = real(folder, file)
    different = []
    for text in filter(None, TEXTS):
        (tmp_path / "text").write_bytes(text.encode())
        # llama.cpp takes "</s>" for an end mark in any vocabulary; in Qwen's it is a token like any other.
        for special in (False, True) if "<" in text and "</s>" not in text else (False,):
            command = [program, "-m", MODELS / file, "--ids", "--no-bos", "--no-escape", "--log-disable", "-f", tmp_path / "text"]
            done = subprocess.run([*command, *([] if special else ["--no-parse-special"])], capture_output=True, check=True)
            if json.loads(done.stdout) != tokenizer.encode(text, special=special):
                different.append((text, special))
    assert not different


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "file"), REAL)
def test_real_ids_are_transformers(folder, file):
    transformers = pytest.importorskip("transformers")
    original, _, _ = real(folder, file)
    theirs = transformers.AutoTokenizer.from_pretrained(str(MODELS / folder))
    for text in TEXTS:
        assert original.encode(text, special=True) == theirs.encode(text, add_special_tokens=False), text
        ids = original.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False, split_special_tokens=True), text
        assert original.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False), text


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((PEER / "src" / "models").glob("ggml-vocab-*.gguf.inp")) or [None], ids=str)
def test_vocabularies_of_llama_cpp_give_the_originals_ids(path):
    """The .out files beside llama.cpp's test vocabularies are ids by the original tokenizers."""
    from halfbyte.formats.gguf_reader import GGUFFile

    if path is None:
        pytest.skip(f"needs llama.cpp's source at {PEER / 'src'} (HALFBYTE_PEER)")
    if not path.with_suffix("").is_file():
        pytest.skip("the vocabulary is not there")
    with GGUFFile(path.with_suffix("")) as opened:
        keys = {key: opened.metadata[key] for key in opened.metadata if key.startswith("tokenizer.")}
    if keys["tokenizer.ggml.model"] not in ("gpt2", "llama"):
        with pytest.raises(TokenizerError, match=keys["tokenizer.ggml.model"]):
            Tokenizer(gguf=keys)
        return
    tokenizer = Tokenizer(gguf=keys)
    texts = path.read_bytes().decode().split("\n__ggml_vocab_test__\n")
    expected = path.with_suffix(".out").read_text().split("\n")
    assert len(texts) > 40
    for text, ids in zip(texts, expected, strict=False):
        assert tokenizer.encode(text) == [int(i) for i in ids.split()], text
    keys = gguf_keys(tokenizer.to_json(), {**tokenizer.special_tokens, "add_bos_token": tokenizer.add_bos})
    again = Tokenizer(gguf=keys)
    assert all(again.encode(text) == tokenizer.encode(text) for text in texts)
