"""How many processors this process may use."""

from __future__ import annotations

import os
from pathlib import Path


def logical_processors() -> int:
    """Processors that the affinity mask allows, hyper-threads counted, but no more than the CPU quota of the process's control groups
    pays for; at least 1. For work that waits for memory or files as much as it computes."""
    count = len(_allowed()) or os.cpu_count() or 1
    return max(1, min(count, _quota() or count))


def physical_cores() -> int:
    """Cores that the affinity mask allows, each once however many hyper-threads it has, but no more than the CPU quota pays for; at least
    1. For work that fills a core's arithmetic units."""
    count = len({_core_of(cpu) for cpu in _allowed()}) or os.cpu_count() or 1
    return max(1, min(count, _quota() or count))


def one_of_each_core() -> list[int]:
    """Numbers of processors that the process may use, the first of each physical core; [] where threads cannot be bound."""
    if not hasattr(os, "sched_setaffinity"):
        return []
    first: dict[str, int] = {}
    for cpu in _allowed():
        first.setdefault(_core_of(cpu), cpu)
    return list(first.values())


def _allowed() -> list[int]:
    """The affinity mask, or [] where there is none."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


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
