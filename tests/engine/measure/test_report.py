"""Reports on tiny models: figures are those of plain NumPy, errors show where they were put, one section is in memory at a time."""

from contextlib import ExitStack

import numpy as np
import pytest

from halfbyte import Engine
from halfbyte.engine.measure import compare, streaming
from halfbyte.engine.measure.compare import ReportError, compare_tensors, tensor_pairs
from halfbyte.engine.measure.evaluation_text import evaluation_tokens
from halfbyte.engine.measure.report import _DistanceMeter, make_report, make_reports, why_not_run
from halfbyte.engine.measure.streaming import StreamedModel, StreamedWeights, load
from halfbyte.engine.measure.token_errors import TokenMeter, scored_positions
from halfbyte.engine.model import ModelError
from halfbyte.engine.run.workers import Workers
from halfbyte.formats.conversion.convert import convert
from halfbyte.formats.conversion.recipe import Recipe
from halfbyte.formats.opening import open_checkpoint
from support import tiny

CHUNK = 32
IDS = np.random.default_rng(0).integers(0, 256, 3 * CHUNK)


def to_hbf(source, path, format):
    with open_checkpoint(source) as checkpoint:
        convert(checkpoint, path, Recipe(None, format, "nearest"))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """name -> path of one tiny model: f32, bf16 and f32 as a folder; q4_0 and q8_0 as .hbf; q8_0 as GGUF."""
    root = tmp_path_factory.mktemp("report")
    stored = tiny.write_folder(root / "f32", dtype="f32")
    tiny.write_folder(root / "bf16", dtype="bf16")
    tiny.write_gguf(root / "q8_0.gguf", tiny.llama_config(), stored, "Q8_0")
    found = {"f32": root / "f32", "bf16": root / "bf16", "gguf": root / "q8_0.gguf"}
    for name in ("q4_0", "q8_0"):
        found[name] = to_hbf(root / "f32", root / f"{name}.hbf", name)
    return found


def changed(models, path, name, change, config=None):
    """A copy of the f32 folder in which one tensor went through `change`."""
    tensors = tiny.weights(config or tiny.llama_config())
    tensors[name] = np.ascontiguousarray(change(tensors[name]), np.float32)
    tiny.write_folder(path, config, tensors, dtype="f32")
    return path


def report(model, reference, ids=IDS, **options):
    with open_checkpoint(model) as a, open_checkpoint(reference) as b:
        return make_report(a, b, ids, **{"threads": 2, "chunk": CHUNK, **options})


# --- streaming ------------------------------------------------------------------------------------------------------------------


def streamed_logits(path, compute, ids):
    with open_checkpoint(path) as checkpoint:
        workers = Workers(2)
        model = StreamedModel(checkpoint, StreamedWeights(checkpoint, 2), workers, compute, len(ids))
        stream, logits = model.new_stream(1)[0], []
        for section in model.sections:
            load(model.matrices(section), 2)
            model.relink(section)
            if section == "head":
                for start in range(0, len(ids), 7):
                    logits.append(model.head(stream, range(start, min(start + 7, len(ids)))).copy())
            else:
                for stage in model.stages(section):
                    model.run(stage, ids, stream)
            for matrix in model.matrices(section):
                matrix.release()
        workers.close()
        return np.concatenate(logits)


@pytest.mark.parametrize("name", ["q4_0", "bf16", "gguf"])
@pytest.mark.parametrize("compute", ["int8", "f32"])
def test_streamed_logits_are_the_engines_bit_for_bit(models, name, compute):
    with Engine(models[name], compute=compute, threads=2) as engine:
        expected = engine.logits(IDS[:CHUNK])
    np.testing.assert_array_equal(streamed_logits(models[name], compute, IDS[:CHUNK]), expected)


def test_only_one_section_is_in_memory(models, monkeypatch):
    held, most, sections = set(), [], set()
    load_one, release = streaming.StreamedMatrix.load, streaming.StreamedMatrix.release

    def loading(self):
        load_one(self)
        held.add((self.name, id(self)))
        most.append(len(held))
        sections.add(frozenset(name.rsplit(".", 2)[0] for name, _ in held.copy()))

    def releasing(self):
        release(self)
        assert self.address == 0
        held.discard((self.name, id(self)))

    monkeypatch.setattr(streaming.StreamedMatrix, "load", loading)
    monkeypatch.setattr(streaming.StreamedMatrix, "release", releasing)
    report(models["gguf"], models["bf16"])
    assert not held
    assert max(most) == 2 * 7  # the seven matrices of a layer, of model and reference
    assert sections == {frozenset(["token_embd"]), frozenset(["blk.0"]), frozenset(["blk.1"])}


def test_matrices_are_loaded_once_for_both_runs_of_the_model(models, monkeypatch):
    names = []
    make = streaming.make_matrix
    monkeypatch.setattr(streaming, "make_matrix", lambda tensor, name=None: (names.append(tensor.name), make(tensor, name))[1])
    report(models["gguf"], models["bf16"])
    # once for the reference and once for the model, and the tied embedding once more as the head
    assert {name: names.count(name) for name in names} == {n: 4 if n == "token_embd.weight" else 2 for n in set(names)}


def test_stages(models):
    with open_checkpoint(models["q4_0"]) as checkpoint:
        workers = Workers(1)
        model = StreamedModel(checkpoint, StreamedWeights(checkpoint, 1), workers, "f32", CHUNK)
        workers.close()
        assert model.sections == ["embed", "layer.0", "layer.1", "head"]
        assert [s.name for s in model.stages("layer.1")] == ["attention", "ffn"]
        rows = [s.rows for s in model.stages("layer.1")]
        whole = model.plan.sections["layer.1"]
        assert (rows[0].start, rows[0].stop, rows[1].stop) == (whole.start, rows[1].start, whole.stop)
        assert {m.name.split(".")[2] for m in model.matrices("layer.1")} == {
            "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down",
        }  # fmt: skip


def test_a_context_that_is_too_short_is_refused(models):
    with pytest.raises(ModelError, match="at most 128 tokens, not 130"):
        report(models["q4_0"], models["f32"], np.zeros(130, int), chunk=130)


def test_what_no_kernel_reads_is_exact_as_a_reference(models, tmp_path):
    """A reference in f64 is not rounded on its way into the kernels; as a model it is run as usual."""
    tensors = {name: value.astype(np.float64) for name, value in tiny.weights(tiny.llama_config()).items()}
    tiny.write_folder(tmp_path / "f64", tensors=tensors)
    with open_checkpoint(tmp_path / "f64") as checkpoint:
        exact, usual = StreamedWeights(checkpoint, 1, exact=True), StreamedWeights(checkpoint, 1)
        assert exact.matrix("blk.0.attn_q.weight").format == usual.matrix("blk.0.attn_q.weight").format == "f32"
    found = report(tmp_path / "f64", models["f32"], compute="f32")
    assert found.tokens.total.kl_max < 1e-6


# --- predictions ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full(models):
    return report(models["q4_0"], models["bf16"])


def test_predictions_are_those_of_the_engine_counted_plainly(models, full):
    runs = {}
    for key, name, compute in (("reference", "bf16", "f32"), ("weights", "q4_0", "f32"), ("model", "q4_0", "int8")):
        with Engine(models[name], compute=compute, threads=1) as engine:
            runs[key] = [engine.logits(ids) for ids in IDS.reshape(3, CHUNK)]
    scored = scored_positions(CHUNK)
    for got, a, b in (
        (full.tokens.total, "reference", "model"),
        (full.tokens.weights, "reference", "weights"),
        (full.tokens.activations, "weights", "model"),
    ):
        meter = TokenMeter()
        for ids, p, q in zip(IDS.reshape(3, CHUNK), runs[a], runs[b], strict=True):
            meter.add(p[scored], q[scored], ids[scored.start + 1 : scored.stop + 1])
        expected = meter.result()
        assert got.count == expected.count == 3 * (CHUNK // 2 - 1)
        assert got.top1 == expected.top1
        for field in ("kl_mean", "kl_median", "kl_p99", "kl_max"):
            assert getattr(got, field) == pytest.approx(getattr(expected, field), rel=1e-3, abs=2e-7), field
        for field in ("ppl", "ppl_reference", "cosine_mean"):
            assert getattr(got, field) == pytest.approx(getattr(expected, field), rel=1e-6), field
    assert full.tokens.divergences.shape == (full.tokens.total.count,)
    assert full.tokens.divergences.mean() == pytest.approx(full.tokens.total.kl_mean)
    assert full.tokens.standard_error == pytest.approx(full.tokens.divergences.std(ddof=1) / full.tokens.total.count**0.5)


@pytest.mark.parametrize("vocabulary", [5, 16, 1024, 2500])
def test_compared_logits_at_any_size_of_vocabulary(vocabulary):
    """The kernel against the float64 measures, with masked tails, ties and logits far from each other."""
    from halfbyte.engine.measure.predictions import LogitMeter
    from halfbyte.engine.plan.plan import Plan

    rng = np.random.default_rng(vocabulary)
    rows, plan, workers = 13, Plan(), Workers(2)
    width = 4 * -(-vocabulary // 32) * 32
    buffers = [plan.buffer(name, rows * width, width) for name in "ab"]
    a = rng.normal(0, 4, (rows, vocabulary)).astype(np.float32)
    b = (a + rng.normal(0, 0.3, a.shape) + rng.normal(0, 30, (rows, 1))).astype(np.float32)
    a[0] = 1.0
    b[1], a[2, 0], b[2, 0] = a[1], 80.0, -80.0
    for buffer, values in zip(buffers, (a, b), strict=True):
        buffer.floats(rows)[:] = np.nan  # what lies beyond the vocabulary must not matter
        buffer.floats(rows)[:, :vocabulary] = values
    targets = rng.integers(0, vocabulary, rows)
    got, expected = LogitMeter(workers, *buffers, vocabulary, rows), TokenMeter()
    got.add(targets)
    workers.close()
    expected.add(a, b, targets)
    np.testing.assert_allclose(got.divergences, expected.divergences, rtol=1e-4, atol=1e-5)
    assert got.divergences[1] == pytest.approx(0, abs=1e-6)
    for field in ("top1", "ppl", "ppl_reference", "cosine_mean"):
        assert getattr(got.result(), field) == pytest.approx(getattr(expected.result(), field), rel=1e-5), field


def test_a_model_against_itself(models):
    found = report(models["f32"], models["f32"], compute="f32")
    assert all(t.errors.nmse == 0 and t.errors.cosine > 1 - 1e-12 for t in found.tensors)
    assert all(layer.stream.total.error == 0 and layer.stream.total.cosine == 1 for layer in found.layers)
    assert found.tokens.total.kl_max == pytest.approx(0, abs=1e-6) and found.tokens.total.top1 == 1
    assert found.tokens.total.ppl == found.tokens.total.ppl_reference
    assert found.tokens.weights is None and found.layers[0].stream.weights is None


def test_errors_of_weights_and_of_activations_are_told_apart(models):
    """With f32 activations the error is that of the weights alone, and int8 activations add to it."""
    int8, f32 = report(models["q4_0"], models["f32"]), report(models["q4_0"], models["f32"], compute="f32")
    assert f32.tokens.total == int8.tokens.weights
    assert [layer.stream.total for layer in f32.layers] == [layer.stream.weights for layer in int8.layers]
    assert 0 < int8.tokens.activations.kl_mean < int8.tokens.weights.kl_mean < 10 * int8.tokens.total.kl_mean
    for layer in int8.layers:
        assert 0 < layer.stream.activations.error < layer.stream.weights.error
        assert layer.stream.total.error <= layer.stream.weights.error + 1.1 * layer.stream.activations.error


# --- several models -------------------------------------------------------------------------------------------------------------


def several(models, names, reference="bf16", **options):
    with ExitStack() as stack:
        *found, base = (stack.enter_context(open_checkpoint(models[name])) for name in (*names, reference))
        return make_reports(found, base, IDS, **{"threads": 2, "chunk": CHUNK, **options})


@pytest.mark.parametrize("compute", ["int8", "f32"])
def test_figures_do_not_depend_on_what_other_models_are_compared(models, compute):
    """Bit for bit those of a report on each model alone, in the order of the models."""
    names = ["q8_0", "gguf", "q4_0"]
    for name, got in zip(names, several(models, names, compute=compute), strict=True):
        alone = report(models[name], models["bf16"], compute=compute)
        assert got.model.path == models[name] and got.reference.path == models["bf16"]
        assert got.tensors == alone.tensors and got.layers == alone.layers and len(got.layers) == 2
        assert got.tokens.total == alone.tokens.total and got.tokens.weights == alone.tokens.weights
        assert got.tokens.activations == alone.tokens.activations
        np.testing.assert_array_equal(got.tokens.divergences, alone.tokens.divergences)


def test_the_reference_is_run_once_for_all_models(models, monkeypatch):
    made, runs = [], []
    make, run = streaming.make_matrix, StreamedModel.run
    monkeypatch.setattr(streaming, "make_matrix", lambda t, name=None: (made.append((t.name, t.format)), make(t, name))[1])
    monkeypatch.setattr(StreamedModel, "run", lambda self, *rest: (runs.append(id(self)), run(self, *rest))[1])
    several(models, ["q4_0", "gguf", "q8_0"])
    assert made.count(("blk.0.attn_q.weight", "bf16")) == 1 and made.count(("blk.0.attn_q.weight", "q8_0")) == 2
    chunks, stages = 3, 1 + 2 * 2
    assert len(runs) == (1 + 3 * 2) * chunks * stages and len(set(runs)) == 1 + 3 * 2


def test_progress_reaches_its_end_once(models):
    said = {}
    several(models, ["q4_0", "q8_0"], progress=lambda what, done, total: said.setdefault(what, []).append((done, total)))
    for what in ("tensors", "text"):
        done, total = zip(*said[what], strict=True)
        assert len(set(total)) == 1 and done[-1] == pytest.approx(total[0]) and list(done) == sorted(done), what


def test_one_model_that_does_not_fit_refuses_all(models, tmp_path):
    tiny.write_folder(tmp_path / "narrow", tiny.llama_config(hidden_size=32, num_attention_heads=2))
    with pytest.raises(ReportError, match="narrow and bf16 have different widths, 32 and 64"):
        several({**models, "narrow": tmp_path / "narrow"}, ["q4_0", "narrow"])


def test_methods_come_from_the_files_own_records(models):
    with open_checkpoint(models["q4_0"]) as a, open_checkpoint(models["gguf"]) as b, open_checkpoint(models["f32"]) as reference:
        recorded, none = compare_tensors(a, reference), compare_tensors(b, reference)
        values = {name: (t.float32().astype(np.float64), reference.tensors[name].float32()) for name, t in a.tensors.items()}
    matrices = [t for t in recorded if len(t.shape) == 2]
    assert len(matrices) == 15 and {t.method for t in matrices} == {"nearest"}
    assert {t.method for t in none} == {None}
    for t in recorded:
        w, r = values[t.name]
        assert t.squared_error == pytest.approx(((w - r) ** 2).sum(), rel=1e-9)


# --- layers ---------------------------------------------------------------------------------------------------------------------


def test_an_error_shows_in_its_own_layer_and_part(models, tmp_path):
    model = changed(models, tmp_path / "m", "model.layers.1.mlp.down_proj.weight", lambda w: 1.1 * w)
    first, second = report(model, models["f32"], compute="f32").layers
    assert first.layer == 0 and second.layer == 1
    for exact in (first.stream, first.parts["attention"], first.parts["ffn"], second.parts["attention"]):
        assert exact.total.error == 0 and exact.total.cosine == 1
    ffn = second.parts["ffn"].total
    assert ffn.error == pytest.approx(0.1, rel=1e-4) and ffn.cosine == pytest.approx(1, abs=1e-6)
    assert 0 < second.stream.total.error < 0.1 and second.stream.total.cosine < 1


def test_distances_against_float64():
    rng = np.random.default_rng(1)
    a = rng.normal(size=(50, 40)).astype(np.float32)
    b = (a + rng.normal(size=a.shape) * np.logspace(-7, 1, 50)[:, None]).astype(np.float32)
    a[7] = b[7] = 0
    b[8] = -a[8]
    meter = _DistanceMeter()
    meter.add(a[:20], b[:20])
    meter.add(a[20:], b[20:])
    p, q = a.astype(np.float64), b.astype(np.float64)
    norms = np.linalg.norm(p, axis=1) * np.linalg.norm(q, axis=1)
    cosine = np.where(norms > 0, (p * q).sum(axis=1) / np.where(norms > 0, norms, 1), 1.0)
    size = np.linalg.norm(p, axis=1)
    error = np.linalg.norm(q - p, axis=1) / np.where(size > 0, size, 1)
    got = meter.result()
    assert got.cosine == pytest.approx(cosine.mean(), abs=1e-7)
    assert got.cosine_min == pytest.approx(-1.0, abs=1e-6)
    assert got.error == pytest.approx(error.mean(), rel=1e-6)


# --- tensors --------------------------------------------------------------------------------------------------------------------


def test_tensors_of_all_kinds_are_compared_by_their_weights(models):
    """GGUF, .hbf and folders hold other names, orders and rotary rows; the errors are those of the numbers."""
    import gguf

    stored = tiny.weights(tiny.llama_config())
    for name in ("gguf", "q8_0"):
        with open_checkpoint(models[name]) as a, open_checkpoint(models["f32"]) as b:
            found = {t.name: t for t in compare_tensors(a, b, threads=2)}
        assert set(found) == {tiny.gguf_name(n) for n in stored}
        for theirs, w in stored.items():
            t = found[tiny.gguf_name(theirs)]
            if w.ndim == 1:
                assert t.errors.nmse == 0 and t.format == "f32"
                continue
            kind = gguf.GGMLQuantizationType.Q8_0
            rounded = gguf.quants.dequantize(gguf.quants.quantize(w, kind), kind).astype(np.float64)
            w = w.astype(np.float64)
            assert t.format == "q8_0" and t.reference_format == "f32" and t.shape == w.shape
            assert t.errors.nmse == pytest.approx(((rounded - w) ** 2).sum() / (w**2).sum(), rel=1e-6)
            assert t.errors.cosine == pytest.approx((rounded * w).sum() / np.linalg.norm(rounded) / np.linalg.norm(w), abs=1e-9)
            assert t.errors.cosine >= 0.9999
            assert t.bits_per_weight == pytest.approx(8.5, rel=0.6)


def test_the_worst_block_is_found_across_chunks(models, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "CHUNK_WEIGHTS", 2048)  # 32 rows of 64

    def spoil(w):
        w = w.copy()
        w[201, 33] += 5
        return w

    model = changed(models, tmp_path / "m", "model.embed_tokens.weight", spoil)
    with open_checkpoint(model) as a, open_checkpoint(models["f32"]) as b:
        asked = []
        tensor = a.tensors["token_embd.weight"]
        read = tensor.float32
        tensor.float32 = lambda rows=None: (asked.append(rows), read(rows))[1]
        worst = compare_tensors(a, b, threads=2)[0]
    assert worst.name == "token_embd.weight" and worst.errors.worst_block == (201, 1)
    assert worst.errors.max_error == pytest.approx(5, rel=1e-6)
    assert [(rows.start, rows.stop) for rows in asked] == [(i, min(i + 32, 272)) for i in range(0, 272, 32)]


def test_a_tied_head_is_compared_with_the_embedding(models, tmp_path):
    config = tiny.llama_config(tie_word_embeddings=False)
    tensors = tiny.weights(tiny.llama_config())
    tensors["lm_head.weight"] = 1.01 * tensors["model.embed_tokens.weight"]
    tiny.write_folder(tmp_path / "untied", config, tensors, dtype="f32")
    found = report(models["f32"], tmp_path / "untied", None)
    head = next(t for t in found.tensors if t.name == "output.weight")
    assert head.nbytes == 0 and head.errors.nmse == pytest.approx((0.01 / 1.01) ** 2, rel=1e-4)
    assert found.bits_per_weight == pytest.approx(8 * found.nbytes / sum(w.size for w in tiny.weights(tiny.llama_config()).values()))
    found = report(tmp_path / "untied", models["f32"], None)
    assert next(t for t in found.tensors if t.name == "output.weight").nbytes > 0


# --- refusals -------------------------------------------------------------------------------------------------------------------


def refused(a, b, match, ids=IDS):
    with pytest.raises(ReportError, match=match) as caught:
        report(a, b, ids)
    assert "\n" not in str(caught.value)


def test_other_models_are_refused_by_what_differs(models, tmp_path):
    for name, config in {
        "qwen2": tiny.qwen2_config(),
        "vocabulary": tiny.llama_config(vocab_size=300),
        "layers": tiny.llama_config(num_hidden_layers=1),
        "narrow": tiny.llama_config(hidden_size=32, num_attention_heads=2),
        "inner": tiny.llama_config(intermediate_size=64),
    }.items():
        tiny.write_folder(tmp_path / name, config)
    refused(models["q4_0"], tmp_path / "qwen2", "different architectures, 'llama' and 'qwen2'")
    refused(models["q4_0"], tmp_path / "vocabulary", "different vocabularies, 272 and 300")
    refused(models["q4_0"], tmp_path / "layers", "numbers of layers, 2 and 1")
    refused(models["q4_0"], tmp_path / "narrow", "different widths, 64 and 32")
    refused(models["q4_0"], tmp_path / "inner", r"blk.0.ffn_gate.weight is 96 x 64 in q4_0.hbf and 64 x 64 in inner")


def test_weights_only_are_compared_by_name(models, tmp_path):
    from safetensors.numpy import save_file

    a, b, c = tmp_path / "a.safetensors", tmp_path / "b.safetensors", tmp_path / "c.safetensors"
    w = np.random.default_rng(0).normal(size=(40, 50)).astype(np.float32)
    save_file({"x": w, "y": w[0]}, a)
    save_file({"x": w + 1, "y": w[0]}, b)
    save_file({"x": w, "z": w[0]}, c)
    found = report(b, a, None)
    assert [t.name for t in found.tensors] == ["x", "y"] and found.tensors[0].errors.max_error == pytest.approx(1, rel=1e-5)
    refused(a, c, r"c.safetensors lacks y; a.safetensors lacks z", None)
    with open_checkpoint(a) as lone:
        assert "only tensors are compared" in why_not_run(lone)


def test_ids_beyond_the_vocabulary_never_reach_a_kernel(models):
    refused(models["q4_0"], models["f32"], "token 272, but the model has only 272", np.full(CHUNK, 272))
    refused(models["q4_0"], models["f32"], "less than one chunk", np.zeros(CHUNK - 1, int))


# --- text -----------------------------------------------------------------------------------------------------------------------


def tokens(models, text, count, chunk, model="q4_0", reference="f32"):
    with open_checkpoint(models[model]) as a, open_checkpoint(models[reference]) as b:
        return evaluation_tokens(a, b, text, count, chunk)


def test_whole_chunks_of_the_text(models):
    """The tiny tokenizer has a token for each byte."""
    text = "abcdefgh" * 20
    for count, expected in ((1, 16), (16, 16), (17, 32), (160, 160), (150, 160)):
        ids, notes = tokens(models, text, count, 16)
        assert len(ids) == expected and not notes
        with open_checkpoint(models["f32"]) as b:
            from halfbyte.engine.text.tokenizer import Tokenizer

            assert ids.tolist() == Tokenizer.from_files(b.tokenizer).encode(text)[:expected]
    ids, notes = tokens(models, text + "abc", 1000, 16)
    assert len(ids) == 160 and notes == ["the text has 163 tokens; its 10 whole chunks of 16 are used"]
    with pytest.raises(ReportError, match="has 15 tokens, which is less than one chunk of 16: give a longer text"):
        tokens(models, text[:15], 100, 16)
    with pytest.raises(ReportError, match="at least 4 tokens, not 3"):
        tokens(models, text, 100, 3)


def test_a_beginning_of_text_token_begins_every_chunk(models, tmp_path):
    import json

    tiny.write_folder(tmp_path / "bos", dtype="f32")
    at = tmp_path / "bos" / "tokenizer_config.json"
    at.write_text(json.dumps({**json.loads(at.read_text()), "add_bos_token": True}))
    both = {**models, "bos": tmp_path / "bos"}
    text = "abcdefgh" * 20
    plain, _ = tokens(models, text, 48, 16)
    ids, notes = tokens(both, text, 48, 16, "bos", "bos")
    assert not notes and ids[::16].tolist() == [256, 256, 256]
    assert ids[1:16].tolist() == plain[:15].tolist()  # one before the text…
    assert ids[17:32].tolist() == plain[16:31].tolist()  # …and one in the place of a token of each chunk
    _, notes = tokens(both, text, 48, 16, "bos", "f32")
    assert notes == ["only bos wants a beginning-of-text token; it is used, as bos says"]


def test_other_tokenizers_are_refused(models, tmp_path):
    from tokenizers import AddedToken, Tokenizer

    tiny.write_folder(tmp_path / "other", dtype="f32")
    made = Tokenizer.from_str((tmp_path / "other" / "tokenizer.json").read_text())
    made.add_tokens([AddedToken("cde", normalized=False)])
    made.save(str(tmp_path / "other" / "tokenizer.json"))
    with pytest.raises(
        ReportError, match=r"the tokenizers of q4_0.hbf and other differ: token 2 of the text is 66 with the one and 258 with the"
    ):
        tokens({**models, "other": tmp_path / "other"}, "abcdefgh" * 20, 32, 16, reference="other")


def test_a_checkpoint_without_a_tokenizer_takes_the_others(models, tmp_path):
    tiny.write_folder(tmp_path / "bare", dtype="f32", tokenizer=False)
    both = {**models, "bare": tmp_path / "bare"}
    _, notes = tokens(both, "abcdefgh" * 20, 32, 16, "q4_0", "bare")
    assert notes == ["bare has no tokenizer; the other's is used"]
    with pytest.raises(ReportError, match="neither bare nor bare has a tokenizer"):
        tokens(both, "abcdefgh" * 20, 32, 16, "bare", "bare")


def test_pairs_name_everything_that_is_missing(tmp_path):
    from safetensors.numpy import save_file

    w = np.zeros((2, 2), np.float32)
    save_file({f"t{i}": w for i in range(30)}, tmp_path / "many.safetensors")
    save_file({"t0": w}, tmp_path / "one.safetensors")
    with (
        open_checkpoint(tmp_path / "many.safetensors") as a,
        open_checkpoint(tmp_path / "one.safetensors") as b,
        pytest.raises(ReportError, match=r"one.safetensors lacks t1, t10, .* and 21 more"),
    ):
        tensor_pairs(a, b)
