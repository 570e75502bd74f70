"""Threads that run plans.

One persistent thread per worker beyond the caller. They claim their work (kernels/interpreter.py), so the operating system may run them
wherever it likes, and a worker that it does not run for a while holds up no more than the piece of work that it has in hand. On request
each is bound to a core of its own while a plan runs, the caller too. The default number of workers is that of the physical cores that
this process may use.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
import weakref
from queue import SimpleQueue
from typing import Any

import numpy as np

from ...quant.errors import HalfbyteError
from ...quant.jit import store
from ...quant.processors import one_of_each_core, physical_cores
from ..kernels.structs import JOB, PHASE, SETTINGS, SETTINGS_AT, sync_bytes
from ..plan.plan import Plan, Section

_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32)
_FUTEX = {"x86_64": 202, "aarch64": 98, "arm64": 98}
_FIELD = {name: i for i, name in enumerate(SETTINGS.split())}
INTERPRETER = ("halfbyte.engine.kernels.interpreter",)

SPIN, YIELDS, PATIENCE = 300, 100, 5000
"""Turns, of some 20 to 70 ns, that a worker waits for others at full speed, then while offering its processor, before it sleeps; and that
it waits for the next plan before it parks."""


class ThreadsError(HalfbyteError):
    """A number of threads that cannot be used."""


class Workers:
    """A pool of `count` workers, the calling thread among them. Not re-entrant: one plan at a time, from any thread.

    count: None: physical_cores().
    bind: bind each worker to a core of its own while a plan runs, where there are enough; None: if HALFBYTE_BIND is 1. It helps where
    memory belongs to cores and nothing else runs; beside other busy processes it hurts.
    The threads end with `close`, or when the Workers are no longer referred to.
    Raises ThreadsError for a count that is not between 1 and 512.
    """

    def __init__(self, count: int | None = None, bind: bool | None = None):
        count = physical_cores() if count is None else count
        if not isinstance(count, (int, np.integer)) or not 1 <= count <= 512:
            raise ThreadsError(f"threads must be a whole number between 1 and 512, not {count!r}")
        self.count = int(count)
        self._process = os.getpid()
        self._lock = threading.Lock()
        bind = os.environ.get("HALFBYTE_BIND") == "1" if bind is None else bind
        cores = one_of_each_core() if bind else []
        self._pool = pool = _Pool(self.count, cores if 1 < self.count <= len(cores) else [])
        # The threads know the pool, not the Workers, which can so be dropped while they wait.
        self._threads = [threading.Thread(target=pool.serve, args=(w,), daemon=True, name=f"halfbyte-{w}") for w in range(1, self.count)]
        self._end = weakref.finalize(self, pool.end)
        self._end.atexit = False  # nothing is left to tidy when the process ends, and they are daemons
        for thread in self._threads:
            thread.start()

    def run(self, plan: Plan, tokens: int, section: Section | None = None, profile: np.ndarray | None = None) -> None:
        """Runs a plan, or a section of it, for a step of `tokens` tokens.

        profile: int64[rows + 1], filled with the cycles that the calling thread spent in each row, and with those of the whole run.
        """
        address, rows = plan.address(section)
        if profile is not None and (profile.dtype != np.int64 or profile.size <= rows):
            raise ThreadsError(f"a profile of {rows} rows needs int64[{rows + 1}]")
        with self._lock:
            if not self._end.alive:
                raise ThreadsError("the workers are closed")
            if os.getpid() != self._process:  # threads do not come along into a fork: waiting for them would never end
                raise ThreadsError("the workers belong to the process that this one was forked from: open the model again here")
            if profile is not None:
                profile[: rows + 1] = 0
            self._pool.run(address, rows, tokens, 0 if profile is None else profile.ctypes.data)

    def close(self) -> None:
        """Ends the threads, and waits until they have ended. May be called twice."""
        with self._lock:
            self._end()
        for thread in self._threads:
            thread.join()


class _Pool:
    """What the threads share: the synchronization block and the compiled interpreter."""

    def __init__(self, count: int, cores: list[int]):
        self._count, self._cores = count, cores
        self._memory = np.zeros(sync_bytes(count) + 128, np.uint8)
        offset = -self._memory.ctypes.data % 128
        self._sync = self._memory.ctypes.data + offset
        self._memory[offset + PHASE] = 1  # claims of zeros are of the phase before
        self._settings = self._memory[offset + SETTINGS_AT : offset + SETTINGS_AT + 8 * len(_FIELD)].view(np.int64)
        self._result = (ctypes.c_int64 * 16)()
        self._entry = _CALL(store.find(*INTERPRETER).address)
        self._posted = self._memory[offset + JOB : offset + JOB + 4].view(np.int32)
        self._turns: list[SimpleQueue[None]] = [SimpleQueue() for _ in range(count - 1)]
        self._configure()

    def run(self, address: int, rows: int, tokens: int, profile: int) -> None:
        """Runs rows of a plan, of which the first is at an address."""
        self._set(plan=address, rows=rows, tokens=tokens, profile=profile, run=1)
        before = _bind(self._cores, 0)
        try:
            self._post()
        finally:
            if before is not None:
                os.sched_setaffinity(0, before)

    def end(self) -> None:
        """Tells the threads to return, each as soon as it can. It takes no lock and waits for nobody: garbage collection may call it."""
        self._set(run=0)
        self._post()

    def serve(self, worker: int) -> None:
        """What the thread of a worker does."""
        _bind(self._cores, worker)
        if self._resident:
            self._call(worker)
            return
        while True:
            self._turns[worker - 1].get()
            self._call(worker)
            if not self._settings[_FIELD["run"]]:
                return

    def _configure(self) -> None:
        self._set(spin=SPIN, yields=YIELDS, patience=PATIENCE)
        number = _FUTEX.get(platform.machine()) if sys.platform == "linux" else None
        if os.environ.get("HALFBYTE_WAIT") == "portable":
            number = None
        if number is not None:
            self._set(syscall=_address(ctypes.CDLL(None).syscall), futex=number, resident=1)
        if sys.platform == "win32":
            self._set(yield_=_address(ctypes.windll.kernel32.SwitchToThread))
        else:
            self._set(yield_=_address(ctypes.CDLL(None).sched_yield))
        self._resident = number is not None

    def _set(self, **values: int) -> None:
        for name, value in values.items():
            self._settings[_FIELD[name]] = value

    def _post(self) -> None:
        if not self._resident:
            self._set(job=self._posted[0] + 1)
            for turn in self._turns:
                turn.put(None)
        self._call(0)

    def _call(self, worker: int) -> None:
        slot = ctypes.addressof(self._result)
        if self._entry(slot, slot + 64, self._sync, worker, self._count):
            raise ThreadsError("a kernel reported an error, which none can: this is a defect in Halfbyte")


def _bind(cores: list[int], worker: int) -> set[int] | None:
    """Binds the calling thread to the worker's core. Returns where it was allowed to run before, or None if nothing was changed."""
    if not cores:
        return None
    try:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {cores[worker]})
    except OSError:  # the mask may have been narrowed meanwhile
        return None
    return before


def _address(function: Any) -> int:
    """Where a C function lies."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0
