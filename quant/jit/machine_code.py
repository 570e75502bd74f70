"""From a typed Python function to machine code that any process can map and call, without numba or llvmlite.

Numba is the front end: it types the function and optimises the LLVM module. That module is emitted once more as position-
independent code, and the few relocations between its own sections are resolved here. A kernel has no undefined symbols: no numba
run time, no C library.
"""

from __future__ import annotations

import platform
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import HalfbyteError

ENTRY = "kernel"


class CompileError(HalfbyteError):
    """A kernel could not be made into machine code."""


@dataclass(frozen=True)
class MachineCode:
    """`kind` "flat": bytes to be mapped as they are, called at `entry`; "object": an object file for LLVM's linker."""

    kind: str
    data: bytes
    entry: int


def compile_kernel(function: Callable[..., None], flat: bool | None = None) -> MachineCode:
    """Compiles `function(arguments: int64, worker: int32, workers: int32) -> None`.

    flat: None = where it is known to work (ELF, x86-64). Raises CompileError if the code needs anything from outside.
    """
    from numba.core import compiler, types
    from numba.core.registry import cpu_target

    from . import target
    from .pipeline import KernelCompiler

    target.current()
    flags: Any = compiler.Flags()
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.error_model = "numpy"
    flags.nrt = False
    cpu_target.target_context.refresh()
    signature = (types.int64, types.int32, types.int32)
    compiled = compiler.compile_extra(
        cpu_target.typing_context, cpu_target.target_context, function, signature, types.void, flags, {},
        pipeline_class=KernelCompiler,
    )  # fmt: skip
    if flat is None:
        flat = sys.platform == "linux" and platform.machine() == "x86_64"
    image = _emit_object(compiled, flat)
    if not flat:
        return MachineCode("object", image, 0)
    code, entry = _flatten(image)
    return MachineCode("flat", code, entry)


def _emit_object(compiled: Any, flat: bool) -> bytes:
    import llvmlite.binding as llvm
    from numba.core.registry import cpu_target

    codegen = cpu_target.target_context.codegen()
    module = compiled.library.optimized()
    module.get_function(compiled.fndesc.llvm_func_name).name = ENTRY
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=codegen._get_host_cpu_name(),
        features=codegen._get_host_cpu_features(),
        opt=3,
        reloc="pic",
        codemodel="small" if flat else "jitdefault",
    )
    return machine.emit_object(module)


def _flatten(image: bytes) -> tuple[bytes, int]:
    """Lays the loadable sections of an ELF x86-64 object one after another and resolves what points between them."""

    def unpack(layout: str, at: int) -> tuple[int, ...]:
        return struct.unpack_from("<" + layout, image, at)

    (table,) = unpack("Q", 0x28)
    size, count, names = unpack("HHH", 0x3A)
    # name, type, flags, address, offset, size, link, info, alignment, entry size
    sections = [unpack("IIQQQQIIQQ", table + i * size) for i in range(count)]

    def text(section: int, at: int) -> str:
        start = sections[section][4] + at
        return image[start : image.index(b"\0", start)].decode()

    base: dict[int, int] = {}
    out = bytearray()
    for i, (name, kind, flags, _, offset, length, _, _, alignment, _) in enumerate(sections):
        if not flags & 2 or not length or text(names, name).startswith((".eh_frame", ".note")):
            continue
        out += bytes(-len(out) % max(alignment, 64))
        base[i] = len(out)
        out += bytes(length) if kind == 8 else image[offset : offset + length]
    symbols_at = next(i for i, s in enumerate(sections) if s[1] == 2)
    offset, length, strings = sections[symbols_at][4], sections[symbols_at][5], sections[symbols_at][6]
    symbols = [unpack("IBBHQQ", offset + 24 * j) for j in range(length // 24)]  # name, info, other, section, value, size
    for s in sections:
        if s[1] != 4 or s[7] not in base:  # relocations with addends, of a section we keep
            continue
        for j in range(s[5] // 24):
            at, info, addend = unpack("QQq", s[4] + 24 * j)
            symbol, kind = symbols[info >> 32], info & 0xFFFFFFFF
            if symbol[3] not in base:
                raise CompileError(f"kernel needs the external symbol {text(strings, symbol[0])!r}, which machine code on disk cannot have")
            if kind not in (2, 4):  # R_X86_64_PC32, R_X86_64_PLT32
                raise CompileError(f"kernel has a relocation of type {kind}, which is not position independent")
            place = base[s[7]] + at
            struct.pack_into("<i", out, place, base[symbol[3]] + symbol[4] + addend - place)
    entry = next(y for y in symbols if text(strings, y[0]) == ENTRY)
    return bytes(out), base[entry[3]] + entry[4]
