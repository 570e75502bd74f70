"""Sensitivities, against models that are written with one matrix changed and run whole; matrices that are replaced while a model runs."""


import numpy as np
import pytest

from halfbyte.engine.measure.divergence import DivergenceMeter
from halfbyte.engine.measure.exchangeable import FloatView, ReplaceableMatrix
from halfbyte.engine.measure.report import make_report
from halfbyte.engine.measure.sensitivity import CHUNK, Probes, measure_sensitivities, probing_tokens
from halfbyte.engine.model import Model, Work
from halfbyte.engine.run.cache import Sequence
from halfbyte.formats.conversion.convert import convert
from halfbyte.formats.conversion.recipe import Recipe
from halfbyte.formats.opening import open_checkpoint
from halfbyte.formats.tensor import ArrayTensor
from halfbyte.quant.block import get_format
from support import tiny

TOKENS = 46
SCORED = range(TOKENS // 2, TOKENS - 1, 2)
TEXTS = np.random.default_rng(11).integers(0, 256, (2, TOKENS))
EVERYWHERE = (("embd|output", "nl4"),)  # embedding and head in four bits, too


class Case:
    """A model in float32 and in nl4, what single matrices of the latter cost, and how to find that out otherwise."""

    def __init__(self, root, tied):
        self.config = tiny.llama_config(tie_word_embeddings=tied)
        self.root, self.tied = root, tied
        self.values = tiny.weights(self.config, head=not tied)
        tiny.write_folder(root / "m", self.config, self.values, dtype="f32")
        with open_checkpoint(root / "m") as reference:
            convert(reference, root / "q.hbf", Recipe(format="nl4", tensors=EVERYWHERE), threads=1)
        self.progress = []
        with open_checkpoint(root / "m") as reference, open_checkpoint(root / "q.hbf") as model:
            self.quantized = {name: tensor.float32() for name, tensor in model.tensors.items()}
            self.found = measure_sensitivities(
                reference, model, TEXTS, threads=2, progress=lambda what, done, total: self.progress.append((what, done, total))
            )
        self.base = self.log_probabilities(root / "m")

    def log_probabilities(self, path):
        """float64[scored tokens of all chunks, vocabulary]."""
        with open_checkpoint(path) as checkpoint:
            model = Model(checkpoint, compute="f32", threads=1, context=TOKENS)
            try:
                logits = [model.step([Work(Sequence(), ids, "all")]).astype(np.float64)[SCORED] for ids in TEXTS]
            finally:
                model.close()
        logits = np.concatenate(logits)
        logits -= logits.max(axis=1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    def divergence_with(self, *names):
        """Mean KL divergence of a folder in which the named matrices are the quantized ones."""
        changed = {name: self.quantized[tiny.gguf_name(name)] if tiny.gguf_name(name) in names else v for name, v in self.values.items()}
        assert sum(changed[name] is not v for name, v in self.values.items()) == len(names)
        folder = self.root / "-".join(names)
        tiny.write_folder(folder, self.config, changed, dtype="f32")
        other = self.log_probabilities(folder)
        return float((np.exp(self.base) * (self.base - other)).sum(axis=1).mean())


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return Case(tmp_path_factory.mktemp("tied"), True)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return Case(tmp_path_factory.mktemp("untied"), False)


@pytest.mark.parametrize(
    "name",
    ["token_embd.weight", "blk.0.attn_q.weight", "blk.0.attn_v.weight", "blk.0.ffn_down.weight", "blk.1.attn_output.weight",
     "blk.1.ffn_gate.weight"],
)  # fmt: skip
def test_one_matrix_changed_and_the_model_run_whole(tied, name):
    wanted = tied.divergence_with(name)
    assert wanted > 1e-5
    assert tied.found[name] == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("name", ["token_embd.weight", "output.weight", "blk.1.ffn_up.weight"])
def test_the_same_with_a_head_of_its_own(untied, name):
    assert untied.found[name] == pytest.approx(untied.divergence_with(name), rel=1e-3)


def test_every_matrix_is_there_in_the_order_of_the_model(tied, untied):
    for case in (tied, untied):
        with open_checkpoint(case.root / "q.hbf") as model:
            matrices = [name for name, tensor in model.tensors.items() if not tensor.vector]
        assert list(case.found) == matrices
        text = [(done, total) for what, done, total in case.progress if what == "text"]
        assert len({total for _, total in text}) == 1 and len(text) > 4  # embed, two layers, and the head stream by stream
        done = [each for each, _ in text]
        assert done == sorted(done) and done[-1] == pytest.approx(text[0][1])


def test_small_changes_add_up(tied, tmp_path):
    """The divergence of all matrices at once, at the same tokens, is about the sum of theirs."""
    with open_checkpoint(tied.root / "m") as reference:
        convert(reference, tmp_path / "q.hbf", Recipe(format="q6_r"), threads=1)
        with open_checkpoint(tmp_path / "q.hbf") as model:
            found = measure_sensitivities(reference, model, TEXTS, threads=1)
            whole = make_report(model, reference, TEXTS.reshape(-1), compute="f32", threads=1, chunk=TOKENS).tokens
    same_tokens = whole.divergences.reshape(len(TEXTS), -1)
    assert same_tokens.shape[1] == TOKENS - 1 - SCORED.start
    assert sum(found.values()) == pytest.approx(same_tokens[:, ::2].mean(), rel=0.25)
    assert sum(found.values()) < sum(tied.found.values()) / 5  # two bits more


def test_what_is_the_reference_costs_nothing_and_is_not_run(tmp_path):
    tiny.write_folder(tmp_path / "m")
    with open_checkpoint(tmp_path / "m") as reference:
        recipe = Recipe(bits=16, tensors=(("blk.1.ffn_up", "q4_0"),))
        convert(reference, tmp_path / "one.hbf", recipe, threads=1)
        with open_checkpoint(tmp_path / "one.hbf") as model:
            found = measure_sensitivities(reference, model, TEXTS, threads=1)
        assert list(found) == ["blk.1.ffn_up.weight"] and found["blk.1.ffn_up.weight"] > 1e-5
        assert measure_sensitivities(reference, reference, TEXTS, threads=1) == {}


def test_a_head_that_only_the_model_has(tied, tmp_path):
    """The reference ties its head; the model holds it twice, the head in four bits: embedding and head are told apart."""
    config = {**tied.config, "tie_word_embeddings": False}
    values = {**tied.values, "lm_head.weight": tied.values["model.embed_tokens.weight"]}
    tiny.write_folder(tmp_path / "two", config, values, dtype="f32")
    with open_checkpoint(tmp_path / "two") as two:
        kept = (("^blk|token_embd", "f32"), ("^output", "nl4"))
        convert(two, tmp_path / "q.hbf", Recipe(format="nl4", tensors=kept), threads=1)
    with open_checkpoint(tied.root / "m") as reference, open_checkpoint(tmp_path / "q.hbf") as model:
        found = measure_sensitivities(reference, model, TEXTS, threads=1)
        tiny.write_folder(tmp_path / "w", config, {**values, "lm_head.weight": model.tensors["output.weight"].float32()}, dtype="f32")
    other = tied.log_probabilities(tmp_path / "w")
    assert list(found) == ["output.weight"]
    assert found["output.weight"] == pytest.approx(float((np.exp(tied.base) * (tied.base - other)).sum(axis=1).mean()), rel=1e-3)


def test_probes_do_not_touch_one_another(tied):
    """Each change is alone: begun with others or by itself it costs the same, to the last bit, with any number of threads."""
    with open_checkpoint(tied.root / "m") as reference, open_checkpoint(tied.root / "q.hbf") as model:
        for threads in (1, 2):
            for names in (["blk.0.attn_k.weight"], ["blk.0.ffn_up.weight", "blk.0.attn_k.weight", "blk.1.attn_q.weight"]):
                with Probes(reference, TEXTS, threads) as probes:
                    assert probes.sections == ["embed", "layer.0", "layer.1", "head"]
                    for section in probes.sections[:-1]:
                        probes.section(section, [model.tensors[n] for n in probes.names(section) if n in names])
                    found = probes.head()
                assert list(found) == sorted(names, key=list(model.tensors).index)
                assert all(found[name] == tied.found[name] for name in names)


def test_how_many_tokens_are_probed(tied):
    with open_checkpoint(tied.root / "m") as checkpoint:
        assert probing_tokens(checkpoint) % CHUNK == 0
        assert probing_tokens(checkpoint) > CHUNK == probing_tokens(checkpoint, 1)


def test_divergence_of_models_is_that_of_reports(tied):
    ids = np.random.default_rng(3).integers(0, 256, 3 * 40 + 7)
    seen = []
    with open_checkpoint(tied.root / "m") as reference, open_checkpoint(tied.root / "q.hbf") as model:
        report = make_report(model, reference, ids, threads=1, chunk=40).tokens
        with DivergenceMeter(reference, ids, 40, 2, lambda what, done, total: seen.append((what, done, total))) as meter:
            for _ in range(2):  # nothing of the first one stays
                assert meter.measure(model) == pytest.approx(report.total.kl_mean, rel=1e-9)
            assert abs(meter.measure(reference)) < report.total.kl_mean / 100
    shares = [done / total for what, done, total in seen if what == "measuring"]
    assert len(shares) == 4 * 3  # the reference and three models, each through embedding and two layers
    assert all(shares[i : i + 3] == sorted(shares[i : i + 3]) and shares[i + 2] <= 1 for i in range(0, 12, 3))


# ---- matrices that are replaced --------------------------------------------------------------------------------------


def values_of(matrix):
    """What a loaded matrix is run with."""
    loaded = matrix._loaded
    form = get_format(loaded.format)
    return form.decode(form.untile(loaded.tiles(), matrix.rows, matrix.columns), matrix.columns)


def draw(rows=20, columns=64, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def test_replaced_and_restored():
    first, second, third = (ArrayTensor("blk.0.x.weight", draw(seed=i)) for i in range(3))
    matrix = ReplaceableMatrix(first)
    assert matrix.format == "f32" and not matrix.integers and matrix.address == 0
    matrix.load()
    home = matrix.address
    assert home % 64 == 0 and home != 0
    np.testing.assert_array_equal(values_of(matrix), first.float32())
    matrix.replace(second)
    np.testing.assert_array_equal(values_of(matrix), second.float32())
    assert matrix.address not in (0, home)
    matrix.load()  # what stands there stays
    np.testing.assert_array_equal(values_of(matrix), second.float32())
    matrix.replace(third)
    np.testing.assert_array_equal(values_of(matrix), third.float32())
    matrix.restore()
    assert matrix.address == home
    matrix.restore()
    np.testing.assert_array_equal(values_of(matrix), first.float32())
    matrix.replace(second)
    matrix.release()
    assert matrix.address == 0
    matrix.restore()
    assert matrix.address == 0  # nothing comes back that was released
    matrix.load()
    np.testing.assert_array_equal(values_of(matrix), first.float32())


def test_another_shape_is_refused():
    matrix = ReplaceableMatrix(ArrayTensor("blk.0.x.weight", draw()))
    matrix.load()
    for shape in ((21, 64), (20, 32), (64, 20)):
        with pytest.raises(ValueError, match=rf"20 x 64; it cannot be replaced by {shape[0]} x {shape[1]}"):
            matrix.replace(ArrayTensor("y", draw(*shape)))
    np.testing.assert_array_equal(values_of(matrix), draw())


def test_formats_that_matrices_are_run_in(tied):
    with open_checkpoint(tied.root / "q.hbf") as model:
        matrix = ReplaceableMatrix(model.tensors["blk.0.attn_q.weight"])
        matrix.load()
        assert matrix.format == "f32"
        np.testing.assert_array_equal(values_of(matrix), tied.quantized["blk.0.attn_q.weight"])
        large = ReplaceableMatrix(model.tensors["token_embd.weight"])
        large.load()
        assert large.format == "bf16"
        wanted = tied.quantized["token_embd.weight"].astype(tiny.DTYPES["bf16"]).astype(np.float32)
        np.testing.assert_array_equal(values_of(large), wanted)
        view = FloatView(model.tensors["blk.0.attn_q.weight"])
        assert (view.tiles(), view.blocks(), view.plain(), view.format, view.nbytes) == (None, None, None, "f32", 4 * 64 * 64)
        np.testing.assert_array_equal(view.float32(slice(3, 9)), tied.quantized["blk.0.attn_q.weight"][3:9])
