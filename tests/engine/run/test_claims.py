"""Work that is claimed: every part once, together with what belongs to it, and nobody waits for a worker that has nothing in hand.

The kernels here are Python functions that write down what they were called for.
"""

import ctypes
import threading
import time
from itertools import pairwise

import numpy as np
import pytest

from halfbyte.engine.kernels.structs import ALWAYS, MANY, NEVER, WHOLE
from halfbyte.engine.plan.plan import Plan
from halfbyte.engine.run import workers as module
from halfbyte.engine.run.workers import Workers
from halfbyte.quant.block import get_format
from halfbyte.quant.jit import store
from support import kernelbox as box
from support.kernelbox import KERNEL


class Recorder:
    """A plan whose rows note (row, thread, worker, third argument), and pause where `pauses` says: (row, worker) to seconds, once."""

    def __init__(self, monkeypatch):
        self.calls, self.pauses, self.plan = [], {}, Plan()
        self._callback = KERNEL(self._call)
        kernel = store.Kernel(ctypes.cast(self._callback, ctypes.c_void_p).value, "row")
        monkeypatch.setitem(store._kernels, ("halfbyte.engine.kernels.recorder",), kernel)

    def _call(self, result, exception, arguments, worker, third):
        row = ctypes.c_int64.from_address(arguments).value
        self.calls.append((row, threading.get_ident(), worker, third))
        time.sleep(self.pauses.pop((row, worker), 0))
        return 0

    def add(self, barrier, units=0):
        self.plan.add("recorder", row=len(self.plan.ops), barrier=barrier, units=units)

    def run(self, workers, tokens=8):
        """Calls of the run, in the order in which they began, by row; and how long it took."""
        self.calls.clear()
        start = time.perf_counter()
        workers.run(self.plan, tokens)
        took = time.perf_counter() - start
        return [[c[1:] for c in self.calls if c[0] == row] for row in range(len(self.plan.ops))], took


@pytest.fixture
def recorder(monkeypatch):
    return Recorder(monkeypatch)


def parts(calls):
    """The runs of parts that a row was called for, sorted."""
    return sorted((third & 0xFFFF, third >> 16) for _, _, third in calls)


@pytest.mark.parametrize("waiting", ["futex", "portable"])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_every_unit_once(recorder, count, waiting, monkeypatch):
    """With fewer units than workers too; and who claims units of a row gets the same ones of the rows beside it."""
    if waiting == "portable":
        monkeypatch.setenv("HALFBYTE_WAIT", "portable")
    sizes = [(1, 1, 1), (2, 2, 2), (18, 6, 6), (48, 48, 48), (4000, 2, 70)]
    for group in sizes:
        for barrier, units in zip((NEVER, NEVER, ALWAYS), group, strict=True):
            recorder.add(barrier, units)
    recorder.plan.link()
    workers = Workers(count)
    for _ in range(20):
        rows, _ = recorder.run(workers)
        for first, group in enumerate(sizes):
            calls = rows[3 * first : 3 * first + 3]
            for units, row in zip(group, calls, strict=True):
                edges = parts(row)
                assert edges[0][0] == 0 and edges[-1][1] == WHOLE and all(a[1] == b[0] for a, b in pairwise(edges))
                taken = [u for a, b in edges for u in range(units * a // WHOLE, units * b // WHOLE)]
                assert taken == list(range(units))
            assert sorted(calls[0]) == sorted(calls[1]) == sorted(calls[2])
            assert len(calls[0]) <= max(group) or len(calls[0]) <= count
    workers.close()


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("tokens", [1, 2])
def test_rows_that_are_dealt_and_rows_for_oneself(recorder, count, tokens):
    recorder.add(MANY)
    recorder.add(ALWAYS)
    recorder.add(MANY)
    recorder.add(NEVER, 30)
    recorder.add(ALWAYS, 30)
    recorder.plan.link()
    workers = Workers(count)
    for _ in range(20):
        (first, dealt, own, one, other), _ = recorder.run(workers, tokens)
        assert sorted(call[1:] for call in dealt) == [(w, count) for w in range(count)]
        assert sorted(one) == sorted(other)
        assert sorted(first) == sorted(dealt) or tokens == 2  # a part's number brings what was made ready for that number
        if tokens == 1:
            assert {c[:2] for c in own} == {c[:2] for c in one} and len(own) == len(set(own))
        else:
            assert sorted(c[1] for c in own) == list(range(count))
    workers.close()


def test_a_worker_that_stalls_keeps_only_what_it_has_in_hand(recorder):
    for _ in range(3):
        recorder.add(ALWAYS, 64)
    recorder.plan.link()
    workers = Workers(3)
    recorder.run(workers)
    for _attempt in range(20):  # until worker 1 comes early enough to get something
        recorder.pauses = {(1, 1): 0.3, (0, 0): 0.01, (1, 0): 0.01}
        rows, took = recorder.run(workers)
        if (1, 1) not in recorder.pauses:
            break
    else:
        pytest.skip("worker 1 never got a processor in time")
    assert took >= 0.3
    (span,) = [third for _, worker, third in rows[1] if worker == 1]
    assert (span >> 16) - (span & 0xFFFF) <= WHOLE // 3 // 2 + 1, "half of its share at most"
    for row in rows:
        assert sum((third >> 16) - (third & 0xFFFF) for _, _, third in row) == WHOLE
    workers.close()


@pytest.mark.parametrize("waiting", ["futex", "portable"])
def test_nobody_waits_for_a_worker_that_does_not_come(recorder, waiting, monkeypatch):
    """Its share is done by the others; when it comes at last it takes part as before."""
    if waiting == "portable":
        monkeypatch.setenv("HALFBYTE_WAIT", "portable")
    recorder.add(MANY)
    recorder.add(ALWAYS)
    recorder.add(NEVER, 64)
    recorder.add(ALWAYS, 64)
    recorder.plan.link()
    gate, real = threading.Event(), module._Pool.serve

    def late(pool, worker):
        if worker == 1:
            gate.wait()
        real(pool, worker)

    monkeypatch.setattr(module._Pool, "serve", late)
    workers = Workers(3)
    for tokens in (1, 5):
        rows, _ = recorder.run(workers, tokens)  # would never return
        assert sorted(worker for _, worker, _ in rows[1]) == [0, 1, 2]
        assert sum(b - a for a, b in parts(rows[2])) == WHOLE
    gate.set()
    for _attempt in range(200):
        recorder.pauses = {(1, 0): 0.005, (1, 2): 0.005}
        rows, _ = recorder.run(workers)
        if len({thread for thread, _, _ in rows[2] + rows[1]}) == 3:
            break
    else:
        raise AssertionError("the late worker never took part")
    workers.close()


def test_sums_do_not_depend_on_who_makes_them():
    """The product of a real matrix added to what is there: a unit that is done twice, or not at all, would show."""
    rng = np.random.default_rng(0)
    rows, columns, tokens = 1000, 96, 9
    form = get_format("q4_0")
    tiles = box.copied(form.tile(form.encode(rng.standard_normal((rows, columns)).astype(np.float32), method="nearest")))
    panels = box.make_panels("int8", rng.standard_normal((tokens, columns)).astype(np.float32))
    step, out = box.Step(tokens), box.floats(12, 1024)
    plan = Plan()
    for _ in range(40):
        plan.add(
            "matmul", "q4_0", "int8", units=-(-rows // 32), step=step.address, weights=tiles.ctypes.data, columns=columns, rows=rows,
            x=panels.ctypes.data, x_worker=0, out=out.ctypes.data, out_stride=out.strides[0], bias=0, add=1,
        )  # fmt: skip
    plan.link()
    results = []
    for count in (1, 2, 3, 8, 40):
        out[:] = 0
        workers = Workers(count)
        workers.run(plan, tokens)
        workers.close()
        results.append(out[:tokens, :rows].copy())
    assert np.abs(results[0]).max() > 1
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
