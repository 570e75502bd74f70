"""The processor that kernels are compiled for, as LLVM names its features.

Taken from Numba's target, not from the machine we run on, so NUMBA_CPU_NAME (and NUMBA_CPU_FEATURES) choose a code path: an emitter that
used an instruction outside the target would make LLVM abort the process. Tests force each path that way, in child processes.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..errors import HalfbyteError
from .processes import child_environment

LANES = 16
"""Logical lanes of every vector: one per row of a tile. LLVM splits them into the registers that the target has."""


class ProcessorError(HalfbyteError):
    """NUMBA_CPU_NAME or NUMBA_CPU_FEATURES asks for a processor that LLVM does not know, or cannot compile for here."""


@dataclass(frozen=True)
class Target:
    """What emitters may use. `dot` is the way four byte products are summed: vnni512, vnni256, avx2, neon, usdot or portable."""

    machine: str
    cpu: str
    features: frozenset[str]
    dot: str
    has_fma: bool
    has_f16: bool
    row_groups: int  # row groups (16 rows each) in a matrix-times-many-tokens tile; bounded by the number of registers


def choose(machine: str, cpu: str, features: frozenset[str]) -> Target:
    """The code path for a processor, from LLVM's feature names."""
    machine = machine.lower()
    if machine in ("x86_64", "amd64"):
        has_f16 = "f16c" in features
        if {"avx512vnni", "avx512bw", "avx512vl"} <= features and "prefer-256-bit" not in features:
            return Target(machine, cpu, features, "vnni512", True, has_f16, 2)
        if "avxvnni" in features or {"avx512vnni", "avx512vl"} <= features:
            return Target(machine, cpu, features, "vnni256", "fma" in features, has_f16, 1)
        if "avx2" in features:
            return Target(machine, cpu, features, "avx2", "fma" in features, has_f16, 1)
        return Target(machine, cpu, features, "portable", False, False, 1)
    if machine in ("aarch64", "arm64"):
        dot = "usdot" if "i8mm" in features else "neon" if "dotprod" in features else "portable"
        return Target(machine, cpu, features, dot, True, True, 1)
    return Target(machine, cpu, features, "portable", False, False, 1)


@cache
def current() -> Target:
    """The target of this process. Imports numba.

    A processor asked for by name (NUMBA_CPU_NAME) has the features LLVM knows it to have, not this machine's. Raises ProcessorError.
    """
    settle()
    from numba.core.registry import cpu_target

    codegen = cpu_target.target_context.codegen()
    cpu, text = codegen._get_host_cpu_name(), codegen._get_host_cpu_features()
    features = frozenset(f[1:] for f in text.split(",") if f.startswith("+")) if text else _LEVELS.get(cpu, frozenset())
    return choose(platform.machine(), cpu, features)


@cache
def settle() -> None:
    """Settles which processor Numba compiles for, before it makes anything of it.

    LLVM aborts the process at some processors that it does not know, and has no list to ask for. So if one is asked for by name,
    another process compiles a function that does nothing. Raises ProcessorError.
    """
    from numba.core import config as numba_config

    config: Any = numba_config

    if config.CPU_NAME and config.CPU_FEATURES is None:
        config.CPU_FEATURES = ""
    name, features = config.CPU_NAME or "", config.CPU_FEATURES or ""
    if not (name or features):
        return
    command = [sys.executable, "-c", _COMPILE_NOTHING, name, features]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=child_environment(), timeout=60)
    except (OSError, ValueError, subprocess.SubprocessError):
        return  # no other process can be had here
    said = done.stderr.decode("utf-8", "replace").splitlines()
    wrong = next((line for line in said if "is not a recognized" in line or line.startswith("LLVM ERROR")), None)
    if wrong is not None:
        given = ", ".join(f"{key}={value}" for key, value in (("NUMBA_CPU_NAME", name), ("NUMBA_CPU_FEATURES", features)) if value)
        problem = wrong.removeprefix("LLVM ERROR:").removesuffix("(ignoring processor)").removesuffix("(ignoring feature)").strip()
        raise ProcessorError(f"{given}: {problem}; unset it to compile for this machine, or use LLVM's names, such as x86-64-v3 or znver4")


_COMPILE_NOTHING = """
import sys, llvmlite.binding as llvm
llvm.initialize_native_target()
llvm.initialize_native_asmprinter()
machine = llvm.Target.from_default_triple().create_target_machine(cpu=sys.argv[1], features=sys.argv[2])
machine.emit_object(llvm.parse_assembly("define void @nothing() { ret void }"))
"""

# Features of the processor names that the tests use; an unlisted name runs the portable path, which every processor can.
_LEVELS = {
    "x86-64-v2": frozenset({"sse4.2"}),
    "x86-64-v3": frozenset({"avx2", "fma", "f16c"}),
    "x86-64-v4": frozenset({"avx2", "fma", "f16c", "avx512bw", "avx512vl"}),
}
_LEVELS |= dict.fromkeys(("haswell", "broadwell", "skylake", "znver1", "znver2", "znver3"), _LEVELS["x86-64-v3"])
_LEVELS |= {name: _LEVELS["x86-64-v3"] | {"avxvnni"} for name in ("alderlake", "raptorlake", "meteorlake", "sierraforest")}
_VNNI = _LEVELS["x86-64-v4"] | {"avx512vnni"}
_LEVELS |= dict.fromkeys(("cascadelake", "icelake-server", "icelake-client", "sapphirerapids", "znver4", "znver5"), _VNNI)

