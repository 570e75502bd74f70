"""The Numba side of argument blocks (arguments.py): a type whose attributes are loads."""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba.core import types
from numba.core.datamodel import models
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, intrinsic, lower_getattr_generic, register_model

from .arguments import parse
from .emit import ELEMENTS


class ArgumentBlock(types.Type):
    """The type of an argument block with the given fields; a value is its address."""

    def __init__(self, fields: str):
        self.fields = {name: (i, kind) for i, (name, kind) in enumerate(parse(fields))}
        super().__init__(name=f"ArgumentBlock({fields})")


@register_model(ArgumentBlock)
class ArgumentBlockModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: ArgumentBlock):
        super().__init__(manager, fe_type, ELEMENTS["i64"])


_TYPES = {"i64": types.int64, "f64": types.float64, "f32": types.float32}


@infer_getattr
class ArgumentBlockFields(AttributeTemplate):
    key = ArgumentBlock

    def generic_resolve(self, block: ArgumentBlock, name: str) -> types.Type | None:  # type: ignore[override]
        if name not in block.fields:
            return None
        return _TYPES[block.fields[name][1]]


@lower_getattr_generic(ArgumentBlock)
def _load_field(context: Any, b: ir.IRBuilder, block: ArgumentBlock, address: ir.Value, name: str) -> ir.Value:
    i, kind = block.fields[name]
    at = b.add(address, ir.Constant(ELEMENTS["i64"], 8 * i))
    return b.load(b.inttoptr(at, ELEMENTS[kind].as_pointer()))


@intrinsic
def view(typing_context, block_type, address):
    """view(ArgumentBlock, address): the block at an address."""

    def codegen(context, b, sig, values):
        return values[1]

    return block_type.instance_type(block_type, address), codegen
