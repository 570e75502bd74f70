"""Kernels by name: from memory, from disk, or compiled now.

    kernel = find("halfbyte.engine.kernels.matmul", "q4_0", "int8")      # .address, .fields

The named module defines `FIELDS` (the argument block) and `build(*parameters)`, which returns the Python function to compile.
Machine code is kept in a cache folder keyed by processor, versions and sources, so a warm start imports neither numba nor the
kernel's module.
"""

from __future__ import annotations

import importlib
import mmap
import os
import platform
import struct
import sys
import threading
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..cache_folder import cache_folder, is_ours, keep_file
from .processes import PACKAGE, child_environment

# magic, crc32 of all that follows the header, entry, bytes of fields text, bytes of code, kind
_HEADER = struct.Struct("<8sIIIII")
_MAGIC = b"HBKERN1\0"
_ALIGN = 64
_SOURCES = ("quant", "engine/kernels")
"""Folders whose Python files, those of all their sub-folders included, go into the machine code."""

Name = tuple[str, ...]
"""(module, *parameters)"""


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel: `address` for call_kernel, `fields` of its argument block."""

    address: int
    fields: str


_kernels: dict[Name, Kernel] = {}
_keep: list[object] = []  # mappings and JIT engines live as long as the process: addresses into them are everywhere
_finding = threading.RLock()


def find(module: str, *parameters: str) -> Kernel:
    """The kernel of that module with these parameters, compiled if need be (about a second)."""
    name = (module, *parameters)
    if name not in _kernels:
        with _finding:  # encoders ask from several threads at once, and Numba's compiler is not made for that
            if name not in _kernels:
                _kernels[name] = _from_disk(name) or _compile(name)
    return _kernels[name]


def missing(names: Iterable[Name]) -> list[Name]:
    """Those that neither memory nor disk holds."""
    out = []
    for name in dict.fromkeys(names):
        if name in _kernels:
            continue
        kernel = _from_disk(name)
        if kernel is None:
            out.append(name)
        else:
            _kernels[name] = kernel
    return out


def prepare(names: Iterable[Name], report: Callable[[int, int], None] | None = None) -> None:
    """Compiles what is missing, in several processes when there is much; `report(done, total)` as it goes on."""
    todo = missing(names)
    if len(todo) > 2 and _folder() is not None:
        _compile_in_processes(todo, report)
        todo = missing(todo)
    for i, name in enumerate(todo):
        if report:
            report(i, len(todo))
        find(*name)
    if report and todo:
        report(len(todo), len(todo))


def _compile_in_processes(todo: list[Name], report: Callable[[int, int], None] | None) -> None:
    """Numba compiles under a lock of its own, so only processes run side by side. Each takes the next kernel when done with one."""
    import subprocess

    from ..processors import logical_processors

    count = min(len(todo), logical_processors(), 8)
    command = [sys.executable, "-m", f"{__package__}.compile_worker"]
    workers = []
    try:
        for _ in range(count):
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=child_environment()
            )
            workers.append(process)
        queue, done = list(reversed(todo)), 0
        lock = threading.Lock()

        def serve(process: subprocess.Popen[str]) -> None:
            nonlocal done
            assert process.stdin and process.stdout
            while True:
                with lock:
                    if not queue:
                        break
                    name = queue.pop()
                try:
                    print(*name, sep="\t", file=process.stdin, flush=True)
                    if not process.stdout.readline():
                        return  # the process died; what it left is compiled here afterwards, where the error can be seen
                except OSError:
                    return
                with lock:
                    done += 1
                    if report:
                        report(done, len(todo))

        threads = [threading.Thread(target=serve, args=(p,), daemon=True) for p in workers]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        for process in workers:
            if process.stdin:
                process.stdin.close()
            process.terminate()
            process.wait()


# ---- compiling -------------------------------------------------------------------------------------------------------


def _compile(name: Name) -> Kernel:
    from .machine_code import compile_kernel
    from .target import settle

    settle()
    module = importlib.import_module(name[0])
    code = compile_kernel(module.build(*name[1:]), flat=None if _loader() == "map" else False)
    body = module.FIELDS.encode()
    body += bytes(-(_HEADER.size + len(body)) % _ALIGN) + code.data
    kind = 0 if code.kind == "flat" else 1
    data = _HEADER.pack(_MAGIC, zlib.crc32(body), code.entry, len(module.FIELDS.encode()), len(code.data), kind) + body
    path = _path(name)
    if path is not None:
        keep_file(path, data)
        kernel = _from_disk(name)
        if kernel is not None:
            return kernel
    return _load(data, None)  # no cache folder, or one that may not be executed from


# ---- loading ---------------------------------------------------------------------------------------------------------


def _from_disk(name: Name) -> Kernel | None:
    path = _path(name)
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not is_ours(status) or status.st_size < _HEADER.size:  # this file is going to be executed
                return None
            if _loader() == "map":
                try:
                    mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC)
                except PermissionError:  # a file system mounted noexec: read below, and copied to memory that may be executed
                    pass
                else:
                    return _load(mapped, mapped)
            return _load(file.read(), None)
    except (OSError, ValueError):
        return None


def _load(data: bytes | mmap.mmap, mapped: mmap.mmap | None) -> Kernel:
    """Checks length and checksum, then finds the address. Raises ValueError on a damaged file."""
    magic, crc, entry, fields_size, code_size, kind = _HEADER.unpack_from(data)
    start = -(-(_HEADER.size + fields_size) // _ALIGN) * _ALIGN
    view = memoryview(data)
    if magic != _MAGIC or len(view) != start + code_size or zlib.crc32(view[_HEADER.size :]) != crc or entry > code_size:
        view.release()
        raise ValueError("damaged kernel file")
    fields = bytes(view[_HEADER.size : _HEADER.size + fields_size]).decode()
    if kind == 1:
        return Kernel(_link(bytes(view[start:])), fields)
    if mapped is None:
        access = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
        mapped = mmap.mmap(-1, len(view), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=access)
        mapped.write(bytes(view))
    _keep.append(mapped)
    return Kernel(np.frombuffer(mapped, np.uint8).ctypes.data + start + entry, fields)


def _link(image: bytes) -> int:
    """The address of an object file's kernel, through LLVM's own loader: other platforms, or no executable mapping of files."""
    import llvmlite.binding as llvm

    from .machine_code import ENTRY

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(image))
    engine.finalize_object()
    _keep.append(engine)
    return engine.get_function_address(ENTRY)


# ---- where, and under which key --------------------------------------------------------------------------------------


def _loader() -> str:
    """ "map" where flat machine code can be mapped, else "link". HALFBYTE_LOADER overrides, for tests and odd systems."""
    wanted = os.environ.get("HALFBYTE_LOADER")
    if wanted in ("map", "link"):
        return wanted
    return "map" if sys.platform == "linux" and platform.machine() == "x86_64" else "link"


_folder_found: list[Path | None] = []


def _folder() -> Path | None:
    if not _folder_found:
        root = cache_folder()
        _folder_found.append(root and root / "kernels" / _key())
    return _folder_found[0]


def _path(name: Name) -> Path | None:
    folder = _folder()
    if folder is None:
        return None
    stem = "-".join((name[0].split(".", 1)[1].replace(".", "_"), *name[1:])) + _foreign(name)
    return folder / f"{stem}.bin"


def _foreign(name: Name) -> str:
    """Formats of other packages bring code that the key below does not see: their file's checksum goes into the name."""
    from ..block import foreign_sources

    crc = 0
    for source in foreign_sources(name[1:]):
        crc = zlib.crc32(Path(source).read_bytes(), crc)
    return f"-{crc:08x}" if crc else ""


def _key() -> str:
    """A name for everything that machine code depends on: processor, compiler versions, loader, sources."""
    parts = [_processor(), _loader().encode(), sys.platform.encode(), _version("numba"), _version("llvmlite")]
    for path in _sources():
        parts.append(path.read_bytes())
    first, second = 0, 1
    for part in parts:
        first, second = zlib.crc32(part, first), zlib.adler32(part, second)
    return f"{first:08x}{second:08x}"


def _sources() -> list[Path]:
    """The files of _SOURCES in a fixed order. os.walk takes half the time of Path.rglob, and this is on the way of every start."""
    found = []
    for folder in _SOURCES:
        for root, _, names in os.walk(PACKAGE / folder):
            found += [Path(root, name) for name in names if name.endswith(".py")]
    return sorted(found)


def _processor() -> bytes:
    """Model and features of the processor, and those that Numba was told to compile for."""
    wanted = os.environ.get("NUMBA_CPU_NAME", "") + "/" + os.environ.get("NUMBA_CPU_FEATURES", "")
    for source in ("/sys/devices/system/cpu/modalias", "/proc/cpuinfo"):  # the second takes the kernel much longer to write
        try:
            with open(source, "rb") as file:
                lines = file.read(1 << 14).split(b"\n\n")[0].split(b"\n")
        except OSError:
            continue
        keep = (b"cpu:type", b"vendor_id", b"cpu family", b"model\t", b"flags", b"Features", b"CPU part", b"CPU implementer")
        found = b"|".join(line for line in lines if line.startswith(keep))
        if b"," in found or b" " in found:
            return wanted.encode() + found
    return (wanted + platform.machine() + platform.processor()).encode()


def _version(package: str) -> bytes:
    """The installed version, from the name of its .dist-info folder: importlib.metadata takes 40 ms to say the same."""
    for folder in sys.path:
        try:
            for entry in os.listdir(folder or "."):
                if entry.startswith(package + "-") and entry.endswith(".dist-info"):
                    return entry.encode()
        except OSError:
            continue
    return b""

