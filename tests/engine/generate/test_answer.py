"""The loop from a prompt to an answer, with a model that recites a script."""

import gc
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.engine.generate import answer as answering
from halfbyte.engine.generate.answer import Answer, Piece, PromptError
from halfbyte.engine.generate.kept_sequence import KeptSequence, common_prefix
from halfbyte.engine.generate.params import SamplingError, SamplingParams
from halfbyte.engine.generate.sampler import LogitsError, Sampled
from support import fakes

FakeEngine, EOS, MARK = fakes.FakeEngine, fakes.EOS, fakes.MARK

PROMPT = list(b"Hi")


def run(engine, prompt=PROMPT, **params):
    pieces = list(Answer(engine, prompt, SamplingParams(**params)))
    assert not engine.open, "the sequence was not freed"
    assert [p.finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 1)
    return "".join(p.text for p in pieces), [i for p in pieces for i in p.ids], pieces[-1].finish_reason


def test_an_answer_until_the_end_of_text():
    engine = FakeEngine("Hello, world")
    assert run(engine) == ("Hello, world", list(b"Hello, world"), "stop")
    assert engine.fed[0][0] == PROMPT and engine.prompts == [b"Hi"]
    assert engine.fed[0][1:] == [[b] for b in b"Hello, world"]


def test_text_comes_as_it_is_made():
    engine = FakeEngine("abc")
    pieces = Answer(engine, PROMPT)
    assert next(pieces) == Piece("a", (97,), None, None)
    assert len(engine.fed[0]) == 1, "one step per piece, none ahead"
    assert next(pieces).text == "b"


def test_a_character_of_several_tokens_is_held_back_until_whole():
    engine = FakeEngine("é€😀")
    pieces = list(Answer(engine, PROMPT))
    assert [p.text for p in pieces] == ["", "é", "", "", "€", "", "", "", "😀", ""]
    assert "".join(p.text for p in pieces) == "é€😀"


def test_a_character_that_stays_broken_is_shown_at_the_end():
    assert run(FakeEngine([0x41, 0xE2, 0x82]))[0] == "A\ufffd"
    assert run(FakeEngine("x€"), max_tokens=2) == ("x\ufffd", [0x78, 0xE2], "length")


@pytest.mark.parametrize("limit, text", [(1, "H"), (3, "Hel"), (5, "Hello"), (6, "Hello")])
def test_max_tokens(limit, text):
    assert run(FakeEngine("Hello"), max_tokens=limit) == (text, list(text.encode()), "stop" if limit > 5 else "length")


def test_max_tokens_zero_runs_nothing():
    engine = FakeEngine("Hello")
    assert run(engine, max_tokens=0) == ("", [], "length")
    assert engine.fed == []


def test_max_tokens_beyond_the_context_is_the_context():
    assert run(FakeEngine("Hello", context=5), max_tokens=10**9) == ("Hel", list(b"Hel"), "length")


def test_a_context_that_fills_ends_with_length():
    engine = FakeEngine("Hello, world", context=9)
    assert run(engine) == ("Hello, ", list(b"Hello, "), "length")
    assert sum(map(len, engine.fed[0])) < 9, "the last token needs no place in the cache"


def test_a_prompt_that_fills_the_context_exactly():
    engine = FakeEngine("Hello", context=2)
    assert run(engine) == ("", [], "length")
    assert engine.fed == []


def test_a_prompt_longer_than_the_context_is_an_error_with_both_numbers():
    engine = FakeEngine("Hello", context=8)
    with pytest.raises(PromptError, match=r"9 tokens.*holds 8"):
        Answer(engine, [65] * 9)  # at once, not at the first piece
    assert engine.fed == []


def test_an_empty_prompt_is_an_error():
    with pytest.raises(PromptError, match="empty"):
        Answer(FakeEngine("Hello"), [])


def test_long_prompts_go_in_chunks(monkeypatch):
    monkeypatch.setattr(answering, "CHUNK", 4)
    engine, calls = FakeEngine("Hello"), []
    pieces = Answer(engine, [65] * 10, progress=lambda done, total: calls.append((done, total)))
    assert "".join(p.text for p in pieces) == "Hello"
    assert [len(ids) for ids in engine.fed[0][:3]] == [4, 4, 2]
    assert calls == [(0, 10), (4, 10), (8, 10)]


# --- ends -----------------------------------------------------------------------------------------------------------------------


def test_stop_ids_end_like_the_end_of_text():
    assert run(FakeEngine("Hello"), stop_ids=[ord("l")]) == ("He", list(b"He"), "stop")


def test_ignore_eos_goes_on_and_shows_no_special_token():
    engine = FakeEngine([65, EOS, 66, MARK, 67])
    assert run(engine, ignore_eos=True, max_tokens=5) == ("ABC", [65, EOS, 66, MARK, 67], "length")
    assert run(engine, ignore_eos=True, stop_ids=[EOS]) == ("A", [65], "stop")


def test_a_stop_string_over_several_tokens():
    text, ids, reason = run(FakeEngine("one</s>two"), stop=["</s>"])
    assert (text, reason) == ("one", "stop")
    assert ids == list(b"one</s>"), "ids are what the model said"


def test_nothing_held_back_is_lost_at_the_end():
    assert run(FakeEngine("one</"), stop=["</s>"]) == ("one</", list(b"one</"), "stop")
    assert run(FakeEngine("one</s>"), stop=["</s>"], max_tokens=5) == ("one</", list(b"one</"), "length")
    assert run(FakeEngine("one</s>"), stop=["</s>"], max_tokens=7) == ("one", list(b"one</s>"), "stop")


def test_a_stop_string_that_is_complete_only_when_the_detokenizer_ends():
    """The last bytes become U+FFFD at the end; a stop string may be waiting for just that."""
    assert run(FakeEngine([0x41, 0x42, 0xE2]), stop=["B\ufffd"])[0::2] == ("A", "stop")


def test_the_state_says_what_ended_it():
    for params, matched in (({}, EOS), ({"stop": ["l"]}, "l"), ({"stop_ids": [108]}, 108), ({"max_tokens": 2}, None)):
        engine = FakeEngine("Hello")
        answer = Answer(engine, PROMPT, SamplingParams(**params))
        list(answer)
        assert answer.matched == matched
        assert answer.feed == []


@settings(max_examples=150, deadline=None)
@given(
    st.text(st.sampled_from("ab<>é😀\n"), max_size=14),
    st.lists(st.text(st.sampled_from("ab<>é😀\n"), min_size=1, max_size=3), max_size=3),
    st.none() | st.integers(0, 20),
)
def test_streamed_pieces_are_the_text_cut_at_the_first_stop(script, stops, limit):
    text, ids, reason = run(FakeEngine(script), stop=stops, max_tokens=limit)
    data = script.encode()
    for n in range((len(data) if limit is None else min(limit, len(data))) + 1):  # after each token: is a stop string complete?
        said = data[:n].decode("utf-8", "ignore")
        ends = [said[:end].endswith(stop) for end in range(len(said) + 1) for stop in stops]
        if any(ends):
            end = next(end for end in range(len(said) + 1) if any(said[:end].endswith(stop) for stop in stops))
            longest = max((stop for stop in stops if said[:end].endswith(stop)), key=len)
            assert (text, ids, reason) == (said[: end - len(longest)], list(data[:n]), "stop")
            return
    whole = data if limit is None else data[:limit]
    expected = whole.decode("utf-8", "ignore")
    broken = whole[len(expected.encode()) :]
    assert text == expected + ("\ufffd" if broken else "")
    assert reason == ("length" if limit is not None and limit <= len(data) else "stop")


def test_the_first_space_belongs_to_an_answer_that_continues_a_text():
    engine = FakeEngine(" Paris")
    engine.tokenizer.strips_space = True
    assert "".join(p.text for p in Answer(engine, PROMPT)) == "Paris"
    assert "".join(p.text for p in Answer(engine, PROMPT, continues=True)) == " Paris"


# --- what else ------------------------------------------------------------------------------------------------------------------


def test_logprobs_belong_to_the_tokens():
    pieces = list(Answer(FakeEngine("ab"), PROMPT, SamplingParams(logprobs=2)))
    assert [len(p.logprobs or ()) for p in pieces] == [1, 1, 0]
    first = pieces[0].logprobs[0]
    assert first.id == 97 and first.top[0] == (97, first.logprob) and len(first.top) == 2
    assert first.logprob == pytest.approx(-math.log1p((fakes.VOCABULARY - 1) * math.exp(-20)), abs=1e-6)
    assert all(p.logprobs is None for p in Answer(FakeEngine("ab"), PROMPT))


def test_same_seed_same_text_and_unset_seeds_differ():
    def text(**params):
        return run(FakeEngine("a" * 40, noise=3.0), temperature=8.0, max_tokens=40, ignore_eos=True, **params)[1]

    assert text(seed=1) == text(seed=1) != text(seed=2)
    assert text() != text()


def test_penalties_see_the_prompt_and_the_answer():
    engine = FakeEngine("aaaa")
    assert run(engine, max_tokens=4, presence_penalty=50.0)[1][:2] == [97, 0]  # "a" once, then the lowest of the equal others
    # "H" is in the prompt: its logit falls from 10 to 1, and the model, biased towards "x" by 12 (-10 + 12 = 2), says that
    assert run(FakeEngine("H"), max_tokens=1, repetition_penalty=10.0, logit_bias={120: 12.0})[1] == [120]
    assert run(FakeEngine("j"), max_tokens=1, repetition_penalty=10.0, logit_bias={120: 12.0})[1] == [ord("j")]


def test_many_answers_in_one_loop_give_what_each_gives_alone():
    """What a server does: one step for all, whatever each of them needs next."""
    scripts = ["first answer", "2nd", "the third one"]
    engines = [FakeEngine(script) for script in scripts]
    states = [Answer(e, PROMPT, SamplingParams(stop=["answer"])) for e in engines]
    sequences = [e.open_sequence() for e in engines]
    texts = ["", "", ""]
    while any(state.finish_reason is None for state in states):
        for i, state in enumerate(states):
            if state.finish_reason is None:
                texts[i] += state.push(engines[i].sample_next(sequences[i], state.feed, state.sampler)).text
    assert texts == ["first ", "2nd", "the third one"]
    with pytest.raises(RuntimeError, match="over"):
        states[0].push(Sampled(0, None, None))


def test_a_kept_sequence_computes_only_what_is_new():
    engine = FakeEngine("one", "two", "six", "ten", context=200)
    kept = KeptSequence(engine)

    def answer(prompt):
        return "".join(p.text for p in Answer(engine, list(prompt), kept=kept))

    assert answer(b"first?") == "one" and kept.reused == 0
    assert answer(b"first?one, second?") == "two" and kept.reused == len(b"first?one")  # goes on
    assert answer(b"first?one, third?") == "six" and kept.reused == len(b"first?one, ")  # branches off
    assert answer(b"first?one") == "ten" and kept.reused == len(b"first?on")  # a beginning of it: one token is fed
    assert engine.prompts == [b"first?", b"first?one, second?", b"first?one, third?", b"first?one"]
    assert [feeds[0] for feeds in engine.fed] == [list(b"first?"), list(b", second?"), list(b"third?"), list(b"e")]
    assert len(engine.open) == 1
    kept.close()
    kept.close()
    assert not engine.open


def test_a_kept_sequence_forgets_all_after_an_error_in_a_step():
    engine = FakeEngine("one", "two", context=200)
    kept = KeptSequence(engine)

    def answer(prompt):
        return "".join(p.text for p in Answer(engine, list(prompt), kept=kept))

    def fail(sequence, ids):
        if ids == [110]:
            raise MemoryError

    engine.hook = fail
    with pytest.raises(MemoryError):
        answer(b"first?")
    assert not engine.open
    engine.hook = None
    assert answer(b"first?") == "two" and kept.reused == 0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_common_prefix(a, b):
    n = common_prefix(a, b)
    assert a[:n] == b[:n] and (n == min(len(a), len(b)) or a[n] != b[n])


def test_closing_frees_the_sequence():
    engine = FakeEngine("Hello")
    pieces = Answer(engine, PROMPT)
    next(pieces)
    assert engine.open
    pieces.close()
    assert not engine.open


def test_dropping_frees_the_sequence():
    engine = FakeEngine("Hello")
    pieces = Answer(engine, PROMPT)
    next(pieces)
    del pieces
    gc.collect()
    assert not engine.open


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, LogitsError("no")])
def test_an_error_in_a_step_frees_the_sequence(error):
    engine = FakeEngine("Hello")

    def fail(sequence, ids):
        if ids == [101]:
            raise error

    engine.hook = fail
    with pytest.raises(error if isinstance(error, type) else type(error)):
        list(Answer(engine, PROMPT))
    assert not engine.open


def test_progress_may_end_it(monkeypatch):
    monkeypatch.setattr(answering, "CHUNK", 4)
    engine = FakeEngine("Hello")

    def progress(done, total):
        if done >= 4:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        list(Answer(engine, [65] * 12, progress=progress))
    assert not engine.open and len(engine.fed[0]) == 1


def test_a_bias_outside_the_vocabulary_is_named():
    engine = FakeEngine("Hello")
    with pytest.raises(SamplingError, match="logit_bias"):
        list(Answer(engine, PROMPT, SamplingParams(logit_bias={10**6: 1.0})))
    assert not engine.open
