"""Streaming: what comes out, joined, is the full decode; characters come whole and at once."""

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from halfbyte.engine.text.detokenizer import Detokenizer
from halfbyte.engine.text.tokenizer import Tokenizer
from support import small_tokenizers as small

BYTE_LEVEL = Tokenizer(small.byte_level())
SPM = Tokenizer(gguf=small.sentencepiece_keys())
BARE_SPM = Tokenizer(gguf=small.sentencepiece_keys(**{"tokenizer.ggml.add_space_prefix": False}))
BOTH = [BYTE_LEVEL, SPM, BARE_SPM]
NAMES = ["byte-level", "sentencepiece", "sentencepiece without space"]


def pieces(tokenizer, ids, **options):
    detokenizer = Detokenizer(tokenizer, **options)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


@pytest.mark.parametrize("tokenizer", BOTH, ids=NAMES)
@pytest.mark.parametrize("skip_special", [True, False])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_pieces_join_to_the_full_decode(tokenizer, skip_special, data):
    # Ids of single bytes and of special tokens more often than chance would have them, and one that is no token.
    ids = st.integers(0, 300) | st.integers(0, tokenizer.vocabulary_size) | st.sampled_from(sorted(tokenizer.special_ids))
    chosen = data.draw(st.lists(ids, max_size=20))
    made = pieces(tokenizer, chosen, skip_special=skip_special)
    assert "".join(made) == tokenizer.decode(chosen, skip_special=skip_special)


@pytest.mark.parametrize("tokenizer", BOTH, ids=NAMES)
@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40))
@example("👩‍👩‍👧‍👦 naïve €")
def test_text_streams_in_whole_characters_as_early_as_possible(tokenizer, text):
    ids = tokenizer.encode(text)
    text = text if tokenizer is BYTE_LEVEL else text.replace("\u2581", " ")
    detokenizer = Detokenizer(tokenizer)
    given_out, bytes_seen = "", b""
    for id in ids:
        given_out += detokenizer.push(id)
        bytes_seen += tokenizer.token_bytes(id)
        certain = bytes_seen.decode("utf-8", "ignore")  # drops the bytes of a character that is not whole yet
        assert given_out == (certain.removeprefix(" ") if tokenizer.strips_space else certain)
    assert detokenizer.finish() == "" and given_out == text


def test_a_character_over_several_tokens_is_held_back():
    ids = BYTE_LEVEL.encode("€")
    assert len(ids) == 3
    assert pieces(BYTE_LEVEL, ids) == ["", "", "€", ""]
    assert pieces(BYTE_LEVEL, ids[:2]) == ["", "", "\ufffd"], "what never became whole comes out at the end"
    assert pieces(BYTE_LEVEL, [ids[0], *ids]) == ["", "\ufffd", "", "€", ""], "what cannot become whole comes out at once"
    assert pieces(BYTE_LEVEL, [ids[1]]) == ["\ufffd", ""]


def test_special_tokens_are_skipped_or_shown():
    end = BYTE_LEVEL.id("<|im_end|>")
    ids = [*BYTE_LEVEL.encode("Hi"), end, *BYTE_LEVEL.encode(" you")]
    assert "".join(pieces(BYTE_LEVEL, ids)) == "Hi you"
    assert "".join(pieces(BYTE_LEVEL, ids, skip_special=False)) == "Hi<|im_end|> you"
    euro = BYTE_LEVEL.encode("€")
    assert "".join(pieces(BYTE_LEVEL, [euro[0], end, *euro[1:]])) == "€"
    assert "".join(pieces(BYTE_LEVEL, [euro[0], end], skip_special=False)) == "\ufffd<|im_end|>"
    assert pieces(BYTE_LEVEL, [BYTE_LEVEL.id("<tool_call>")]) == ["<tool_call>", ""], "added, but not special"


def test_the_space_that_sentencepiece_puts_first():
    ids = SPM.encode("the dog")
    assert SPM.token(ids[0]) == "▁the"
    assert "".join(pieces(SPM, ids)) == "the dog"
    assert "".join(pieces(SPM, ids, continues=True)) == " the dog", "after a text of its own the space belongs there"
    assert "".join(pieces(SPM, [1, *ids])) == "the dog"
    assert "".join(pieces(SPM, SPM.encode("  two"))) == "  two"
    assert "".join(pieces(BARE_SPM, BARE_SPM.encode(" the"))) == " the"


def test_a_token_costs_the_same_however_long_the_text_is():
    ids = BYTE_LEVEL.encode("The quick brown fox €. ")
    detokenizer = Detokenizer(BYTE_LEVEL)

    def seconds(count):
        start = time.perf_counter()
        for _ in range(count):
            for id in ids:
                detokenizer.push(id)
        return time.perf_counter() - start

    early = min(seconds(100) for _ in range(5))
    seconds(20000)
    late = min(seconds(100) for _ in range(5))
    assert late < 5 * early
