"""Tokens chosen by compiled code against their definition in NumPy: the same ones, bit for bit."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfbyte import Engine
from halfbyte.engine.generate.params import SamplingError, SamplingParams
from halfbyte.engine.generate.sampler import LogitsError, Sampler
from halfbyte.engine.generate.weights import weights
from halfbyte.engine.model import Work
from halfbyte.engine.plan.builder import StepState
from halfbyte.engine.plan.plan import Plan
from halfbyte.engine.run.token_choice import SampleError, TokenChoice
from halfbyte.engine.run.workers import Workers
from support import tiny

GARBAGE = 7e9
"""Where no logits are: the end of a row is padding."""


@pytest.fixture(scope="module")
def workers():
    pools = {count: Workers(count) for count in (1, 3)}
    yield pools
    for pool in pools.values():
        pool.close()


class Rows:
    """A plan whose logits are written by hand."""

    def __init__(self, pool, vocabulary, rows):
        self.pool, self.vocabulary = pool, vocabulary
        self.plan, width = Plan(), 4 * -(-vocabulary // 32) * 32
        self.logits = self.plan.buffer("logits", rows * width, width)
        self.step = StepState(rows, 0)
        self.choice = TokenChoice(pool, self.step, self.logits, vocabulary, rows)
        self.choice.add_to(self.plan)
        self.plan.link()

    def choose(self, logits, samplers, masks=None):
        """What each sampler takes from its row, or the text of the error."""
        count = len(samplers)
        self.step.set(count)
        self.logits.floats(count)[:] = GARBAGE
        self.logits.floats(count)[:, : self.vocabulary] = logits
        requests = [s.request(self.vocabulary, m) for s, m in zip(samplers, masks or [None] * count, strict=True)]
        self.choice.check(requests, count)
        simple = self.choice.put(requests)
        if simple:
            self.pool.run(self.plan, count)
        return [outcome(lambda: s.sampled(c)) for s, c in zip(samplers, self.choice.choose(requests, simple), strict=True)]  # noqa: B023


def outcome(attempt):
    try:
        return attempt()
    except LogitsError as error:
        return str(error)


def expected(logits, samplers, masks=None):
    found = zip(logits, samplers, masks or [None] * len(samplers), strict=True)
    return [outcome(lambda: s.sample(row, mask=m)) for row, s, m in found]  # noqa: B023


def logits_of(kind, random, rows, vocabulary):
    """Rows of one kind: spread wide or thin, of few values, all equal, half banned, tiny, sorted, at a large offset."""
    x = random.normal(0, {"flat": 1e-3, "wide": 8.0}.get(kind, 2.0), (rows, vocabulary)).astype(np.float32)
    if kind == "few":
        x = np.round(x)
    elif kind == "equal":
        x[:] = 3.0
    elif kind == "zeros":
        x = np.where(x > 0, np.float32(0.0), np.float32(-0.0))
    elif kind == "banned":
        x[random.random(x.shape) < 0.5] = -np.inf
    elif kind == "tiny":
        x *= np.float32(1e-38)
    elif kind == "sorted":
        x = np.sort(x, axis=1)
    elif kind == "offset":
        x += np.float32(1e4)
    elif kind == "one":
        x[:] = -np.inf
        x[:, vocabulary // 2] = -5.0
    return x


KINDS = ("peaked", "flat", "wide", "few", "equal", "zeros", "banned", "tiny", "sorted", "offset", "one")

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-30, 0.1, 0.8, 1.0, 3.0, 1e6, 1e300]),
    top_k=st.sampled_from([0, 0, 1, 5, 255, 256, 257, 1000, 10**12]),
    top_p=st.sampled_from([1.0, 1.0, 0.01, 0.5, 0.95, 0.9999]),
    min_p=st.sampled_from([0.0, 0.0, 0.001, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.8, 1.3]),
    repetition_window=st.sampled_from([0, 3, 64]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.3, -0.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    logprobs=st.sampled_from([None, None, 0, 3, 300]),
    seed=st.integers(0, 2**64 - 1),
)

SIZES = (1, 2, 15, 16, 17, 255, 256, 257, 1000, 1024, 5000, 16383, 16385)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(SIZES), st.sampled_from(KINDS), st.lists(PARAMS, min_size=1, max_size=4), st.integers(0, 2**32), st.data())
def test_the_tokens_are_those_of_the_definition(workers, vocabulary, kind, params, seed, data):
    """Whatever the logits, the parameters, the history, the mask and the rows beside."""
    random = np.random.default_rng(seed)
    logits = logits_of(kind, random, len(params), vocabulary)
    samplers, masks = [], []
    for each in params:
        if data.draw(st.booleans()):
            each.logit_bias = {int(i): float(random.choice([-math.inf, 2.0, 5.0])) for i in random.integers(0, vocabulary, 3)}
        samplers.append(Sampler(each, random.integers(0, vocabulary, random.integers(0, 90)).tolist()))
        for id in random.integers(0, vocabulary, random.integers(0, 90)):
            samplers[-1].push(int(id))
        masks.append(random.integers(0, 2**32, -(-vocabulary // 32), np.uint32) if data.draw(st.booleans()) else None)
    rows = Rows(workers[data.draw(st.sampled_from([1, 3]))], vocabulary, len(params))
    assert rows.choose(logits, samplers, masks) == expected(logits, samplers, masks)


@pytest.mark.parametrize("vocabulary", [49152, 152064, 262145])
def test_large_vocabularies(workers, vocabulary):
    rows = Rows(workers[3], vocabulary, 3)
    random = np.random.default_rng(vocabulary)
    for kind in ("peaked", "flat", "few", "equal", "sorted"):
        logits = logits_of(kind, random, 3, vocabulary)
        for options in (
            {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.95}, {"temperature": 0.8, "top_k": 40, "logprobs": 5},
            {"temperature": 2.0, "top_k": 5000, "top_p": 0.5}, {"temperature": 1.0, "min_p": 0.3}, {},
        ):  # fmt: skip
            samplers = [Sampler(SamplingParams(seed=seed, **options)) for seed in range(3)]
            assert rows.choose(logits, samplers) == expected(logits, samplers)


def test_a_list_too_short_is_made_up_for(workers, monkeypatch):
    """Peaked rows never need the whole row again; flat ones always do, and only then."""
    rows, runs = Rows(workers[1], 20000, 1), []
    run = workers[1].run
    monkeypatch.setattr(workers[1], "run", lambda plan, *rest: (runs.append([op.kernel for op in plan.ops]), run(plan, *rest)))
    random = np.random.default_rng(0)
    for kind, widely in (("wide", 0), ("flat", 1)):
        runs.clear()
        for seed in range(20):
            sampler = Sampler(SamplingParams(temperature=1.0, top_p=0.9, seed=seed))
            logits = logits_of(kind, random, 1, 20000)
            assert rows.choose(logits, [sampler]) == expected(logits, [sampler])
        assert runs.count(["sample_widely"]) == 20 * widely and len(runs) == 20 * (1 + widely)


def test_greedy_rows_take_no_plan_of_their_own(workers):
    rows = Rows(workers[3], 5000, 2)
    logits = logits_of("few", np.random.default_rng(0), 2, 5000)
    assert rows.choose(logits, [Sampler(SamplingParams()) for _ in range(2)]) == expected(logits, [Sampler(SamplingParams())] * 2)
    assert rows.choice._whole is None


def test_counts_kept_as_the_text_grows_are_those_of_the_text(workers):
    """Token by token, over more different tokens than there is room for at first, with a window that forgets."""
    rows, random = Rows(workers[3], 1000, 1), np.random.default_rng(4)
    params = SamplingParams(
        temperature=1.0, seed=5, repetition_penalty=1.5, repetition_window=40, frequency_penalty=0.4, presence_penalty=0.3,
        logit_bias={7: 3.0, 8: -math.inf},
    )  # fmt: skip
    sampler = Sampler(params, random.integers(0, 1000, 30).tolist())
    for step in range(300):
        logits = logits_of("peaked", random, 1, 1000)
        got = rows.choose(logits, [sampler])
        assert got == [Sampler(params).sample(logits[0], sampler.history, 30)], step
        sampler.push(got[0].id)
        if step == 200:
            sampler.take_back(50)


def test_logits_are_the_models_own_again_where_log_probabilities_were_wanted(workers):
    rows = Rows(workers[1], 300, 1)
    logits = logits_of("peaked", np.random.default_rng(0), 1, 300)
    rows.choose(logits, [Sampler(SamplingParams(logprobs=2, logit_bias={5: 9.0}, repetition_penalty=2.0), [1, 2, 3])])
    np.testing.assert_array_equal(rows.logits.floats(1)[:, :300], logits)


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3, "logprobs": 2}, {"logit_bias": {4: 2.0}}])
def test_logits_that_are_not_finite_are_refused_by_name(workers, bad, params):
    """The row with the fault alone is refused."""
    logits = np.zeros((2, 5000), np.float32)
    logits[0, [4321, 4700]] = bad
    found = Rows(workers[3], 5000, 2).choose(logits, [Sampler(SamplingParams(seed=1, **params)) for _ in range(2)])
    assert "2 of 5000, first token id 4321" in found[0] and not isinstance(found[1], str)


def test_what_is_left_may_be_nothing(workers):
    rows = Rows(workers[1], 100, 1)
    nothing = np.zeros(4, np.uint32)
    assert "no token is left" in rows.choose(np.zeros((1, 100), np.float32), [Sampler(SamplingParams())], [nothing])[0]
    assert "no token is left" in rows.choose(np.full((1, 100), -np.inf, np.float32), [Sampler(SamplingParams())])[0]
    biased = Sampler(SamplingParams(logit_bias={3: 3e38}))
    assert "token id 3 inf" in rows.choose(np.full((1, 100), 3e38, np.float32), [biased])[0]


def test_requests_that_do_not_fit(workers):
    rows = Rows(workers[1], 100, 2)
    sampler = Sampler(SamplingParams())
    with pytest.raises(SampleError, match="3 words"):
        rows.choose(np.zeros((1, 100), np.float32), [sampler], [np.zeros(3, np.uint32)])
    with pytest.raises(SampleError, match="uint32"):
        sampler.request(100, np.zeros(4, np.int64))
    with pytest.raises(SampleError, match="different"):
        rows.choice.check([sampler.request(100)] * 2, 2)
    with pytest.raises(SamplingError, match=r"logit_bias.*100.*vocabulary of 100"):
        Sampler(SamplingParams(logit_bias={100: 1.0})).request(100)


def test_weights_are_exponentials_and_their_sums_exact():
    logits = np.random.default_rng(0).normal(0, 4, 20000).astype(np.float32)
    largest = logits.max()
    found = weights(logits, largest, 0.7)
    np.testing.assert_allclose(found, np.exp((logits.astype(np.float64) - largest) * np.float32(0.7)), rtol=1e-6, atol=2.0**-34)
    assert (found * 2.0**34 == np.rint(found * 2.0**34)).all()
    assert found.sum() == math.fsum(found) == found[::-1].cumsum()[-1]


def test_steps_of_a_model_give_the_tokens_of_its_logits(tmp_path):
    """Prefill and decode mixed, more outputs than one run of the head, in steps that are cut: as from the logits of each alone."""
    tiny.write_folder(tmp_path / "model", tiny.llama_config(max_position_embeddings=256))
    with Engine(tmp_path / "model", threads=2, capacity=4096) as engine:
        vocabulary, random = engine.model.vocabulary, np.random.default_rng(1)
        options = ({}, {"temperature": 0.9}, {"temperature": 1.0, "top_p": 0.7, "logprobs": 3}, {"repetition_penalty": 1.4})
        prompts = [random.integers(0, vocabulary, random.integers(1, 40)).tolist() for _ in range(40)]
        samplers = [Sampler(SamplingParams(seed=i, **options[i % 4]), prompt) for i, prompt in enumerate(prompts)]
        sequences = [engine.open_sequence() for _ in prompts]
        works = [Work(s, p) for s, p in zip(sequences, prompts, strict=True)]
        works.insert(7, Work(engine.open_sequence(), [1, 2], "none"))
        choices = engine.sample(works, [s.request(vocabulary) for s in samplers])
        for prompt, sampler, choice in zip(prompts, samplers, choices, strict=True):
            assert sampler.sampled(choice) == sampler.sample(engine.logits(prompt)[-1])
        with pytest.raises(SampleError, match="1 requests"):
            engine.sample([Work(sequences[0], [1, 2], "all")], [samplers[0].request(vocabulary)])
        before = sequences[0].length
        every = [Sampler(SamplingParams(temperature=1.0, seed=i)) for i in range(3)]
        found = engine.sample([Work(sequences[0], [1, 2, 3], "all")], [s.request(vocabulary) for s in every])
        logits = engine.logits([*prompts[0], 1, 2, 3])[before:]
        assert [c.id for c in found] == [s.sample(row).id for s, row in zip(every, logits, strict=True)]
