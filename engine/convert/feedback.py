"""Conversion that knows the inputs of matrices: layer after layer is calibrated, quantized and written.

A model is run over a text (calibrate.py), and as the sums over a layer's inputs come, the layer's matrices are quantized with them and
written: with Gram matrices by error feedback (quant/feedback.py), with second moments by a weighted search. Or the sums come from a
file of statistics. Memory is that of one layer, its Gram matrices, and a few runs of rows.

What no product of the plan reads (norms, an embedding that is not the head), and what keeps its blocks, is written as convert.py does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from ...formats.checkpoint import Checkpoint
from ...formats.conversion.convert import (
    ConversionResult,
    TensorResult,
    digesting,
    files_nbytes,
    inputs,
    native_metadata,
    plan,
    replacement_note,
    requantization_note,
    source_keys,
    tensor_result,
    usable,
)
from ...formats.conversion.recipe import Choice, Recipe, RecipeError
from ...formats.conversion.statistics import Statistics
from ...formats.conversion.stream import Job, Measure, streams
from ...formats.decoder import EMBEDDING, HEAD
from ...formats.hbf.writer import NativeWriter
from ...formats.tensor import Tensor
from ...quant.block import get_format
from ...quant.feedback import DAMPING
from ...quant.methods import TIED_DAMPING, Inputs
from ...quant.processors import logical_processors
from .calibration import Calibration, InputStatistics, MatrixInput, stacks
from .non_finite import finite_checkpoint, naming_weights
from .quantize_tensor import TensorQuantizer

LEAST_IMPORTANCE = 1e-6
"""Importance of a column that was never active, by the mean of all: a weight of 0 would let it become anything."""
_SEARCH, _FEEDBACK, _FEEDBACK_COLUMN = 100.0, 2000.0, 2.75
"""What quantizing a weight costs, in multiplications of the run: by search; by error feedback, and for each column. For times only."""

Progress = Callable[[str, float, float], None]
"""progress(what, done, total): "kernels" in number, "layers" in multiplications."""
Take = Callable[[tuple[str, ...], list[Inputs]], None]
"""take(names, inputs): quantizes and writes the matrices of these names, which share their inputs: one, or one for each expert."""


def convert_with_text(
    checkpoint: Checkpoint,
    output: str | os.PathLike[str],
    recipe: Recipe,
    texts: np.ndarray,
    *,
    provenance: Mapping[str, Any] | None = None,
    threads: int | None = None,
    allow_nonfinite: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> ConversionResult:
    """Writes a checkpoint as a .hbf file, whole or not at all, by what its matrices read when it is run over a text.

    recipe      method "feedback" (also if it names none), or "search" for a search weighted by second moments
    texts       int[chunks, tokens] ids, see calibration_text.calibration_tokens
    provenance  what the file says about the text, in its metadata
    The rest as in formats.convert.convert. Results are the same for any number of threads.

    Raises CalibrationError for a model that cannot be run over the text, and as convert.
    """
    conversion = _Conversion(checkpoint, output, recipe, threads, allow_nonfinite, progress)

    def provide(take: Take) -> None:
        def consume(found: list[InputStatistics]) -> None:
            for each in stacks(found):
                take(each[0].names, [conversion.known(one) for one in each])

        def wants_gram(each: MatrixInput) -> bool:
            return conversion.method == "feedback" and any(name in conversion.wanted for name in each.names)

        run = finite_checkpoint(checkpoint) if allow_nonfinite else checkpoint
        with naming_weights(checkpoint), Calibration(run, texts, threads=threads, progress=conversion.ran) as calibration:
            conversion.expect({name for each in calibration.inputs for name in each.names})
            calibration.run(consume, wants_gram)

    return conversion.run(provide, dict(provenance or {}))


def convert_with_statistics(
    checkpoint: Checkpoint,
    output: str | os.PathLike[str],
    recipe: Recipe,
    statistics: Statistics,
    *,
    provenance: Mapping[str, Any] | None = None,
    threads: int | None = None,
    allow_nonfinite: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> ConversionResult:
    """The same by a file of statistics. Matrices whose Gram matrix it does not have get a weighted search, others a plain one.

    Raises StatisticsError for statistics of another model, RecipeError for error feedback where the file has no Gram matrices, and as
    formats.convert.convert.
    """
    conversion = _Conversion(checkpoint, output, recipe, threads, allow_nonfinite, progress)

    def provide(take: Take) -> None:
        groups: dict[str, list[str]] = {}
        for name in conversion.wanted:
            if name in statistics:
                groups.setdefault(statistics.gram_owner(name), []).append(name)
        conversion.expect({name for names in groups.values() for name in names})
        for names in groups.values():
            tensor = conversion.wanted[names[0]].tensor
            weights = statistics.weights(names[0], tensor.columns, tensor.matrices)
            damping, known = conversion.damping(names), []
            for matrix in range(tensor.matrices):
                gram = statistics.gram(names[0], matrix) if conversion.method == "feedback" else None
                known.append(Inputs(diagonal=None if weights is None else weights[matrix], gram=gram, damping=damping))
            take(tuple(names), known)

    known = [name for name in conversion.wanted if name in statistics]
    if not known:
        raise RecipeError(f"{statistics.path} knows none of the matrices that are to be quantized: it was made from another model")
    if conversion.method == "feedback" and statistics.gram(known[0]) is None:
        problem = "has no Gram matrices, which error feedback needs: make them with qcalibrate --gram, or give the text itself"
        raise RecipeError(f"{statistics.path} {problem}")
    return conversion.run(provide, dict(provenance or {}))


def known_inputs(found: InputStatistics, damping: float = DAMPING) -> Inputs:
    """What calibration has found, as quantization takes it."""
    mean = found.sums.mean()
    diagonal = np.maximum(found.sums, LEAST_IMPORTANCE * mean) if mean > 0 else None
    return Inputs(diagonal=diagonal, gram=found.gram, damping=damping)


def estimated_multiplications(checkpoint: Checkpoint, recipe: Recipe, texts: np.ndarray) -> float:
    """About how many multiplications `convert_with_text` takes, in those of a float32 matrix product. For telling how long."""
    tensors = [t for t in usable(checkpoint)[0] if not t.vector]
    body = [t for t in tensors if t.name not in (EMBEDDING, HEAD)]
    feedback = (recipe.method or "feedback") == "feedback"
    run = sum(t.size + (t.columns**2 / 4 if feedback else 0) for t in body)  # about two matrices share an input
    return texts.size * float(run) + sum(quantizing_multiplications(t, feedback) for t in tensors)


def quantizing_multiplications(tensor: Tensor, feedback: bool) -> float:
    """What quantizing a matrix costs, in multiplications of the run: by error feedback, or by search alone."""
    return tensor.size * (_FEEDBACK + _FEEDBACK_COLUMN * tensor.columns if feedback else _SEARCH)


class _Conversion:
    """One conversion: what is planned, what is written, how far it is.

    wanted  jobs by name of the matrices that are to be quantized with what is known of their inputs; smaller after `expect`
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        output: str | os.PathLike[str],
        recipe: Recipe,
        threads: int | None,
        allow_nonfinite: bool,
        progress: Progress,
    ):
        self.method = recipe.method or "feedback"
        if self.method == "nearest":
            raise RecipeError("--method nearest looks at no inputs: leave --calibrate out, or choose search or feedback")
        self._checkpoint, self._output, self._recipe = checkpoint, output, recipe
        self._threads, self._allow, self._progress = threads or logical_processors(), allow_nonfinite, progress
        kept, left_out = usable(checkpoint)
        self._plans = {tensor.name: plan(tensor, recipe) for tensor in kept}
        self.wanted = {name: job for name, (job, _) in self._plans.items() if _can_be_wanted(job)}
        self._tied = HEAD not in checkpoint.tensors
        self._done: dict[str, TensorResult] = {}
        self._ran = self._to_run = self._quantized = 0.0
        self.result = ConversionResult(Path(output), "hbf", recipe.asked, files_nbytes(checkpoint), left_out=left_out)

    # ---- what is known -----------------------------------------------------------------------------------------------

    def damping(self, names: tuple[str, ...] | list[str]) -> float:
        """A tied embedding's rows are inputs as well."""
        return TIED_DAMPING if self._tied and EMBEDDING in names else DAMPING

    def known(self, found: InputStatistics) -> Inputs:
        return known_inputs(found, self.damping(found.names))

    def expect(self, names: set[str]) -> None:
        """Says of which matrices something will be known. The others are written now."""
        self.wanted = {name: job for name, job in self.wanted.items() if name in names}
        self._to_quantize = sum(self._cost(job) for job in self.wanted.values())
        rest = [job for name, (job, _) in self._plans.items() if name not in self.wanted]
        with closing(streams(rest, self._threads, allow_nonfinite=self._allow)) as encoded:
            for stream, job in zip(encoded, rest, strict=True):
                self._writer.write(job.tensor.name, stream.pieces)
                self._record(job, stream.measure, stream.nbytes)

    # ---- work --------------------------------------------------------------------------------------------------------

    def run(self, provide: Callable[[Take], None], provenance: dict[str, Any]) -> ConversionResult:
        checkpoint, recipe, result = self._checkpoint, self._recipe, self.result
        result.notes += requantization_note(self._plans.values()) + recipe.unused(job.tensor for job, _ in self._plans.values())
        with NativeWriter(self._output, inputs=inputs(checkpoint)) as writer, digesting(checkpoint.files) as digests:
            self._writer = writer
            for key, value in native_metadata(checkpoint, recipe).items():
                writer.add(key, value)
            writer.add("halfbyte.calibration", json.dumps(provenance))
            for job, _ in self._plans.values():
                writer.declare(job.tensor.name, job.tensor.shape, job.format, source=job.tensor.format)
            provide(self._take)
            for key, value in source_keys(checkpoint, digests.result()).items():
                writer.add(key, value)
        result.tensors += [self._done[name] for name in self._plans]
        result.bytes_after = os.stat(self._output).st_size
        result.notes += replacement_note(result)
        return result

    def _take(self, names: tuple[str, ...], known: list[Inputs]) -> None:
        for name in names:
            job = self.wanted.get(name)
            if job is not None:
                cost = self._cost(job) / job.tensor.size
                made = TensorQuantizer(job.tensor, job.format, known, self.method, threads=self._threads, allow_nonfinite=self._allow)
                self._writer.write(name, made.pieces(lambda weights, cost=cost: self._quantized_some(weights * cost)))  # type: ignore[misc]
                self._record(job, made.measure, made.nbytes, made.method)
                job.tensor.release()

    def _quantized_some(self, cost: float) -> None:
        self._quantized += cost
        self._advance()

    def _record(self, job: Job, measure: Measure, nbytes: int, method: str = "") -> None:
        choice: Choice = self._plans[job.tensor.name][1]
        done = tensor_result(job, choice, measure, nbytes)
        done.method = method or done.method
        self._writer.record(done.name, cosine=done.cosine, nmse=done.nmse, method=done.method)
        self._done[done.name] = done

    # ---- how far -----------------------------------------------------------------------------------------------------

    def ran(self, what: str, done: float, total: float) -> None:
        """Called by the calibration."""
        if what == "text":
            self._ran, self._to_run = done, total
            self._advance()
        else:
            self._progress(what, done, total)

    def _cost(self, job: Job) -> float:
        return quantizing_multiplications(job.tensor, self.method == "feedback")

    def _advance(self) -> None:
        self._progress("layers", self._ran + self._quantized, self._to_run + self._to_quantize)


def _can_be_wanted(job: Job) -> bool:
    tensor: Tensor = job.tensor
    return not job.kept and not tensor.vector and get_format(job.format).integers

