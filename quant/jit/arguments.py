"""Argument blocks: the one address that a kernel gets points to 8-byte fields, read by name inside.

    FIELDS = "step weights columns epsilon:f32"
    ArgumentBlock(FIELDS)                     a Numba type;  a = view(Arguments, address);  a.columns, a.epsilon
    pack(FIELDS, {"step": …})                 the bytes, made without numba

A field is an int64 (addresses, counts), or a float32 in the low half of its 8 bytes with `:f32`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from ..errors import HalfbyteError


class ArgumentError(HalfbyteError):
    """An argument block lacks a field or has one too many: a mistake in a plan, not in a file."""


def parse(fields: str) -> list[tuple[str, str]]:
    """[(name, "i64" | "f32")] in order."""
    return [(name, kind or "i64") for name, _, kind in (field.partition(":") for field in fields.split())]


def pack(fields: str, values: Mapping[str, float]) -> bytearray:
    """The block as bytes. Raises ArgumentError naming missing and unknown fields, and values that do not fit."""
    wanted = parse(fields)
    names = {name for name, _ in wanted}
    if names != set(values):
        raise ArgumentError(f"missing fields {sorted(names - set(values))}, unknown fields {sorted(set(values) - names)}")
    out = bytearray(8 * len(wanted))
    for i, (name, kind) in enumerate(wanted):
        try:
            struct.pack_into("<q" if kind == "i64" else "<f", out, 8 * i, values[name])
        except (struct.error, OverflowError) as error:
            raise ArgumentError(f"field {name!r} cannot be {values[name]!r}: {error}") from None
    return out
