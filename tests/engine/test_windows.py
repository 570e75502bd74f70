"""Models with sliding windows, and caches of other types, end to end: transformers' logits, the same bits however a text is cut,
texts that are cut back, pages that are left behind."""

from dataclasses import replace

import numpy as np
import pytest

from halfbyte import Engine
from halfbyte.engine.engine import Work
from halfbyte.engine.generate.kept_sequence import KeptSequence
from halfbyte.engine.kernels.structs import PAGE
from halfbyte.engine.measure.streaming import StreamedModel, StreamedWeights, load
from halfbyte.engine.model import Model
from halfbyte.engine.run.cache import BEHIND, Sequence
from halfbyte.formats.families.llama import FAMILY
from halfbyte.formats.opening import open_checkpoint
from support import tiny

CONTEXT = 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A function: a model's folder, with a window or none."""
    made = {}

    def path(window):
        if window not in made:
            made[window] = tmp_path_factory.mktemp("windows") / str(window)
            heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24}
            config = tiny.llama_config(model_type="mistral", max_position_embeddings=CONTEXT, sliding_window=window, **heads)
            tiny.write_folder(made[window], config)
        return made[window]

    return path


def ids_of(seed, count):
    return np.random.default_rng(seed).integers(3, 250, count).tolist()


def fed(engine, ids, size):
    """Logits of all tokens, fed `size` at a time, and the sequence."""
    sequence = engine.open_sequence()
    steps = [engine.step([Work(sequence, ids[at : at + size], "all")]).copy() for at in range(0, len(ids), size)]
    return np.concatenate(steps), sequence


@pytest.mark.parametrize(("kv_type", "window"), [("q8", None), ("f16", 45), ("q8", 300)])
def test_the_same_bits_however_a_text_comes(folder, kv_type, window):
    ids, other = ids_of(0, 620), ids_of(1, 700)
    whole = None
    for threads in (1, 2, 3):
        with Engine(folder(window), threads=threads, kv_type=kv_type, capacity=2 * CONTEXT) as engine:
            logits, _ = fed(engine, ids, 620)
            whole = logits if whole is None else whole
            np.testing.assert_array_equal(logits, whole)
            for size in (1, 7, 64) if threads == 2 else (13,):
                logits, _ = fed(engine, ids, size)
                np.testing.assert_array_equal(logits, whole, err_msg=f"{threads} threads, chunks of {size}")
            # beside another text, whose pages change hands with its own
            a, b, at = engine.open_sequence(), engine.open_sequence(), 0
            for count in (600, 1, 1, 5, 1, 12):
                got = engine.step([Work(b, other[at : at + count], "none"), Work(a, ids[at : at + count], "last")])
                at += count
                np.testing.assert_array_equal(got[0], whole[at - 1])
            if window == 45:
                held = a.tables[0].used - a.tables[0].first
                assert held * PAGE <= window + BEHIND + 2 * PAGE
    assert np.ptp(whole) > 1


def test_a_windowed_text_cut_back(folder):
    """By a few tokens it goes on; by more than is kept behind the window it begins anew."""
    ids, other = ids_of(2, 700), ids_of(3, 60)
    with Engine(folder(40), threads=2) as engine:
        free = engine.model.cache.free_positions
        whole, sequence = fed(engine, ids, 100)
        assert engine.model.cache.free_positions >= free - 40 - BEHIND - 2 * PAGE
        for length in (690, 600, 700 - BEHIND):
            engine.step([Work(sequence, (other * 3)[: 700 - sequence.length])] if sequence.length < 700 else [])
            assert engine.truncate_sequence(sequence, length) == sequence.length == length
            np.testing.assert_array_equal(engine.next_logits(sequence, [ids[length]]), whole[length])
        assert engine.truncate_sequence(sequence, 100) == sequence.length == sequence.used == 0
        np.testing.assert_array_equal(engine.next_logits(sequence, ids[:300]), whole[299])
        assert engine.truncate_sequence(sequence, 100) == 100, "all that was ever there"
        np.testing.assert_array_equal(engine.next_logits(sequence, ids[100:200]), whole[199])
        engine.close_sequence(sequence)
        assert engine.model.cache.free_positions == free


def test_a_kept_sequence_of_a_windowed_model(folder):
    """Prompts that share a beginning get the logits of a cache that is empty, whether or not the beginning is still there."""
    first = ids_of(4, 600)
    prompts = [first, [*first[:500], 7, 8], [*first[:60], 9], [*first[:60], 9, 10, 11]]
    with Engine(folder(16), threads=1) as engine:
        kept, reused = KeptSequence(engine), []
        for prompt in prompts:
            expected = engine.logits(prompt)[-1]
            *most, last = kept.begin(prompt)
            if most:
                kept.extend(most)
            logits = engine.next_logits(kept._sequence, [last])
            kept._ids.append(last)
            reused.append(kept.reused)
            np.testing.assert_array_equal(logits, expected)
        assert reused == [0, 500, 0, 61]


@pytest.mark.parametrize("window", [1, 8, 33])
@pytest.mark.parametrize("kind", ["Mistral", "Phi3"])
def test_windows_are_those_of_transformers(kind, window, tmp_path):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=144, intermediate_size=96, num_attention_heads=6, num_key_value_heads=2, vocab_size=80, num_hidden_layers=3,
        max_position_embeddings=128, original_max_position_embeddings=128, sliding_window=window, tie_word_embeddings=False, pad_token_id=0,
        attn_implementation="eager",
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().float()
    ids = np.random.default_rng(0).integers(3, 80, 100)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * 0.15 + ("norm" in name))
        expected = model(torch.tensor(ids[None])).logits[0].numpy()
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(tiny.tokenizer_json())

    def logits(size):
        with open_checkpoint(tmp_path) as checkpoint:
            assert {layer.attention.window for layer in checkpoint.model.layers} == {window}
            model = Model(checkpoint, compute="f32", threads=2)
            sequence = Sequence()
            try:
                return np.concatenate([model.step([Work(sequence, ids[at : at + size], "all")]).copy() for at in range(0, 100, size)])
            finally:
                model.close()

    assert np.abs(logits(100) - expected).max() < 1e-4 * expected.std()
    np.testing.assert_array_equal(logits(9), logits(100))


def test_windows_of_some_layers(tmp_path):
    """Layers that see all and layers that see little: streamed, in steps, and cut back, with one result."""
    tiny.write_folder(tmp_path, tiny.llama_config(num_hidden_layers=3, max_position_embeddings=CONTEXT))

    def layer(spec, index, metadata):
        return replace(spec, attention=replace(spec.attention, window=20 * (index % 2)))

    ids = np.array(ids_of(5, 600))
    with open_checkpoint(tmp_path) as checkpoint:
        checkpoint.family = replace(FAMILY, layer=layer)
        model = Model(checkpoint, threads=2)
        try:
            assert [model.cache.group(i) for i in range(3)] == [0, 1, 0]
            sequence = Sequence()
            whole = np.concatenate([model.step([Work(sequence, ids[at : at + 100], "all")]).copy() for at in range(0, 600, 100)])
            assert sequence.tables[0].first == 0 and sequence.tables[1].first == (600 - 20 + 1 - BEHIND) // PAGE
            assert model.truncate(sequence, 500) == 500
            np.testing.assert_array_equal(model.step([Work(sequence, ids[500:], "all")]), whole[500:])
            assert model.truncate(sequence, 100) == 0 == sequence.used
            streamed = StreamedModel(checkpoint, StreamedWeights(checkpoint, 2), model.workers, "int8", 600)
            stream = streamed.new_stream(1)[0]
            for section in streamed.sections[:-1]:
                load(streamed.matrices(section), 1)
                streamed.relink(section)
                for stage in streamed.stages(section):
                    streamed.run(stage, ids, stream)
            load(streamed.matrices("head"), 1)
            streamed.relink("head")
            np.testing.assert_array_equal(streamed.head(stream, range(570, 600)), whole[570:])
        finally:
            model.close()
