"""The methods behind one interface: the same kinds of blocks from all, and the same bytes whoever computes them."""


import ml_dtypes
import numpy as np
import pytest

from halfbyte.quant import FormatError, NonFiniteError, get_format
from halfbyte.quant.block import format_names
from halfbyte.quant.encoders import encode
from halfbyte.quant.measures import TensorMeter, tensor_errors
from halfbyte.quant.methods import METHODS, Inputs, quantize
from support import TESTS, module

_feedback = module(TESTS / "quant" / "test_feedback.py")
inputs, weights = _feedback.inputs, _feedback.weights

INTEGER = [name for name in format_names() if get_format(name).integers]


@pytest.mark.parametrize("name", INTEGER)
def test_every_format_gains_with_what_is_known(name):
    """In the loss of the outputs: feedback below search below nearest, whatever the format."""
    block_format, w, gram = get_format(name), weights(15, 96), inputs(96)  # so few rows that no encoder is compiled
    losses = []
    for method in METHODS:
        found = quantize(block_format, w, "blocks", inputs=Inputs(gram=gram), method=method, threads=1)
        assert found.method == method and found.data.shape == block_format.blocks_shape(15, 96)
        rest = w - block_format.decode(found.data)
        losses.append(float(((rest @ gram) * rest / (w**2).sum(axis=1, keepdims=True)).sum()))
        assert found.errors.nmse == pytest.approx(tensor_errors(w, w - rest).nmse, rel=1e-4)
    assert losses[2] < 0.8 * losses[1]
    assert losses[1] < losses[0]
    assert quantize(block_format, w, "blocks", inputs=Inputs(gram=gram)).method == "feedback"


def test_the_result_depends_neither_on_threads_nor_on_runs_of_rows_nor_on_the_source_type():
    block_format, gram = get_format("nl4"), inputs(160)
    w = weights(1700, 160).astype(ml_dtypes.bfloat16)
    with_inputs = {"inputs": Inputs(gram=gram), "rounds": 1, "passes": 1}
    alone = quantize(block_format, w, threads=1, **with_inputs)
    for threads in (2, 3, 8):
        again = quantize(block_format, w, threads=threads, **with_inputs)
        np.testing.assert_array_equal(again.data, alone.data)
        np.testing.assert_array_equal(again.losses, alone.losses)
        assert again.errors == alone.errors
    meter, rows = TensorMeter(), (slice(0, 16), slice(16, 1040), slice(1040, 1700))
    parts = [quantize(block_format, w[run].astype(np.float32), meter=meter, **with_inputs) for run in rows]
    np.testing.assert_array_equal(np.concatenate([part.data for part in parts]), alone.data)
    np.testing.assert_array_equal(np.concatenate([part.losses for part in parts], axis=1), alone.losses)
    assert meter.result().nmse == pytest.approx(alone.errors.nmse)
    blocks = quantize(block_format, w.view(np.uint16), "blocks", **with_inputs).data
    np.testing.assert_array_equal(block_format.tile(blocks), alone.data)


def test_it_falls_back_to_what_it_knows():
    block_format, w, gram = get_format("q4_0"), weights(20, 64), inputs(64)
    plain = encode(block_format, w, method="search").data
    weighted = encode(block_format, w, method="search", importance=gram.diagonal().copy()).data
    for given, method, wanted in (
        (None, None, plain),
        (None, "feedback", plain),
        (Inputs(), "feedback", plain),
        (Inputs(gram=np.zeros((64, 64), np.float32)), "feedback", plain),  # an expert that was never hit
        (Inputs(diagonal=np.zeros(64)), None, plain),
        (Inputs(diagonal=gram.diagonal()), None, weighted),
        (Inputs(diagonal=gram.diagonal().astype(np.float64) * 2.0**150), "feedback", weighted),
    ):
        found = quantize(block_format, w, inputs=given, method=method)
        assert found.method == "search" and found.losses is None
        np.testing.assert_array_equal(found.data, wanted)
    found = quantize(block_format, w, inputs=Inputs(gram=gram), method="nearest")
    np.testing.assert_array_equal(found.data, encode(block_format, w, method="nearest").data)
    f16 = quantize(get_format("f16"), w, inputs=Inputs(gram=gram), method="feedback")
    assert f16.method == "nearest"
    np.testing.assert_array_equal(f16.data, encode(get_format("f16"), w).data)


def test_matrices_of_the_same_inputs_share_one_factor():
    given = Inputs(gram=inputs(64))
    assert given.hessian is given.hessian
    more = Inputs(gram=inputs(64), damping=3 * given.damping)
    assert more.hessian.damping == pytest.approx(3 * given.hessian.damping)


def test_more_damping_is_nearer_to_the_weights():
    """What the damping of a tied embedding is for: its rows are inputs too."""
    block_format, w, gram = get_format("q6_r"), weights(64, 96), inputs(96)
    errors = [quantize(block_format, w, inputs=Inputs(gram=gram, damping=d)).errors.nmse for d in (0.01, 0.1, 1.0)]
    assert errors[0] > 1.02 * errors[1] > 1.02**2 * errors[2]


def test_progress_and_empty_matrices():
    done = []
    gram = inputs(32)
    quantize(get_format("q4_0"), weights(9000, 32), inputs=Inputs(gram=gram), progress=done.append, rounds=1, passes=0)
    assert sum(done) == 9000 and len(done) > 1
    for shape in ((0, 32), (20, 0)):
        found = quantize(get_format("q4_0"), np.zeros(shape, np.float32), inputs=Inputs(gram=gram[: shape[1], : shape[1]]))
        assert found.data.size == 0 and found.errors.nmse == 0


def test_arguments_are_checked():
    q4_0, w, gram = get_format("q4_0"), weights(32, 64), inputs(64)
    with pytest.raises(FormatError, match="my tensor: unknown method 'best'; known are nearest, search, feedback"):
        quantize(q4_0, w, method="best", name="my tensor")
    with pytest.raises(FormatError, match="known are tiles, blocks"):
        quantize(q4_0, w, "rows", inputs=Inputs(gram=gram))
    with pytest.raises(FormatError, match="my tensor: second moments are of 64 columns, the matrix has 96"):
        quantize(q4_0, weights(16, 96), inputs=Inputs(gram=gram), name="my tensor")
    with pytest.raises(FormatError, match="my tensor"):
        quantize(q4_0, w.astype(np.int32), inputs=Inputs(gram=gram), name="my tensor")
    w[20, 7] = np.nan
    with pytest.raises(NonFiniteError, match=r"my tensor \[row 20, column 7\] is nan"):
        quantize(q4_0, w, inputs=Inputs(gram=gram), name="my tensor")
