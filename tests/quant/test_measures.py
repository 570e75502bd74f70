"""Error measures against plain formulas, in pieces and at the edges."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.quant import FormatError
from halfbyte.quant.measures import (
    TensorMeter,
    TokenMeter,
    cosine,
    kl_divergence,
    log_softmax,
    scored_positions,
    tensor_errors,
)


def pair(rows: int, columns: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    reference = rng.standard_normal((rows, columns)).astype(np.float32)
    return reference, reference + (rng.standard_normal((rows, columns)) * 0.1).astype(np.float32)


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 40), columns=st.integers(1, 100), cut=st.integers(0, 40), seed=st.integers(0, 99))
def test_tensor_errors_in_pieces_equal_the_formulas(rows, columns, cut, seed):
    reference, values = pair(rows, columns, seed)
    meter = TensorMeter()
    meter.add(reference[:cut], values[:cut])
    meter.add(reference[cut:], values[cut:])
    found = meter.result()
    r, v = reference.astype(np.float64), values.astype(np.float64)
    assert found.cosine == pytest.approx((r * v).sum() / np.sqrt((r * r).sum() * (v * v).sum()), rel=1e-12)
    assert found.nmse == pytest.approx(((v - r) ** 2).sum() / (r * r).sum(), rel=1e-12)
    assert found.max_error == np.abs(v - r).max()
    blocks = {(i, j): ((v - r)[i, 32 * j : 32 * j + 32] ** 2).sum() for i in range(rows) for j in range(-(-columns // 32))}
    worst = max(blocks, key=lambda b: blocks[b])
    size = min(32, columns - 32 * worst[1])
    assert found.worst_block == worst
    assert found.worst_block_error == pytest.approx(math.sqrt(blocks[worst] / size) / np.sqrt((r * r).mean()), rel=1e-9)


def test_a_large_tensor_is_measured_in_runs():
    reference, values = pair(700, 800)
    values[650, 100] += 50
    found = tensor_errors(reference, values)
    assert found.worst_block == (650, 3)
    assert found.nmse == pytest.approx(
        ((values - reference).astype(np.float64) ** 2).sum() / (reference.astype(np.float64) ** 2).sum()
    )


def test_equal_and_zero_tensors():
    reference, _ = pair(3, 40)
    same = tensor_errors(reference, reference)
    assert (same.cosine, same.nmse, same.max_error, same.worst_block_error) == (1.0, 0.0, 0.0, 0.0)
    zero = np.zeros_like(reference)
    both = tensor_errors(zero, zero)
    assert (both.cosine, both.nmse) == (1.0, 0.0)
    assert tensor_errors(reference, zero).cosine == 0 and tensor_errors(reference, zero).nmse == pytest.approx(1)
    assert (tensor_errors(zero, reference).cosine, tensor_errors(zero, reference).nmse) == (0.0, math.inf)
    empty = TensorMeter().result()
    assert (empty.cosine, empty.nmse, empty.worst_block) == (1.0, 0.0, (0, 0))
    assert tensor_errors(np.zeros((0, 5)), np.zeros((0, 5))).nmse == 0.0


def test_opposite_tensor_and_extreme_magnitudes():
    reference, _ = pair(3, 40)
    assert tensor_errors(reference, -reference).cosine == pytest.approx(-1)
    huge = np.full((2, 64), 3e38, np.float32)
    assert tensor_errors(huge, huge * np.float32(0.5)).nmse == pytest.approx(0.25)
    tiny = np.full((2, 64), 1e-40, np.float32)
    assert tensor_errors(tiny, tiny).cosine == pytest.approx(1)


def test_nan_is_never_hidden():
    reference, values = pair(70, 64)
    values[66, 40] = np.nan
    meter = TensorMeter()
    for i in range(70):
        meter.add(reference[i : i + 1], values[i : i + 1])
    found = meter.result()
    assert math.isnan(found.cosine) and math.isnan(found.nmse) and math.isnan(found.max_error)
    assert found.worst_block == (66, 1)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["cosine"] == "nan"


def test_vectors_and_shapes():
    reference, values = pair(1, 40)
    assert tensor_errors(reference[0], values[0]) == tensor_errors(reference, values)
    with pytest.raises(FormatError, match="shapes"):
        tensor_errors(reference, values[:, :39])


def test_cosine_rows():
    a, b = pair(5, 70)
    found = cosine(a, b)
    for i in range(5):
        assert found[i] == pytest.approx(tensor_errors(a[i], b[i]).cosine, rel=1e-12)
    zero = np.zeros(3)
    np.testing.assert_array_equal(cosine(np.array([zero, zero]), np.array([zero, zero + 1])), [1, 0])
    assert np.isnan(cosine(np.array([np.nan, 1]), np.array([1.0, 1.0])))


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
