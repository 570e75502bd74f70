"""Threads that run plans: right results with any number of them, no processor time when idle, an end that always comes."""

import gc
import os
import sys
import threading
import time

import numpy as np
import pytest

from halfbyte.engine.engine import Engine
from halfbyte.engine.kernels.structs import ALWAYS, MANY
from halfbyte.engine.plan.builder import StepState
from halfbyte.engine.plan.plan import Plan, Section
from halfbyte.engine.run.workers import ThreadsError, Workers
from halfbyte.quant.processors import one_of_each_core
from support import ORACLES

TOKENS, COLUMNS, ROWS = 24, 64, 61

wait = pytest.fixture(params=["futex", "portable"])(lambda request, monkeypatch: set_wait(request.param, monkeypatch))


def set_wait(name, monkeypatch):
    if name == "portable":
        monkeypatch.setenv("HALFBYTE_WAIT", "portable")
    else:
        monkeypatch.delenv("HALFBYTE_WAIT", raising=False)
    return name


class Reversing:
    """A plan whose every row turns the order of the tokens around: each worker reads what others wrote in the row before."""

    def __init__(self, barrier=ALWAYS):
        self.plan, self.step = Plan(), StepState(TOKENS, 1)
        self.step.ids[:] = np.arange(TOKENS)[::-1]
        self.step.set(TOKENS)
        self.buffers = [self.plan.buffer(f"b{i}", TOKENS * 4 * COLUMNS, 4 * COLUMNS) for i in range(ROWS + 1)]
        for i in range(ROWS):
            if i % 20 == 0:
                self.plan.begin(f"part.{i // 20}")
            self.plan.add(
                "gather", barrier=barrier, step=self.step.address, x=self.buffers[i], x_stride=4 * COLUMNS, columns=COLUMNS,
                out=self.buffers[i + 1],
            )  # fmt: skip
        self.plan.link()

    def run(self, workers, **options):
        """Runs on fresh numbers and returns (result, what it must be)."""
        given = np.random.default_rng().standard_normal((TOKENS, COLUMNS)).astype(np.float32)
        for buffer in self.buffers[1:]:
            buffer.array[:] = 0xFF
        self.buffers[0].floats(TOKENS)[:] = given
        workers.run(self.plan, TOKENS, **options)
        return self.buffers[ROWS].floats(TOKENS).copy(), given[::-1] if ROWS % 2 else given


@pytest.fixture(scope="module")
def reversing():
    return Reversing()


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_any_number_of_threads(count, wait, reversing):
    """More than there are cores too: then they yield or sleep at every barrier."""
    workers = Workers(count)
    try:
        for _ in range(10 if count > 2 else 100):
            got, wanted = reversing.run(workers)
            np.testing.assert_array_equal(got, wanted)
    finally:
        workers.close()


def test_rows_that_meet_only_if_there_is_more_than_one_token():
    many = Reversing(MANY)
    workers = Workers(2)
    for _ in range(50):
        got, wanted = many.run(workers)
        np.testing.assert_array_equal(got, wanted)
    workers.close()


def test_parked_workers_wake(wait, reversing):
    workers = Workers(2)
    for pause in (0.0, 0.001, 0.01, 0.3):
        time.sleep(pause)
        got, wanted = reversing.run(workers)
        np.testing.assert_array_equal(got, wanted)
    workers.close()


def test_idle_workers_take_no_time(wait, reversing):
    workers = Workers(4)
    reversing.run(workers)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.1
    workers.close()


def test_closing(wait, reversing):
    before = threading.active_count()
    workers = Workers(3)
    assert threading.active_count() == before + 2
    reversing.run(workers)
    workers.close()
    assert threading.active_count() == before
    workers.close()
    with pytest.raises(ThreadsError, match="closed"):
        reversing.run(workers)


def test_workers_that_are_dropped_end_their_threads(wait, reversing):
    before = threading.active_count()
    workers = Workers(4)
    reversing.run(workers)
    threads = list(workers._threads)
    assert threading.active_count() == before + 3
    del workers
    gc.collect()
    for thread in threads:
        thread.join(10)
    assert threading.active_count() == before


def test_an_engine_that_is_dropped_ends_its_threads():
    engine = Engine(ORACLES / "llama", threads=3)
    engine.logits([1, 2, 3])
    names = [f"halfbyte-{n}" for n in (1, 2)]
    threads = [t for t in threading.enumerate() if t.name in names and t in engine.model.workers._threads]
    assert len(threads) == 2 and all(t.is_alive() for t in threads)
    del engine
    gc.collect()
    for thread in threads:
        thread.join(10)
    assert not any(t.is_alive() for t in threads)


def test_closing_at_once(wait):
    """Before a thread has come to its first wait."""
    for _ in range(20):
        Workers(3).close()


def test_callers_in_many_threads_take_turns(reversing):
    workers, wrong = Workers(2), []
    plans = [reversing, Reversing(), Reversing()]

    def call(plan):
        for _ in range(30):
            got, wanted = plan.run(workers)
            wrong.extend([] if np.array_equal(got, wanted) else [1])

    threads = [threading.Thread(target=call, args=(p,)) for p in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    workers.close()
    assert not wrong


def test_other_python_threads_go_on_meanwhile(reversing):
    """A plan runs without the interpreter's lock."""
    workers, ticks, done = Workers(1), [], threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0)

    thread = threading.Thread(target=tick)
    thread.start()
    for _ in range(200):
        reversing.run(workers)
    done.set()
    thread.join()
    workers.close()
    assert len(ticks) > 10


@pytest.mark.parametrize("count", [0, -1, 513, 1.5, "2", float("nan")])
def test_numbers_of_threads_that_cannot_be(count):
    with pytest.raises(ThreadsError, match="between 1 and 512"):
        Workers(count)


def test_profile(reversing):
    for count in (1, 2):
        workers = Workers(count)
        profile = np.full(ROWS + 1, -1)
        reversing.run(workers, profile=profile)
        assert (profile[:ROWS] > (0 if count == 1 else -1)).all() and 0 < profile[:ROWS].sum() < profile[ROWS]
        kept = profile.copy()
        reversing.run(workers)  # not asked for: not written
        np.testing.assert_array_equal(profile, kept)
        part = np.full(22, -1)
        workers.run(reversing.plan, TOKENS, reversing.plan.sections["part.1"], part)
        assert 0 < part[:20].sum() < part[20] and part[21] == -1
    for bad in (np.zeros(ROWS, np.int64), np.zeros(ROWS + 1, np.int32)):
        with pytest.raises(ThreadsError, match="profile"):
            workers.run(reversing.plan, TOKENS, profile=bad)
    workers.close()


def test_a_section_alone(reversing):
    workers = Workers(2)
    plan, buffers = reversing.plan, reversing.buffers
    for buffer in buffers:
        buffer.array[:] = 0
    buffers[20].floats(TOKENS)[:] = 7
    workers.run(plan, TOKENS, plan.sections["part.1"])
    assert (buffers[40].floats(TOKENS) == 7).all() and (buffers[41].array == 0).all() and (buffers[19].array == 0).all()
    workers.run(plan, TOKENS, Section(0, 0))  # nothing at all
    workers.close()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs affinity masks")
def test_threads_are_bound_only_when_asked(reversing, monkeypatch):
    """And the caller may run afterwards where it could before."""
    before = os.sched_getaffinity(0)
    for options in ({}, {"bind": False}, {"bind": True}):
        workers = Workers(2, **options)
        reversing.run(workers)
        assert os.sched_getaffinity(0) == before
        (thread,) = workers._threads
        bound = options.get("bind", False) and len(one_of_each_core()) >= 2
        assert os.sched_getaffinity(thread.native_id) == ({one_of_each_core()[1]} if bound else before)
        workers.close()
    monkeypatch.setenv("HALFBYTE_BIND", "1")
    workers = Workers(2)
    reversing.run(workers)
    assert len(os.sched_getaffinity(workers._threads[0].native_id)) == (1 if len(one_of_each_core()) >= 2 else len(before))
    workers.close()


@pytest.mark.skipif(not hasattr(os, "fork") or sys.platform == "darwin", reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_is_told_and_does_not_hang(reversing):
    workers = Workers(2)
    reversing.run(workers)
    child = os.fork()
    if child == 0:
        try:
            reversing.run(workers)
        except ThreadsError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    got, wanted = reversing.run(workers)
    np.testing.assert_array_equal(got, wanted)
    workers.close()
