"""Bit for bit the same logits: whatever the threads, the cutting of the prompt, the other sequences of a step, prefill or decode."""

from contextlib import contextmanager

import numpy as np
import pytest

from halfbyte.engine.kernels.structs import SPLIT
from halfbyte.engine.model import STEP_OUTPUTS, STEP_SEQUENCES, Model, Work
from halfbyte.engine.plan.builder import split_sequences
from halfbyte.engine.run.cache import Sequence
from halfbyte.formats.conversion.convert import convert
from halfbyte.formats.conversion.recipe import Recipe
from halfbyte.formats.opening import open_checkpoint
from halfbyte.quant.block import BUILT_IN
from support import ORACLES

LENGTH = 2 * SPLIT + 110
"""Attention of the last tokens is computed in three parts when they come alone."""


@pytest.fixture(scope="session")
def long_model(tmp_path_factory):
    """A function: the file of the oracle "long" in a format."""
    folder, made = tmp_path_factory.mktemp("exact"), {}

    def path(name):
        if name not in made:
            with open_checkpoint(ORACLES / "long") as checkpoint:
                convert(checkpoint, folder / f"{name}.hbf", Recipe(format=name, method="nearest"))
            made[name] = folder / f"{name}.hbf"
        return made[name]

    return path


@contextmanager
def running(path, **options):
    with open_checkpoint(path) as checkpoint:
        model = Model(checkpoint, **options)
        try:
            yield model
        finally:
            model.close()


def ids_of(seed, count=LENGTH):
    return np.random.default_rng(seed).integers(0, 50, count)


def in_chunks(model, ids, size):
    """Logits of all tokens, fed `size` at a time."""
    sequence = Sequence()
    out = [model.step([Work(sequence, ids[at : at + size], "all")]).copy() for at in range(0, len(ids), size)]
    model.release(sequence)
    return np.concatenate(out)


@pytest.mark.parametrize("compute", ["int8", "f32"])
@pytest.mark.parametrize("name", ["q4_0", "f16"])
def test_threads_and_chunks(name, compute, long_model):
    ids = ids_of(0)
    whole = None
    for threads in (1, 2, 3):
        with running(long_model(name), threads=threads, compute=compute) as model:
            logits = in_chunks(model, ids, LENGTH)
            whole = logits if whole is None else whole
            assert np.isfinite(whole).all() and np.ptp(whole) > 1
            np.testing.assert_array_equal(logits, whole)
            for size in (1, 7, 64):
                np.testing.assert_array_equal(in_chunks(model, ids, size), whole, err_msg=f"{threads} threads, chunks of {size}")


@pytest.mark.parametrize("name", [n for n in BUILT_IN if n not in ("q4_0", "f16", "f32")])
def test_every_format(name, long_model):
    ids = ids_of(1)
    with running(long_model(name), threads=1) as model:
        whole = in_chunks(model, ids, LENGTH)
        np.testing.assert_array_equal(in_chunks(model, ids[:40], 1), whole[:40])
    with running(long_model(name), threads=3) as model:
        np.testing.assert_array_equal(in_chunks(model, ids, 13), whole)
        sequence = Sequence()
        model.step([Work(sequence, ids[:-20], "none")])
        tail = [model.step([Work(sequence, [i])])[0].copy() for i in ids[-20:]]
        np.testing.assert_array_equal(tail, whole[-20:])


@pytest.mark.parametrize("threads", [1, 2])
def test_alone_or_among_others(threads, long_model):
    """Eight texts at once: long and short ones, prompts and single tokens in one step, more than there are parts of attention for."""
    lengths = [LENGTH, 300, 1, 2, 77, 520, 33, 600]
    texts = [ids_of(10 + i, n) for i, n in enumerate(lengths)]
    with running(long_model("q4_0"), threads=threads, capacity=4096) as model:
        alone = [in_chunks(model, ids, len(ids)) for ids in texts]
        for few in (False, True):
            chosen = [0, 5] if few else range(len(texts))
            assert few == (len(chosen) <= split_sequences(model._limits))
            sequences = {i: Sequence() for i in chosen}
            rng = np.random.default_rng(threads)
            at = dict.fromkeys(chosen, 0)
            for i in chosen:  # most of the long texts at once, so that what follows has long contexts
                at[i] = max(0, len(texts[i]) - 60)
                if at[i]:
                    model.step([Work(sequences[i], texts[i][: at[i]], "none")])
            steps = 0
            while any(at[i] < len(texts[i]) for i in chosen):
                work, rows = [], []
                for i in rng.permutation([i for i in chosen if at[i] < len(texts[i])]):
                    count = int(rng.choice([1, 1, 1, 2, 5, 40]))
                    piece = texts[i][at[i] : at[i] + count]
                    outputs = rng.choice(["all", "last", "none"])
                    work.append(Work(sequences[i], piece, outputs))
                    stop = at[i] + len(piece)
                    rows += {"all": [(i, p) for p in range(at[i], stop)], "last": [(i, stop - 1)], "none": []}[outputs]
                    at[i] = stop
                logits = model.step(work)
                assert logits.shape == (len(rows), 50)
                for row, (i, position) in zip(logits, rows, strict=True):
                    np.testing.assert_array_equal(row, alone[i][position], err_msg=f"text {i} position {position}")
                steps += 1
            assert steps > 2
            for sequence in sequences.values():
                model.release(sequence)
        assert model.cache.free_positions >= 4096


def test_lone_tokens_of_many_sequences(long_model):
    """Decode steps of 1, 2, … sequences, below and above the number for which attention is split among workers."""
    ids = ids_of(3)
    with running(long_model("q8_0"), threads=2, capacity=12 * 1024) as model:
        expected = in_chunks(model, ids, LENGTH)
        sequences = [Sequence() for _ in range(9)]
        starts = [LENGTH - 2, 256, 255, 300, 511, 512, 100, 31, 513]
        for sequence, start in zip(sequences, starts, strict=True):
            model.step([Work(sequence, ids[:start], "none")])
        for count in range(1, 10):
            logits = model.step([Work(s, [ids[n]]) for s, n in zip(sequences[:count], starts, strict=False)])
            np.testing.assert_array_equal(logits, expected[starts[:count]])
            for sequence, start in zip(sequences, starts, strict=True):
                model.cache.truncate(sequence, start)


def test_steps_that_fit_no_buffer(long_model):
    """More tokens, more outputs and more sequences than one run of the plan takes."""
    ids = ids_of(4, 700)
    with running(long_model("q8_0"), threads=2, capacity=16384) as model:
        expected = in_chunks(model, ids, 50)
        np.testing.assert_array_equal(in_chunks(model, ids, 700), expected)
        sequences = [Sequence() for _ in range(STEP_SEQUENCES + 3)]
        logits = model.step([Work(s, ids[:3], "all") for s in sequences])
        assert len(sequences) * 3 > STEP_OUTPUTS
        np.testing.assert_array_equal(logits, np.tile(expected[:3], (len(sequences), 1)))
        for sequence in sequences:
            model.release(sequence)


def test_what_a_page_held_before_does_not_matter(long_model):
    """Pages are reused without being cleared; NaN and infinity in them must not reach a later text."""
    ids = ids_of(5, 300)
    with running(long_model("q4_0"), threads=2) as model:
        expected = in_chunks(model, ids, 300)
        (group,) = model.cache.groups
        group.memory[:] = 0xFF
        np.testing.assert_array_equal(in_chunks(model, ids, 300), expected)
        group.memory.view(np.uint16)[:] = 0x7C00
        np.testing.assert_array_equal(in_chunks(model, ids, 1), expected)


def test_a_text_cut_back_goes_on_as_if_nothing_had_been(long_model):
    ids, other = ids_of(6, 400), ids_of(7, 400)
    with running(long_model("q4_0"), threads=2) as model:
        expected = in_chunks(model, ids, 400)
        sequence = Sequence()
        model.step([Work(sequence, ids[:270], "none")])
        model.step([Work(sequence, other[:100], "none")])
        model.cache.truncate(sequence, 270)
        assert sequence.length == 270
        np.testing.assert_array_equal(model.step([Work(sequence, ids[270:], "all")]), expected[270:])
