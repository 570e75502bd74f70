"""Machine code on disk: made once, loaded without a compiler, never trusted further than its checksum and its owner."""

import ctypes
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from halfbyte.quant.jit import arguments, machine_code, store

KERNEL = "halfbyte.engine.kernels.gather"
posix = pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs POSIX file ownership")

USE = """
import ctypes, sys
import numpy as np
from halfbyte.quant.jit import store
from halfbyte.quant.jit.arguments import pack
kernel = store.find("halfbyte.engine.kernels.gather")
x, out = np.arange(96, dtype=np.float32).reshape(3, 32), np.zeros((2, 32), np.float32)
ids = np.array([2, 0], np.int32)
step = np.array([2, ids.ctypes.data, 0, 0, 0], np.int64)
values = {"step": step.ctypes.data, "x": x.ctypes.data, "x_stride": 128, "columns": 32, "out": out.ctypes.data}
block = np.frombuffer(pack(kernel.fields, values), np.uint8)
call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32)(kernel.address)
slots = (ctypes.c_int64 * 16)()
assert call(ctypes.addressof(slots), ctypes.addressof(slots) + 64, block.ctypes.data, 0, 1) == 0
assert (out == x[[2, 0]]).all()
print("numba" in sys.modules or "llvmlite" in sys.modules, store._folder())
"""


def environment(cache, **more):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA_", "HALFBYTE_"))}
    return env | {"HALFBYTE_CACHE": str(cache), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)} | more


def use(cache, **more):
    """Finds and calls a kernel in a child. Returns (whether a compiler was imported, the folder of this key)."""
    done = subprocess.run([sys.executable, "-c", USE], env=environment(cache, **more), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled, folder = done.stdout.strip().split(" ", 1)
    return compiled == "True", folder


def file_in(folder):
    (path,) = (os.path.join(folder, n) for n in os.listdir(folder))
    return path


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A cache folder with the kernel in it: (cache, the kernel's file)."""
    cache = tmp_path_factory.mktemp("warm")
    compiled, folder = use(cache)
    assert compiled
    return cache, file_in(folder)


@pytest.fixture
def copied(warm, tmp_path):
    """A cache folder of its own with the kernel in it."""
    cache, path = warm
    here = tmp_path / os.path.relpath(path, cache)
    here.parent.mkdir(parents=True)
    here.write_bytes(Path(path).read_bytes())
    here.chmod(0o600)
    return tmp_path, here


def test_a_warm_start_imports_no_compiler(warm):
    compiled, _ = use(warm[0])
    assert not compiled


def test_nothing_but_kernels_is_left_in_the_folder(warm):
    assert [n for n in os.listdir(os.path.dirname(warm[1])) if not n.endswith(".bin")] == []


def test_the_key_changes_with_the_processor_and_the_loader(warm):
    keys = {warm[1].split(os.sep)[-2]}
    code = "from halfbyte.quant.jit import store; print(store._key())"
    for more in ({"NUMBA_CPU_NAME": "x86-64"}, {"NUMBA_CPU_FEATURES": "+avx2"}, {"HALFBYTE_LOADER": "link"}):
        done = subprocess.run([sys.executable, "-c", code], env=environment(warm[0], **more), capture_output=True, text=True, check=True)
        keys.add(done.stdout.strip())
    assert len(keys) == 4


@pytest.mark.parametrize(
    "file", ["quant/block.py", "quant/jit/simd.py", "quant/deep/new.py", "engine/kernels/matmul.py", "engine/kernels/of/moe.py"]
)
def test_the_key_changes_with_every_source_however_deep(tmp_path, monkeypatch, file):
    monkeypatch.setattr(store, "PACKAGE", tmp_path)
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("a = 1\n")
    before = store._key()
    (tmp_path / file).write_text("a = 2\n")
    assert store._key() != before


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d[: len(d) // 2], lambda d: d[:10], lambda d: b"", lambda d: d + b"\0", lambda d: b"x" + d[1:],
        lambda d: d[:200] + bytes([d[200] ^ 1]) + d[201:], lambda d: d[:-1] + bytes([d[-1] ^ 0x80]),
        lambda d: d[:8] + struct.pack("<I", 1) + d[12:], lambda d: d[:16] + b"\xff\xff\xff\xff" + d[20:], lambda d: os.urandom(len(d)),
    ],
)  # fmt: skip
def test_a_damaged_file_is_not_loaded(copied, damage, monkeypatch):
    _, path = copied
    whole = path.read_bytes()
    monkeypatch.setattr(store, "_folder_found", [path.parent])
    assert store._from_disk((KERNEL,)) is not None
    path.write_bytes(damage(whole))
    assert store._from_disk((KERNEL,)) is None


def test_a_damaged_file_is_compiled_again(copied):
    cache, path = copied
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    assert use(cache)[0]
    assert path.read_bytes()[:8] == whole[:8] and path.stat().st_size == len(whole)
    assert not use(cache)[0]


@posix
@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_not_executed(copied, mode, monkeypatch):
    _, path = copied
    monkeypatch.setattr(store, "_folder_found", [path.parent])
    path.chmod(mode)
    assert store._from_disk((KERNEL,)) is None
    path.chmod(0o644)
    assert store._from_disk((KERNEL,)) is not None


@posix
def test_a_file_of_somebody_else_is_not_executed(copied, monkeypatch):
    _, path = copied
    monkeypatch.setattr(store, "_folder_found", [path.parent])
    monkeypatch.setattr(os, "getuid", lambda: os.stat(path).st_uid + 1)
    assert store._from_disk((KERNEL,)) is None


@posix
def test_whatever_the_umask_is(tmp_path):
    before = os.umask(0)
    try:
        folder = use(tmp_path)[1]
    finally:
        os.umask(before)
    assert os.stat(file_in(folder)).st_mode & 0o022 == 0
    assert not use(tmp_path)[0]


def test_without_a_cache_folder():
    compiled, folder = use("")
    assert compiled and folder == "None"


def test_a_cache_folder_that_cannot_be(tmp_path):
    """A file where the folder should be: no file can be kept, and that is all."""
    (tmp_path / "file").write_text("mine")
    assert use(tmp_path / "file")[0]
    assert use(tmp_path / "file" / "deeper")[0]
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_code_may_not_be_mapped_from(copied, monkeypatch):
    """A file system mounted noexec: the code is read, checked and copied to memory that may be executed."""
    _, path = copied
    if store._loader() != "map":
        pytest.skip("machine code is not mapped on this platform")
    monkeypatch.setattr(store, "_folder_found", [path.parent])
    real = store.mmap.mmap

    def refuse(file, *args, **more):
        if file != -1:
            raise PermissionError(1, "Operation not permitted")
        return real(file, *args, **more)

    monkeypatch.setattr(store.mmap, "mmap", refuse)
    assert store._from_disk((KERNEL,)) is not None


def test_three_processes_at_once(tmp_path):
    running = [
        subprocess.Popen([sys.executable, "-c", USE], env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [p.communicate(timeout=120) for p in running]
    assert [p.returncode for p in running] == [0, 0, 0], said
    folder = said[0][0].strip().split(" ", 1)[1]
    assert [n[-4:] for n in os.listdir(folder)] == [".bin"]


def test_kernels_are_compiled_side_by_side(tmp_path):
    """More than two are missing: child processes compile them, each is reported once, and no child stays."""
    code = """
import sys
from halfbyte.quant.jit import store
if __name__ == "__main__":
    names = [("halfbyte.engine.kernels.gather",)] + [("halfbyte.engine.kernels.rms_norm", k) for k in ("int8", "f32")]
    seen = []
    store.prepare(names, lambda done, total: seen.append((done, total)))
    assert store.missing(names) == [] and seen[-1][0] == seen[-1][1] and {t for _, t in seen} == {3}, seen
    print("numba" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(tmp_path), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "False"


def test_a_kernel_that_does_not_exist():
    with pytest.raises(ModuleNotFoundError):
        store.find("halfbyte.engine.kernels.nothing")


def test_one_kernel_for_all_threads():
    found = []
    threads = [threading.Thread(target=lambda: found.append(store.find(KERNEL))) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len({k.address for k in found}) == 1 and len(found) == 4


# ---- argument blocks ---------------------------------------------------------------------------------------------------


def test_arguments_are_packed_in_order():
    block = arguments.pack("a b:f32 c", {"c": -5, "a": 2**62, "b": 0.25})
    assert struct.unpack_from("<q", block, 0) == (2**62,)
    assert struct.unpack_from("<f", block, 8) == (0.25,)
    assert struct.unpack_from("<q", block, 16) == (-5,) and len(block) == 24


def test_arguments_that_are_missing_or_too_many():
    with pytest.raises(arguments.ArgumentError, match=r"missing fields \['b'\], unknown fields \['x', 'y'\]"):
        arguments.pack("a b", {"a": 1, "x": 2, "y": 3})
    assert arguments.parse("a b:f32") == [("a", "i64"), ("b", "f32")]


# ---- machine code ------------------------------------------------------------------------------------------------------


def test_machine_code_that_needs_something_from_outside_is_refused():
    """Flat code has no loader to find a C library's function."""
    import math

    def kernel(arguments, worker, workers):
        address = np.float64(arguments)
        if math.lgamma(address) > 1e300:  # a call of the C library
            while True:
                pass

    if store._loader() != "map":
        pytest.skip("machine code is not mapped on this platform")
    with pytest.raises(machine_code.CompileError, match="lgamma"):
        machine_code.compile_kernel(kernel, flat=True)


@pytest.mark.parametrize("loader", ["map", "link"])
def test_constants_of_a_kernel_come_along(loader):
    """A switch and float constants live in sections of their own, which flat code must find at the right distance."""
    if loader == "map" and store._loader() != "map":
        pytest.skip("machine code is not mapped on this platform")
    from halfbyte.quant.jit.memory import load_f32, load_i64, store_f32

    table = (0.125, 3.5, -7.25, 1e10, 2.0**-20, 9.75, -0.5, 11.0)

    def kernel(arguments, worker, workers):
        for i in range(8):
            kind, factor = load_i64(arguments + 16 * i), np.float32(1)
            if kind == 0:
                factor = np.float32(0.125)
            elif kind == 1:
                factor = np.float32(3.5)
            elif kind == 2:
                factor = np.float32(-7.25)
            elif kind == 3:
                factor = np.float32(1e10)
            elif kind == 4:
                factor = np.float32(2.0**-20)
            elif kind == 5:
                factor = np.float32(9.75)
            elif kind == 6:
                factor = np.float32(-0.5)
            elif kind == 7:
                factor = np.float32(11.0)
            store_f32(arguments + 16 * i + 8, load_f32(arguments + 16 * i + 8) * factor)

    code = machine_code.compile_kernel(kernel, flat=loader == "map")
    body = b"x" + bytes(-(store._HEADER.size + 1) % store._ALIGN) + code.data
    header = (store._MAGIC, store.zlib.crc32(body), code.entry, 1, len(code.data), int(code.kind != "flat"))
    found = store._load(store._HEADER.pack(*header) + body, None)
    data = np.zeros(8, [("kind", "<i8"), ("value", "<f4"), ("", "<f4")])
    data["kind"], data["value"] = [7, 0, 5, 2, 1, 3, 6, 4], 2
    call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32)(found.address)
    slots = (ctypes.c_int64 * 16)()
    assert call(ctypes.addressof(slots), ctypes.addressof(slots) + 64, data.ctypes.data, 0, 1) == 0
    np.testing.assert_array_equal(data["value"], np.float32(table)[data["kind"]] * np.float32(2))
