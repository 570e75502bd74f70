"""Tokenizers from the cache folder: the same answers as the whole tokenizer's, and no answers from files that are not sound."""

import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from halfbyte.engine.text import reduced_tokenizer as tokenizer_reduced
from halfbyte.engine.text import token_table as tokenizer_cache
from halfbyte.engine.text.reduced_tokenizer import ReducedTokenizer
from halfbyte.engine.text.token_table import TokenTable, Unfit, make_table
from halfbyte.engine.text.tokenizer import Tokenizer, TokenizerError
from halfbyte.formats.tokenizer.from_gguf import from_gguf
from halfbyte.formats.tokenizer.pretokenizers import LLAMA3
from support import DATA, ROOT, TESTS
from support import small_tokenizers as small

FOLDER = DATA / "tokenizers"
TEXTS = [*small.TEXTS.TEXTS, *small.TEXTS.LONE_SURROGATES]


# Tokenizers of all kinds that checkpoints have


def trained(normalizer=None, pre_tokenizer=None, size=900, added=(), **model):
    """A byte-level BPE tokenizer in the manner of GPT-2 and its heirs."""
    tokenizer = tokenizers.Tokenizer(models.BPE(**model))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(small.TEXTS.CORPUS.split("\n"), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<|begin|>", "<|end|>", "\u3000")])
    tokenizer.add_tokens([AddedToken(token, normalized=True) for token in ("<tool>", "\xe9t\xe9", "Z")])
    return tokenizer


def words(pattern):
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def llama3():
    source = json.loads(trained(None, words(LLAMA3), ignore_merges=True).to_str())
    vocabulary = source["model"]["vocab"]
    for token in ("\u0120entirely", "whole", "<|end|>x"):  # no merge leads to them; ignore_merges finds them
        vocabulary[token] = len(vocabulary)
    added = [token for token in source["added_tokens"] if token["content"] not in vocabulary]
    for i, token in enumerate(added):
        token["id"] = len(vocabulary) + i
    begin = added[0]
    first = {"SpecialToken": {"id": begin["content"], "type_id": 0}}
    one, two = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    source["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, one],
        "pair": [first, one, first, two],
        "special_tokens": {begin["content"]: {"id": begin["content"], "ids": [begin["id"]], "tokens": [begin["content"]]}},
    }
    return json.dumps(source).encode()


def sentencepiece(**model):
    source = from_gguf(small.sentencepiece_keys())
    return json.dumps({**source, "model": {**source["model"], **model}}).encode()


def metaspace():
    """In the manner of Mistral's later files: Metaspace splits, and the first piece alone gets a space in front."""
    source = json.loads(sentencepiece())
    space = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": True}
    return json.dumps({**source, "normalizer": None, "pre_tokenizer": space}).encode()


def without_bytes():
    """Characters that are no tokens become the unknown token, several in a row one."""
    return sentencepiece(byte_fallback=False)


def with_gaps():
    """Ids with gaps between them."""
    source = json.loads(small.byte_level())
    vocabulary = source["model"]["vocab"]
    moved = {token: id if id < 300 else id + 40 for token, id in vocabulary.items()}
    added = [{**token, "id": 1500 + i} for i, token in enumerate(source["added_tokens"])]
    moved |= {token["content"]: token["id"] for token in added}
    return json.dumps({**source, "added_tokens": added, "model": {**source["model"], "vocab": moved}}).encode()


DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
KINDS = {
    "qwen2": small.byte_level,
    "gpt2": lambda: trained(continuing_subword_prefix="", end_of_word_suffix="").to_str().encode(),
    "smollm": lambda: trained(None, DIGITS).to_str().encode(),
    "nfc": lambda: trained(normalizers.NFC()).to_str().encode(),
    "roberta": lambda: trained(normalizers.NFKC(), pre_tokenizers.ByteLevel(add_prefix_space=True)).to_str().encode(),
    "llama3": llama3,
    "gaps": with_gaps,
    "sentencepiece": sentencepiece,
    "metaspace": metaspace,
    "unknown": without_bytes,
    "unknown apart": lambda: sentencepiece(byte_fallback=False, fuse_unk=False),
}


@pytest.fixture(scope="module", params=KINDS)
def pair(request):
    """(the whole tokenizer, one from its table)"""
    whole = Tokenizer(KINDS[request.param]())
    return whole, reduced(whole)


def reduced(whole):
    made = Tokenizer(whole._json)
    made._load(ReducedTokenizer(table_of(whole)))
    return made


def table_of(whole):
    return TokenTable(*make_table(whole._source.library))


def same(pair, text):
    whole, made = pair
    made._source._left = tokenizer_reduced.MOST
    for special in (False, True):
        for bos in (False, True):
            assert made.encode(text, special=special, bos=bos) == whole.encode(text, special=special, bos=bos), (text, special, bos)
    assert isinstance(made._source, ReducedTokenizer)


# The same ids


def test_texts(pair):
    for text in TEXTS:
        same(pair, text)
        same(pair, text + "<|end|>" + text + " <tool> <|im_end|><s>")


def test_prose_and_code(pair):
    text = "\n".join(path.read_text(encoding="utf-8") for path in [Path(__file__), TESTS / "support" / "texts.py", FOLDER / "make.py"])
    for start in range(0, len(text), 997):
        same(pair, text[start : start + 1 + start % 1500])


PIECES = [
    "the", " the", "\u0120", "\u2581", "<0x0A>", "\n", " ", "   ", "\t", "\0", "a", "Z", "\xe9", "e\u0301", "\u3000", "\u4e2d",
    "\U0001f680", "12", "'s", "<|end|>", "<|begin|>", "<tool", "<tool>", "whole", "entirely", "<unk>", "<s>", "ing", "\r\n", "==", "\ud800",
]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=24).map("".join)))
def test_any_text(pair, text):
    same(pair, text)


def test_every_token_alone_and_beside_another(pair):
    whole, _ = pair
    spelled = [token for token in map(whole.token, range(6000)) if token is not None]
    for at in range(0, len(spelled), 7):
        same(pair, "".join(spelled[at : at + 2]) + " " + spelled[at])
        text = b"".join(whole.token_bytes(id) for id in range(at, at + 3)).decode("utf-8", "replace")
        same(pair, text)


def test_a_long_word_and_its_longest_tokens(pair):
    whole, _ = pair
    longest = max((token for token in map(whole.token, range(6000)) if token is not None), key=len)
    same(pair, longest * 50)
    same(pair, "the" * 1000)
    same(pair, " " * 999)


def test_what_is_known_about_tokens(pair):
    whole, made = pair
    for id in range(-3, 6000):
        assert made.token(id) == whole.token(id) and made.token_bytes(id) == whole.token_bytes(id)
        token = whole.token(id)
        if token is not None:
            assert made.id(token) == whole.id(token) == id
            assert made.strips_around(id) == whole.strips_around(id)
    for token in ("", "no such token", "<|im_end|>", "\ud800", "x" * 5000):
        assert made.id(token) == whole.id(token)
    assert made.token(1 << 40) is made.token(10**6) is None
    for name in ("vocabulary_size", "bos_id", "eos_ids", "add_bos", "special_ids", "special_tokens", "strips_space"):
        assert getattr(made, name) == getattr(whole, name), name
    assert sorted(made.special_tokens_text()) == sorted(whole.special_tokens_text())
    assert made.to_json() == whole.to_json()
    assert made.decode(range(0, 900, 3)) == whole.decode(range(0, 900, 3))


def test_bos_comes_from_the_post_processor():
    whole = Tokenizer(llama3(), config={"bos_token": "<|begin|>"})
    made = Tokenizer(llama3(), config={"bos_token": "<|begin|>"})
    made._load(ReducedTokenizer(table_of(whole)))
    assert made.add_bos and made.bos_id is not None
    assert made.encode("x", bos=True) == whole.encode("x", bos=True) == [made.bos_id, *made.encode("x")]


def test_characters_that_are_dropped_make_neighbours_of_others():
    whole = Tokenizer(sentencepiece(byte_fallback=False, unk_token=None))
    made = reduced(whole)
    assert made.encode("the dog") == whole.encode("the dog") and isinstance(made._source, ReducedTokenizer)
    assert "\u2581th" in map(whole.token, whole.encode("t\U0010ffffh")), "the test needs tokens that join over the gap"
    assert made.encode("t\U0010ffffh") == whole.encode("t\U0010ffffh")


def test_errors_while_encoding_are_the_same():
    raw = sentencepiece(byte_fallback=False, unk_token="<nowhere>")
    whole = Tokenizer(raw)
    for tokenizer in (whole, reduced(whole)):
        assert tokenizer.encode("the dog") == whole.encode("the dog")
        with pytest.raises(TokenizerError, match="<nowhere>"):
            tokenizer.encode("the \U0010ffff")


# What no table holds


def unfit(**parts):
    source = json.loads(small.byte_level())
    return json.dumps({**source, "model": {**source["model"], **parts}}).encode()


def twice():
    vocabulary = json.loads(small.byte_level())["model"]["vocab"]
    return unfit(vocab={**vocabulary, "twice": 5})


def far():
    vocabulary = json.loads(small.byte_level())["model"]["vocab"]
    return unfit(vocab={**vocabulary, "far": 4_000_000_000})


def byte_merge():
    """A merge of bytes that stand for a character which is no token: what it makes is no part of the text."""
    source = json.loads(sentencepiece())
    model = source["model"]
    model["vocab"]["<0xF4><0x8F>"] = 9000
    model["merges"].append(["<0xF4>", "<0x8F>"])
    return json.dumps(source).encode()


@pytest.mark.parametrize(
    "raw",
    [
        unfit(end_of_word_suffix="</w>", merges=[]),
        unfit(dropout=0.1),
        unfit(vocab={"": 0, "a": 1}, merges=[]),
        twice(),
        far(),
        byte_merge(),
    ],
)
def test_tokenizers_that_no_table_holds_work_without(raw, monkeypatch, tmp_path):
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path))
    library = tokenizers.Tokenizer.from_str(raw.decode())
    with pytest.raises(Unfit):
        make_table(library)
    later = Tokenizer(raw, wait=False)
    assert later.token(1) == library.id_to_token(1) and not list(tmp_path.rglob("*.bin"))


def test_the_byte_merge_would_have_been_missed():
    whole = Tokenizer(byte_merge())
    assert 9000 in whole.encode("\U0010ffff")


def test_a_model_that_is_no_bpe():
    library = tokenizers.Tokenizer(models.Unigram([("a", 0.0), ("<unk>", 0.0)], 1))
    with pytest.raises(Unfit):
        make_table(library)


def test_tokens_of_one_hash_are_told_apart():
    with pytest.raises(Unfit):
        tokenizer_cache._find_arrays([b"ab", b"cd", b"ab"])


# The file


@pytest.fixture(autouse=True)
def small_tokenizers_too(monkeypatch):
    monkeypatch.setattr(tokenizer_cache, "LEAST_BYTES", 0)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenizers"


RAW = small.byte_level()


def kind():
    """What a tokenizer is made from now."""
    later = Tokenizer(RAW, wait=False)
    assert later.encode("Hello <|im_end|> world", special=True) == Tokenizer(RAW).encode("Hello <|im_end|> world", special=True)
    return type(later._source).__name__


def only(folder):
    [path] = folder.iterdir()
    return path


def test_the_second_start_uses_the_table(cache):
    assert kind() == "_Library" and kind() == "ReducedTokenizer"
    if os.name == "posix":
        assert only(cache).stat().st_mode & 0o777 == 0o600


def test_damage_is_noticed_wherever_it_is(cache):
    kind()
    path = only(cache)
    good = path.read_bytes()
    for at in [*range(0, 40, 3), *range(40, len(good), len(good) // 50), len(good) - 1]:
        path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        assert kind() == "_Library", at
        assert path.read_bytes() == good, "written anew"
    for damaged in (b"", good[:10], good[:-1], good + b"\0"):
        path.write_bytes(damaged)
        assert kind() == "_Library" and path.read_bytes() == good


def test_a_table_serves_only_the_tokenizer_that_it_was_made_from(cache):
    """A file may have the checksum and the length of another; the bytes decide."""
    kind()
    path = only(cache)
    other = RAW.replace(b'"version":"1.0"', b'"version": "1.0"')
    assert other != RAW
    path.rename(tokenizer_cache._path(other))
    assert tokenizer_cache.open_table(other) is None
    tokenizer_cache._path(other).rename(path)
    assert tokenizer_cache.open_table(RAW) is not None


def test_a_small_tokenizer_needs_no_table(cache, monkeypatch):
    monkeypatch.setattr(tokenizer_cache, "LEAST_BYTES", len(RAW) + 1)
    assert kind() == kind() == "_Library" and not cache.exists()


def test_no_cache_folder(monkeypatch):
    monkeypatch.setenv("HALFBYTE_CACHE", "")
    assert kind() == kind() == "_Library"


def test_a_cache_folder_that_cannot_be_made(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "file"))
    assert kind() == kind() == "_Library"


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")
def test_a_file_that_others_can_write_is_not_read(cache):
    kind()
    only(cache).chmod(0o666)
    assert kind() == "_Library", "and it is replaced by one of our own"
    assert kind() == "ReducedTokenizer"


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")
def test_a_wide_umask_does_not_spoil_the_cache(cache):
    before = os.umask(0)
    try:
        assert kind() == "_Library" and kind() == "ReducedTokenizer"
    finally:
        os.umask(before)


def test_the_folder_does_not_grow_for_ever(cache, monkeypatch):
    monkeypatch.setattr(tokenizer_cache, "MOST_FILES", 3)
    raws = [RAW + b" " * i for i in range(6)]
    for i, raw in enumerate(raws):
        Tokenizer(raw, wait=False).ready()
        os.utime(tokenizer_cache._path(raw), (i, i))
    assert {path.name for path in cache.iterdir()} == {tokenizer_cache._path(raw).name for raw in raws[-3:]}


def test_a_long_text_builds_the_whole_tokenizer(cache):
    kind()
    later = Tokenizer(RAW, wait=False)
    text = "All the world's a stage. " * (tokenizer_reduced.MOST // 25)
    assert len(text) > tokenizer_reduced.MOST - 25
    whole = Tokenizer(RAW)
    assert later.encode(text) == whole.encode(text) and isinstance(later._source, ReducedTokenizer)
    assert later.encode(text) == whole.encode(text) and not isinstance(later._source, ReducedTokenizer), "the texts together are long"
    assert later.encode("Hello") == whole.encode("Hello")


def test_threads(cache):
    kind()
    later, whole = Tokenizer(RAW, wait=False), Tokenizer(RAW)
    texts = [text for text in TEXTS if text.isprintable()] * 3
    wanted = [[whole.encode(text, special=special) for text in texts] for special in (False, True)]
    wrong = []

    def work(special):
        for text, ids in zip(texts, wanted[special], strict=True):
            if later.encode(text, special=bool(special)) != ids:
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# Real tokenizers

MODELS = Path(os.environ.get("HALFBYTE_MODELS", Path.home() / ".cache" / "halfbyte-models"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "qwen2.5-coder-1.5b-instruct"])
def test_real_tokenizers(name):
    path = MODELS / name / "tokenizer.json"
    if not path.is_file():
        pytest.skip(f"needs {path} (HALFBYTE_MODELS)")
    whole = Tokenizer(path.read_bytes())
    both = whole, reduced(whole)
    source = both[1]._source
    sources = [*sorted(TESTS.rglob("*.py")), *sorted(ROOT.glob("docs/*.md")), *sorted(Path(np.__file__).parent.glob("lib/*.py"))]
    random = np.random.default_rng(1)
    for path in sources:
        text = path.read_text(encoding="utf-8")
        for start in random.integers(0, max(len(text), 1), 24):
            same(both, text[start : start + int(random.integers(1, 1200))])
    for _ in range(1000):
        same(both, whole.decode(random.integers(0, whole.vocabulary_size, 12), skip_special=False).replace("\ufffd", ""))
    # SmolLM2's vocabulary lacks some bytes.
    odd = ["".join(map(chr, random.integers(0, 0xD800, 20))) + chr(random.integers(0x1F000, 0x1FAFF)) for _ in range(1000)]
    for text in [*TEXTS, *odd]:
        for special in (False, True):
            assert both[1].encode(text, special=special) == whole.encode(text, special=special), (text, special)
        both[1]._source, source._left = source, tokenizer_reduced.MOST
