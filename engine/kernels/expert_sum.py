"""What a token's experts gave, each times its weight, added to the residual stream: from the first rank to the last, then to the stream.

So the order does not depend on which experts they are, or on when they came. Whole units of 32 columns are claimed.
"""

from __future__ import annotations

from ...quant.jit.fields import ArgumentBlock, view
from ...quant.jit.memory import load_f32, load_i32
from ...quant.jit.simd import F32, fma, load, store, zeros
from .panels import units
from .structs import GROUP, GROUP_BYTES, ROUTE_BYTES, STEP

FIELDS = "step x stride columns routes used groups out out_stride"
"""x       float32, slot s at x + s * stride bytes
routes  of all tokens, with their places
groups  a GROUP for each expert
out     float32, token t at out + t * out_stride bytes: the residual stream
"""


def build():
    Arguments, Step, Group = ArgumentBlock(FIELDS), ArgumentBlock(STEP), ArgumentBlock(GROUP)

    def kernel(arguments, worker, span):
        a = view(Arguments, arguments)
        first, last = units(a.columns, span)
        last = min(2 * last, (a.columns + 15) // 16)
        for t in range(view(Step, a.step).tokens):
            routes, out = a.routes + t * a.used * ROUTE_BYTES, a.out + t * a.out_stride
            for i in range(2 * first, last):
                total = zeros(F32)
                for r in range(a.used):
                    route = routes + r * ROUTE_BYTES
                    slot = view(Group, a.groups + load_i32(route) * GROUP_BYTES).start + load_i32(route + 4)
                    total = fma(load(F32, a.x + slot * a.stride + 64 * i), zeros(F32) + load_f32(route + 8), total)
                store(out + 64 * i, load(F32, out + 64 * i) + total)

    return kernel
