"""Error measures against plain formulas, in pieces and at the edges."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.quant import FormatError
from halfbyte.quant.measures import TensorMeter, cosine, tensor_errors


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
