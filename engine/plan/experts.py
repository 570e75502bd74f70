"""A mixture of experts as rows of a plan: each token goes through a few of many gated networks (Shazeer et al. 2017; Jiang et al. 2024).

The tokens of a step are gathered by expert, so that every expert's matrices are read once, and what a token gets is the same alone and in
any company: its experts and their ranks follow from its own scores, and its sums have an order of their own.
"""

from __future__ import annotations

from ...formats.layers import ExpertsSpec
from ..kernels.structs import ALWAYS, BLOCK, GROUP_BYTES, NEVER, ROUTE_BYTES, UNIT, expert_slots, panel_bytes, route_scratch
from .builder import Builder, Panels
from .operands import Matrix
from .plan import Buffer, PlanError


def experts(
    b: Builder, panels: Panels, x: Buffer, router: Matrix, gate: Matrix, up: Matrix, down: Matrix, spec: ExpertsSpec, activation: str
) -> None:
    """x += the weighted sum of what each token's experts make of `panels`. gate, up and down hold a matrix for each of spec.count experts.

    Raises PlanError for matrices that do not fit.
    """
    _check(panels, router, gate, up, down, spec)
    step, count, used = b._now.address, spec.count, spec.used
    slots = expert_slots(b._rows, count, used)
    scores = b.matmul(panels, router, b.floats("router", count))
    routes = _shared(b, f"routes[{used}]", b._rows * used * ROUTE_BYTES)
    groups = _shared(b, f"groups[{count}]", count * GROUP_BYTES)
    own = route_scratch(count)
    b.plan.add(
        "route", "chosen" if spec.normalize else "all", step=step, scores=scores, stride=scores.width, experts=count, used=used, out=routes,
        scratch=_shared(b, f"route.scratch[{count}]", own * b.limits.workers), scratch_worker=own, label=router.name,
    )  # fmt: skip
    b.plan.add("group_tokens", step=step, routes=routes, used=used, experts=count, out=groups, label=router.name)

    gathered = Panels(panels.columns, {}, {})
    for kind in b._kinds([gate, up]):
        made = _shared(b, f"gathered.{kind}[{panels.columns}x{slots}]", panel_bytes(kind, slots, panels.columns))
        b.plan.add(
            "gather_panels", kind, step=step, x=panels.buffers[kind], x_worker=panels.strides[kind], columns=panels.columns, routes=routes,
            used=used, groups=groups, out=made, label=gate.name,
        )  # fmt: skip
        gathered.buffers[kind], gathered.strides[kind] = made, 0

    def product(matrix: Matrix, source: Panels, name: str, barrier: int) -> Buffer:
        kind, width = b._kinds([matrix])[0], 4 * -(-matrix.rows_each // BLOCK) * BLOCK
        out = _shared(b, f"{name}[{matrix.rows_each}x{slots}]", slots * width, width)
        b.plan.add(
            "expert_matmul", matrix.format, kind, barrier=barrier, units=-(-matrix.rows_each // UNIT), groups=groups, experts=count,
            weights=matrix, matrix_nbytes=matrix.matrix_nbytes, columns=matrix.columns, rows=matrix.rows_each, x=source.buffers[kind],
            out=out, out_stride=width, label=matrix.name,
        )  # fmt: skip
        return out

    # A worker goes on with the rows that it made itself, so nobody waits between these three.
    g, u = product(gate, gathered, "experts.gate", NEVER), product(up, gathered, "experts.up", NEVER)
    inner = Panels(down.columns, {}, {})
    kinds = b._kinds([down])
    for kind in kinds:
        made = _shared(b, f"experts.gated.{kind}[{down.columns}x{slots}]", panel_bytes(kind, slots, down.columns))
        b.plan.add(
            "expert_gated", kind, activation, barrier=ALWAYS if kind == kinds[-1] else NEVER, units=-(-down.columns // UNIT),
            groups=groups, experts=count, gate=g, up=u, stride=g.width, columns=down.columns, out=made, label=down.name,
        )  # fmt: skip
        inner.buffers[kind], inner.strides[kind] = made, 0
    d = product(down, inner, "experts.down", ALWAYS)
    b.plan.add(
        "expert_sum", units=-(-down.rows_each // UNIT), step=step, x=d, stride=d.width, columns=down.rows_each, routes=routes, used=used,
        groups=groups, out=x, out_stride=x.width, label=down.name,
    )  # fmt: skip


def _shared(b: Builder, name: str, nbytes: int, width: int = 0) -> Buffer:
    """A buffer that all layers use one after another; its name holds whatever its size depends on."""
    return b.plan.buffers.get(name) or b.plan.buffer(name, nbytes, width)


def _check(panels: Panels, router: Matrix, gate: Matrix, up: Matrix, down: Matrix, spec: ExpertsSpec) -> None:
    if not 1 <= spec.used <= spec.count:
        raise PlanError(f"{router.name}: {spec.used} of {spec.count} experts cannot be used")
    if (router.rows, router.columns) != (spec.count, panels.columns):
        raise PlanError(f"{router.name} is {router.rows} x {router.columns}; {spec.count} experts of {panels.columns} columns need another")
    inner, width = gate.rows_each, panels.columns  # what is read is the residual stream, normalized
    for matrix, rows, columns in ((gate, inner, width), (up, inner, width), (down, width, inner)):
        if (matrix.matrices, matrix.rows_each, matrix.columns) != (spec.count, rows, columns):
            raise PlanError(
                f"{matrix.name} is {matrix.matrices} x {matrix.rows_each} x {matrix.columns}; "
                f"its layer needs {spec.count} x {rows} x {columns}"
            )
