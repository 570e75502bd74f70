"""Experts in calibration and conversion: each one's inputs are the tokens that it computes, and its codes are chosen by these alone."""

import io
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import numpy as np
import pytest

from halfbyte.engine.convert.calibration import calibrate, stacks
from halfbyte.engine.convert.feedback import convert_with_statistics, convert_with_text
from halfbyte.engine.convert.mix import Goal, convert_to_goal
from halfbyte.engine.convert.quantize_tensor import TensorQuantizer
from halfbyte.engine.model import Model, Work
from halfbyte.engine.run.cache import Sequence
from halfbyte.formats.conversion.open_statistics import open_statistics
from halfbyte.formats.conversion.recipe import Recipe
from halfbyte.formats.conversion.statistics import StatisticsError, StatisticsWriter
from halfbyte.formats.opening import open_checkpoint
from halfbyte.formats.tensor import ArrayTensor
from halfbyte.quant.block import get_format
from halfbyte.quant.errors import FormatError
from halfbyte.quant.methods import Inputs, quantize
from halfbyte.tools import qcalibrate
from support import ORACLES, tiny

ROUTERS = [f"blk.{layer}.ffn_gate_inp.weight" for layer in (0, 1)]
IDS = np.random.default_rng(3).integers(0, 50, (3, 64))


@contextmanager
def model_with_an_idle_expert():
    """The oracle with one of three experts for a token, whose last expert has the scores of the one before and so never comes first."""
    with open_checkpoint(ORACLES / "mixtral_odd") as checkpoint:
        routers = {}
        for name in ROUTERS:
            weights = checkpoint.tensors[name].float32().copy()
            weights[2] = weights[1]
            routers[name] = ArrayTensor(name, weights)
        yield checkpoint.with_tensors(routers)


def inputs_of(checkpoint, texts, **options):
    """InputStatistics of every expert, by names of matrices."""
    found = []
    calibrate(checkpoint, texts, found.extend, **{"threads": 2, **options})
    return {name: each for each in stacks(found) for name in each[0].names}


def logits_of(checkpoint, ids, **options):
    model = Model(checkpoint, threads=2, **options)
    try:
        return model.step([Work(Sequence(), ids, "all")]).copy()
    finally:
        model.close()


def test_gram_matrices_of_experts_are_those_of_transformers():
    with np.load(ORACLES / "mixtral" / "inputs.npz") as reference, open_checkpoint(ORACLES / "mixtral") as checkpoint:
        found = inputs_of(checkpoint, reference["ids"])
        assert found["blk.0.ffn_gate_exps.weight"] is found["blk.0.ffn_up_exps.weight"]
        assert len(found[ROUTERS[0]]) == 1 and found[ROUTERS[0]][0].count == reference["ids"].size
        for layer in (0, 1):
            for theirs, ours in (("gate_up_proj", "ffn_gate_exps"), ("down_proj", "ffn_down_exps")):
                experts = found[f"blk.{layer}.{ours}.weight"]
                assert [each.matrix for each in experts] == [0, 1, 2, 3]
                assert sum(each.count for each in experts) == 2 * reference["ids"].size
                for number, each in enumerate(experts):
                    expected = np.zeros((each.columns, each.columns))
                    expected[np.triu_indices(each.columns)] = reference[f"{layer}.{theirs}.{number}"]
                    expected = np.triu(expected) + np.triu(expected, 1).T
                    np.testing.assert_allclose(each.gram, expected, atol=1e-4 * expected.diagonal().max())
                    np.testing.assert_allclose(each.sums, expected.diagonal(), rtol=1e-4)


def test_sums_of_experts_do_not_depend_on_threads():
    with model_with_an_idle_expert() as checkpoint:
        one, three = (inputs_of(checkpoint, IDS, threads=n) for n in (1, 3))
        assert one.keys() == three.keys()
        for name, experts in one.items():
            for a, b in zip(experts, three[name], strict=True):
                assert a.count == b.count
                np.testing.assert_array_equal(a.gram, b.gram)
        idle = one["blk.1.ffn_down_exps.weight"][2]
        assert idle.count == 0 and not idle.gram.any() and not idle.sums.any()


@pytest.mark.parametrize(("form", "worst"), [("q4_0", 0.8), ("nl4", 0.8), ("q8_0", 0.08)])
def test_each_expert_is_quantized_by_what_it_reads(form, worst, tmp_path):
    """As if it were alone; one that never came up is searched. The file runs."""
    with model_with_an_idle_expert() as checkpoint:
        inputs = inputs_of(checkpoint, IDS)
        for threads in (1, 3):
            convert_with_text(checkpoint, tmp_path / f"{threads}.hbf", Recipe(format=form, method="feedback"), IDS, threads=threads)
        expected = logits_of(checkpoint, IDS[0], compute="f32")
        assert (tmp_path / "1.hbf").read_bytes() == (tmp_path / "3.hbf").read_bytes()
        with open_checkpoint(tmp_path / "1.hbf") as written:
            for name in ("blk.0.ffn_gate_exps.weight", "blk.1.ffn_up_exps.weight", "blk.1.ffn_down_exps.weight"):
                weights, made = checkpoint.tensors[name].float32(), written.tensors[name]
                alone = [quantize(get_format(form), weights[e], inputs=Inputs(gram=inputs[name][e].gram)) for e in range(3)]
                assert [each.method for each in alone] == ["feedback", "feedback", "search"]
                np.testing.assert_array_equal(made.tiles(), np.concatenate([each.data for each in alone]), err_msg=name)
                assert made.recorded["method"] == "feedback+search"
                plain = [quantize(get_format(form), weights[e], method="search").data for e in range(3)]
                assert [(a.data != b).any() for a, b in zip(alone, plain, strict=True)] == [True, True, False]
            assert written.tensors[ROUTERS[0]].format == "f32"
            logits = logits_of(written, IDS[0])
    assert np.sqrt(np.mean((logits - expected) ** 2)) < worst * expected.std()


def test_a_file_of_statistics_does_as_well(tmp_path):
    """Sums, counts and Gram matrices of every expert are written and read, and choose nearly the same codes."""
    name, shape = "blk.1.ffn_down_exps.weight", (3, 72, 40)
    with model_with_an_idle_expert() as checkpoint:
        found = []
        calibrate(checkpoint, IDS, found.extend, threads=1)
        groups = stacks(found)
        table = [(each[0].names, len(each), each[0].columns, True) for each in groups]
        with StatisticsWriter(tmp_path / "s.safetensors", table, {}) as writer:
            for each in groups:
                writer.write(each[0].names, [one.sums for one in each], [one.count for one in each], [one.gram for one in each])
        experts = next(each for each in groups if name in each[0].names)
        with open_statistics(tmp_path / "s.safetensors") as statistics:
            assert statistics.sums[name].sums.shape == (3, 40)
            np.testing.assert_array_equal(statistics.sums[name].counts, [each.count for each in experts])
            for number, each in enumerate(experts):
                np.testing.assert_allclose(statistics.gram(name, number), each.gram, atol=1e-4 * each.sums.max(initial=0))
            weights = statistics.weights(name, 40, 3)
            assert weights.shape == (3, 40) and (weights[2] == 1).all() and (weights[0] != weights[1]).any()
            with pytest.raises(StatisticsError, match="is 3x40, the model's is 2x40"):
                statistics.weights(name, 40, 2)
            convert_with_statistics(checkpoint, tmp_path / "b.hbf", Recipe(4, method="feedback"), statistics, threads=1)
            convert_with_statistics(checkpoint, tmp_path / "c.hbf", Recipe(4, method="search"), statistics, threads=1)
        convert_with_text(checkpoint, tmp_path / "a.hbf", Recipe(4), IDS, threads=1)
        held = checkpoint.tensors[name].float32()
    with open_checkpoint(tmp_path / "a.hbf") as a, open_checkpoint(tmp_path / "b.hbf") as b, open_checkpoint(tmp_path / "c.hbf") as c:
        assert a.tensors[name].shape == shape
        assert (a.tensors[name].tiles() != b.tensors[name].tiles()).mean() < 0.05
        np.testing.assert_array_equal(a.tensors[name].matrix(2).tiles(), b.tensors[name].matrix(2).tiles())
        for number in range(3):
            wanted = quantize(get_format("q4_0"), held[number], inputs=Inputs(diagonal=weights[number]), method="search").data
            np.testing.assert_array_equal(c.tensors[name].matrix(number).tiles(), wanted)


def test_inputs_of_another_number_of_matrices_are_refused():
    tensor = ArrayTensor("experts", np.zeros((3, 16, 32), np.float32))
    with pytest.raises(FormatError, match="the inputs of 2 matrices are known, it has 3"):
        TensorQuantizer(tensor, "q4_0", [Inputs(), Inputs()], "search", threads=1)


def test_qcalibrate_and_a_mix(tmp_path, monkeypatch):
    """The command line's file names every expert; a goal for the size gives experts a format."""
    tiny.write_folder(tmp_path / "m", tiny.mixtral_config())
    out = io.StringIO()
    monkeypatch.setattr("sys.argv", ["qcalibrate", str(tmp_path / "m"), "--tokens", "256", "--gram", "-o", str(tmp_path / "s.safetensors")])
    with redirect_stdout(out), redirect_stderr(out):
        assert qcalibrate.main() == 0, out.getvalue()
    with open_statistics(tmp_path / "s.safetensors") as statistics:
        counts = statistics.sums["blk.0.ffn_up_exps.weight"].counts
        assert len(counts) == 3 and counts.sum() == 512 and statistics.gram("blk.0.ffn_up_exps.weight", 1).shape == (64, 64)
    texts = np.random.default_rng(0).integers(0, 256, (6, 64))
    with open_checkpoint(tmp_path / "m") as checkpoint:
        convert_to_goal(checkpoint, tmp_path / "mix.hbf", Recipe(), Goal(bits_per_weight=6.0), texts, threads=1)
        expected = logits_of(checkpoint, texts[0], compute="f32")
    with open_checkpoint(tmp_path / "mix.hbf") as written:
        stack = written.tensors["blk.0.ffn_up_exps.weight"]
        assert stack.shape == (3, 96, 64) and get_format(stack.format).integers
        assert "feedback" in stack.recorded["method"] and written.tensors[ROUTERS[0]].format == "bf16"
        logits = logits_of(written, texts[0])
    assert np.sqrt(np.mean((logits - expected) ** 2)) < 0.5 * expected.std()
