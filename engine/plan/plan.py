"""A plan: what a step computes, as data.

An architecture writes a plan once, at load: rows of (kernel, arguments, barrier) over named buffers. It can be printed, run as a
whole in one compiled call, or section by section, which is how a report compares activations and how a bug is found. The same
plan serves any number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from ...quant.errors import HalfbyteError
from ...quant.jit import store
from ...quant.jit.arguments import pack
from ..kernels.structs import ALWAYS, MANY, NEVER, PLAN_ROW

KERNELS = "halfbyte.engine.kernels."
_COLUMNS = PLAN_ROW // 8


class PlanError(HalfbyteError):
    """A plan that does not fit together: a mistake in an architecture, named with its row."""


@dataclass(frozen=True)
class Buffer:
    """Memory with a name, aligned to 64 bytes and zero at first. `width`: bytes of a token's row, 0 if it is not one row per token."""

    name: str
    array: np.ndarray  # uint8
    width: int = 0

    @cached_property
    def address(self) -> int:
        return self.array.ctypes.data

    @property
    def nbytes(self) -> int:
        return self.array.size

    def floats(self, tokens: int) -> np.ndarray:
        """float32[tokens, width / 4], a view."""
        return self.array[: tokens * self.width].view(np.float32).reshape(tokens, -1)


class Addressed(Protocol):
    """What lies at an address, such as a matrix of weights. The address is taken when the plan is linked."""

    @property
    def address(self) -> int: ...

    @property
    def name(self) -> str: ...


Argument = int | float | Addressed
"""A field of an argument block: a number, or something (a buffer, a matrix) for its address."""


@dataclass(frozen=True)
class Op:
    """A row before its kernel is compiled. `barrier`: the number of tokens above which no row after it begins before it is done.
    `units`: of its work that workers claim; 0: it is dealt among them, or, where no barrier follows, every worker does it for itself."""

    kernel: str
    parameters: tuple[str, ...]
    arguments: Mapping[str, Argument]
    barrier: int
    units: int
    label: str

    @property
    def name(self) -> store.Name:
        return (KERNELS + self.kernel, *self.parameters)


@dataclass
class Section:
    """A run of rows: `plan[start:stop]`."""

    start: int
    stop: int


@dataclass
class Plan:
    """Rows in order. `add` while it is written, `link` once, then `address`, `len`, `sections`.

    results: buffers that are read from outside, by what they hold: "stream", the residual stream of the step's tokens; "hidden", that of
    the tokens that get logits, before the last norm; "logits".
    """

    ops: list[Op] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    sections: dict[str, Section] = field(default_factory=dict)
    results: dict[str, Buffer] = field(default_factory=dict)
    _table: np.ndarray = field(default_factory=lambda: np.zeros((0, _COLUMNS), np.int64))
    _blocks: dict[int, np.ndarray] = field(default_factory=dict)

    def buffer(self, name: str, nbytes: int, width: int = 0) -> Buffer:
        """A new buffer. Pages that are never touched take no memory. Raises PlanError if the name is taken."""
        if name in self.buffers:
            raise PlanError(f"two buffers are called {name!r}")
        raw = np.zeros(nbytes + 128, np.uint8)
        start = -raw.ctypes.data % 64
        made = Buffer(name, raw[start : start + nbytes + 64], width)
        self.buffers[name] = made
        return made

    def add(
        self, kernel: str, *parameters: object, barrier: int = ALWAYS, units: int = 0, label: str = "", **arguments: Argument
    ) -> None:
        """Appends a row; the kernel is the module of that name in engine/kernels. barrier, units: see Op."""
        self.ops.append(Op(kernel, tuple(map(str, parameters)), arguments, barrier, units, label))

    def begin(self, section: str) -> None:
        """Rows added from here on belong to this section, until the next one begins."""
        if self.sections:
            list(self.sections.values())[-1].stop = len(self.ops)
        if section in self.sections:
            raise PlanError(f"two sections are called {section!r}")
        self.sections[section] = Section(len(self.ops), len(self.ops))

    def link(self, report: Callable[[int, int], None] | None = None) -> None:
        """Finds every kernel, compiling what is missing, and packs all arguments. `report(done, total)` while compiling.

        Raises PlanError if rows that workers claim go on without a barrier into one that they do not.
        """
        if self.sections:
            list(self.sections.values())[-1].stop = len(self.ops)
        self._check_claims()
        self._meet_after_what_lasts()
        store.prepare([op.name for op in self.ops], report)
        self._table = np.zeros((len(self.ops), _COLUMNS), np.int64)
        self._blocks = {}
        self.relink(Section(0, len(self.ops)))

    def relink(self, section: Section) -> None:
        """Packs the arguments of a section again, for a plan whose weights have moved. Not while the plan runs."""
        for row in range(section.start, section.stop):
            op = self.ops[row]
            kernel = store.find(*op.name)
            values: dict[str, Any] = {k: getattr(v, "address", v) for k, v in op.arguments.items()}
            try:
                block = np.frombuffer(pack(kernel.fields, values), np.uint8)
            except HalfbyteError as error:
                raise PlanError(f"row {row}, {op.kernel} {op.label}: {error}") from None
            self._blocks[row] = block
            self._table[row] = kernel.address, block.ctypes.data, op.barrier, op.units

    def _check_claims(self) -> None:
        """Who claimed units of a row does not have what another row's worker needs."""
        for row, (op, after) in enumerate(pairwise(self.ops)):
            if op.units and not after.units and op.barrier != ALWAYS:
                raise PlanError(f"row {row}, {op.kernel} {op.label}, is claimed; a barrier must follow before {after.kernel} {after.label}")

    def _meet_after_what_lasts(self) -> None:
        """What every worker made for itself is there until the next barrier: later, a worker may come that has had no part in it. A row
        whose result is read after that gets a barrier, so that what each worker would have made is there for good."""
        made: dict[int, tuple[int, int]] = {}  # where a result lies: who made it, and after how many barriers
        barriers = 0
        for row, op in enumerate(self.ops):
            for name, buffer in op.arguments.items():
                if name == "scratch" or not isinstance(buffer, Buffer) or not op.arguments.get(f"{name}_worker"):
                    continue
                where = buffer.address
                if op.barrier == MANY and not op.units and name in ("out", "lone"):
                    made[where] = row, barriers
                elif where in made and made[where][1] != barriers:
                    maker = made[where][0]
                    self.ops[maker] = replace(self.ops[maker], barrier=ALWAYS)
            barriers += op.barrier == ALWAYS

    def __len__(self) -> int:
        return len(self._table)

    def address(self, section: Section | None = None) -> tuple[int, int]:
        """(address of the first row, number of rows) of a section, or of the whole plan."""
        start, stop = (section.start, section.stop) if section else (0, len(self._table))
        return self._table.ctypes.data + start * PLAN_ROW, stop - start

    def span(self, first: str, last: str) -> Section:
        """From the beginning of one section to the end of another."""
        return Section(self.sections[first].start, self.sections[last].stop)

    def __str__(self) -> str:
        """A line per row: number, section, kernel and parameters, buffers and numbers, where workers meet."""
        names = {s.start: name for name, s in self.sections.items()}
        meet = {ALWAYS: "| barrier", MANY: "| barrier if many", NEVER: ""}
        lines = []
        for i, op in enumerate(self.ops):
            if i in names:
                lines.append(f"{names[i]}:")
            arguments = " ".join(f"{k}={getattr(v, 'name', v)}" for k, v in op.arguments.items())
            lines.append(f"{i:5} {op.kernel}[{', '.join(op.parameters)}] {op.label} {arguments} {meet[op.barrier]}".rstrip())
        return "\n".join(lines)
