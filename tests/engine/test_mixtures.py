"""Models with experts: the same bits in any company, quantized files that run, and plans that refuse what does not fit."""

from contextlib import contextmanager

import numpy as np
import pytest

from halfbyte.engine.model import Model, Work
from halfbyte.engine.plan.builder import Builder, Limits
from halfbyte.engine.plan.experts import experts
from halfbyte.engine.plan.plan import PlanError
from halfbyte.engine.run.cache import PagedCache, Sequence
from halfbyte.engine.run.weights import Weights
from halfbyte.formats.conversion.convert import convert
from halfbyte.formats.conversion.recipe import Recipe
from halfbyte.formats.layers import ExpertsSpec
from halfbyte.formats.opening import open_checkpoint
from support import ORACLES


@contextmanager
def running(path, **options):
    with open_checkpoint(path) as checkpoint:
        model = Model(checkpoint, **options)
        try:
            yield model
        finally:
            model.close()


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A function: the file of an oracle in a format."""
    folder = tmp_path_factory.mktemp("mixtures")

    def path(oracle, form):
        target = folder / f"{oracle}.{form}.hbf"
        if not target.exists():
            with open_checkpoint(ORACLES / oracle) as checkpoint:
                convert(checkpoint, target, Recipe(format=form))
        return target

    return path


def reference(name):
    with np.load(ORACLES / name / "ref.npz") as ref:
        return ref["ids"], ref["logits"]


def in_chunks(model, ids, size):
    sequence = Sequence()
    out = [model.step([Work(sequence, ids[at : at + size], "all")]).copy() for at in range(0, len(ids), size)]
    model.release(sequence)
    return np.concatenate(out)


@pytest.mark.parametrize("oracle", ["mixtral", "mixtral_odd"])
@pytest.mark.parametrize(("form", "compute"), [("q4_0", "int8"), ("nl4", "f32"), ("bf16", "int8")])
def test_threads_and_chunks(oracle, form, compute, converted):
    """Where a token's neighbours go to does not matter to it: alone, in chunks of any size, with any number of threads."""
    ids, _ = reference(oracle)
    whole = None
    for threads in (1, 2, 3):
        with running(converted(oracle, form), threads=threads, compute=compute) as model:
            logits = in_chunks(model, ids, len(ids))
            whole = logits if whole is None else whole
            assert np.isfinite(whole).all() and np.ptp(whole) > 1
            np.testing.assert_array_equal(logits, whole)
            for size in (1, 3, 7):
                np.testing.assert_array_equal(in_chunks(model, ids, size), whole, err_msg=f"{threads} threads, chunks of {size}")


def test_among_other_texts(converted):
    texts = [np.random.default_rng(i).integers(0, 50, n) for i, n in enumerate((40, 1, 17, 8))]
    with running(converted("mixtral_odd", "q8_0"), threads=2, capacity=1024) as model:
        alone = [in_chunks(model, ids, len(ids)) for ids in texts]
        together = model.step([Work(Sequence(), ids, "all") for ids in texts])
        np.testing.assert_array_equal(together, np.concatenate(alone))


def test_quantized_files_are_close(converted):
    ids, expected = reference("mixtral")
    for form, most in (("q8_0", 0.06), ("q4_0", 0.8)):
        with running(converted("mixtral", form), threads=2) as model:
            logits = in_chunks(model, ids, len(ids))
        error = np.sqrt(np.mean((logits - expected) ** 2)) / expected.std()
        assert 1e-4 < error < most, (form, error)


def test_what_does_not_fit_is_refused_before_anything_runs():
    with open_checkpoint(ORACLES / "mixtral") as checkpoint:
        weights = Weights(checkpoint, 1)
        b = Builder(weights, PagedCache.of(checkpoint.model, "f16", 4), Limits(6, 1, 1, 32, 1), "int8")
        router, gate, up, down = (
            weights.matrix(f"blk.0.{n}.weight") for n in ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
        )
        x = b.embed(weights.matrix("token_embd.weight"))
        normed = b.rms_norm(x, "blk.0.ffn_norm.weight", 64, 1e-5, [router, gate, up])
        for stacks, spec, words in (
            ((router, gate, up, down), ExpertsSpec(4, 5), "5 of 4 experts"),
            ((router, gate, up, down), ExpertsSpec(3, 2), r"ffn_gate_inp.weight is 4 x 64; 3 experts"),
            ((router, gate, down, up), ExpertsSpec(4, 2), r"ffn_down_exps.weight is 4 x 64 x 48; its layer needs 4 x 48 x 64"),
            ((router, gate, up, up), ExpertsSpec(4, 2), r"ffn_up_exps.weight is 4 x 48 x 64; its layer needs 4 x 64 x 48"),
            ((router, router, up, down), ExpertsSpec(4, 2), r"ffn_gate_inp.weight is 1 x 4 x 64"),
        ):
            with pytest.raises(PlanError, match=words):
                experts(b, normed, x, *stacks, spec, "silu")
