"""Kernels for a processor that this machine is not: machine code by LLVM, printed as assembly.

    python jit_foreign.py TRIPLE MACHINE CPU FEATURES

A process of its own, because the target is chosen once in a process. Prints, for each kernel, `kernel NAME`, its assembly, and the
symbols that it would need from outside.
"""

import importlib
import platform
import sys

import llvmlite.binding as llvm

from halfbyte.quant.jit import target

TRIPLE, MACHINE, CPU, FEATURES = sys.argv[1:5]
CHOSEN = target.choose(MACHINE, CPU, frozenset(f[1:] for f in FEATURES.split(",") if f))
target.current = lambda: CHOSEN
platform.machine = lambda: MACHINE

KERNELS = {"matmul": ("q8_0", "int8"), "matmul nl5": ("nl5", "int8"), "attention": ("64", "64", "3", "f16"), "interpreter": ()}


def lowered(function):
    """LLVM IR of a kernel before optimization."""
    from numba.core import compiler, types
    from numba.core.registry import cpu_target

    from halfbyte.quant.jit.pipeline import KernelCompiler

    flags = compiler.Flags()
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.error_model, flags.nrt = "numpy", False
    cpu_target.target_context.refresh()
    signature = (types.int64, types.int32, types.int32)
    compiled = compiler.compile_extra(
        cpu_target.typing_context, cpu_target.target_context, function, signature, types.void, flags, {}, pipeline_class=KernelCompiler
    )
    compiled.library._ensure_finalized()
    return str(compiled.library._final_module)


def main():
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    foreign = llvm.Target.from_triple(TRIPLE).create_target_machine(cpu=CPU, features=FEATURES, opt=3, reloc="pic")
    heads = {"target triple": f'target triple = "{TRIPLE}"', "target datalayout": f'target datalayout = "{foreign.target_data}"'}
    print("path", CHOSEN.dot)
    for name, parameters in KERNELS.items():
        text = lowered(importlib.import_module(f"halfbyte.engine.kernels.{name.split()[0]}").build(*parameters))
        lines = [next((new for old, new in heads.items() if line.startswith(old)), line) for line in text.split("\n")]
        ir = llvm.parse_assembly("\n".join(lines))
        ir.verify()
        builder = llvm.create_pass_builder(foreign, llvm.create_pipeline_tuning_options(speed_level=3))
        builder.getModulePassManager().run(ir, builder)
        print("kernel", name)
        print(foreign.emit_assembly(ir))
        outside = [f.name for f in ir.functions if f.is_declaration and not f.name.startswith("llvm.")]
        print("outside", *outside, ".")


if __name__ == "__main__":
    main()
