"""Two checkpoints of one model held against each other: whether they are that, and how far every tensor is from its reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ...formats.checkpoint import Checkpoint
from ...formats.decoder import EMBEDDING, HEAD
from ...formats.errors import printable, some
from ...formats.tensor import Tensor
from ...quant.errors import HalfbyteError
from ...quant.measures import TensorErrors, TensorMeter
from ...quant.processors import logical_processors

CHUNK_WEIGHTS = 1 << 20
"""Weights of a tensor that are in memory as floats at a time, per thread and checkpoint."""


class ReportError(HalfbyteError):
    """Two checkpoints cannot be compared, or not as asked."""


@dataclass(frozen=True)
class TensorReport:
    """One tensor against its reference.

    nbytes         in the file; 0 for a head that is tied to the embedding
    weights        their number
    method         how it was quantized, as the file has recorded it; None if it has not
    squared_error  sum of (weight - reference)²; NaN if one of them is not a number
    errors         as in quant.measures.TensorErrors
    """

    name: str
    shape: tuple[int, ...]
    format: str
    reference_format: str
    nbytes: int
    weights: int
    method: str | None
    squared_error: float
    errors: TensorErrors

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.weights if self.weights else 0.0

    @property
    def part(self) -> str:
        """What the tensor is in any layer: "attn_q.weight" of "blk.3.attn_q.weight"."""
        return self.name.split(".", 2)[2] if self.layer is not None else self.name

    @property
    def layer(self) -> int | None:
        """The layer it belongs to, or None."""
        pieces = self.name.split(".", 2)
        return int(pieces[1]) if len(pieces) == 3 and pieces[0] == "blk" and pieces[1].isdecimal() else None


def check_comparable(model: Checkpoint, reference: Checkpoint) -> None:
    """Raises ReportError, naming what differs, unless both are checkpoints of the same kind of model."""
    pair = f"{_name(model)} and {_name(reference)}"
    if model.architecture is None or reference.architecture is None:
        return  # weights only: tensors are compared by name
    if model.architecture != reference.architecture:
        raise ReportError(
            f"{pair} are of different architectures, {model.architecture!r} and {reference.architecture!r}: they cannot be compared"
        )
    ours, theirs = model.model, reference.model
    for what, a, b in (
        ("vocabularies", ours.vocabulary, theirs.vocabulary),
        ("numbers of layers", len(ours.layers), len(theirs.layers)),
        ("widths", ours.width, theirs.width),
        ("numbers of heads", ours.layers[0].attention.heads, theirs.layers[0].attention.heads),
    ):
        if a != b:
            raise ReportError(f"{pair} have different {what}, {a} and {b}: they are not the same model")


def tensor_pairs(model: Checkpoint, reference: Checkpoint) -> list[tuple[str, Tensor, Tensor]]:
    """(name, tensor, reference's tensor) of all tensors, in the model's order. A head that one of the two ties to its embedding is compared
    with that embedding. Raises ReportError naming every tensor that is missing or of another shape.
    """
    ours, theirs = model.tensors, reference.tensors

    def found(tensors: dict[str, Tensor], name: str) -> Tensor | None:
        return tensors.get(name) or (tensors.get(EMBEDDING) if name == HEAD else None)

    names = [*ours, *(name for name in theirs if name not in ours)]
    missing_ours = [name for name in names if found(ours, name) is None]
    missing_theirs = [name for name in names if found(theirs, name) is None]
    problems = []
    if missing_theirs:
        problems.append(f"{_name(reference)} lacks {some(missing_theirs)}")
    if missing_ours:
        problems.append(f"{_name(model)} lacks {some(missing_ours)}")
    pairs = [(name, a, b) for name in names if (a := found(ours, name)) is not None and (b := found(theirs, name)) is not None]
    other = [
        f"{printable(name, 120)} is {_shape(a)} in {_name(model)} and {_shape(b)} in {_name(reference)}"
        for name, a, b in pairs
        if a.shape != b.shape
    ]
    if other:
        problems.append("; ".join(other[:4]) + (f" and {len(other) - 4} more" if len(other) > 4 else ""))
    if problems:
        raise ReportError(f"the tensors cannot be compared: {'; '.join(problems)}")
    return pairs


def compare_tensors(
    model: Checkpoint, reference: Checkpoint, threads: int | None = None, advance: Callable[[int], None] = lambda weights: None
) -> list[TensorReport]:
    """The errors of all tensors, in chunks of rows on several threads. advance(weights): called as weights have been compared."""
    pairs = tensor_pairs(model, reference)

    def compare(pair: tuple[str, Tensor, Tensor]) -> TensorReport:
        name, ours, theirs = pair
        meter = TensorMeter()
        for rows in row_slices(ours):
            # A vector is one row, and has no slices.
            a, b = (t.float32(None if t.vector else rows) for t in (theirs, ours))
            meter.add(a, b)
            ours.release(rows)
            theirs.release(rows)
            advance(ours.size if ours.vector else (rows.stop - rows.start) * ours.columns)
        ours.release()
        theirs.release()
        nbytes = ours.nbytes if name in model.tensors else 0  # a tied head takes no bytes of its own
        method = ours.recorded.get("method") or None
        errors = meter.result()
        return TensorReport(name, ours.shape, ours.format, theirs.format, nbytes, ours.size, method, meter.error_energy, errors)

    with ThreadPoolExecutor(threads or logical_processors()) as pool:
        return list(pool.map(compare, pairs))


def row_slices(tensor: Tensor) -> Iterator[slice]:
    """Slices of whole groups of 16 rows that cover the tensor, of about CHUNK_WEIGHTS weights each."""
    if tensor.vector:
        yield slice(0, 1)
        return
    step = max(16, CHUNK_WEIGHTS // max(tensor.columns, 1) // 16 * 16)
    for start in range(0, tensor.rows, step):
        yield slice(start, min(start + step, tensor.rows))


def _name(checkpoint: Checkpoint) -> str:
    return printable(checkpoint.path.name, 120)


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "a number"
