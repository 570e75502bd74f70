"""SIMD values for Numba code.

A value is a vector of lanes, or a small tile of such vectors held in registers, shaped and broadcast as in numpy:

    acc = zeros(tile(F32, 2, 6))      # 12 registers, shape (2, 6)
    acc = fma(a, b, acc)              # (2, 1) with (1, 6) gives (2, 6), at compile time

Every operation becomes one LLVM instruction per vector. Vectors have 16 logical lanes, one per row of a weight tile; LLVM splits them where
registers are narrower, so a kernel is written once. Only operations that differ between processors choose here: dot4, f16 and fma.
Addresses are int64. Scalars beside a vector are converted to its element type and copied to all lanes.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
from numba.core import types
from numba.core.datamodel import models
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, register_model

from . import emit
from .emit import ELEMENTS
from .target import LANES

FLOATS = ("f32", "f16", "f64")


class Vector(types.Type):
    """Numba type of `lanes` elements, or of a tile of them with a numpy shape."""

    def __init__(self, element: str, lanes: int = LANES, shape: tuple[int, ...] = ()):
        self.element, self.lanes, self.shape = element, lanes, shape
        super().__init__(name=f"Vector({element} x {lanes}, {shape})")

    @property
    def register(self) -> ir.VectorType:
        """LLVM type of one vector."""
        return ir.VectorType(ELEMENTS[self.element], self.lanes)

    def like(self, element: str | None = None, shape: tuple[int, ...] | None = None) -> Vector:
        """The same type with another element or shape."""
        return Vector(element or self.element, self.lanes, self.shape if shape is None else shape)


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Vector):
        be_type = ir.ArrayType(fe_type.register, math.prod(fe_type.shape)) if fe_type.shape else fe_type.register
        super().__init__(manager, fe_type, be_type)


F64, F32, F16, I32, I16, I8 = Vector("f64"), Vector("f32"), Vector("f16"), Vector("i32"), Vector("i16"), Vector("i8")


def tile(vector: Vector, *shape: int) -> Vector:
    """The type of a tile of vectors."""
    return vector.like(shape=shape)


# ---- tiles as registers -----------------------------------------------------------------------------------------------

Index = tuple[int, ...]


def _registers(b: ir.IRBuilder, t: Vector, value: ir.Value) -> dict[Index, ir.Value]:
    if not t.shape:
        return {(): value}
    return {ix: b.extract_value(value, i) for i, ix in enumerate(_indices(t.shape))}


def _indices(shape: tuple[int, ...]) -> list[Index]:
    return list(itertools.product(*map(range, shape)))


def _pack(b: ir.IRBuilder, t: Vector, registers: dict[Index, ir.Value]) -> ir.Value:
    if not t.shape:
        return registers[()]
    value = ir.Constant(ir.ArrayType(t.register, math.prod(t.shape)), ir.Undefined)
    for i, ix in enumerate(_indices(t.shape)):
        value = b.insert_value(value, registers[ix], i)
    return value


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    rank, out = max(map(len, shapes)), []
    for dims in zip(*[(1,) * (rank - len(s)) + s for s in shapes], strict=True):
        sizes = set(dims) - {1}
        if len(sizes) > 1:
            raise TypeError(f"tiles of shapes {shapes} do not broadcast")
        out.append(sizes.pop() if sizes else 1)
    return tuple(out)


def _pick(registers: dict[Index, ir.Value], shape: tuple[int, ...], ix: Index) -> ir.Value:
    ix = ix[len(ix) - len(shape) :]
    return registers[tuple(0 if d == 1 else i for d, i in zip(shape, ix, strict=True))]


def _as_vector(b: ir.IRBuilder, like: Vector, t: types.Type, v: ir.Value) -> tuple[Vector, ir.Value]:
    """A scalar operand, converted and copied to all lanes; vectors pass through."""
    if isinstance(t, Vector):
        return t, v
    element, is_float = ELEMENTS[like.element], like.element in FLOATS
    if isinstance(t, types.IntegerLiteral):
        number = float(t.literal_value) if is_float else t.literal_value & (2**element.width - 1)
        return like.like(shape=()), ir.Constant(like.register, [number] * like.lanes)
    if isinstance(t, types.Integer):
        if is_float:
            v = b.sitofp(v, element)
        elif v.type.width != element.width:
            v = b.trunc(v, element) if v.type.width > element.width else b.sext(v, element)
    elif v.type != element:
        v = b.fptrunc(v, element) if v.type == ir.DoubleType() else b.fpext(v, element)
    return like.like(shape=()), emit.splat(b, v, like.lanes)


def _elementwise(
    b: ir.IRBuilder, result: Vector, operands: list[tuple[Vector, ir.Value]], op: Callable[..., ir.Value]
) -> ir.Value:
    parts = [(_registers(b, t, v), t.shape) for t, v in operands]
    return _pack(b, result, {ix: op(*[_pick(r, s, ix) for r, s in parts]) for ix in _indices(result.shape)})


def _result(args: tuple[types.Type, ...], element: str | None = None) -> Vector:
    vectors = [a for a in args if isinstance(a, Vector)]
    return vectors[0].like(element, _broadcast(*[v.shape for v in vectors]))


def _operation(emitter: Callable[..., ir.Value], arity: int, element: str | None = None, doc: str = "") -> Any:
    """An intrinsic that applies `emitter(builder, *registers)` register by register."""

    def build(args: tuple[types.Type, ...]) -> Any:
        like = _result(args)
        result = _result(args, element)

        def codegen(context: Any, b: ir.IRBuilder, sig: Any, values: list[ir.Value]) -> ir.Value:
            operands = [_as_vector(b, like, t, v) for t, v in zip(sig.args, values, strict=True)]
            return _elementwise(b, result, operands, lambda *r: emitter(b, *r))

        return result(*args), codegen

    if arity == 1:

        def one(typing_context, x):
            return build((x,))

        function: Any = one
    elif arity == 2:

        def two(typing_context, x, y):
            return build((x, y))

        function = two
    else:

        def three(typing_context, x, y, z):
            return build((x, y, z))

        function = three
    function.__doc__ = doc
    return intrinsic(function)


# ---- operators ---------------------------------------------------------------------------------------------------------

_OPERATORS: dict[Any, tuple[str | None, str | None]] = {
    operator.add: ("fadd", "add"),
    operator.sub: ("fsub", "sub"),
    operator.mul: ("fmul", "mul"),
    operator.truediv: ("fdiv", None),
    operator.and_: (None, "and_"),
    operator.or_: (None, "or_"),
    operator.xor: (None, "xor"),
    operator.lshift: (None, "shl"),
    operator.rshift: (None, "lshr"),  # logical: lanes are bit patterns
}


def _define_operator(op: Any, float_name: str | None, int_name: str | None) -> None:
    def generic(self: Any, args: Any, kws: Any) -> Any:
        if len(args) == 2 and any(isinstance(a, Vector) for a in args):
            return signature(_result(args), *args)
        return None

    def lower(context: Any, b: ir.IRBuilder, sig: Any, values: list[ir.Value]) -> ir.Value:
        like = _result(sig.args)
        name = float_name if like.element in FLOATS else int_name
        if name is None:
            raise TypeError(f"{op} is not defined for vectors of {like.element}")
        operands = [_as_vector(b, like, t, v) for t, v in zip(sig.args, values, strict=True)]
        return _elementwise(b, sig.return_type, operands, lambda x, y: getattr(b, name)(x, y))

    for each in (op, getattr(operator, "i" + op.__name__.strip("_"))):
        infer_global(each)(type(f"Vector_{each.__name__}", (AbstractTemplate,), {"key": each, "generic": generic}))
        for operand_types in ((Vector, Vector), (Vector, types.Any), (types.Any, Vector)):
            lower_builtin(each, *operand_types)(lower)


for _op, (_float_name, _int_name) in _OPERATORS.items():
    _define_operator(_op, _float_name, _int_name)

fma = _operation(emit.fma, 3, doc="x * y + z, rounded once where the processor can")
maximum = _operation(emit.maximum, 2, doc="the larger, lane by lane; the second where either is NaN")
minimum = _operation(emit.minimum, 2, doc="the smaller, lane by lane; the second where either is NaN")
absolute = _operation(emit.absolute, 1, doc="|x| of f32 lanes")
round_even = _operation(emit.round_even, 1, doc="f32 lanes to the nearest whole number, ties to even; |x| < 2**22")
exp = _operation(emit.exp, 1, doc="e**x of f32 lanes, about 2 ulp; exactly 0 below -87 (see emit.exp)")
to_i32 = _operation(emit.to_i32, 1, "i32", doc="f32 lanes to i32, towards zero; i8 and i16 lanes sign-extended")
to_u32 = _operation(emit.to_u32, 1, "i32", doc="i8 and i16 lanes zero-extended to i32")
to_f32 = _operation(emit.to_f32, 1, "f32", doc="f16, i32 or bf16-in-i16 lanes as f32: i16 lanes are bf16 bit patterns")
to_f64 = _operation(emit.to_f64, 1, "f64", doc="f32 lanes widened")
to_f16 = _operation(emit.to_f16, 1, "f16", doc="f32 lanes rounded to f16, ties to even")
to_bytes = _operation(emit.to_bytes, 1, "i8", doc="the low byte of each i32 lane")
bits_as_f32 = _operation(emit.bits_as_f32, 1, "f32", doc="i32 lanes reinterpreted")
f32_bits = _operation(emit.f32_bits, 1, "i32", doc="f32 lanes reinterpreted")
less = _operation(emit.less, 2, "i1", doc="mask of lanes where x < y (signed integers; ordered floats)")


@intrinsic
def where(typing_context, mask, x, y):
    """x where the mask is set, else y."""
    like = _result(tuple(t for t in (x, y) if isinstance(t, Vector)))
    result = like.like(shape=_broadcast(*[t.shape for t in (mask, x, y) if isinstance(t, Vector)]))

    def codegen(context, b, sig, values):
        operands = [(mask, values[0]), *(_as_vector(b, like, t, v) for t, v in zip((x, y), values[1:], strict=True))]
        return _elementwise(b, result, operands, lambda m, p, q: b.select(m, p, q))

    return result(mask, x, y), codegen


def _dot4(full_range: bool) -> Any:
    def dot(typing_context, acc, w, x):
        result = acc.like(shape=_broadcast(acc.shape, w.shape, x.shape))

        def codegen(context, b, sig, values):
            operands = list(zip(sig.args, values, strict=True))
            return _elementwise(b, result, operands, lambda p, q, r: emit.dot4(b, p, q, r, full_range))

        return result(acc, w, x), codegen

    return intrinsic(dot)


dot4 = _dot4(False)
"""dot4(acc, w, x): each i32 lane of acc plus the sum of 4 products of unsigned bytes of w (at most 127) and signed bytes of x."""

dot4_full = _dot4(True)
"""dot4 for bytes of w up to 255; on processors without a mixed-sign dot product it costs twice as much."""


def lookup(table: tuple[int, ...]) -> Any:
    """A function of i32 lanes: each of their bytes, a code, becomes table[code]; 16 or 32 numbers 0..255. One or two byte shuffles."""
    if len(table) not in (16, 32) or not all(0 <= entry < 256 for entry in table):
        raise ValueError(f"a table of 16 or 32 bytes is needed, not {table}")
    return _operation(lambda b, codes: emit.lookup(b, codes, tuple(table)), 1, doc=f"bytes of i32 lanes, looked up in {table}")


def staircase(edges: tuple[float, ...], values: tuple[float, ...]) -> Any:
    """A function of f32 lanes: values[number of edges below x]. The edges ascend, and there is one value more."""
    return _operation(lambda b, x: emit.staircase(b, x, tuple(edges), tuple(values)), 1, doc=f"{values}, by edges {edges}")


@intrinsic
def like(typing_context, vector_type, other):
    """The type of a tile of the same shape as the first, of vectors like the second: like(tile(I32, 2, 1), F32) is tile(F32, 2, 1)."""
    result = types.TypeRef(other.instance_type.like(shape=vector_type.instance_type.shape))

    def codegen(context, b, sig, values):
        return context.get_dummy_value()

    return result(vector_type, other), codegen


# ---- memory ----------------------------------------------------------------------------------------------------------


@intrinsic
def zeros(typing_context, vector_type):
    """zeros(F32) or zeros(tile(F32, G, T))"""
    result = vector_type.instance_type

    def codegen(context, b, sig, values):
        return _pack(b, result, {ix: ir.Constant(result.register, None) for ix in _indices(result.shape)})

    return result(vector_type), codegen


@intrinsic
def iota(typing_context, start):
    """i32 lanes start, start + 1, …"""

    def codegen(context, b, sig, values):
        first = b.trunc(values[0], ELEMENTS["i32"]) if values[0].type.width > 32 else values[0]
        return b.add(emit.splat(b, first, LANES), ir.Constant(I32.register, list(range(LANES))))

    return I32(start), codegen


@intrinsic
def load(typing_context, vector_type, address):
    """One vector from an address of any alignment."""
    result = vector_type.instance_type

    def codegen(context, b, sig, values):
        return emit.load(b, values[1], result.register)

    return result(vector_type, address), codegen


@intrinsic(prefer_literal=True)
def load_tile(typing_context, vector_type, address, stride):
    """A tile of vectors; register number i (in C order) comes from address + i * stride bytes."""
    result = vector_type.instance_type

    def codegen(context, b, sig, values):
        loaded = {ix: emit.load(b, _step(b, values[1], stride, values[2], i), result.register) for i, ix in _numbered(result)}
        return _pack(b, result, loaded)

    return result(vector_type, address, stride), codegen


@intrinsic(prefer_literal=True)
def load_tile_2d(typing_context, vector_type, address, row_stride, column_stride):
    """A tile of shape (G, T); register (g, t) comes from address + g * row_stride + t * column_stride bytes."""
    result = vector_type.instance_type

    def codegen(context, b, sig, values):
        def register_at(g, t):
            at = _step(b, _step(b, values[1], row_stride, values[2], g), column_stride, values[3], t)
            return emit.load(b, at, result.register)

        return _pack(b, result, {(g, t): register_at(g, t) for g, t in _indices(result.shape)})

    return result(vector_type, address, row_stride, column_stride), codegen


@intrinsic(prefer_literal=True)
def spread(typing_context, vector_type, address, stride):
    """One scalar per register, copied to all lanes: register number i gets the scalar at address + i * stride bytes."""
    result = vector_type.instance_type

    def codegen(context, b, sig, values):
        def scalar(i):
            at = _step(b, values[1], stride, values[2], i)
            return emit.splat(b, emit.load(b, at, ELEMENTS[result.element]), result.lanes)

        return _pack(b, result, {ix: scalar(i) for i, ix in _numbered(result)})

    return result(vector_type, address, stride), codegen


def _numbered(t: Vector) -> list[tuple[int, Index]]:
    return list(enumerate(_indices(t.shape)))


def _step(b: ir.IRBuilder, address: ir.Value, stride_type: types.Type, stride: ir.Value, i: int) -> ir.Value:
    if i == 0:
        return address
    if isinstance(stride_type, types.IntegerLiteral):
        return b.add(address, ir.Constant(ELEMENTS["i64"], stride_type.literal_value * i))
    return b.add(address, b.mul(stride, ir.Constant(ELEMENTS["i64"], i)))


@intrinsic
def store(typing_context, address, vector):
    """One vector to an address of any alignment."""

    def codegen(context, b, sig, values):
        emit.store(b, values[1], values[0])
        return context.get_dummy_value()

    return types.void(address, vector), codegen


@intrinsic(prefer_literal=True)
def store_tile(typing_context, address, vector, row_stride, column_stride):
    """Register (g, t) of a tile goes to address + g * row_stride + t * column_stride bytes."""

    def codegen(context, b, sig, values):
        for (g, t), register in _registers(b, vector, values[1]).items():
            at = _step(b, _step(b, values[0], row_stride, values[2], g), column_stride, values[3], t)
            emit.store(b, register, at)
        return context.get_dummy_value()

    return types.void(address, vector, row_stride, column_stride), codegen


# ---- across lanes ----------------------------------------------------------------------------------------------------


def _reduction(combine: Callable[..., ir.Value], doc: str) -> Any:
    """One scalar from the lanes of a vector, in a fixed tree, so that no compiler chooses the order of a sum."""

    def reduce(typing_context, vector):
        scalar = {"f64": types.float64, "f32": types.float32, "i32": types.int32}[vector.element]

        def codegen(context, b, sig, values):
            return emit.tree(b, values[0], combine)

        return scalar(vector), codegen

    reduce.__doc__ = doc
    return intrinsic(reduce)


lanes_sum = _reduction(emit.add, "Sum of all lanes: halves folded onto each other, 8, 4, 2, 1.")
lanes_max = _reduction(emit.maximum, "Largest lane.")
lanes_min = _reduction(emit.minimum, "Smallest lane.")


@intrinsic
def mask_bits(typing_context, mask):
    """The lanes of a mask as the low bits of an int64, lane 0 lowest."""

    def codegen(context, b, sig, values):
        return b.zext(b.bitcast(values[0], ir.IntType(mask.lanes)), ELEMENTS["i64"])

    return types.int64(mask), codegen


@intrinsic
def lowest_bit(typing_context, bits):
    """Number of the lowest bit that is set in an int64; 64 if none is."""

    def codegen(context, b, sig, values):
        return emit.call(b, "llvm.cttz.i64", ELEMENTS["i64"], values[0], ir.Constant(ELEMENTS["i1"], 0))

    return types.int64(types.int64), codegen


@intrinsic
def count_bits(typing_context, bits):
    """How many bits of an int64 are set."""

    def codegen(context, b, sig, values):
        return emit.call(b, "llvm.ctpop.i64", ELEMENTS["i64"], values[0])

    return types.int64(types.int64), codegen


@intrinsic
def register(typing_context, tile_value, row, column):
    """Register (row, column) of a tile; the indices are literals."""
    ix = (row.literal_value, column.literal_value)
    result = tile_value.like(shape=())

    def codegen(context, b, sig, values):
        return _registers(b, tile_value, values[0])[ix]

    return result(tile_value, row, column), codegen
