"""Threads that run plans.

One persistent thread per worker beyond the caller. While a plan runs, each worker is bound to a core of its own, the caller too: unbound
on a busy machine, two spinning workers may share a core, and every barrier costs a time slice. The default number of workers is that of
the physical cores that this process may use.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from ...quant.errors import HalfbyteError
from ...quant.jit import store
from ..kernels.structs import SETTINGS, SETTINGS_AT, SYNC_BYTES
from ..plan.plan import Plan, Section

_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32)
_FUTEX = {"x86_64": 202, "aarch64": 98, "arm64": 98}
INTERPRETER = ("halfbyte.engine.kernels.interpreter",)


class ThreadsError(HalfbyteError):
    """A number of threads that cannot be used."""


def default_threads() -> int:
    """Physical cores that this process may use: affinity mask, hyper-threads and the cgroup's CPU quota respected."""
    try:
        allowed = sorted(os.sched_getaffinity(0))
    except AttributeError:
        return max(1, os.cpu_count() or 1)
    cores = {_core_of(cpu) for cpu in allowed}
    return max(1, min(len(cores), _quota() or len(cores)))


def _core_of(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _quota() -> int | None:
    """Whole CPUs of the tightest CPU quota among the process's control groups and those around them, or None."""
    paths = {"": "/", "cpu": "/"}  # version 2 has one tree, version 1 one for each controller
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            paths |= dict.fromkeys(paths.keys() & set(controllers.split(",")), path)
    except (OSError, ValueError):
        pass
    found = [_quota_of(folder / "cpu.max") for folder in _around("/sys/fs/cgroup", paths[""])]
    for folder in _around("/sys/fs/cgroup/cpu", paths["cpu"]):
        found.append(_quota_of(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"))
    limits = [limit for limit in found if limit is not None]
    return max(1, int(min(limits))) if limits else None


def _around(root: str, path: str) -> list[Path]:
    """The folder of a control group and of those around it. In a container, `path` may be the host's, and only the root is there."""
    parts = [part for part in path.split("/") if part]
    return [Path("/".join([root, *parts[:n]])) for n in range(len(parts), -1, -1)]


def _quota_of(*files: Path) -> float | None:
    """CPUs that the file or files with a quota and a period allow, or None."""
    try:
        quota, period = (int(word) for word in " ".join(file.read_text() for file in files).split())
        return quota / period if quota > 0 and period > 0 else None
    except (OSError, ValueError):  # no such group, or "max"
        return None


class Workers:
    """A pool of `count` workers, the calling thread among them. Not re-entrant: one plan at a time, from any thread."""

    def __init__(self, count: int | None = None):
        count = default_threads() if count is None else count
        if not isinstance(count, (int, np.integer)) or not 1 <= count <= 512:
            raise ThreadsError(f"threads must be a whole number between 1 and 512, not {count!r}")
        self.count = int(count)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._memory = np.zeros(SYNC_BYTES + 64, np.uint8)
        offset = -self._memory.ctypes.data % 64
        self._sync = self._memory.ctypes.data + offset
        self._settings = self._memory[offset + SETTINGS_AT : offset + SYNC_BYTES].view(np.int64)
        self._result = (ctypes.c_int64 * 16)()
        self._entry = _CALL(store.find(*INTERPRETER).address)
        self._field = {name: i for i, name in enumerate(SETTINGS.split())}
        self._closed = False
        self._cores = _cores() if 1 < count <= default_threads() else []
        self._configure()
        self._turns = [threading.Semaphore(0) for _ in range(count - 1)]
        self._threads = [threading.Thread(target=self._serve, args=(w,), daemon=True, name=f"halfbyte-{w}") for w in range(1, count)]
        for thread in self._threads:
            thread.start()

    def run(self, plan: Plan, tokens: int, section: Section | None = None, profile: np.ndarray | None = None) -> None:
        """Runs a plan, or a section of it, for a step of `tokens` tokens.

        profile: int64[rows + 1], filled with the cycle counter at the start of each row and at the end.
        """
        address, rows = plan.address(section)
        if profile is not None and (profile.dtype != np.int64 or profile.size <= rows):
            raise ThreadsError(f"a profile of {rows} rows needs int64[{rows + 1}]")
        with self._lock:
            if self._closed:
                raise ThreadsError("the workers are closed")
            if os.getpid() != self._process:  # threads do not come along into a fork: waiting for them would never end
                raise ThreadsError("the workers belong to the process that this one was forked from: open the model again here")
            self._settings[:4] = address, rows, tokens, 1
            self._settings[self._field["profile"]] = 0 if profile is None else profile.ctypes.data
            before = _bind(self._cores, 0)
            try:
                self._post()
            finally:
                if before is not None:
                    os.sched_setaffinity(0, before)

    def close(self) -> None:
        """Ends the threads. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._settings[self._field["run"]] = 0
            self._post()
        for thread in self._threads:
            thread.join()

    def _configure(self) -> None:
        settings, field = self._settings, self._field
        settings[field["spin"]], settings[field["patience"]] = 2000, 5000
        number = _FUTEX.get(platform.machine()) if sys.platform == "linux" else None
        if os.environ.get("HALFBYTE_WAIT") == "portable":
            number = None
        if number is not None:
            settings[field["syscall"]] = _address(ctypes.CDLL(None).syscall)
            settings[field["futex"]] = number
            settings[field["resident"]] = 1
        elif sys.platform == "win32":
            settings[field["yield_"]] = _address(ctypes.windll.kernel32.SwitchToThread)
        else:
            settings[field["yield_"]] = _address(ctypes.CDLL(None).sched_yield)
        self._resident = number is not None

    def _post(self) -> None:
        if not self._resident:
            for turn in self._turns:
                turn.release()
        self._call(0)

    def _serve(self, worker: int) -> None:
        _bind(self._cores, worker)
        if self._resident:
            self._call(worker)
            return
        while True:
            self._turns[worker - 1].acquire()
            self._call(worker)
            if self._closed:
                return

    def _call(self, worker: int) -> None:
        slot = ctypes.addressof(self._result)
        if self._entry(slot, slot + 64, self._sync, worker, self.count):
            raise ThreadsError("a kernel reported an error, which none can: this is a defect in Halfbyte")


def _cores() -> list[int]:
    """One processor of each physical core that the process may use; [] where threads cannot be bound."""
    if not hasattr(os, "sched_setaffinity"):
        return []
    first: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        first.setdefault(_core_of(cpu), cpu)
    return list(first.values())


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
