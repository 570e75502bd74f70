"""A plan is plain data: it can be printed, checked and cut into sections before anything runs."""


import numpy as np
import pytest

from halfbyte.engine.kernels.structs import ALWAYS, MANY, NEVER, PLAN_ROW
from halfbyte.engine.model import Model, Work
from halfbyte.engine.plan.builder import Builder, Limits, split_sequences
from halfbyte.engine.plan.operands import LayerShape
from halfbyte.engine.plan.plan import Plan, PlanError
from halfbyte.engine.run.cache import PagedCache, Sequence
from halfbyte.engine.run.weights import Weights
from halfbyte.formats.opening import open_checkpoint
from support import ORACLES

LLAMA = ORACLES / "llama"


@pytest.fixture(scope="module")
def model():
    with open_checkpoint(LLAMA) as checkpoint:
        model = Model(checkpoint, threads=2, compute="f32")
        yield model
        model.close()


def test_buffers():
    plan = Plan()
    a = plan.buffer("a", 100, 20)
    assert a.address % 64 == 0 and a.nbytes >= 100 and not a.array.any()
    assert a.floats(3).shape == (3, 5) and a.floats(3).dtype == np.float32
    with pytest.raises(PlanError, match="two buffers are called 'a'"):
        plan.buffer("a", 8)


def test_sections():
    plan = Plan()
    plan.begin("first")
    plan.add("gather", step=0, x=0, x_stride=0, columns=0, out=0)
    plan.add("gather", step=0, x=0, x_stride=0, columns=0, out=0)
    plan.begin("second")
    plan.add("gather", step=0, x=0, x_stride=0, columns=0, out=0)
    with pytest.raises(PlanError, match="two sections are called 'first'"):
        plan.begin("first")
    plan.link()
    assert len(plan) == 3
    start, rows = plan.address()
    assert rows == 3 and plan.address(plan.sections["second"]) == (start + 2 * PLAN_ROW, 1)
    assert plan.address(plan.sections["first"]) == (start, 2)
    assert plan.address(plan.span("first", "second")) == (start, 3)


def test_arguments_that_do_not_fit_their_kernel():
    plan = Plan()
    plan.add("gather", step=0, x=0, x_stride=0, columns=0, label="the row")
    with pytest.raises(PlanError, match=r"row 0, gather the row: missing fields \['out'\], unknown fields \[\]"):
        plan.link()
    plan = Plan()
    plan.add("gather", step=0, x=1.5, x_stride=0, columns=0, out=0)
    with pytest.raises(PlanError, match=r"row 0, gather .*'x' cannot be 1.5"):
        plan.link()


def test_claimed_rows_end_with_a_barrier():
    plan = Plan()
    for barrier, units in ((NEVER, 3), (MANY, 3), (ALWAYS, 0)):
        plan.add("gather", step=0, x=0, x_stride=0, columns=0, out=0, barrier=barrier, units=units, label=str(units))
    with pytest.raises(PlanError, match="row 1, gather 3, is claimed; a barrier must follow before gather 0"):
        plan.link()


def test_what_each_worker_makes_for_itself_gets_a_barrier_if_it_is_read_later():
    """Behind a barrier a worker may be that has had no part in what was before it."""
    norm = {"step": 0, "x": 0, "x_stride": 0, "weight": 0, "columns": 32, "epsilon": 1e-5, "out_worker": 128}
    product = {"step": 0, "weights": 0, "columns": 32, "rows": 32, "x_worker": 128, "out": 0, "out_stride": 128, "bias": 0, "add": 0}
    plan = Plan()
    soon, later = plan.buffer("soon", 1024), plan.buffer("later", 1024)
    plan.add("rms_norm", "f32", barrier=MANY, out=soon, **norm)
    plan.add("rms_norm", "f32", barrier=MANY, out=later, **norm)
    plan.add("matmul", "f32", "f32", units=1, x=soon, **product)
    plan.add("matmul", "f32", "f32", units=1, x=later, **product)
    plan.add("rms_norm", "f32", barrier=MANY, out=later, **norm)
    plan.add("matmul", "f32", "f32", units=1, x=later, **product)
    plan.link()
    assert [op.barrier for op in plan.ops] == [MANY, ALWAYS, ALWAYS, ALWAYS, MANY, ALWAYS]
    assert [int(barrier) for _, _, barrier, _ in plan._table] == [op.barrier for op in plan.ops]


def test_printed(model):
    text = str(model.plan)
    lines = text.split("\n")
    assert lines[0] == "embed:" and "layer.1:" in lines and "head:" in lines
    rows = [line for line in lines if line.startswith(" ")]
    assert [int(r.split()[0]) for r in rows] == list(range(len(model.plan)))
    assert sum("matmul[f32, f32] blk.0." in r for r in rows) == 7
    assert "blk.1.ffn_down.weight" in text and "| barrier if many" in text


def test_every_sum_is_met_before_it_is_read(model):
    """Workers meet after each product whose result others read, and after attention, whatever the number of tokens."""
    for op in model.plan.ops:
        assert op.barrier in (ALWAYS, MANY, NEVER)
        if op.kernel == "attention" or (op.kernel == "matmul" and "down" in op.label):
            assert op.barrier == ALWAYS


def test_section_by_section_is_the_whole(model):
    """How a report looks between layers."""
    ids = np.arange(3, 15)
    sequence = Sequence()
    whole = model.step([Work(sequence, ids, "all")]).copy()
    model.release(sequence)
    real, model._go = model._go, lambda section, tokens: [real(s, tokens) for s in model.plan.sections.values()]
    try:
        parts = model.step([Work(sequence, ids, "all")]).copy()
    finally:
        model._go = real
        model.release(sequence)
    np.testing.assert_array_equal(parts, whole)


def test_widths_are_checked_before_anything_runs():
    with open_checkpoint(LLAMA) as checkpoint:
        weights = Weights(checkpoint, 1)
        builder = Builder(weights, PagedCache([LayerShape("f16", 2, 16, 16)] * 2, 4), Limits(6, 1, 1, 32, 1), "int8")
        up, down = weights.matrix("blk.0.ffn_up.weight"), weights.matrix("blk.0.ffn_down.weight")
        x = builder.embed(weights.matrix("token_embd.weight"))
        normed = builder.rms_norm(x, "blk.0.attn_norm.weight", 64, 1e-5, [up])
        with pytest.raises(PlanError, match=r"blk.0.ffn_down.weight is 64 x 128; it gets 64 columns"):
            builder.matmul(normed, down, builder.floats("y", 64))
        with pytest.raises(PlanError, match=r"blk.0.ffn_up.weight is 128 x 64; .* room for 64 rows"):
            builder.matmul(normed, up, builder.floats("y", 64))
        with pytest.raises(PlanError, match=r"attn_norm.weight has 64 weights for 65 columns"):
            builder.rms_norm(x, "blk.0.attn_norm.weight", 65, 1e-5, [up])


def test_attention_is_split_only_for_few_sequences():
    assert split_sequences(Limits(512, 32, 256, 4096, 2)) == 4
    assert split_sequences(Limits(512, 32, 3, 4096, 8)) == 3
