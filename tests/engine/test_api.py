"""The engine's public face on a tiny model: logits, steps, generation, errors by name, nothing kept."""

import gc
import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from halfbyte import Engine
from halfbyte.engine.engine import Work
from halfbyte.engine.generate.answer import PromptError
from halfbyte.engine.kernels.cache_layouts import CacheLayoutError
from halfbyte.engine.kernels.structs import PAGE
from halfbyte.engine.model import ContextError, ModelError, TokenError
from halfbyte.engine.run.cache import CacheFullError, Sequence, SequenceError
from halfbyte.engine.run.workers import ThreadsError
from halfbyte.formats.conversion.convert import convert
from halfbyte.formats.conversion.recipe import Recipe
from halfbyte.formats.opening import open_checkpoint
from halfbyte.quant.errors import HalfbyteError
from support import tiny

VOCABULARY = tiny.llama_config()["vocab_size"]
CONTEXT = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("api") / "model"
    config = tiny.llama_config(max_position_embeddings=CONTEXT)
    tiny.write_folder(path, config)
    return path


@pytest.fixture(scope="module")
def engine(folder):
    with Engine(folder, threads=2) as engine:
        yield engine


def free(engine):
    return engine.model.cache.free_positions


def test_logits(engine):
    ids = [1, 5, 9, 200]
    before = free(engine)
    logits = engine.logits(ids)
    assert logits.shape == (4, VOCABULARY) and logits.dtype == np.float32
    np.testing.assert_array_equal(engine.logits(np.array(ids)), logits)
    np.testing.assert_array_equal(engine.logits(ids[:2]), logits[:2])
    assert free(engine) == before


def test_logits_are_the_callers_own(engine):
    first = engine.logits([3, 4])
    kept = first.copy()
    engine.logits([7, 8])
    np.testing.assert_array_equal(first, kept)


def test_step_takes_many_sequences(engine):
    a, b = engine.open_sequence(), engine.open_sequence()
    logits = engine.step([Work(a, [1, 2, 3], "all"), Work(b, [4], "last"), Work(engine.open_sequence(), [5], "none")])
    assert logits.shape == (4, VOCABULARY) and (a.length, b.length) == (3, 1)
    np.testing.assert_array_equal(engine.next_logits(b, [6]).copy(), engine.logits([4, 6])[-1])
    assert engine.step([]).shape == (0, VOCABULARY)
    for sequence in (a, b):
        engine.close_sequence(sequence)
        assert sequence.length == 0


@pytest.mark.parametrize("bad", [-1, VOCABULARY, 2**31, 2**40, -(2**63), 2**70])
def test_token_ids_out_of_range(engine, bad):
    before = free(engine)
    with pytest.raises(TokenError, match=r"position 2|whole numbers"):
        engine.logits([1, 2, bad])
    with pytest.raises(TokenError, match=str(VOCABULARY) + "|whole numbers"):
        engine.logits([bad])
    assert free(engine) == before


@pytest.mark.parametrize("bad", [[1.5], ["3"], [None], [[1, 2], [3]], "abc", [float("nan")], [1, 2.0]])
def test_token_ids_that_are_none(engine, bad):
    with pytest.raises(TokenError):
        engine.logits(bad)


def test_a_step_without_tokens(engine):
    with pytest.raises(TokenError, match="at least one token"):
        engine.logits([])


def test_a_sequence_twice_in_a_step(engine):
    sequence = engine.open_sequence()
    with pytest.raises(HalfbyteError, match="once"):
        engine.step([Work(sequence, [1]), Work(sequence, [2])])
    assert sequence.length == 0 and sequence.used == 0
    engine.close_sequence(sequence)


def test_outputs_that_do_not_exist(engine):
    with pytest.raises(HalfbyteError, match="outputs"):
        engine.step([Work(engine.open_sequence(), [1], "some")])


def test_the_context_ends(engine):
    before = free(engine)
    with pytest.raises(ContextError, match=f"{CONTEXT + 1} tokens .*{CONTEXT}"):
        engine.logits([1] * (CONTEXT + 1))
    assert engine.logits([1] * CONTEXT).shape[0] == CONTEXT
    sequence = engine.open_sequence()
    engine.next_logits(sequence, [1] * CONTEXT)
    with pytest.raises(ContextError):
        engine.next_logits(sequence, [1])
    assert sequence.length == CONTEXT
    engine.close_sequence(sequence)
    assert free(engine) == before


def test_a_smaller_and_a_larger_context(folder):
    with Engine(folder, threads=1, context=10) as engine:
        assert engine.context == 10
        with pytest.raises(ContextError, match=r"11 tokens .*10"):
            engine.logits([1] * 11)
    with Engine(folder, threads=1, context=100) as longer, Engine(folder, threads=1) as usual:
        assert longer.context == 100
        np.testing.assert_array_equal(longer.logits([1] * 100)[:CONTEXT], usual.logits([1] * CONTEXT))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"threads": 0}, ThreadsError), ({"threads": -3}, ThreadsError), ({"threads": 100000}, ThreadsError),
        ({"context": 0}, ModelError), ({"context": -1}, ModelError), ({"compute": "int4"}, ModelError),
    ],
)  # fmt: skip
def test_options_that_cannot_be(folder, options, error):
    before = threading.active_count()
    with pytest.raises(error):
        Engine(folder, **options)
    assert threading.active_count() <= before + 1  # the tokenizer's, which ends by itself


def test_the_cache_is_full(folder):
    with Engine(folder, threads=1) as engine:
        pages = engine.model.cache
        sequences = []
        with pytest.raises(CacheFullError, match="KV cache is full"):
            for _ in range(pages.pages + 1):
                sequences.append(engine.open_sequence())
                engine.next_logits(sequences[-1], [1] * PAGE)
        assert len(sequences) == pages.pages + 1 and free(engine) == 0
        engine.close_sequence(sequences[0])
        engine.close_sequence(sequences[1])
        # a step that does not fit as a whole changes nothing, also of what would have fitted
        works = [Work(engine.open_sequence(), [1] * PAGE) for _ in range(3)]
        with pytest.raises(CacheFullError):
            engine.step(works)
        assert free(engine) == 2 * PAGE and all(w.sequence.length == w.sequence.used == 0 for w in works)
        logits = engine.step(works[:2]).copy()
        np.testing.assert_array_equal(logits[0], logits[1])
        for sequence in sequences:
            engine.close_sequence(sequence)


class Stop(BaseException):
    """Such as KeyboardInterrupt."""


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_step_that_is_broken_off_has_not_happened(engine, monkeypatch, error, after):
    """Raised before, between and after the parts of a step: lengths and pages are as they were, and the texts go on as if nothing was."""
    model = engine.model
    a, b, fresh = engine.open_sequence(), engine.open_sequence(), engine.open_sequence()
    engine.step([Work(a, [1, 2, 3]), Work(b, [9] * PAGE)])
    free_before, tables = free(engine), [t.pages[: t.used].tolist() for s in (a, b) for t in s.tables]
    expected = engine.logits([1, 2, 3, *range(4, 44)])[-1]
    monkeypatch.setattr(model, "_limits", replace(model._limits, tokens=25))  # steps of several parts
    real, runs = model._go, []

    def go(section, tokens):
        if len(runs) == after:
            raise error
        runs.append(section)
        real(section, tokens)
        if len(runs) == 2 and after == 2:
            raise error

    model._go = go
    try:
        with pytest.raises(error):
            engine.step([Work(a, list(range(4, 44))), Work(fresh, [7]), Work(b, [8])])
    finally:
        model._go = real
    assert (a.length, b.length, fresh.length, fresh.used) == (3, PAGE, 0, 0)
    assert free(engine) == free_before and [t.pages[: t.used].tolist() for s in (a, b) for t in s.tables] == tables
    np.testing.assert_array_equal(engine.next_logits(a, list(range(4, 44))), expected)
    for sequence in (a, b):
        engine.close_sequence(sequence)


def test_sequences_of_another_engine(engine, folder):
    """Refused, and what came before them in the step is given back."""
    with Engine(folder, threads=1) as other:
        theirs, mine = other.open_sequence(), engine.open_sequence()
        other.next_logits(theirs, [1, 2])
        before = free(engine)
        with pytest.raises(SequenceError, match="another engine"):
            engine.step([Work(mine, [1]), Work(theirs, [3])])
        assert free(engine) == before and (mine.length, mine.used, theirs.length, theirs.used) == (0, 0, 2, 1)


def test_a_sequence_that_is_dropped_gives_its_pages_back(engine):
    before = free(engine)
    sequences = [engine.open_sequence() for _ in range(3)]
    engine.step([Work(s, [1] * PAGE) for s in sequences])
    assert free(engine) == before - 3 * PAGE
    del sequences[1:]
    gc.collect()
    assert free(engine) == before - PAGE
    engine.close_sequence(sequences[0])
    del sequences
    gc.collect()
    assert free(engine) == before, "pages that were given back are not given back again"


def test_sequences_dropped_by_other_threads_while_steps_run(engine):
    before, wanted = free(engine), engine.logits([5, 6, 7])[-1]
    wrong = []

    def work():
        for _ in range(30):
            sequence = engine.open_sequence()
            with engine.lock:
                if not np.array_equal(engine.next_logits(sequence, [5, 6, 7]), wanted):
                    wrong.append(1)
            del sequence

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    gc.collect()
    assert not wrong and free(engine) == before


KV_TYPES = [("q8", "int8", 0.03), ("q8", "f32", 0.03), ("f16", "f32", 1e-3), ("f32", "int8", 0)]


@pytest.mark.parametrize(("kv_type", "compute", "most"), KV_TYPES)
def test_kv_types(folder, kv_type, compute, most):
    """The error of the cache alone, for the weights are floats; and its size."""
    ids = list(range(3, 60))
    with Engine(folder, threads=1, compute=compute, kv_type=kv_type) as some, Engine(folder, threads=1, compute="f32") as exact:
        assert exact.model.kv_type == "f32" and some.model.kv_type == kv_type
        expected = exact.logits(ids)
        error = np.sqrt(np.mean((some.logits(ids) - expected) ** 2)) / expected.std()
        assert error == most == 0 or 1e-6 < error < most
        ratio = some.model.cache.bytes_per_position / exact.model.cache.bytes_per_position
        assert ratio == {"f32": 1, "f16": 0.5, "q8": (16 + 4) / (4 * 16)}[kv_type]  # heads of 16


def test_a_kv_type_that_does_not_exist(folder):
    with pytest.raises(CacheLayoutError, match="one of f16, f32, q8, not 'q3'"):
        Engine(folder, kv_type="q3")


def test_generate(engine):
    before = free(engine)
    pieces = list(engine.generate("hello", max_tokens=10, stop_ids=[], ignore_eos=True, logprobs=3))
    assert pieces[-1].finish_reason == "length" and all(p.finish_reason is None for p in pieces[:-1])
    ids = [i for p in pieces for i in p.ids]
    assert len(ids) == 10
    prompt = engine.tokenizer.encode("hello")
    logits = engine.logits(prompt + ids[:-1])[len(prompt) - 1 :]
    assert ids == logits.argmax(-1).tolist()
    top = pieces[0].logprobs[0].top
    exact = logits[0].astype(float) - np.log(np.exp(logits[0].astype(float)).sum())
    assert [i for i, _ in top] == np.argsort(-exact)[:3].tolist()
    np.testing.assert_allclose([p for _, p in top], np.sort(exact)[::-1][:3], atol=1e-4)
    assert free(engine) == before


def test_pages_are_free_after_an_answer_that_was_not_awaited(engine):
    before = free(engine)
    answer = engine.generate("hello", max_tokens=30, ignore_eos=True)
    next(answer)
    assert free(engine) < before
    answer.close()
    assert free(engine) == before
    answer = engine.generate([1, 2, 3], max_tokens=30, ignore_eos=True)
    next(answer)
    del answer
    gc.collect()
    assert free(engine) == before


def test_messages_go_through_the_template(engine):
    ids = engine.prompt_ids([{"role": "user", "content": "hi"}])
    assert engine.tokenizer.decode(ids, skip_special=False).startswith("<|im_start|>user\nhi<|im_end|>")
    pieces = list(engine.generate([{"role": "user", "content": "hi"}], max_tokens=3, ignore_eos=True))
    assert sum(len(p.ids) for p in pieces) == 3


def test_a_prompt_longer_than_the_context(engine):
    with pytest.raises(PromptError, match=f"{CONTEXT + 5}.*{CONTEXT}"):
        list(engine.generate([1] * (CONTEXT + 5)))
    with pytest.raises(PromptError, match="empty"):
        list(engine.generate([]))
    with pytest.raises(TokenError):
        list(engine.generate([1, VOCABULARY]))


def test_a_context_that_fills_ends_with_length(engine):
    pieces = list(engine.generate([1] * (CONTEXT - 5), ignore_eos=True))
    assert pieces[-1].finish_reason == "length"
    assert sum(len(p.ids) for p in pieces) in (5, 6)


def test_the_same_seed_gives_the_same_text_whatever_the_threads(folder):
    texts = []
    for threads in (1, 2, 3):
        with Engine(folder, threads=threads) as engine:
            for seed in (1, 2):
                pieces = list(engine.generate("once", max_tokens=20, temperature=1.5, seed=seed, ignore_eos=True))
                texts.append((seed, [i for p in pieces for i in p.ids]))
    assert texts[0] == texts[2] == texts[4] and texts[1] == texts[3] == texts[5]
    assert texts[0][1] != texts[1][1]


@pytest.mark.parametrize("quantization", ["F32", "F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_gguf_folder_and_native_file_are_one_model(quantization, tmp_path):
    """Rotary rows are interleaved in llama's GGUF files. A .hbf made from GGUF holds the same bits, so it gives the same bits."""
    config = tiny.llama_config(rms_norm_eps=float(np.float32(1e-5)))
    tensors = tiny.weights(config, head=True)
    if quantization == "F16":  # norms are f16 too in a folder, and float32 in GGUF
        tensors = {k: v.astype(np.float16).astype(np.float32) for k, v in tensors.items()}
    alphabet = [str(t) for t in range(config["vocab_size"])]
    import gguf

    kinds = gguf.GGUFValueType
    extra = {
        "tokenizer.ggml.model": ("gpt2", kinds.STRING),
        "tokenizer.ggml.pre": ("llama-bpe", kinds.STRING),
        "tokenizer.ggml.tokens": (alphabet, kinds.ARRAY, kinds.STRING),
        "tokenizer.ggml.token_type": ([1] * len(alphabet), kinds.ARRAY, kinds.INT32),
        "tokenizer.ggml.eos_token_id": (2, kinds.UINT32),
    }
    tiny.write_gguf(tmp_path / "m.gguf", config, tensors, quantization, extra)
    ids = np.random.default_rng(0).integers(0, config["vocab_size"], 40)
    logits = model_logits(tmp_path / "m.gguf", ids)
    if quantization != "F32":
        with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
            convert(checkpoint, tmp_path / "m.hbf", Recipe(format=quantization.lower()))
        if quantization in ("F16", "Q8_0"):  # with fewer bits the embedding and the head get six
            np.testing.assert_array_equal(model_logits(tmp_path / "m.hbf", ids), logits)
        else:
            assert np.abs(model_logits(tmp_path / "m.hbf", ids) - logits).max() < 0.5 * logits.std()
    if quantization in ("F32", "F16"):
        tiny.write_folder(tmp_path / "folder", config, tensors, dtype=quantization.lower())
        np.testing.assert_array_equal(model_logits(tmp_path / "folder", ids), logits)


def model_logits(path, ids, **options):
    from halfbyte.engine.model import Model

    with open_checkpoint(path) as checkpoint:
        model = Model(checkpoint, threads=2, **options)
        try:
            return model.step([Work(Sequence(), ids, "all")]).copy()
        finally:
            model.close()


def test_every_tensor_type_of_gguf_runs_close_to_its_own_values(tmp_path):
    """K-quants run in a format of ours; in f32 compute the logits must be those of the dequantized weights."""
    import gguf

    rng = np.random.default_rng(5)
    config = tiny.llama_config(hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
    tensors = tiny.weights(config, head=True)
    ids = rng.integers(0, config["vocab_size"], 12)
    for kind in ("Q4_K", "Q5_K", "Q6_K"):
        stored, exact = {}, {}
        for name, value in tensors.items():
            if value.ndim == 1:
                stored[name] = exact[name] = value
                continue
            stored[name] = k_blocks(kind, value.shape, rng)
            exact[name] = gguf.quants.dequantize(stored[name], gguf.GGMLQuantizationType[kind])
        write_raw_gguf(tmp_path / f"{kind}.gguf", config, stored, kind)
        write_raw_gguf(tmp_path / f"{kind}.f32.gguf", config, exact, "F32")
        got = model_logits(tmp_path / f"{kind}.gguf", ids, compute="f32")
        wanted = model_logits(tmp_path / f"{kind}.f32.gguf", ids, compute="f32")
        error = np.sqrt(np.mean((got - wanted) ** 2)) / wanted.std()
        assert error < {"Q4_K": 0.02, "Q5_K": 0.02, "Q6_K": 0.02}[kind], (kind, error)


def k_blocks(kind, shape, rng):
    """Random blocks of a K-quant with scales that give weights of about 0.1."""
    import gguf

    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (shape[0], shape[1] // 256, size), np.uint8)
    if kind == "Q6_K":
        raw[..., 192:208] = rng.integers(-20, 20, raw[..., 192:208].shape).astype(np.int8).view(np.uint8)
        raw[..., 208:] = np.array([3e-4], np.float16).view(np.uint8)
    else:
        raw[..., :4] = np.array([6e-4, 5e-3] if kind == "Q4_K" else [3e-4, 5e-3], np.float16).view(np.uint8)
    return raw.reshape(shape[0], -1)


def write_raw_gguf(path, config, tensors, kind):
    import gguf

    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    for name, value in tensors.items():
        if value.dtype == np.float32:
            writer.add_tensor(tiny.gguf_name(name), value)
        else:
            writer.add_tensor(tiny.gguf_name(name), value, raw_dtype=gguf.GGMLQuantizationType[kind])
    for layer in range(config["num_hidden_layers"]):
        for name, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
            size = config[heads] * config["hidden_size"] // config["num_attention_heads"]
            writer.add_tensor(f"blk.{layer}.attn_{name}.bias", np.linspace(-1, 1, size, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_closing_frees_threads_and_files(folder, tmp_path):
    with open_checkpoint(folder) as checkpoint:
        convert(checkpoint, tmp_path / "m.hbf", Recipe(bits=4))
    before = threading.active_count()
    engine = Engine(tmp_path / "m.hbf", threads=3)
    engine.logits([1])
    assert threading.active_count() >= before + 2
    engine.close()
    engine.close()
    gc.collect()
    assert threading.active_count() <= before + 1
    maps = Path("/proc/self/maps")
    if maps.exists():
        del engine
        gc.collect()
        assert str(tmp_path / "m.hbf") not in maps.read_text()
    with pytest.raises(HalfbyteError, match="closed"):
        engine = Engine(tmp_path / "m.hbf", threads=1)
        engine.close()
        engine.logits([1])
    os.remove(tmp_path / "m.hbf")


def test_two_engines_side_by_side(folder):
    with Engine(folder, threads=1) as a, Engine(folder, threads=2) as b:
        wanted, results = a.logits([1, 2, 3, 4]), []

        def work(engine):
            results.extend(np.array_equal(engine.logits([1, 2, 3, 4]), wanted) for _ in range(20))

        threads = [threading.Thread(target=work, args=(e,)) for e in (a, b)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert len(results) == 40 and all(results)


def test_a_model_without_layers_of_its_kind_is_refused(folder, tmp_path):
    with pytest.raises(HalfbyteError):
        Engine(tmp_path / "nothing")
    with pytest.raises(HalfbyteError):
        Engine(Path(__file__))
