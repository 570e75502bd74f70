"""What a file of another kind has to hold: its tensors made of the canonical ones, and how they are written.

GGUF and Hugging Face exports share this: a family's expressions turned round, a job for each tensor of the file, the loop that writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

from ...quant.block import get_format
from ...quant.processors import logical_processors
from ..checkpoint import Checkpoint
from ..expression import evaluate, invert, sources
from ..tensor import Tensor
from .convert import ConversionResult, tensor_result
from .recipe import Choice
from .stream import Job, streams

Plan = Callable[[Tensor], tuple[Job, Choice]]
"""What becomes of a canonical tensor."""


@dataclass(frozen=True)
class Target:
    """A tensor of the file to be written. tensor: reads the canonical ones, `parts`, as the file has them."""

    tensor: Tensor
    parts: tuple[Tensor, ...]

    @property
    def shown(self) -> str:
        """What it is called in results: the canonical tensor that it is, or its own name where it is made of several."""
        return self.parts[0].name if len(self.parts) == 1 and self.parts[0].size == self.tensor.size else self.tensor.name


def targets(checkpoint: Checkpoint, kind: Literal["gguf", "huggingface"], spell: Callable[[str], str] = lambda name: name) -> list[Target]:
    """The tensors of a file of a kind. spell: the file's name of what expressions name.

    Raises ExpressionError for what such a file cannot hold.
    """
    assert checkpoint.family is not None
    specs = [spec for spec in checkpoint.family.tensors(checkpoint.metadata) if spec.name in checkpoint.tensors]
    made = [(spec.name, expression) for spec in specs if (expression := spec.made_of(kind)) is not None]
    find = checkpoint.tensors.__getitem__
    return [
        Target(evaluate(expression, spell(name), find, checkpoint.path), tuple(find(part) for part in sources(expression)))
        for name, expression in invert(made).items()
    ]


def planned(target: Target, plan: Plan) -> tuple[Job, Choice]:
    """The job of a target: that of its parts; where they differ, that of the part with the most bits per weight."""
    jobs = [plan(part) for part in target.parts]
    job, choice = max(jobs, key=lambda pair: get_format(pair[0].format).bits_per_weight())
    kept = all(other.kept and other.format == job.format for other, _ in jobs)
    return replace(job, tensor=target.tensor, kept=kept), choice


def by_parts(found: Sequence[Target], jobs: Sequence[tuple[Job, Choice]]) -> list[tuple[Job, Choice]]:
    """The jobs as they concern the canonical tensors: what a joined tensor is made of may be of several formats."""
    return [(replace(job, tensor=part), choice) for target, (job, choice) in zip(found, jobs, strict=True) for part in target.parts]


def main_format(jobs: Sequence[tuple[Job, Choice]]) -> str:
    """The format that most weights have."""
    weights: dict[str, int] = {}
    for job, _ in jobs:
        weights[job.format] = weights.get(job.format, 0) + job.tensor.size
    return max(weights, key=lambda name: weights[name])


class TensorWriter(Protocol):
    """What writes a file's tensors, declared before."""

    def write(self, name: str, data: np.ndarray | Iterable[np.ndarray]) -> None: ...


def write_tensors(
    writer: TensorWriter,
    found: Sequence[Target],
    jobs: Sequence[tuple[Job, Choice]],
    result: ConversionResult,
    threads: int | None,
    allow_nonfinite: bool,
    advance: Callable[[int], None],
) -> None:
    """Encodes the tensors of the targets by their jobs and writes them in order; `result` takes what became of each."""
    encoded = streams([job for job, _ in jobs], threads or logical_processors(), allow_nonfinite=allow_nonfinite, advance=advance)
    with closing(encoded):
        for stream, target, (job, choice) in zip(encoded, found, jobs, strict=True):
            writer.write(job.tensor.name, stream.pieces)
            result.tensors.append(replace(tensor_result(job, choice, stream.measure, stream.nbytes), name=target.shown))
