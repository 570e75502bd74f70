"""The sampler against plain definitions written out here, and against statistics."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.engine.generate.params import SamplingError, SamplingParams
from halfbyte.engine.generate.sampler import LogitsError, Sampler
from halfbyte.quant.errors import HalfbyteError


def logits_of(*values):
    return np.array(values, np.float32)


def support(params, logits, draws=300, history=(), prompt_length=0):
    """Ids that come up in many draws."""
    logits = np.asarray(logits, np.float32)
    return {
        Sampler(SamplingParams(seed=seed, **params)).sample(logits, list(history), prompt_length).id for seed in range(draws)
    }


def softmax(x):
    e = np.exp(np.asarray(x, np.float64) - np.max(x))
    return e / e.sum()


# --- greedy ---------------------------------------------------------------------------------------------------------------------


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals():
    assert Sampler(SamplingParams()).sample(logits_of(0, 3, 1, 3)).id == 1
    assert Sampler(SamplingParams()).sample(logits_of(5, 3, 1, 5)).id == 0
    assert Sampler(SamplingParams()).sample(logits_of(-math.inf, -7, -math.inf)).id == 1


def test_greedy_gives_no_logprobs_unless_asked():
    assert Sampler(SamplingParams()).sample(logits_of(0, 1)) == (1, None, None)


def test_logits_are_left_as_they_were():
    logits = np.linspace(-3, 3, 50, dtype=np.float32)
    kept = logits.copy()
    params = SamplingParams(
        temperature=0.7, top_k=9, top_p=0.9, min_p=0.1, repetition_penalty=1.3, presence_penalty=1, logit_bias={3: 4}, logprobs=3
    )
    Sampler(params).sample(logits, [1, 2, 3], 1)
    assert np.array_equal(logits, kept)


def test_read_only_logits_are_enough():
    logits = np.linspace(-3, 3, 50, dtype=np.float32)
    logits.flags.writeable = False
    Sampler(SamplingParams(temperature=1, top_k=5, repetition_penalty=1.1, logprobs=2)).sample(logits, [1], 0)


# --- bias and penalties ---------------------------------------------------------------------------------------------------------


def test_bias_adds_and_bans():
    assert Sampler(SamplingParams(logit_bias={0: 2.5})).sample(logits_of(1, 3)).id == 0
    assert Sampler(SamplingParams(logit_bias={1: -math.inf})).sample(logits_of(1, 3)).id == 0


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_once():
    sampler = Sampler(SamplingParams(repetition_penalty=2.0))
    assert sampler.sample(logits_of(3, 1.6, -9), [0, 0, 0], 3).id == 1  # 3 / 2 = 1.5 < 1.6, however often it occurs
    assert sampler.sample(logits_of(3, 1.4, -9), [0, 0, 0], 3).id == 0
    assert sampler.sample(logits_of(-1, -1.9, -9), [0], 0).id == 1  # -1 * 2 = -2 < -1.9
    assert sampler.sample(logits_of(-1, -2.1, -9), [0], 0).id == 0


def test_repetition_window_forgets():
    sampler = Sampler(SamplingParams(repetition_penalty=2.0, repetition_window=2))
    assert sampler.sample(logits_of(3, 1.6, -9), [0, 2, 2], 3).id == 0
    assert sampler.sample(logits_of(3, 1.6, -9), [2, 0, 2], 3).id == 1


def test_frequency_and_presence_count_the_answer_only():
    frequency = Sampler(SamplingParams(frequency_penalty=0.5))
    assert frequency.sample(logits_of(3, 2.2), [0, 0, 0], 3).id == 0  # all in the prompt
    assert frequency.sample(logits_of(3, 2.2), [1, 0], 1).id == 0  # 3 - 0.5
    assert frequency.sample(logits_of(3, 2.2), [1, 0, 0], 1).id == 1  # 3 - 1.0
    presence = Sampler(SamplingParams(presence_penalty=0.5))
    assert presence.sample(logits_of(3, 2.2), [1, 0, 0, 0], 1).id == 0  # 3 - 0.5, once
    assert presence.sample(logits_of(3, 2.6), [1, 0, 0, 0], 1).id == 1
    assert presence.sample(logits_of(3, 2.6), [0, 0], 2).id == 0
    negative = Sampler(SamplingParams(frequency_penalty=-1.0))
    assert negative.sample(logits_of(1, 2.5), [0, 0], 0).id == 0  # rewarded: 1 + 2


def test_penalties_come_before_the_cut():
    # without the penalty top-k 1 would keep token 0; with it the likeliest is token 1
    assert support({"temperature": 1, "top_k": 1, "presence_penalty": 5.0}, [4, 3, 0], 20, [0], 0) == {1}


# --- what is cut off ------------------------------------------------------------------------------------------------------------


def test_top_k_keeps_k_and_breaks_ties_by_id():
    assert support({"temperature": 1, "top_k": 2}, [1, 1, 1, 1]) == {0, 1}
    assert support({"temperature": 1, "top_k": 3}, [0, 2, 1, 2, 2]) == {1, 3, 4}
    assert support({"temperature": 1, "top_k": 1}, [2, 2]) == {0}
    assert support({"temperature": 1, "top_k": 99}, [1, 1, 1]) == {0, 1, 2}
    assert support({"temperature": 1, "top_k": 0}, [1, 1, 1]) == {0, 1, 2}


def test_top_p_keeps_the_shortest_list_that_reaches_it():
    logits = np.log([0.5, 0.25, 0.15, 0.1])
    assert support({"temperature": 1, "top_p": 0.45}, logits) == {0}
    assert support({"temperature": 1, "top_p": 0.55}, logits) == {0, 1}
    assert support({"temperature": 1, "top_p": 0.8}, logits) == {0, 1, 2}
    assert support({"temperature": 1, "top_p": 0.95}, logits) == {0, 1, 2, 3}


def test_top_p_looks_at_temperature_one_and_at_what_top_k_left():
    logits = np.log([0.5, 0.25, 0.15, 0.1])
    assert support({"temperature": 50.0, "top_p": 0.55}, logits) == {0, 1}  # flat in the end, but only two are left
    assert support({"temperature": 1.0, "top_k": 2, "top_p": 0.66}, logits) == {0}  # 0.5 / 0.75 reaches 0.66


def test_min_p_is_relative_to_the_likeliest():
    logits = np.log([0.5, 0.26, 0.14, 0.1])
    assert support({"temperature": 1, "min_p": 0.5}, logits) == {0, 1}
    assert support({"temperature": 50.0, "min_p": 0.5}, logits) == {0, 1}
    assert support({"temperature": 1, "min_p": 1.0}, [3, 1, 3]) == {0, 2}
    assert support({"temperature": 1, "min_p": 0.5, "top_k": 1}, logits) == {0}


def test_a_wide_nucleus_is_found_beyond_the_first_guess():
    """A flat distribution needs thousands of tokens: the search for the nucleus must widen, and keep exactly the right ones."""
    vocabulary = 5000
    logits = np.linspace(1e-3, 0, vocabulary, dtype=np.float32)  # strictly falling, nearly flat
    expected = int(np.searchsorted(np.cumsum(softmax(logits)), 0.8)) + 1
    found = support({"temperature": 1, "top_p": 0.8}, logits, 3000)
    assert max(found) < expected and max(found) > 0.99 * expected
    assert len(found) > 2000


def test_tiny_temperature_is_greedy_and_huge_is_flat():
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        assert support({"temperature": 5e-324}, [1, 3, 2], 50) == {1}
    assert support({"temperature": 1e6}, [0, 30, 60]) == {0, 1, 2}
    assert support({"temperature": 1.0}, [-math.inf, 0, -math.inf], 50) == {1}


@pytest.mark.parametrize(
    "params, expected",
    [
        ({"temperature": 1.0}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, np.array([16, 9, 4, 1]) / 30),
        ({"temperature": 1.0, "top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"temperature": 0.5, "top_k": 3, "min_p": 0.6}, [16 / 25, 9 / 25, 0, 0]),
        ({"temperature": 1.0, "top_p": 0.75}, [4 / 9, 3 / 9, 2 / 9, 0]),
    ],
)
def test_frequencies_are_the_distribution(params, expected):
    n = 20_000
    sampler = Sampler(SamplingParams(seed=1, **params))
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    counts = np.bincount([sampler.sample(logits, range(i)).id for i in range(n)], minlength=4)
    assert np.abs(counts / n - expected).max() < 4 * math.sqrt(0.25 / n)
    assert counts[np.asarray(expected) == 0].sum() == 0


def test_frequencies_over_a_whole_vocabulary():
    """More tokens than one run of the sum in two levels, and not a multiple of it."""
    vocabulary, n = 1000, 30_000
    logits = np.random.default_rng(3).normal(0, 2, vocabulary).astype(np.float32)
    p = softmax(logits)
    sampler = Sampler(SamplingParams(seed=2, temperature=1))
    counts = np.bincount([sampler.sample(logits, range(i)).id for i in range(n)], minlength=vocabulary)
    likely = p * n > 20
    chi2 = float((((counts - p * n) ** 2) / (p * n))[likely].sum())
    assert chi2 < likely.sum() + 5 * math.sqrt(2 * likely.sum())
    blocks = np.array_split(np.arange(vocabulary), 5)
    for block in blocks:
        assert abs(counts[block].sum() / n - p[block].sum()) < 5 * math.sqrt(0.25 / n)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=40),
    st.integers(0, 12),
    st.floats(0.01, 1.0),
    st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    st.integers(0, 2**64 - 1),
)
def test_what_is_drawn_is_in_the_naive_set(values, top_k, top_p, min_p, seed):
    logits = np.array(values, np.float32)
    order = sorted(range(len(values)), key=lambda i: (-logits[i], i))
    kept = order[: top_k or len(order)]
    cumulated = np.cumsum(softmax(logits[kept]))
    kept = kept[: int(np.sum(cumulated < top_p + 1e-6)) + 1]  # rounding decides at the edge: the larger set is meant
    ratio = np.exp(np.float64(logits[kept]) - np.float64(logits[order[0]]))
    kept = [i for i, r in zip(kept, ratio, strict=True) if r >= min_p * (1 - 1e-5)]
    drawn = Sampler(SamplingParams(temperature=1.3, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)).sample(logits).id
    assert drawn in kept


# --- seeds ----------------------------------------------------------------------------------------------------------------------


def answer(seed, n=40):
    sampler = Sampler(SamplingParams(temperature=1, seed=seed))
    logits, ids = np.zeros(1000, np.float32), []
    for _ in range(n):
        ids.append(sampler.sample(logits, ids).id)
    return ids


def test_same_seed_same_answer_and_other_seeds_others():
    assert answer(7) == answer(7)
    assert answer(7) != answer(8)
    assert answer(-1) == answer(2**64 - 1)  # a negative seed is its two's complement
    assert len(set(answer(7))) > 30  # each token has a number of its own


def test_unset_seeds_differ_and_are_known():
    a = Sampler(SamplingParams(temperature=1))
    b = Sampler(SamplingParams(temperature=1))
    assert a.seed != b.seed
    again = Sampler(SamplingParams(temperature=1, seed=a.seed))
    assert [a.uniform(n) for n in range(5)] == [again.uniform(n) for n in range(5)]


def test_the_generator_is_splitmix64():
    """Steele, Lea and Flood's generator, seeded with 0, begins with these (the reference implementation's output)."""
    from halfbyte.engine.generate.sampler import _GAMMA, _mix

    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert [_mix((n + 1) * _GAMMA & (2**64 - 1)) for n in range(4)] == known
    draws = np.array([Sampler(SamplingParams(seed=5)).uniform(n) for n in range(4000)])
    assert draws.min() >= 0 and draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.02 and abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.06


def test_a_draw_depends_on_the_place_in_the_answer_alone():
    """Taken back by a token and tried again, it comes out the same; the prompt's length does not matter."""
    logits = np.zeros(500, np.float32)
    sampler = Sampler(SamplingParams(temperature=1, seed=3))
    first = sampler.sample(logits, [1, 2, 3], 3).id
    sampler.sample(logits, [1, 2, 3, first], 3)
    assert sampler.sample(logits, [1, 2, 3], 3).id == first == sampler.sample(logits, [], 0).id


# --- log-probabilities ----------------------------------------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_distribution():
    logits = np.random.default_rng(0).normal(0, 3, 400).astype(np.float32)
    expected = np.log(softmax(logits))
    params = SamplingParams(temperature=2.0, top_k=3, repetition_penalty=1.5, logit_bias={7: 50.0}, logprobs=5)
    id, logprob, top = Sampler(params).sample(logits, [1, 2], 0)
    assert id == 7
    assert logprob == pytest.approx(expected[7], abs=1e-5)
    assert [i for i, _ in top] == list(np.argsort(-expected)[:5])
    assert [p for _, p in top] == pytest.approx(sorted(expected, reverse=True)[:5], abs=1e-5)


def test_logprobs_zero_is_the_token_alone_and_more_than_the_vocabulary_is_all():
    assert Sampler(SamplingParams(logprobs=0)).sample(logits_of(0, 0)) == (0, pytest.approx(-math.log(2)), [])
    top = Sampler(SamplingParams(logprobs=99)).sample(logits_of(0, 1, 0)).top
    assert [i for i, _ in top] == [1, 0, 2]


def test_logprobs_of_huge_logits_do_not_overflow():
    assert Sampler(SamplingParams(logprobs=0)).sample(logits_of(1e30, 0)).logprob == 0.0


# --- bad input ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_named(temperature, bad):
    with pytest.raises(LogitsError, match=r"1 of 3.*first token id 2"):
        Sampler(SamplingParams(temperature=temperature, top_k=2)).sample(logits_of(1, 2, bad))


def test_no_token_left():
    with pytest.raises(LogitsError, match="no token is left"):
        Sampler(SamplingParams()).sample(logits_of(-math.inf, -math.inf))
    with pytest.raises(LogitsError, match="no token is left"):
        Sampler(SamplingParams(logit_bias={0: -math.inf, 1: -math.inf})).sample(logits_of(1, 2))


def test_bias_beyond_the_vocabulary():
    with pytest.raises(SamplingError, match=r"logit_bias.*9.*vocabulary of 2"):
        Sampler(SamplingParams(logit_bias={9: 1.0})).sample(logits_of(1, 2))


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "1"),
        ("temperature", True), ("temperature", None), ("top_k", -1), ("top_k", 1.5), ("top_k", True), ("top_p", 0),
        ("top_p", 1.01), ("top_p", -1), ("top_p", math.nan), ("min_p", -0.1), ("min_p", 1.1), ("repetition_penalty", 0),
        ("repetition_penalty", -1), ("repetition_penalty", math.inf), ("repetition_window", -1),
        ("frequency_penalty", math.nan), ("presence_penalty", math.inf), ("presence_penalty", 10**400), ("seed", 2**64),
        ("seed", -(2**63) - 1), ("seed", 1.0), ("seed", "x"), ("stop", ""), ("stop", ["a", ""]), ("stop", [1]), ("stop", 5),
        ("stop", None), ("stop_ids", [-1]), ("stop_ids", ["a"]), ("stop_ids", 3), ("max_tokens", -1), ("max_tokens", 1.0),
        ("max_tokens", "5"), ("logprobs", -1), ("logprobs", True), ("ignore_eos", 1), ("logit_bias", [1]),
        ("logit_bias", {"a": 1}), ("logit_bias", {-1: 1}), ("logit_bias", {1: math.nan}), ("logit_bias", {1: math.inf}),
        ("logit_bias", None),
    ],
)  # fmt: skip
def test_bad_parameters_are_refused_by_name(field, value):
    with pytest.raises(SamplingError, match=f"^{field}: ") as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field and isinstance(caught.value, HalfbyteError)
    assert "\n" not in str(caught.value)


def test_good_parameters_are_taken_in_their_usual_spellings():
    params = SamplingParams(
        temperature=1, top_p=np.float32(0.5), stop="\n", stop_ids={3}, logit_bias={np.int64(2): -math.inf}, max_tokens=0, seed=-1
    )
    assert params.stop == ("\n",) and params.stop_ids == (3,) and params.logit_bias == {2: -math.inf} and params.max_tokens == 0
    assert SamplingParams(stop=["a", "b", "a"]).stop == ("a", "b")
