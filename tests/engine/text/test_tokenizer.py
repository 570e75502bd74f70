"""Tokenizers: ids equal to the libraries', special tokens only where asked for, broken files refused."""

import json
import subprocess
import sys
import threading

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.engine.text.tokenizer import Tokenizer, TokenizerError
from halfbyte.formats.tokenizer.from_gguf import compact, dumps, from_gguf
from halfbyte.formats.tokenizer.to_gguf import gguf_keys
from halfbyte.quant.errors import HalfbyteError
from support import DATA
from support import small_tokenizers as small

FOLDER = DATA / "tokenizers"
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


def test_importing_it_brings_in_nothing_heavy():
    code = (
        "import sys, halfbyte.engine.text.tokenizer, halfbyte.engine.text.detokenizer, halfbyte.engine.text.template; "
        "print(sorted({'numba', 'llvmlite', 'gguf', 'jinja2', 'transformers', 'torch', 'tokenizers', 'rich'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
