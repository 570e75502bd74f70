"""Argument blocks: the one address that a kernel gets points to 8-byte fields, read by name inside.

    FIELDS = "step weights columns epsilon:f32"
    ArgumentBlock(FIELDS)                     a Numba type;  a = view(Arguments, address);  a.columns, a.epsilon
    pack(FIELDS, {"step": …})                 the bytes, made without numba

A field is an int64 (addresses, counts), a float64 with `:f64`, or a float32 in the low half of its 8 bytes with `:f32`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import cache

from ..errors import HalfbyteError


class ArgumentError(HalfbyteError):
    """An argument block lacks a field or has one too many: a mistake in a plan, not in a file."""


def parse(fields: str) -> list[tuple[str, str]]:
    """[(name, "i64" | "f64" | "f32")] in order."""
    return [(name, kind or "i64") for name, _, kind in (field.partition(":") for field in fields.split())]


def pack(fields: str, values: Mapping[str, float]) -> bytearray:
    """The block as bytes. Raises ArgumentError naming missing and unknown fields, and values that do not fit."""
    kinds, block = _layout(fields)
    if kinds.keys() != values.keys():
        missing, unknown = kinds.keys() - values.keys(), values.keys() - kinds.keys()
        raise ArgumentError(f"missing fields {sorted(missing)}, unknown fields {sorted(unknown)}")
    try:
        return bytearray(block.pack(*[values[name] for name in kinds]))
    except (struct.error, OverflowError):
        for name, kind in kinds.items():
            try:
                struct.pack(_CODES[kind], values[name])
            except (struct.error, OverflowError) as error:
                raise ArgumentError(f"field {name!r} cannot be {values[name]!r}: {error}") from None
        raise


_CODES = {"i64": "q", "f64": "d", "f32": "f4x"}


@cache
def _layout(fields: str) -> tuple[dict[str, str], struct.Struct]:
    """({name: "i64" | "f64" | "f32"} in order, the block)"""
    kinds = dict(parse(fields))
    return kinds, struct.Struct("<" + "".join(map(_CODES.__getitem__, kinds.values())))
