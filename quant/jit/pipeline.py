"""Numba's compiler with what kernels do not need left out.

A kernel is some 40 small functions that are all inlined into one. Numba would optimise each by itself, wrap it for Python and
make machine code of it, most of it for nothing. Here a function is typed, lowered and kept as LLVM IR; only the kernel's module,
with all of them linked in, is optimised, once. That makes cold starts three times faster.
"""

from __future__ import annotations

from typing import Any

from numba import _dynfunc  # type: ignore[attr-defined]
from numba.core.codegen import CPUCodeLibrary
from numba.core.compiler import CompilerBase, _LowerResult
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.typed_passes import (
    AnnotateTypes,
    IRLegalization,
    NativeLowering,
    NoPythonBackend,
    NopythonTypeInference,
    PreLowerStripPhis,
)
from numba.core.untyped_passes import (
    DeadBranchPrune,
    FixupArgs,
    IRProcessing,
    ReconstructSSA,
    RewriteSemanticConstants,
    TranslateByteCode,
)


class InlineLibrary(CPUCodeLibrary):
    """IR of a function that others inline: linked, never optimised by itself, never machine code."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True

    def optimized(self) -> Any:
        """The LLVM module, optimised as a whole."""
        self._ensure_finalized()
        passes, builder = self._codegen._module_pass_manager()
        passes.run(self._final_module, builder)
        return self._final_module


@register_pass(mutates_CFG=True, analysis_only=False)
class LowerOnly(NativeLowering):
    """Lowers to IR in an InlineLibrary."""

    _name = "lower_only"

    def run_pass(self, state: Any) -> bool:
        codegen = state.targetctx.codegen()
        state.library = InlineLibrary(codegen, state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        result: _LowerResult = state["cr"]
        # Callers find a function by its Python entry point. There is none: this one has no address, and nobody calls it.
        entry = _dynfunc.make_function(result.fndesc.lookup_module(), state.func_id.func_name, "", 0, result.env, (state.library,))
        state["cr"] = result._replace(cfunc=entry)
        state.targetctx.insert_user_function(entry, result.fndesc, [state.library])
        return True


class KernelCompiler(CompilerBase):
    """Passes for functions of numbers, addresses and SIMD values: no objects, closures, containers, loop lifting or parallel regions."""

    def define_pipelines(self) -> list[PassManager]:
        passes = PassManager("kernel")
        for step in (
            TranslateByteCode,
            FixupArgs,
            IRProcessing,
            RewriteSemanticConstants,
            DeadBranchPrune,
            ReconstructSSA,
            NopythonTypeInference,
            PreLowerStripPhis,
            IRLegalization,
            AnnotateTypes,
            LowerOnly,
            NoPythonBackend,
        ):
            passes.add_pass(step, step.__name__)
        passes.finalize()
        return [passes]
