"""Outputs are whole or absent: on errors, signals, kills and full disks."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from halfbyte.formats import atomic
from halfbyte.formats.atomic import atomic_file, atomic_folder
from halfbyte.formats.errors import OutputError

posix = pytest.mark.skipif(os.name == "nt", reason="signals and locks of POSIX")


def test_a_file_appears_whole(tmp_path):
    path = tmp_path / "a.bin"
    with atomic_file(path) as file:
        file.write(b"hello ")
        assert not path.exists()
        file.write(b"world")
        file.write_at(0, b"J")
        file.write(b"")
        assert file.tell() == 11
    assert path.read_bytes() == b"Jello world"
    assert list(tmp_path.iterdir()) == [path]


def test_what_was_reserved_and_not_written_is_cut(tmp_path):
    with atomic_file(tmp_path / "a", size=1_000_000) as file:
        file.write(b"abc")
    assert (tmp_path / "a").read_bytes() == b"abc"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_nothing_is_left_and_nothing_harmed_on_an_error(tmp_path, error):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with pytest.raises(error), atomic_file(path, size=100) as file:
        file.write(b"new")
        raise error
    assert path.read_bytes() == b"old"
    with pytest.raises(error), atomic_folder(tmp_path / "f") as folder:
        (folder / "x").write_bytes(b"new")
        raise error
    assert list(tmp_path.iterdir()) == [path]


@posix
def test_the_mode_of_a_replaced_file_and_the_umask_are_kept(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    path.chmod(0o640)
    with atomic_file(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o640
    old = os.umask(0o027)
    try:
        with atomic_file(tmp_path / "b"):
            pass
    finally:
        os.umask(old)
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o640


@posix
def test_a_link_keeps_pointing_where_it_did(tmp_path):
    (tmp_path / "deep").mkdir()
    real, link = tmp_path / "deep" / "real", tmp_path / "link"
    link.symlink_to(real)
    with atomic_file(link) as file:
        file.write(b"x")
    assert link.is_symlink() and real.read_bytes() == b"x"


def test_an_output_that_is_an_input_is_refused(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"weights")
    other = tmp_path / "hard"
    os.link(path, other)
    for target in (path, other, tmp_path / "x" / ".." / "a" if os.name == "nt" else tmp_path / "." / "a"):
        with pytest.raises(OutputError, match="also the input"), atomic_file(target, inputs=[tmp_path / "no", path]):
            pass
    folder = tmp_path / "f"
    folder.mkdir()
    with pytest.raises(OutputError, match="also the input"), atomic_folder(folder, inputs=[folder]):
        pass
    assert path.read_bytes() == b"weights" and sorted(p.name for p in tmp_path.iterdir()) == ["a", "f", "hard"]


def test_targets_that_cannot_be_written(tmp_path):
    (tmp_path / "folder").mkdir()
    for target, words in [
        (tmp_path / "folder", "is a folder"),
        (tmp_path / "missing" / "a", "no folder"),
        (tmp_path / ("x" * 300), "cannot be written"),
        ("a\0b", "not a file name"),
        ("/", "not a file name"),
    ]:
        with pytest.raises(OutputError, match=words), atomic_file(target):
            pass
    if os.name != "nt":
        with pytest.raises(OutputError, match="not a regular file"), atomic_file("/dev/null"):
            pass
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_folder_appears_whole(tmp_path):
    target = tmp_path / "model"
    with atomic_folder(target) as folder:
        (folder / "config.json").write_text("{}")
        (folder / "sub").mkdir()
        (folder / "sub" / "x").write_text("x")
        assert not target.exists()
    assert sorted(p.name for p in target.rglob("*")) == ["config.json", "sub", "x"]
    with pytest.raises(OutputError, match="not empty"), atomic_folder(target):
        pass
    (tmp_path / "empty").mkdir()
    with atomic_folder(tmp_path / "empty") as folder:
        (folder / "a").write_text("a")
    assert (tmp_path / "empty" / "a").exists()
    with pytest.raises(OutputError, match="is a file"), atomic_folder(target / "config.json"):
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "model"]


def test_a_full_disk_is_one_error_that_says_how_much(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "_write_at", full)
        words = r"disk is full: needs at least 5 bytes, \d+ are free"
        with pytest.raises(OutputError, match=words) as caught, atomic_file(tmp_path / "a") as file:
            file.write(b"hello")
        assert caught.value.needed == 5
    if hasattr(os, "posix_fallocate"):
        monkeypatch.setattr(os, "posix_fallocate", full)
        with (
            pytest.raises(OutputError, match=r"disk is full: needs 12345 bytes") as caught,
            atomic_file(tmp_path / "a", size=12345),
        ):
            pytest.fail("the work began on a full disk")
        assert caught.value.needed == 12345
    assert list(tmp_path.iterdir()) == []


@posix
@pytest.mark.parametrize("reserve", [None, 2_000_000])
def test_a_file_that_may_not_grow(tmp_path, reserve):
    code = f"""
import resource
from halfbyte.formats.atomic import atomic_file
from halfbyte.formats.errors import OutputError
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
try:
    with atomic_file({str(tmp_path / "a")!r}, size={reserve}) as file:
        for _ in range(20):
            file.write(bytes(100_000))
except OutputError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "larger than allowed: needs" in done.stdout and done.stderr == "" and done.returncode == 0
    assert list(tmp_path.iterdir()) == []


CHILD = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
from halfbyte.formats.atomic import atomic_file, atomic_folder, waiting_folder
with {call}({path!r}) as out:
    (out / "x").write_text("x") if hasattr(out, "joinpath") else out.write(b"partial")
    print("ready", flush=True)
    time.sleep(60)
"""


def start(call: str, path) -> subprocess.Popen:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(call=call, path=str(path))], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout.readline() == b"ready\n"
    return child


@posix
@pytest.mark.parametrize("call", ["atomic_file", "atomic_folder"])
@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_signals_leave_nothing(tmp_path, call, number, status):
    child = start(call, tmp_path / "out")
    assert len(list(tmp_path.iterdir())) == 1
    child.send_signal(number)
    child.communicate(timeout=10)
    assert child.returncode == status
    assert list(tmp_path.iterdir()) == []


@posix
@pytest.mark.parametrize("call", ["atomic_file", "atomic_folder"])
def test_what_a_killed_run_leaves_is_removed_by_the_next_and_a_living_one_is_let_be(tmp_path, call):
    target = tmp_path / "out"
    killed, alive, other = start(call, target), start(call, target), start(call, tmp_path / "out.other")
    for child in (killed, other):
        child.kill()
        child.communicate()
    left = sorted(p.name for p in tmp_path.iterdir())
    assert len(left) == 3 and all(name.startswith(".out") and name.endswith(".halfbyte-tmp") for name in left)
    stranger = tmp_path / ".out.halfbyte-tmp"
    stranger.write_text("not ours")
    with getattr(atomic, call)(target) as out:
        (out / "y").write_text("y") if call == "atomic_folder" else out.write(b"whole")
    names = sorted(p.name for p in tmp_path.iterdir())
    assert len(names) == 4 and stranger.exists() and sum(name.startswith(".out.other.") for name in names) == 1
    alive.terminate()
    alive.communicate()
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith(".out.other."))[:2] == [".out.halfbyte-tmp", "out"]


def test_a_waiting_folder_goes_and_stays_while_its_target_is_written(tmp_path):
    target = tmp_path / "out"
    with atomic.waiting_folder(target) as folder:
        assert folder.parent == tmp_path and folder.name.startswith(".out.") and not any(folder.iterdir())
        (folder / "first").write_bytes(b"x")
        with atomic_file(target) as file:  # it looks for leftovers, of which this is none
            file.write(b"whole")
        assert (folder / "first").read_bytes() == b"x"
    assert list(tmp_path.iterdir()) == [target]
    with pytest.raises(KeyboardInterrupt), atomic.waiting_folder(target) as folder:
        (folder / "first").write_bytes(b"x")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == [target]
    with pytest.raises(OutputError, match="no folder"), atomic.waiting_folder(tmp_path / "none" / "out"):
        pass


@posix
@pytest.mark.parametrize("next_one", ["waiting_folder", "atomic_file"])
def test_a_waiting_folder_of_a_killed_run_is_removed_by_the_next(tmp_path, next_one):
    target = tmp_path / "out"
    killed, alive = start("waiting_folder", target), start("waiting_folder", target)
    killed.kill()
    killed.communicate()
    assert len(list(tmp_path.iterdir())) == 2
    with getattr(atomic, next_one)(target):
        assert len(list(tmp_path.iterdir())) == 2  # that of the living one, and its own
    alive.terminate()
    alive.communicate()
    assert [p.name for p in tmp_path.iterdir()] == (["out"] if next_one == "atomic_file" else [])


@posix
def test_killing_at_any_moment_leaves_a_whole_file_or_none(tmp_path):
    code = f"""
from halfbyte.formats.atomic import atomic_file
print("ready", flush=True)
while True:
    with atomic_file({str(tmp_path / "out")!r}, size=3_000_000) as file:
        for _ in range(30):
            file.write(b"x" * 100_000)
"""
    for wait in (0, 0.001, 0.003, 0.007, 0.02):
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        child.stdout.readline()
        time.sleep(wait)
        child.kill()
        child.communicate()
        seen = [p for p in tmp_path.iterdir() if p.name == "out"]
        assert all(p.read_bytes() == b"x" * 3_000_000 for p in seen)
        assert sum(p.name != "out" for p in tmp_path.iterdir()) <= 1, "each run cleans up behind the one before"


@posix
def test_handlers_of_others_stay(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with atomic_file(tmp_path / "a"):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is before
    seen = []
    thread = threading.Thread(target=lambda: atomic_file(tmp_path / "b").__enter__() and seen.append(1))
    thread.start()
    thread.join()
    assert seen and signal.getsignal(signal.SIGTERM) is before


def test_two_runs_at_once_both_succeed(tmp_path):
    path = tmp_path / "a"
    with atomic_file(path) as first, atomic_file(path) as second:
        first.write(b"first")
        second.write(b"second")
    assert path.read_bytes() == b"first" and list(tmp_path.iterdir()) == [path]


def test_names_of_every_length(tmp_path):
    for name in ("x" * 255, "ü" * 127, "a"):
        with atomic_file(tmp_path / name) as file:
            file.write(b"x")
    assert len(list(tmp_path.iterdir())) == 3
