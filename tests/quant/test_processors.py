"""How many processors there are to use, from files of the kernel that are faked."""

import os
from pathlib import Path

import pytest

from halfbyte.quant import processors
from halfbyte.quant.processors import logical_processors, one_of_each_core, physical_cores


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function: eight processors on four cores, the given affinity mask, and files by path."""

    def make(allowed, files=None):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(allowed), raising=False)
        monkeypatch.setattr(processors, "Path", lambda path: Path(f"{tmp_path}/{path}"))
        siblings = {f"/sys/devices/system/cpu/cpu{c}/topology/thread_siblings_list": f"{c % 4},{c % 4 + 4}\n" for c in range(8)}
        for path, text in (siblings | (files or {})).items():
            (tmp_path / path[1:]).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path[1:]).write_text(text)
        return physical_cores()

    return make


@pytest.mark.parametrize(("allowed", "cores"), [(range(8), 4), ([0, 4], 1), ([0, 1, 4, 5], 2), ([3], 1), (range(4), 4)])
def test_one_for_each_physical_core(machine, allowed, cores):
    assert machine(allowed) == cores


def test_without_topology(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {900, 901, 902}, raising=False)
    monkeypatch.setattr(processors, "_quota", lambda: None)
    assert physical_cores() == 3


def test_without_affinity(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert physical_cores() == 6


@pytest.mark.parametrize(
    ("quota", "threads"),
    [
        ("max 100000", 4), ("200000 100000", 2), ("250000 100000", 2), ("50000 100000", 1), ("800000 100000", 4),
        ("", 4), ("0 0", 4), ("x y", 4),
    ],
)  # fmt: skip
def test_a_quota(machine, quota, threads):
    assert machine(range(8), {"/sys/fs/cgroup/cpu.max": quota + "\n"}) == threads


def test_the_tightest_quota_around(machine):
    files = {
        "/proc/self/cgroup": "0::/user.slice/job.scope\n",
        "/sys/fs/cgroup/user.slice/cpu.max": "300000 100000\n",
        "/sys/fs/cgroup/user.slice/job.scope/cpu.max": "max 100000\n",
    }
    assert machine(range(8), files) == 3
    assert machine(range(8), {"/sys/fs/cgroup/user.slice/job.scope/cpu.max": "100000 100000\n"}) == 1


@pytest.mark.parametrize(("quota", "threads"), [("-1", 4), ("200000", 2), ("10000", 1)])
def test_version_1(machine, quota, threads):
    """In a container the path is that of the host, and the files are at the root."""
    files = {
        "/proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n",
        "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": quota + "\n",
        "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert machine(range(8), files) == threads


def test_hyper_threads_count_as_processors_but_not_as_cores(machine):
    machine(range(8))
    assert (logical_processors(), physical_cores(), one_of_each_core()) == (8, 4, [0, 1, 2, 3])
    machine([1, 5, 6])
    assert (logical_processors(), physical_cores(), one_of_each_core()) == (3, 2, [1, 6])
    machine(range(8), {"/sys/fs/cgroup/cpu.max": "300000 100000\n"})
    assert (logical_processors(), physical_cores()) == (3, 3)
