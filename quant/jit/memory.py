"""Scalars at addresses, atomics, and calls by address, as Numba functions. Addresses are int64."""

from __future__ import annotations

import platform
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from . import emit
from .emit import ELEMENTS

_I32, _I64 = ELEMENTS["i32"], ELEMENTS["i64"]
_BYTES = ir.IntType(8).as_pointer()


def _loader(numba_type: types.Type, stored: str, convert: str | None = None) -> Any:
    def loader(typing_context, address):
        def codegen(context, b, sig, values):
            value = emit.load(b, values[0], ELEMENTS[stored])
            return value if convert is None else getattr(b, convert)(value, context.get_value_type(numba_type))

        return numba_type(address), codegen

    return intrinsic(loader)


load_i64 = _loader(types.int64, "i64")
load_i32 = _loader(types.int64, "i32", "sext")
load_u16 = _loader(types.int64, "i16", "zext")
load_u8 = _loader(types.int64, "i8", "zext")
load_f32 = _loader(types.float32, "f32")
load_f64 = _loader(types.float64, "f64")


def _storer(stored: str, convert: str | None = None) -> Any:
    def storer(typing_context, address, value):
        def codegen(context, b, sig, values):
            v = values[1]
            if convert is not None and v.type != ELEMENTS[stored]:
                v = getattr(b, convert)(v, ELEMENTS[stored])
            emit.store(b, v, values[0])
            return context.get_dummy_value()

        wanted = {"f32": types.float32, "f64": types.float64}.get(stored, types.int64)
        return types.void(address, wanted), codegen

    return intrinsic(storer)


store_i64 = _storer("i64")
store_i32 = _storer("i32", "trunc")
store_i16 = _storer("i16", "trunc")
store_i8 = _storer("i8", "trunc")
store_f32 = _storer("f32")
store_f64 = _storer("f64")


@intrinsic
def store_f16(typing_context, address, value):
    """A float32 rounded to f16, ties to even."""

    def codegen(context, b, sig, values):
        halves = emit.to_f16(b, emit.splat(b, values[1], 4))  # as a vector: a scalar conversion may be a library call
        emit.store(b, b.extract_element(halves, ir.Constant(_I32, 0)), values[0])
        return context.get_dummy_value()

    return types.void(address, types.float32), codegen


@intrinsic
def sqrt_f32(typing_context, x):
    """Square root, correctly rounded."""

    def codegen(context, b, sig, values):
        return emit.call(b, "llvm.sqrt.f32", ELEMENTS["f32"], values[0])

    return types.float32(types.float32), codegen


# ---- atomics ---------------------------------------------------------------------------------------------------------

# Sequentially consistent: who ends a barrier writes the generation and then looks for sleepers, who sleeps counts itself and then looks
# at the generation. With acquire and release alone, ARM may look before it writes, and a sleeper is never woken. The same code on x86.


@intrinsic
def atomic_add(typing_context, address, value):
    """Adds to an int32 and returns its old value."""

    def codegen(context, b, sig, values):
        return b.atomic_rmw("add", emit.pointer(b, values[0], _I32), values[1], "seq_cst")

    return types.int32(types.int64, types.int32), codegen


@intrinsic
def atomic_load(typing_context, address):
    """An int32."""

    def codegen(context, b, sig, values):
        return b.load_atomic(emit.pointer(b, values[0], _I32), "seq_cst", 4)

    return types.int32(types.int64), codegen


@intrinsic
def atomic_store(typing_context, address, value):
    """Stores an int32."""

    def codegen(context, b, sig, values):
        b.store_atomic(values[1], emit.pointer(b, values[0], _I32), "seq_cst", 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int32), codegen


@intrinsic
def atomic_load_i64(typing_context, address):
    """An int64."""

    def codegen(context, b, sig, values):
        return b.load_atomic(emit.pointer(b, values[0], _I64), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_store_i64(typing_context, address, value):
    """Stores an int64."""

    def codegen(context, b, sig, values):
        b.store_atomic(values[1], emit.pointer(b, values[0], _I64), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def atomic_swap_if(typing_context, address, old, new):
    """Stores the int64 `new` if `old` is there. Returns whether it was."""

    def codegen(context, b, sig, values):
        return b.extract_value(b.cmpxchg(emit.pointer(b, values[0], _I64), values[1], values[2], "seq_cst", "seq_cst"), 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def pause(typing_context):
    """Tells the processor that this is a waiting loop."""
    machine = platform.machine().lower()

    def codegen(context, b, sig, values):
        if machine in ("x86_64", "amd64"):
            emit.call(b, "llvm.x86.sse2.pause", ir.VoidType())
        elif machine in ("aarch64", "arm64"):
            emit.call(b, "llvm.aarch64.hint", ir.VoidType(), ir.Constant(_I32, 1))
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def cycles(typing_context):
    """The processor's cycle or time-stamp counter."""

    def codegen(context, b, sig, values):
        return emit.call(b, "llvm.readcyclecounter", _I64)

    return types.int64(), codegen


# ---- calls by address ------------------------------------------------------------------------------------------------


@intrinsic
def call_kernel(typing_context, address, arguments, worker, workers):
    """Calls a compiled kernel (see machine_code.py). Numba's convention: i32 f(result*, exception*, arguments…).

    A void function still writes to its result slot, so real memory is passed for both.
    """

    def codegen(context, b, sig, values):
        slots = cgutils.alloca_once(b, ir.ArrayType(_I64, 9))
        result = b.bitcast(slots, _BYTES)
        exception = b.bitcast(b.gep(slots, [ir.Constant(_I64, 0), ir.Constant(_I64, 1)]), _BYTES)
        kind = ir.FunctionType(_I32, [_BYTES, _BYTES, _I64, _I32, _I32])
        return b.call(emit.pointer(b, values[0], kind), [result, exception, *values[1:]])

    return types.int32(types.int64, types.int64, types.int32, types.int32), codegen


@intrinsic
def call_c(typing_context, address, number, a, b_, c, d):
    """Calls a C function `long f(long, ...)` such as syscall, with seven arguments of which the last three are 0."""

    def codegen(context, b, sig, values):
        zero = ir.Constant(_I64, 0)
        kind = ir.FunctionType(_I64, [_I64], var_arg=True)
        return b.call(emit.pointer(b, values[0], kind), [*values[1:], zero, zero])

    int64 = types.int64
    return int64(int64, int64, int64, int64, int64, int64), codegen
