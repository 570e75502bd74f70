"""How a model's canonical tensors are made of those of a file, and the other way round.

A family gives for each canonical tensor an expression over the tensors of a Hugging Face checkpoint, and one over those of a GGUF
file: rows of a fused matrix, experts stacked, columns and rows exchanged, codes paired with their scales. `evaluate` turns one into a
Tensor that reads the file when it is asked for rows. `invert` turns a family's expressions round, for exporters: which tensors the file
has to hold, each as an expression over canonical ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .errors import TensorError
from .metadata import CheckpointError
from .tensor import RowsTensor, Tensor
from .views import JoinedView, MicroscalingView, OffsetView, RowsView, TransposedView

Find = Callable[[str], Tensor]
"""The tensor of a name in the file that is read, or among the canonical ones."""


class ExpressionError(CheckpointError):
    """A file's tensors cannot be made of the canonical ones."""


@dataclass(frozen=True)
class Source:
    """A tensor as the file has it."""

    name: str


@dataclass(frozen=True)
class Rows:
    """Rows start to stop - 1 of a matrix (elements of a vector) that has `total` of them in all."""

    of: Expression
    start: int
    stop: int
    total: int


@dataclass(frozen=True)
class Concat:
    """Matrices one below the other, or vectors one after another; `rows` of each."""

    parts: tuple[Expression, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Stack:
    """Matrices of one shape as [matrices, rows, columns]."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True)
class Select:
    """One matrix of `total` stacked ones."""

    of: Expression
    index: int
    total: int


@dataclass(frozen=True)
class Transpose:
    """A matrix with rows and columns exchanged."""

    of: Expression


@dataclass(frozen=True)
class Offset:
    """`amount` added to every weight: norms that a file stores as w - 1."""

    of: Expression
    amount: float


@dataclass(frozen=True)
class Halves:
    """Rotary rows that lie as interleaved pairs (2j, 2j + 1) of each of `heads` heads, put into halves (j, j + size / 2)."""

    of: Expression
    heads: int


@dataclass(frozen=True)
class Pairs:
    """The inverse of Halves."""

    of: Expression
    heads: int


@dataclass(frozen=True)
class Blocks:
    """MXFP4 codes and their scales, two tensors, as one."""

    codes: Source
    scales: Source


Expression = Source | Rows | Concat | Stack | Select | Transpose | Offset | Halves | Pairs | Blocks


def sources(expression: Expression) -> tuple[str, ...]:
    """The tensors of the file that an expression reads."""
    match expression:
        case Source(name):
            return (name,)
        case Concat(parts) | Stack(parts):
            return tuple(name for part in parts for name in sources(part))
        case Blocks(codes, scales):
            return codes.name, scales.name
        case _:
            return sources(expression.of)


def respelled(expression: Expression, spell: Callable[[str], str]) -> Expression:
    """The same expression over tensors that are spelled otherwise."""

    def again(part: Any) -> Any:
        return respelled(part, spell)

    match expression:
        case Source(name):
            return Source(spell(name))
        case Concat(parts) | Stack(parts):
            return replace(expression, parts=tuple(map(again, parts)))
        case Blocks(codes, scales):
            return Blocks(again(codes), again(scales))
        case _:
            return replace(expression, of=again(expression.of))


def _depth(expression: Expression) -> int:
    """How many expressions lie within one another, a Source being one."""
    match expression:
        case Source() | Blocks():
            return 1
        case Concat(parts) | Stack(parts):
            return 1 + max(map(_depth, parts))
        case _:
            return 1 + _depth(expression.of)


def halves_order(heads: int, rows: int) -> np.ndarray:
    """int64[rows]: row i of the half order is row order[i] of the interleaved order, head by head."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)


def pairs_order(heads: int, rows: int) -> np.ndarray:
    """int64[rows]: row i of the interleaved order is row order[i] of the half order; the inverse of `halves_order`."""
    return np.arange(rows).reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(rows)


def evaluate(expression: Expression, name: str, find: Find, path: Any) -> Tensor:
    """The tensor of that name that an expression describes, of tensors that `find` gives. Nothing is read yet.

    path: of the file, for errors. Raises TensorError for tensors whose shapes do not allow it.
    """

    def made(part: Expression) -> Tensor:
        return evaluate(part, name, find, path)

    match expression:
        case Source(source):
            return find(source).renamed(name)
        case Rows(of, start, stop, total):
            base = made(of)
            _check(base, base.shape[:1] == (total,), f"{total} rows", of, path)
            return _taken(name, base, slice(start, stop), (stop - start, *base.shape[1:]))
        case Select(of, index, total):
            base = made(of)
            _check(base, base.shape[:1] == (total,) and len(base.shape) == 3, f"{total} matrices", of, path)
            rows = base.shape[1]
            return _taken(name, base, slice(index * rows, (index + 1) * rows), base.shape[1:])
        case Concat(parts, rows):
            bases = [made(part) for part in parts]
            for base, count, part in zip(bases, rows, parts, strict=True):
                _check(base, base.shape == (count, *bases[0].shape[1:]), f"{count} rows", part, path)
            return JoinedView(name, bases, (sum(rows), *bases[0].shape[1:]))
        case Stack(parts):
            bases = [made(part) for part in parts]
            for base, part in zip(bases, parts, strict=True):
                _check(base, base.shape == bases[0].shape and len(base.shape) == 2, f"the shape {list(bases[0].shape)}", part, path)
            return JoinedView(name, bases, (len(bases), *bases[0].shape))
        case Transpose(of):
            base = made(of)
            _check(base, len(base.shape) == 2, "two dimensions", of, path)
            return TransposedView(name, base)
        case Offset(of, amount):
            return OffsetView(name, made(of), amount)
        case Halves(of, heads) | Pairs(of, heads):
            base = made(of)
            count = base.shape[0] if base.shape else 0
            _check(base, count > 0 and count % (2 * heads) == 0, f"rows in pairs for {heads} heads", of, path)
            order = (halves_order if isinstance(expression, Halves) else pairs_order)(heads, count)
            return _taken(name, base, order, base.shape)
        case Blocks(codes, scales):
            pair = find(codes.name), find(scales.name)
            fits = all(isinstance(one, RowsTensor) and one.format == "u8" for one in pair) and len(pair[0].shape) > 2
            _check(pair[0], fits and pair[0].shape == (*pair[1].shape, 16), "16 bytes of codes for each scale", codes, path)
            return MicroscalingView(name, *pair)  # type: ignore[arg-type]


def _check(tensor: Tensor, right: bool, wanted: str, part: Expression, path: Any) -> None:
    if not right:
        raise TensorError(path, f"has shape {list(tensor.shape)}; the metadata call for {wanted}", where=sources(part)[0])


def _taken(name: str, base: Tensor, index: slice | np.ndarray, shape: tuple[int, ...]) -> Tensor:
    return base.taken(name, index, shape) if isinstance(base, RowsTensor) else RowsView(name, base, index, shape)


def invert(made: Iterable[tuple[str, Expression]]) -> dict[str, Expression]:
    """The tensors of a file as expressions over canonical tensors, from (canonical name, how it is made of the file's).

    In the order in which the canonical ones first name them. Raises ExpressionError where a part of a file's tensor is in none of them,
    and for what cannot be written back (Blocks).
    """
    made = list(made)
    found: dict[str, Expression] = {}
    parts: dict[Expression, list[tuple[int, int, int, Expression, bool]]] = {}

    def solve(expression: Expression, value: Expression) -> None:
        """`value` is what `expression` gives; hence what its sources are."""
        match expression:
            case Source(name):
                if found.setdefault(name, value) != value:
                    raise ExpressionError(f"{name}: two canonical tensors claim it as a whole")
            case Offset(of, amount):
                solve(of, Offset(value, -amount))
            case Halves(of, heads):
                solve(of, Pairs(value, heads))
            case Pairs(of, heads):
                solve(of, Halves(value, heads))
            case Transpose(of):
                solve(of, Transpose(value))
            case Concat(pieces, rows):
                at = 0
                for piece, count in zip(pieces, rows, strict=True):
                    solve(piece, Rows(value, at, at + count, sum(rows)))
                    at += count
            case Stack(pieces):
                for i, piece in enumerate(pieces):
                    solve(piece, Select(value, i, len(pieces)))
            case Rows(of, start, stop, total):
                parts.setdefault(of, []).append((start, stop, total, value, False))
            case Select(of, index, total):
                parts.setdefault(of, []).append((index, index + 1, total, value, True))
            case Blocks(codes):
                raise ExpressionError(f"{codes.name}: weights cannot be written as MXFP4 codes and scales in two tensors")

    for name, expression in made:
        solve(expression, Source(name))
    while parts:
        of = max(parts, key=_depth)  # the outermost first: what is solved may add pieces to what lies within it
        pieces = parts.pop(of)
        pieces.sort(key=lambda piece: piece[:2])
        ends = [0, *(stop for _, stop, *_ in pieces)]
        if [start for start, *_ in pieces] != ends[:-1] or ends[-1] != pieces[0][2]:
            problem = "not all of its rows are known, each once; the checkpoint lacks a tensor that is part of it"
            raise ExpressionError(f"{sources(of)[0]}: {problem}")
        values = tuple(piece[3] for piece in pieces)
        stacked = pieces[0][4]
        solve(of, Stack(values) if stacked else Concat(values, tuple(stop - start for start, stop, *_ in pieces)))
    order = {name: place for place, name in reversed(list(enumerate(n for _, e in made for n in sources(e))))}
    return dict(sorted(found.items(), key=lambda item: order[item[0]]))
