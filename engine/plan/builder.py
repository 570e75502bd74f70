"""What architectures are composed of: the steps of a transformer as rows of a plan.

A Builder owns the plan and its buffers. Each method appends the rows of one step and returns the buffers that hold its result, so an
architecture reads like the forward pass it describes. Widths are checked here, before anything runs.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np

from ...formats.layers import AttentionSpec
from ...quant.jit.arguments import parse
from ..kernels.structs import (
    ALWAYS,
    ATTENTION_FEATURES,
    BLOCK,
    MANY,
    NEVER,
    SEQUENCE_BYTES,
    SPLIT,
    STEP,
    UNIT,
    attention_scratch,
    padded_tokens,
    panel_bytes,
    part_bytes,
    rope_scratch,
)
from .operands import LayerPages, LayerShape, Matrix, RotaryTable, WeightsByName
from .plan import Buffer, Plan, PlanError


@dataclass(frozen=True)
class Limits:
    """What the buffers have room for. tokens: of one step; outputs: tokens of one step that get logits; sequences: in one step."""

    tokens: int
    outputs: int
    sequences: int
    context: int
    workers: int


@dataclass(frozen=True)
class Panels:
    """Activations ready for matrix products, by kind. `private`: with one token each worker has its own, `stride` bytes apart."""

    columns: int
    buffers: dict[str, Buffer]
    strides: dict[str, int]


class StepState:
    """The struct that rows of a plan point to, and the arrays behind it. There is one for each group of the cache; they differ in the
    block tables of the sequences alone."""

    def __init__(self, tokens: int, sequences: int, groups: int = 1):
        self._fields = {name: i for i, (name, _) in enumerate(parse(STEP))}
        self._structs = np.zeros((groups, len(self._fields)), np.int64)
        self.ids = np.zeros(tokens, np.int32)
        self.positions = np.zeros(tokens, np.int64)
        self._tables = np.zeros((groups, max(sequences, 1), SEQUENCE_BYTES // 8), np.int64)
        self._structs[:, self._fields["ids"]] = self.ids.ctypes.data
        self._structs[:, self._fields["positions"]] = self.positions.ctypes.data
        self._structs[:, self._fields["table"]] = [table.ctypes.data for table in self._tables]

    @property
    def address(self) -> int:
        """The struct for rows that read no block table."""
        return self.group(0)

    def group(self, number: int) -> int:
        """Address of the struct for the rows of layers of a group."""
        return self._structs[number].ctypes.data

    @property
    def tokens(self) -> int:
        return int(self._structs[0, self._fields["tokens"]])

    def set(self, tokens: int, sequences: int = 0) -> None:
        self._structs[:, self._fields["tokens"]] = tokens
        self._structs[:, self._fields["sequences"]] = sequences

    def place(self, number: int, pages: List[int], first: int, count: int, start: int, splits: int = 0) -> None:
        """Sequence number `number` of the step; see SEQUENCE. pages: addresses of its block tables, one for each group."""
        for rows, address in zip(self._tables, pages, strict=True):
            rows[number] = first, count, start, address, splits


class Builder:
    """Writes a plan. `kind` is that of the activations where weights are integers: "int8", or "f32" to measure without that error."""

    def __init__(self, weights: WeightsByName, cache: LayerPages, limits: Limits, kind: str):
        self.plan = Plan()
        self.weights, self.cache, self.limits, self.kind = weights, cache, limits, kind
        self.step = StepState(limits.tokens, limits.sequences, len(cache.groups))
        self.outputs = StepState(limits.outputs, 0)
        self._now, self._rows = self.step, limits.tokens
        self._panels: dict[tuple[str, str, int], Buffer] = {}
        self._floats: dict[tuple[str, int], Buffer] = {}

    # ---- buffers -----------------------------------------------------------------------------------------------------

    def floats(self, name: str, columns: int) -> Buffer:
        """float32 rows, one per token of the step, zero beyond `columns`. The same name and width give the same buffer."""
        key = (f"{name}.{self._suffix}", columns)
        if key not in self._floats:
            width = 4 * -(-columns // BLOCK) * BLOCK
            self._floats[key] = self.plan.buffer(f"{key[0]}[{columns}]", padded_tokens(self._rows) * width, width)
        return self._floats[key]

    def _panel(self, name: str, kind: str, columns: int, private: bool) -> tuple[Buffer, int]:
        key = (f"{name}.{self._suffix}{'.private' if private else ''}", kind, columns)
        own = -(-panel_bytes(kind, 1, columns) // 128) * 128 if private else 0
        if key not in self._panels:
            nbytes = max(panel_bytes(kind, self._rows, columns), own * self.limits.workers + panel_bytes(kind, 1, columns))
            self._panels[key] = self.plan.buffer(f"{key[0]}.{kind}[{columns}]", nbytes)
        return self._panels[key], own

    @property
    def _suffix(self) -> str:
        return "step" if self._now is self.step else "outputs"

    def _kinds(self, matrices: List[Matrix]) -> list[str]:
        return list(dict.fromkeys(self.kind if m.integers else "f32" for m in matrices))

    # ---- steps -------------------------------------------------------------------------------------------------------

    def embed(self, table: Matrix) -> Buffer:
        """Token ids -> the residual stream."""
        x = self.plan.results["stream"] = self.floats("x", table.columns)
        scratch = self.plan.buffer("embed.scratch", 2048 * self.limits.workers)
        self.plan.add(
            "embed", table.format, step=self._now.address, table=table, columns=table.columns,
            out=x, out_stride=x.width, scratch=scratch, scratch_worker=2048, label=table.name,
        )  # fmt: skip
        return x

    def rms_norm(self, x: Buffer, weight: str, columns: int, epsilon: float, consumers: List[Matrix]) -> Panels:
        """Normalized activations in panels, of every kind that the consumers read."""
        vector = self.weights.vector(weight)
        if vector.size < columns:
            raise PlanError(f"{weight} has {vector.size} weights for {columns} columns")
        panels = Panels(columns, {}, {})
        for kind in self._kinds(consumers):
            out, own = self._panel("norm", kind, columns, True)
            self.plan.add(
                "rms_norm", kind, barrier=MANY, step=self._now.address, x=x, x_stride=x.width, weight=vector.ctypes.data,
                columns=columns, out=out, out_worker=own, epsilon=epsilon, label=weight,
            )  # fmt: skip
            panels.buffers[kind], panels.strides[kind] = out, own
        return panels

    def matmul(
        self, panels: Panels, matrix: Matrix, out: Buffer, bias: str | None = None, add: bool = False, barrier: int = ALWAYS
    ) -> Buffer:
        """out = matrix · panels (+ bias) (+ out)."""
        kind = self._kinds([matrix])[0]
        if panels.columns != matrix.columns or out.width < 4 * -(-matrix.rows // 16) * 16:
            raise PlanError(
                f"{matrix.name} is {matrix.rows} x {matrix.columns}; it gets {panels.columns} columns and room for {out.width // 4} rows"
            )
        vector = self.weights.vector(bias, 16).ctypes.data if bias else 0
        self.plan.add(
            "matmul", matrix.format, kind, barrier=barrier, units=-(-matrix.rows // UNIT), step=self._now.address, weights=matrix,
            columns=matrix.columns, rows=matrix.rows, x=panels.buffers[kind], x_worker=panels.strides[kind], out=out, out_stride=out.width,
            bias=vector, add=int(add), label=matrix.name,
        )  # fmt: skip
        return out

    def attention(
        self, layer: int, q: Buffer, k: Buffer, v: Buffer, spec: AttentionSpec, rope: RotaryTable | None, consumer: Matrix,
        sinks: str | None = None,
    ) -> Panels:  # fmt: skip
        """Rotates q and k, stores k and v, attends, and gives the result in panels for `consumer`.

        rope: None for attention without positions; sinks: name of the vector of a score for each query head. Raises PlanError for what
        does not fit together.
        """
        limits, heads, key_size, value_size = self.limits, spec.heads, spec.key_size, spec.value_size
        shape = self.cache.shapes[layer]
        if shape != LayerShape.of(spec, shape.layout):
            raise PlanError(f"layer {layer} attends as {spec}, and the cache keeps {shape}")
        if rope is not None and rope.dimensions > key_size:
            raise PlanError(f"layer {layer}: a rotary table of {rope.dimensions} dimensions for heads of {key_size}")
        if spec.sinks != (sinks is not None):
            raise PlanError(f"layer {layer} has sinks or has none: {spec} and {sinks}")
        queries, out = self.floats("q.rotated", heads * key_size), self.floats("attention", heads * value_size)
        for name, got, size in (("q", q, heads * key_size), ("k", k, spec.kv_heads * key_size), ("v", v, spec.kv_heads * value_size)):
            if got.width < 4 * size or (got is q and got.width != queries.width):
                raise PlanError(f"layer {layer}: {name} has room for {got.width // 4} columns, not {size}")
        own = -(-q.width // 128) * 128
        private = self._private("q.lone", own * limits.workers)
        merge_scratch = part_bytes(value_size) + out.width + 64
        scratch_worker = -(-max(attention_scratch(key_size, value_size), merge_scratch, rope_scratch(key_size)) // 128) * 128
        scratch = self._private("attention.scratch", scratch_worker * limits.workers)
        parts = self._private("attention.parts", self.part_slots() * heads * part_bytes(value_size))
        features = [name for name in ATTENTION_FEATURES if getattr(spec, name)]
        added = 0
        if sinks is not None:
            vector = self.weights.vector(sinks)
            if vector.size < heads:
                raise PlanError(f"{sinks} has {vector.size} scores for {heads} heads")
            added = vector.ctypes.data
        step, pages, page_bytes = self.step.group(self.cache.group(layer)), self.cache.layer(layer), shape.page_bytes
        self.plan.add(
            "rope_store", key_size, value_size, rope.dimensions if rope else 0, shape.layout, barrier=MANY, step=step, q=q, k=k, v=v,
            q_stride=q.width, k_stride=k.width, v_stride=v.width, heads=heads, kv_heads=spec.kv_heads,
            table=rope.address if rope else 0, cache=pages, page_bytes=page_bytes, out=queries, lone=private, lone_worker=own,
            scratch=scratch, scratch_worker=scratch_worker, scale=spec.scale, label=f"layer {layer}",
        )  # fmt: skip
        self.plan.add(
            "attention", key_size, value_size, heads // spec.kv_heads, shape.layout, *features, step=step, q=queries, lone=private,
            lone_worker=own, q_stride=q.width, out_stride=out.width, cache=pages, page_bytes=page_bytes, heads=heads,
            kv_heads=spec.kv_heads, out=out, scratch=scratch, scratch_worker=scratch_worker, parts=parts, window=spec.window,
            soft_cap=spec.soft_cap, sinks=added, label=f"layer {layer}",
        )  # fmt: skip
        panels = Panels(heads * value_size, {}, {})
        merged = [name for name in features if name != "soft_cap"]
        for kind in self._kinds([consumer]):
            made, stride = self._panel("attention", kind, heads * value_size, True)
            self.plan.add(
                "attention_merge", value_size, kind, *merged, barrier=MANY, step=step, x=out, x_stride=out.width, heads=heads,
                columns=heads * value_size, parts=parts, out=made, out_worker=stride, scratch=scratch, scratch_worker=scratch_worker,
                window=spec.window, sinks=added, label=f"layer {layer}",
            )  # fmt: skip
            panels.buffers[kind], panels.strides[kind] = made, stride
        return panels

    def gated(
        self, panels: Panels, gate: Matrix, up: Matrix, consumer: Matrix, activation: str, biases: tuple[str | None, str | None]
    ) -> Panels:
        """activation(gate · panels) * (up · panels), in panels for `consumer`."""
        g, u = self.floats("gate", gate.rows), self.floats("up", up.rows)
        if gate.rows != up.rows:
            raise PlanError(f"{gate.name} has {gate.rows} rows and {up.name} has {up.rows}")
        # Claimed together: a worker goes on with the rows that it made itself, so nobody waits between these three.
        self.matmul(panels, gate, g, biases[0], barrier=NEVER)
        self.matmul(panels, up, u, biases[1], barrier=NEVER)
        result = Panels(gate.rows, {}, {})
        kinds = self._kinds([consumer])
        for kind in kinds:
            out, _ = self._panel("gated", kind, gate.rows, False)
            self.plan.add(
                "gated", kind, activation, barrier=ALWAYS if kind == kinds[-1] else NEVER, units=-(-gate.rows // UNIT),
                step=self._now.address, gate=g, up=u, stride=g.width, columns=gate.rows, out=out,
            )  # fmt: skip
            result.buffers[kind], result.strides[kind] = out, 0
        return result

    def select_outputs(self, x: Buffer, columns: int) -> Buffer:
        """From here on the plan works on the tokens that get logits. Their rows are gathered."""
        self._now, self._rows = self.outputs, self.limits.outputs
        out = self.floats("x", columns)
        self.plan.add(
            "gather", barrier=MANY, step=self._now.address, x=x, x_stride=x.width, columns=columns, out=out
        )
        self.plan.results["hidden"] = out
        return out

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def part_slots(self) -> int:
        """Parts of attention that fit: only when few sequences run is their attention split among workers (see Engine)."""
        return split_sequences(self.limits) * -(-self.limits.context // SPLIT)

    def optional(self, name: str) -> str | None:
        """The name of a vector if the checkpoint has it."""
        return name if name in self.weights else None

    def _private(self, name: str, nbytes: int) -> Buffer:
        """Memory that layers use one after another: one buffer for each name and size."""
        name = f"{name}[{nbytes}]"
        return self.plan.buffers.get(name) or self.plan.buffer(name, nbytes)


def split_sequences(limits: Limits) -> int:
    """The most sequences in a step for which lone tokens' attention is split: beyond, there is work for everyone anyway."""
    return min(limits.sequences, 2 * limits.workers)
