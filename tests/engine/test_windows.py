"""Models with sliding windows, and caches of other types, end to end: transformers' logits, the same bits however a text is cut,
texts that are cut back, pages that are left behind."""

from dataclasses import replace

import numpy as np
import pytest

from halfbyte import Engine
from halfbyte.engine.engine import Work
from halfbyte.engine.generate.generation import Memory
from halfbyte.engine.kernels.structs import PAGE
from halfbyte.engine.model import Model
from halfbyte.engine.run.cache import BEHIND, Sequence
from halfbyte.formats.decoder import Dimensions
from halfbyte.formats.opening import open_checkpoint
from support import tiny

CONTEXT = 1024


@pytest.fixture
def attention(monkeypatch):
    """A function: from here on the layers of all models attend with these fields of AttentionSpec changed."""
    plain = Dimensions.attention.fget

    def change(**fields):
        monkeypatch.setattr(Dimensions, "attention", property(lambda size: replace(plain(size), **fields)))

    return change


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("windows") / "model"
    tiny.write_folder(path, tiny.llama_config(max_position_embeddings=CONTEXT, num_attention_heads=6, num_key_value_heads=2, head_dim=24))
    return path


def ids_of(seed, count):
    return np.random.default_rng(seed).integers(3, 250, count).tolist()


def fed(engine, ids, size):
    """Logits of all tokens, fed `size` at a time, and the sequence."""
    sequence = engine.open_sequence()
    steps = [engine.step([Work(sequence, ids[at : at + size], "all")]).copy() for at in range(0, len(ids), size)]
    return np.concatenate(steps), sequence


@pytest.mark.parametrize(("kv_type", "window"), [("q8", 0), ("f16", 45), ("q8", 300)])
def test_the_same_bits_however_a_text_comes(folder, attention, kv_type, window):
    attention(window=window)
    ids, other = ids_of(0, 620), ids_of(1, 700)
    whole = None
    for threads in (1, 2, 3):
        with Engine(folder, threads=threads, kv_type=kv_type, capacity=2 * CONTEXT) as engine:
            logits, sequence = fed(engine, ids, 620)
            whole = logits if whole is None else whole
            np.testing.assert_array_equal(logits, whole)
            for size in (1, 7, 64) if threads == 2 else (13,):
                logits, sequence = fed(engine, ids, size)
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


def test_a_windowed_text_cut_back(folder, attention):
    """By a few tokens it goes on; by more than is kept behind the window it begins anew."""
    attention(window=40)
    ids, other = ids_of(2, 700), ids_of(3, 60)
    with Engine(folder, threads=2) as engine:
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


def test_a_memory_of_a_windowed_model(folder, attention):
    """Prompts that share a beginning get the logits of a cache that is empty, whether or not the beginning is still there."""
    attention(window=16)
    first = ids_of(4, 600)
    prompts = [first, [*first[:500], 7, 8], [*first[:60], 9], [*first[:60], 9, 10, 11]]
    with Engine(folder, threads=1) as engine:
        memory, reused = Memory(engine), []
        for prompt in prompts:
            expected = engine.logits(prompt)[-1]
            logits = memory.next_logits(memory.begin(prompt))
            reused.append(memory.reused)
            np.testing.assert_array_equal(logits, expected)
        assert reused == [0, 500, 0, 61]


@pytest.mark.parametrize("window", [1, 8, 33])
def test_windows_are_those_of_transformers(window, attention, tmp_path):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        hidden_size=72, intermediate_size=96, num_attention_heads=6, num_key_value_heads=2, head_dim=24, vocab_size=80,
        num_hidden_layers=3, max_position_embeddings=128, sliding_window=window, tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config).eval().float()
    ids = np.random.default_rng(0).integers(3, 80, 100)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * 0.15 + ("norm" in name))
        expected = model(torch.tensor(ids[None])).logits[0].numpy()
    model.config.sliding_window = None  # the file says nothing of it; the engine is told here
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(tiny.tokenizer_json())

    def logits(size):
        with open_checkpoint(tmp_path) as checkpoint:
            model = Model(checkpoint, compute="f32", threads=2)
            sequence = Sequence()
            try:
                return np.concatenate([model.step([Work(sequence, ids[at : at + size], "all")]).copy() for at in range(0, 100, size)])
            finally:
                model.close()

    assert np.abs(logits(100) - expected).max() > 0.1 * expected.std(), "without the window it is another model"
    attention(window=window)
    assert np.abs(logits(100) - expected).max() < 1e-4 * expected.std()
    np.testing.assert_array_equal(logits(9), logits(100))
