"""Matrix products of experts: out[slot, row] = sum over columns of weight[expert][row, column] * x[slot, column].

Parameters: the weights' block format; the kind of activation panels. It is matmul.py's product, once for every expert that has tokens, so
an output's bits do not depend on how many tokens, or which, an expert has.
"""

from __future__ import annotations

from ...quant.jit.fields import ArgumentBlock, view
from .matmul import groups_product
from .panels import units
from .structs import GROUP, GROUP_BYTES, RECORD

FIELDS = "groups experts weights matrix_nbytes columns rows x out out_stride"
"""groups         a GROUP for each expert
weights        tiles of the first expert's matrix, of `rows` x `columns`; matrix_nbytes from one to the next
x              panels as gather_panels.py gives them
out            float32, slot s at out + s * out_stride bytes; written in whole groups of 16 rows
"""


def build(format_name: str, kind: str):
    product, record = groups_product(format_name, kind), RECORD[kind]
    Arguments, Group = ArgumentBlock(FIELDS), ArgumentBlock(GROUP)

    def kernel(arguments, worker, span):
        a = view(Arguments, arguments)
        blocks = (a.columns + 31) // 32
        first, last = units(a.rows, span)
        first, last = 2 * first, min(2 * last, (a.rows + 15) // 16)
        for e in range(a.experts):
            group = view(Group, a.groups + e * GROUP_BYTES)
            start, count = group.start, group.count
            if count > 0:
                weights, x, out = a.weights + e * a.matrix_nbytes, a.x + start * blocks * record, a.out + start * a.out_stride
                product(weights, blocks, first, last, x, count, out, a.out_stride, 0, 0)

    return kernel
