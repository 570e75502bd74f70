"""LLVM instructions of one register: everything about IR, and everything that differs between processors, stays in this file."""

from __future__ import annotations

import math
from collections.abc import Callable

import llvmlite.ir as ir

from . import target

ELEMENTS: dict[str, ir.Type] = {
    "i1": ir.IntType(1),
    "i8": ir.IntType(8),
    "i16": ir.IntType(16),
    "i32": ir.IntType(32),
    "i64": ir.IntType(64),
    "f16": ir.HalfType(),
    "f32": ir.FloatType(),
    "f64": ir.DoubleType(),
}
_I8, _I16, _I32, _I64, _F32, _F64 = (ELEMENTS[k] for k in ("i8", "i16", "i32", "i64", "f32", "f64"))


def pointer(b: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return b.inttoptr(address, kind.as_pointer())


def load(b: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    value = b.load(pointer(b, address, kind))
    value.align = 1
    return value


def store(b: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
    b.store(value, pointer(b, address, value.type)).align = 1


def splat(b: ir.IRBuilder, scalar: ir.Value, lanes: int) -> ir.Value:
    vector = ir.VectorType(scalar.type, lanes)
    first = b.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return b.shuffle_vector(first, ir.Constant(vector, ir.Undefined), _mask([0] * lanes))


def constant(like: ir.VectorType, number: float) -> ir.Constant:
    return ir.Constant(like, [number] * like.count)


def call(b: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    """Call of an LLVM intrinsic by its full name."""
    function = b.module.globals.get(name)
    if function is None:
        function = ir.Function(b.module, ir.FunctionType(result, [a.type for a in args]), name)
    return b.call(function, args)


def _mask(indices: list[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(_I32, len(indices)), indices)


def _lanes(b: ir.IRBuilder, v: ir.Value, indices: list[int]) -> ir.Value:
    return b.shuffle_vector(v, ir.Constant(v.type, ir.Undefined), _mask(indices))


def _width(kind: ir.Type) -> int:
    return {ir.HalfType: 16, ir.FloatType: 32}.get(type(kind)) or kind.width  # type: ignore[attr-defined]


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def add(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.fadd(x, y) if _element(x) in (_F32, _F64) else b.add(x, y)


def _element(v: ir.Value) -> ir.Type:
    return v.type.element if isinstance(v.type, ir.VectorType) else v.type


def fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    if not target.current().has_fma:  # llvm.fma would call a slow library function there
        return b.fadd(b.fmul(x, y), z)
    return call(b, f"llvm.fma.v{x.type.count}f32", x.type, x, y, z)


def less(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.fcmp_ordered("<", x, y) if _element(x) == _F32 else b.icmp_signed("<", x, y)


def maximum(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.select(less(b, y, x), x, y)


def minimum(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.select(less(b, x, y), x, y)


def absolute(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    ints = ir.VectorType(_I32, x.type.count)
    return b.bitcast(b.and_(b.bitcast(x, ints), constant(ints, 0x7FFFFFFF)), x.type)


def round_even(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Adding and subtracting 1.5 * 2**23 rounds in the adder; exact for |x| < 2**22, and no processor lacks it."""
    magic = constant(x.type, float(3 << 22))
    return b.fsub(b.fadd(x, magic), magic)


def exp(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """2**n * p(r), n = round(x / ln 2), r reduced in two steps; polynomial of degree 7 (Cephes expf, S. Moshier).

    Exactly 0 for x < -87, so that masked scores contribute nothing at all; clamped above 88.
    """
    floats, ints = x.type, ir.VectorType(_I32, x.type.count)
    tiny = b.fcmp_ordered("<", x, constant(floats, -87.0))
    x = minimum(b, maximum(b, x, constant(floats, -87.0)), constant(floats, 88.0))
    n = round_even(b, b.fmul(x, constant(floats, 1.4426950408889634)))
    r = fma(b, n, constant(floats, -0.693359375), x)
    r = fma(b, n, constant(floats, 2.12194440e-4), r)
    p: ir.Value = constant(floats, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(b, p, r, constant(floats, c))
    p = b.fadd(fma(b, p, b.fmul(r, r), r), constant(floats, 1.0))
    power = b.shl(b.add(b.fptosi(n, ints), constant(ints, 127)), constant(ints, 23))
    return b.select(tiny, constant(floats, 0.0), b.fmul(p, b.bitcast(power, floats)))


# ---- conversions -----------------------------------------------------------------------------------------------------


def to_i32(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    ints = ir.VectorType(_I32, x.type.count)
    return b.fptosi(x, ints) if _element(x) == _F32 else b.sext(x, ints)


def to_u32(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return b.zext(x, ir.VectorType(_I32, x.type.count))


def to_bytes(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return b.trunc(x, ir.VectorType(_I8, x.type.count))


def bits_as_f32(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return b.bitcast(x, ir.VectorType(_F32, x.type.count))


def f32_bits(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return b.bitcast(x, ir.VectorType(_I32, x.type.count))


def to_f32(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    floats, ints = ir.VectorType(_F32, x.type.count), ir.VectorType(_I32, x.type.count)
    element = _element(x)
    if element == _I32:
        return b.sitofp(x, floats)
    if element == _I16:  # bf16: the upper half of an f32
        return b.bitcast(b.shl(b.zext(x, ints), constant(ints, 16)), floats)
    if target.current().has_f16:
        return b.fpext(x, floats)
    # Without the instruction LLVM calls a library function per lane. Exponent and mantissa moved into place, then scaled by 2**112
    # in one exact product, which also makes subnormals right; infinity and NaN keep their all-ones exponent.
    half = b.zext(b.bitcast(x, ir.VectorType(_I16, x.type.count)), ints)
    sign = b.shl(b.and_(half, constant(ints, 0x8000)), constant(ints, 16))
    magnitude = b.shl(b.and_(half, constant(ints, 0x7FFF)), constant(ints, 13))
    scaled = b.bitcast(b.fmul(b.bitcast(magnitude, floats), constant(floats, 2.0**112)), ints)
    special = b.icmp_unsigned(">=", magnitude, constant(ints, 0x0F800000))
    return b.bitcast(b.or_(sign, b.select(special, b.or_(magnitude, constant(ints, 0x7F800000)), scaled)), floats)


def to_f64(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return b.fpext(x, ir.VectorType(_F64, x.type.count))


def to_f16(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    halves, ints = ir.VectorType(ir.HalfType(), x.type.count), ir.VectorType(_I32, x.type.count)
    if target.current().has_f16:
        return b.fptrunc(x, halves)
    # Round to nearest even by adding half of the last kept place; subnormal results through one rounding f32 addition.
    floats = x.type
    bits = b.bitcast(x, ints)
    sign = b.and_(b.lshr(bits, constant(ints, 16)), constant(ints, 0x8000))
    magnitude = b.and_(bits, constant(ints, 0x7FFFFFFF))
    odd = b.and_(b.lshr(magnitude, constant(ints, 13)), constant(ints, 1))
    normal = b.lshr(b.add(b.add(magnitude, constant(ints, -((127 - 15) << 23) + 0xFFF & 0xFFFFFFFF)), odd), constant(ints, 13))
    shifted = b.fadd(b.bitcast(magnitude, floats), constant(floats, 0.5))
    subnormal = b.sub(b.bitcast(shifted, ints), constant(ints, 0x3F000000))
    result = b.select(b.icmp_unsigned("<", magnitude, constant(ints, 113 << 23)), subnormal, normal)
    result = b.select(b.icmp_unsigned(">=", magnitude, constant(ints, 0x477FF000)), constant(ints, 0x7C00), result)
    result = b.select(b.icmp_unsigned(">", magnitude, constant(ints, 0x7F800000)), constant(ints, 0x7E00), result)
    return b.bitcast(b.trunc(b.or_(result, sign), ir.VectorType(_I16, x.type.count)), halves)


# ---- across lanes ----------------------------------------------------------------------------------------------------


def tree(b: ir.IRBuilder, v: ir.Value, combine: Callable[..., ir.Value]) -> ir.Value:
    """Lanes folded in halves: 16 -> 8 -> 4 -> 2 -> 1."""
    count = v.type.count
    while count > 1:
        count //= 2
        v = combine(b, _lanes(b, v, list(range(count))), _lanes(b, v, list(range(count, 2 * count))))
    return b.extract_element(v, ir.Constant(_I32, 0))


# ---- four byte products per lane -------------------------------------------------------------------------------------


def dot4(b: ir.IRBuilder, acc: ir.Value, w: ir.Value, x: ir.Value, full_range: bool) -> ir.Value:
    """acc[i] + sum over j < 4 of unsigned byte w[4i+j] * signed byte x[4i+j]; all are i32 lanes. Exact on every path."""
    way = target.current().dot
    if way == "vnni512":
        return call(b, "llvm.x86.avx512.vpdpbusd.512", acc.type, acc, w, x)
    if way == "vnni256":
        return _split(b, 8, lambda a, p, q: call(b, "llvm.x86.avx512.vpdpbusd.256", a.type, a, p, q), acc, w, x)
    if way == "avx2":
        return _split(b, 8, lambda a, p, q: _dot4_avx2(b, a, p, q, full_range), acc, w, x)
    if way in ("neon", "usdot"):
        return _split(b, 4, lambda a, p, q: _dot4_neon(b, a, p, q, full_range, way == "usdot"), acc, w, x)
    return _dot4_portable(b, acc, w, x)


def _split(b: ir.IRBuilder, lanes: int, op: Callable[..., ir.Value], *vectors: ir.Value) -> ir.Value:
    """`op` on pieces of `lanes` lanes, joined again. LLVM holds the parts in registers of their own; the shuffles cost nothing."""
    count = vectors[0].type.count
    parts = [op(*[_lanes(b, v, list(range(i, i + lanes))) for v in vectors]) for i in range(0, count, lanes)]
    while len(parts) > 1:
        parts = [
            b.shuffle_vector(p, q, _mask(list(range(2 * p.type.count)))) for p, q in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]


def _dot4_avx2(b: ir.IRBuilder, acc: ir.Value, w: ir.Value, x: ir.Value, full_range: bool) -> ir.Value:
    """vpmaddubsw saturates above 32767: two products fit when bytes of w are at most 128. Larger ones are split into two halves."""
    bytes_, pairs = ir.VectorType(_I8, 32), ir.VectorType(_I16, 16)
    w, x = b.bitcast(w, bytes_), b.bitcast(x, bytes_)
    if full_range:
        words = ir.VectorType(_I16, 16)
        low = b.and_(b.bitcast(b.lshr(b.bitcast(w, words), constant(words, 1)), bytes_), constant(bytes_, 127))
        halves = [low, b.sub(w, low)]
    else:
        halves = [w]
    for part in halves:
        sums = call(b, "llvm.x86.avx2.pmadd.ub.sw", pairs, part, x)
        acc = b.add(acc, call(b, "llvm.x86.avx2.pmadd.wd", acc.type, sums, constant(pairs, 1)))
    return acc


def _dot4_neon(b: ir.IRBuilder, acc: ir.Value, w: ir.Value, x: ir.Value, full_range: bool, mixed: bool) -> ir.Value:
    bytes_ = ir.VectorType(_I8, 16)
    w, x = b.bitcast(w, bytes_), b.bitcast(x, bytes_)
    if mixed:
        return call(b, "llvm.aarch64.neon.usdot.v4i32.v16i8", acc.type, acc, w, x)
    parts = [w]
    if full_range:  # sdot reads w as signed: 7 low bits, then the top bit as 64 twice
        top = b.and_(b.lshr(w, constant(bytes_, 1)), constant(bytes_, 64))
        parts = [b.and_(w, constant(bytes_, 127)), top, top]
    for part in parts:
        acc = call(b, "llvm.aarch64.neon.sdot.v4i32.v16i8", acc.type, acc, part, x)
    return acc


def _dot4_portable(b: ir.IRBuilder, acc: ir.Value, w: ir.Value, x: ir.Value) -> ir.Value:
    """Plain IR: products of even and of odd bytes as i16 pairs, a pattern that LLVM turns into multiply-add where there is one."""
    count = acc.type.count
    words, wide = ir.VectorType(_I16, 2 * count), ir.VectorType(_I32, 2 * count)
    w, x = b.bitcast(w, words), b.bitcast(x, words)
    eight, low = constant(words, 8), constant(words, 255)
    for ww, xx in ((b.and_(w, low), b.ashr(b.shl(x, eight), eight)), (b.lshr(w, eight), b.ashr(x, eight))):
        products = b.mul(b.sext(ww, wide), b.sext(xx, wide))
        even, odd = (_lanes(b, products, [2 * i + j for i in range(count)]) for j in (0, 1))
        acc = b.add(acc, b.add(even, odd))
    return acc


# ---- tables -----------------------------------------------------------------------------------


def lookup(b: ir.IRBuilder, codes: ir.Value, table: tuple[int, ...]) -> ir.Value:
    """i32 lanes whose four bytes are codes below 16 or 32 -> lanes whose bytes are table[code], numbers 0..255."""
    features, way, machine = target.current().features, target.current().dot, target.current().machine
    bytes_, wide = b.bitcast(codes, ir.VectorType(_I8, 4 * codes.type.count)), len(table) == 32
    if machine in ("aarch64", "arm64"):
        name, pieces = f"llvm.aarch64.neon.tbl{len(table) // 16}.v16i8", [_table(table[i : i + 16], 16) for i in range(0, len(table), 16)]
        return b.bitcast(_split(b, 16, lambda part: call(b, name, part.type, *pieces, part), bytes_), codes.type)
    if wide and way == "vnni512" and "avx512vbmi" in features:
        found = call(b, "llvm.x86.avx512.permvar.qi.512", bytes_.type, _table(table, 64), bytes_)
        return b.bitcast(found, codes.type)
    shuffle, size = None, 0
    if way == "vnni512":
        shuffle, size = "llvm.x86.avx512.pshuf.b.512", 64
    elif way in ("vnni256", "avx2"):
        shuffle, size = "llvm.x86.avx2.pshuf.b", 32
    elif machine in ("x86_64", "amd64") and features & {"ssse3", "sse4.1", "sse4.2", "avx"}:
        shuffle, size = "llvm.x86.ssse3.pshuf.b.128", 16
    if shuffle is None:  # one entry after another, where its code stands
        found = constant(bytes_.type, table[0])
        for code, entry in enumerate(table[1:], 1):
            here = b.icmp_unsigned("==", bytes_, constant(bytes_.type, code))
            found = b.select(here, constant(bytes_.type, entry), found)
        return b.bitcast(found, codes.type)

    def look(part: ir.Value, entries: tuple[int, ...]) -> ir.Value:
        return call(b, shuffle, part.type, _table(entries, size), part)

    def either(part: ir.Value) -> ir.Value:
        """The shuffles go by the four lowest bits of a code and pass over the fifth."""
        upper = b.icmp_unsigned("!=", b.and_(part, constant(part.type, 16)), constant(part.type, 0))
        return b.select(upper, look(part, table[16:]), look(part, table[:16]))

    found = _split(b, size, either if wide else lambda part: look(part, table), bytes_)
    return b.bitcast(found, codes.type)


def staircase(b: ir.IRBuilder, x: ir.Value, edges: tuple[float, ...], values: tuple[float, ...]) -> ir.Value:
    """values[number of edges below x], for f32 lanes and ascending edges."""
    if target.current().dot == "vnni512" and len(values) in (16, 32):
        return _staircase_by_permutes(b, x, edges, values)
    found: ir.Value = constant(x.type, values[0])
    for edge, value in zip(edges, values[1:], strict=True):
        found = b.select(less(b, constant(x.type, edge), x), constant(x.type, value), found)
    return found


def _staircase_by_permutes(b: ir.IRBuilder, x: ir.Value, edges: tuple[float, ...], values: tuple[float, ...]) -> ir.Value:
    """A binary search, in which tables of 16 or 32 numbers are looked up by one instruction."""
    ints = ir.VectorType(_I32, 16)

    def look(numbers: tuple[float, ...], at: ir.Value) -> ir.Value:
        parts = [ir.Constant(x.type, list(numbers[i : i + 16])) for i in range(0, len(numbers), 16)]
        if len(parts) == 1:
            return call(b, "llvm.x86.avx512.permvar.sf.512", x.type, parts[0], at)
        return call(b, "llvm.x86.avx512.vpermi2var.ps.512", x.type, parts[0], at, parts[1])

    padded, step = (*edges, math.inf), len(values) // 2
    index: ir.Value = constant(ints, 0)
    while step:
        edge = look(padded, b.add(index, constant(ints, step - 1))) if 2 * step < len(values) else constant(x.type, edges[step - 1])
        index = b.select(less(b, edge, x), b.add(index, constant(ints, step)), index)
        step //= 2
    return look(values, index)


def _table(entries: tuple[int, ...], count: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(_I8, count), list(entries) * (count // len(entries)))
