"""Measures of predictions: against the formulas, and counted as llama-perplexity counts."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.engine.measure.token_errors import TokenMeter, kl_divergence, log_softmax, scored_positions
from halfbyte.quant import FormatError
from halfbyte.quant.measures import cosine


def logits(n: int, vocabulary: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    p = rng.standard_normal((n, vocabulary)).astype(np.float32) * 4
    return p, p + rng.standard_normal((n, vocabulary)).astype(np.float32) * 0.5, rng.integers(0, vocabulary, n)


def test_log_softmax_is_stable():
    x = np.array([[1000.0, 1001, 1002], [-1000, -1000, -1000], [0, -np.inf, 0]])
    found = log_softmax(x)
    np.testing.assert_allclose(np.exp(found).sum(axis=1), 1, rtol=1e-14)
    np.testing.assert_allclose(found[0], np.array([-2.0, -1, 0]) - np.log(1 + np.exp(-1) + np.exp(-2)), rtol=1e-14)
    np.testing.assert_allclose(found[2], [-np.log(2), -np.inf, -np.log(2)])


def test_kl_divergence_of_known_distributions():
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.25, 0.5])
    expected = 0.5 * np.log(2) + 0.25 * np.log(0.5)
    assert kl_divergence(np.log(p) + 7, np.log(q) - 3) == pytest.approx(expected, rel=1e-12)
    assert kl_divergence(np.log(p), np.log(p)) == 0
    assert kl_divergence(np.array([0.0, -np.inf]), np.array([0.0, 0.0])) == pytest.approx(np.log(2))
    assert kl_divergence(np.array([0.0, 0.0]), np.array([0.0, -np.inf])) == np.inf


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 30), vocabulary=st.integers(1, 50), seed=st.integers(0, 99), cut=st.integers(0, 30))
def test_token_errors_in_pieces_equal_the_formulas(n, vocabulary, seed, cut):
    p, q, targets = logits(n, vocabulary, seed)
    meter = TokenMeter()
    meter.add(p[:cut], q[:cut], targets[:cut])
    meter.add(p[cut:], q[cut:], targets[cut:])
    found = meter.result()
    softmax = [np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(axis=1, keepdims=True) for x in (p, q)]
    kl = (softmax[0] * np.log(softmax[0] / softmax[1])).sum(axis=1)
    assert found.count == n
    assert found.kl_mean == pytest.approx(kl.mean(), rel=1e-9, abs=1e-12)
    assert found.kl_median == pytest.approx(np.median(kl), rel=1e-9, abs=1e-12)
    assert found.kl_p99 == pytest.approx(np.percentile(kl, 99), rel=1e-9, abs=1e-12)
    assert found.kl_max == pytest.approx(kl.max(), rel=1e-9, abs=1e-12)
    assert found.top1 == (p.argmax(axis=1) == q.argmax(axis=1)).mean()
    for ppl, s in ((found.ppl_reference, softmax[0]), (found.ppl, softmax[1])):
        assert ppl == pytest.approx(np.exp(-np.log(s[np.arange(n), targets]).mean()), rel=1e-9)
    assert found.cosine_mean == pytest.approx(cosine(p, q).mean(), rel=1e-12)


def test_measures_made_elsewhere_count_like_logits():
    p, q, targets = logits(40, 30)
    by_logits, by_measures = TokenMeter(), TokenMeter()
    by_logits.add(p, q, targets)
    lp, lq, rows = log_softmax(p), log_softmax(q), np.arange(40)
    for run in (slice(0, 13), slice(13, 40)):
        at = rows[run], targets[run]
        same = p[run].argmax(axis=1) == q[run].argmax(axis=1)
        by_measures.add_measures(kl_divergence(p[run], q[run]), same, -lp[at], -lq[at], cosine(p[run], q[run]))
    for key, value in by_logits.result().to_dict().items():
        assert by_measures.result().to_dict()[key] == pytest.approx(value, rel=1e-12), key
    np.testing.assert_allclose(by_measures.divergences, kl_divergence(p, q), rtol=1e-12)


def test_token_meter_runs_over_a_large_vocabulary():
    p, q, targets = logits(9, 300_000)
    meter = TokenMeter()
    meter.add(p, q, targets)
    assert meter.result().kl_mean == pytest.approx(kl_divergence(p, q).mean(), rel=1e-12)
    assert meter.result().count == 9


def test_no_positions_and_a_uniform_model():
    empty = TokenMeter().result()
    assert empty.count == 0 and math.isnan(empty.kl_mean)
    assert json.loads(json.dumps(empty.to_dict(), allow_nan=False))["ppl"] == "nan"
    meter = TokenMeter()
    meter.add(np.zeros((4, 50)), np.zeros((4, 50)), np.arange(4))
    found = meter.result()
    assert found.ppl == pytest.approx(50) and found.top1 == 1 and found.kl_mean == 0


def test_what_does_not_fit_is_refused():
    meter = TokenMeter()
    with pytest.raises(FormatError, match=r"\[2, 5\]"):
        meter.add(np.zeros((2, 5)), np.zeros((2, 6)), np.zeros(2, int))
    with pytest.raises(FormatError, match="vocabulary of 5"):
        meter.add(np.zeros((2, 5)), np.zeros((2, 5)), np.array([0, 5]))
    with pytest.raises(FormatError, match="vocabulary of 5"):
        meter.add(np.zeros((2, 5)), np.zeros((2, 5)), np.array([0, -1]))


def test_scored_positions_are_those_of_llama_perplexity():
    """First position n_ctx / 2, then n_ctx - first - 1 of them: each predicts the token after it inside the chunk."""
    assert scored_positions(512) == slice(256, 511)
    assert len(range(512)[scored_positions(512)]) == 512 - 256 - 1
