"""Calibration: what the inputs of a model's matrices are like, seen over a text.

The model is run as streaming.py runs it, section by section, in float32: the residual streams of all chunks are kept, one layer's
weights are in memory at a time. In every section the plan says which rows are matrix products and which panels they read; the rows
are run up to a product and its panels read. So nothing here knows an architecture, and what is measured is what kernels read.

`calibrate` hands each layer's sums to a consumer and forgets them, so that a conversion can quantize layer after layer while the model
runs. With `sequential` the consumer gives back weights, and all that comes after sees inputs that these weights made: errors of earlier
matrices can then be made good for by later ones (Frantar et al. 2022, arXiv 2210.17323, there "sequential" and "true sequential").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from types import TracebackType

import numpy as np

from ...formats.checkpoint import Checkpoint
from ...formats.errors import printable
from ...formats.tensor import ArrayTensor
from ...quant.errors import HalfbyteError
from ..kernels.structs import GROUP_BYTES, panel_bytes
from ..measure.exchangeable import ReplaceableMatrix, ReplaceableWeights
from ..measure.streaming import OUTPUTS, StreamedMatrix, StreamedModel, StreamedWeights, load
from ..plan.plan import Buffer, Section
from ..run.workers import Workers
from .input_sums import InputSums, flush, read_panels

CHUNK = 512
"""Tokens of a text that are one context, as llama-imatrix has it."""
SMALLEST_CHUNK = 4

Progress = Callable[[str, float, float], None]
"""progress(what, done, total): "kernels" in number, "text" in multiplications."""


class CalibrationError(HalfbyteError):
    """A model or a text that cannot be used for calibration."""


class ActivationError(CalibrationError):
    """What a matrix reads is not finite."""


@dataclass(frozen=True)
class InputStatistics:
    """What one input was like. Matrices that read the same input share it. What an expert reads, the tokens routed to it, is an input.

    names    GGUF names of the matrices that read it, in the order of the plan
    section  "layer.3", or "head"
    columns  of the input, and of these matrices
    count    tokens; 0 for an expert that no token chose
    sums     float64[columns], Σ x²
    gram     float32[columns, columns], Σ x xᵀ, symmetric; None if it was not asked for
    matrix   which of the matrices of these names reads it: the number of the expert
    """

    names: tuple[str, ...]
    section: str
    columns: int
    count: int
    sums: np.ndarray
    gram: np.ndarray | None
    matrix: int = 0


def stacks(found: Iterable[InputStatistics]) -> list[list[InputStatistics]]:
    """Inputs by the matrices that read them: for each set of names one, or one for each expert in the order of their numbers."""
    by_names: dict[tuple[str, ...], list[InputStatistics]] = {}
    for each in found:
        by_names.setdefault(each.names, []).append(each)
    return list(by_names.values())


Replacement = Mapping[str, np.ndarray]
"""float32 of a matrix's shape, by the names of matrices."""

Consumer = Callable[[list[InputStatistics]], Replacement | None]
"""consumer(inputs) is called with all inputs of a layer, layer after layer, then with that of the head. With `sequential` it is called
with one input (of experts, with each one's) at a time, and gives the weights with which the matrices that read it are run from there on
(None: as they are)."""


@dataclass(frozen=True)
class MatrixInput:
    """An input as the plan has it, or one for each of `matrices` experts.

    row     the first product that reads it; before that row the panels in `buffer` are complete
    groups  which of the panels are whose, a GROUP for each expert (kernels/structs.py); None if there are no experts
    """

    names: tuple[str, ...]
    section: str
    columns: int
    row: int
    buffer: Buffer
    matrices: int = 1
    groups: Buffer | None = None


def calibrate(
    checkpoint: Checkpoint,
    texts: np.ndarray,
    consumer: Consumer,
    *,
    grams: bool | Callable[[MatrixInput], bool] = True,
    sequential: bool = False,
    threads: int | None = None,
    progress: Progress = lambda what, done, total: None,
) -> None:
    """Runs a checkpoint over int[chunks, tokens] ids and hands what its matrices read to `consumer`, layer by layer. See Calibration."""
    with Calibration(checkpoint, texts, sequential=sequential, threads=threads, progress=progress) as calibration:
        calibration.run(consumer, grams)


def _checked(checkpoint: Checkpoint, texts: np.ndarray) -> np.ndarray:
    if checkpoint.architecture is None:
        raise CalibrationError(f"{checkpoint.path} holds weights only, no config.json and tokenizer.json: it cannot be run")
    texts = np.asarray(texts)
    if texts.ndim != 2 or texts.dtype.kind not in "iu" or not len(texts) or texts.shape[1] < SMALLEST_CHUNK:
        raise CalibrationError(f"the text must be ids in at least one chunk of at least {SMALLEST_CHUNK} tokens")
    vocabulary = checkpoint.model.vocabulary
    if int(texts.min()) < 0 or int(texts.max()) >= vocabulary:
        raise CalibrationError(
            f"{checkpoint.path}: its tokenizer gives token {int(texts.max())}, but the model has only {vocabulary} tokens"
        )
    return texts


def token_counts(checkpoint: Checkpoint, texts: np.ndarray) -> np.ndarray:
    """int64[vocabulary]: how often each token is in int[chunks, tokens] ids. Raises CalibrationError."""
    texts = _checked(checkpoint, texts)
    assert checkpoint.architecture is not None
    size = checkpoint.model.vocabulary
    return np.bincount(texts.reshape(-1), minlength=size).astype(np.int64)


def matrix_inputs(model: StreamedModel, section: str) -> list[MatrixInput]:
    """The distinct inputs of a section's matrix products, in the order of the plan.

    Two products read the same input if they read the same buffer and nothing has written to it in between.
    Raises CalibrationError for a plan whose products do not read float panels.
    """
    rows, ops = model.plan.sections[section], model.plan.ops
    written: dict[str, int] = {}
    found: dict[tuple[str, int], MatrixInput] = {}
    for row in range(rows.start, rows.stop):
        op = ops[row]
        if op.kernel in ("matmul", "expert_matmul"):
            buffer, matrix = op.arguments["x"], op.arguments["weights"]
            if not isinstance(buffer, Buffer) or not isinstance(matrix, StreamedMatrix) or op.parameters[1] != "f32":
                raise CalibrationError(f"row {row} of the plan, {op.label}, does not read float panels")
            key = (buffer.name, written.get(buffer.name, -1))
            known = found.get(key)
            names = (*(known.names if known else ()), matrix.name)
            groups = op.arguments.get("groups")
            assert groups is None or isinstance(groups, Buffer)
            found[key] = MatrixInput(names, section, matrix.columns, known.row if known else row, buffer, matrix.matrices, groups)
        out = op.arguments.get("out")
        if isinstance(out, Buffer):
            written[out.name] = row
    return list(found.values())


class Calibration:
    """A model and a text, ready to `run`. A context manager.

    checkpoint  best the original weights, of any readable kind; must stay open
    texts       int[chunks, tokens] ids: each chunk is a context of its own
    sequential  the consumer may replace weights as it goes; takes three times as long

    `inputs` are the distinct inputs of all matrix products in the order in which they will be handed over, `texts` the ids.
    The sums are the same for any number of threads, as long as NumPy's BLAS uses one (OPENBLAS_NUM_THREADS=1 before NumPy is imported).
    Raises CalibrationError for texts that cannot be run, ModelError and WeightError for checkpoints that cannot.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        texts: np.ndarray,
        *,
        sequential: bool = False,
        threads: int | None = None,
        progress: Progress = lambda what, done, total: None,
    ):
        self.texts = _checked(checkpoint, texts)
        self._sequential, self._progress = sequential, progress
        with ExitStack() as stack:
            workers = Workers(threads)
            stack.callback(workers.close)
            self._threads = workers.count
            self._pool = stack.enter_context(ThreadPoolExecutor(workers.count))
            weights: StreamedWeights
            if sequential:  # what the embedding and the head are made of is never replaced
                weights = ReplaceableWeights(checkpoint, workers.count, ends=False)
            else:
                weights = StreamedWeights(checkpoint, workers.count, exact=True)
            tokens = self.texts.shape[1]
            model = self._model = StreamedModel(
                checkpoint, weights, workers, "f32", tokens, lambda done, total: progress("kernels", done, total)
            )
            self._inputs = {section: matrix_inputs(model, section) for section in model.sections}
            self._closing = stack.pop_all()

    @property
    def inputs(self) -> list[MatrixInput]:
        return [each for section in self._inputs.values() for each in section]

    def run(self, consumer: Consumer, grams: bool | Callable[[MatrixInput], bool] = True) -> None:
        """Runs the text through the model.

        grams: whether Gram matrices are made: for all inputs, none, or those for which a function says so.
        Raises CalibrationError for activations that are not finite, and for replacements that do not fit; and what the consumer raises.
        """
        self._consumer, self._make_gram = consumer, grams if callable(grams) else lambda _: bool(grams)
        model = self._model
        self._streams = model.new_stream(len(self.texts))
        self._done, self._total = 0.0, sum(self._cost(section) for section in model.sections) * len(self.texts)
        self._advance(0)
        for section in model.sections:
            matrices = [] if section == "head" else model.matrices(section)
            try:
                load(matrices, self._threads)
                model.relink(section)
                if section == "head":
                    self._head()
                elif self._sequential and self._inputs[section]:
                    self._replacing(section)
                else:
                    self._layer(section)
            finally:
                for matrix in matrices:
                    matrix.release()

    def close(self) -> None:
        """Ends the workers."""
        self._closing.close()

    def __enter__(self) -> Calibration:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- sections ----------------------------------------------------------------------------------------------------

    def _layer(self, section: str) -> None:
        """All inputs of a section in one pass, which leaves the streams behind it."""
        inputs, rows = self._inputs[section], self._model.plan.sections[section]
        moments = [self._moments(i) for i in inputs]
        cuts = [rows.start, *(i.row for i in inputs), rows.stop]
        for ids, stream in zip(self.texts, self._streams, strict=True):
            self._room(moments)
            self._model.begin(ids, stream)
            for i, each in enumerate(inputs):
                self._model.go(Section(cuts[i], cuts[i + 1]))
                self._take(each, moments[i])
            self._model.go(Section(cuts[-2], cuts[-1]))
            self._model.end(stream)
            self._advance(self._cost(section))
        if inputs:
            self._give(inputs, moments)

    def _replacing(self, section: str) -> None:
        """One input after another, each as the weights chosen so far make it; then the streams are taken through."""
        inputs, rows = self._inputs[section], self._model.plan.sections[section]
        matrices = {m.name: m for m in self._model.matrices(section)}
        share = self._cost(section) / (len(inputs) + 1)
        for each in inputs:
            moments = self._moments(each)
            for ids, stream in zip(self.texts, self._streams, strict=True):
                self._room([moments])
                self._model.begin(ids, stream)
                self._model.go(Section(rows.start, each.row))
                self._take(each, moments)
                self._advance(share)
            for name, values in (self._give([each], [moments]) or {}).items():
                matrix = matrices.get(name)
                if name not in each.names or not isinstance(matrix, ReplaceableMatrix):
                    raise CalibrationError(f"{printable(name, 80)} cannot be replaced now: the matrices are {', '.join(each.names)}")
                if values.shape != matrix.shape:
                    shape = " x ".join(map(str, matrix.shape))
                    raise CalibrationError(f"{name} is {shape}; it cannot be replaced by {values.shape}")
                if not np.isfinite(values).all():
                    raise CalibrationError(f"{name} cannot be replaced by weights that are not finite")
                matrix.replace(ArrayTensor(name, values))
            self._model.relink(section)
        for ids, stream in zip(self.texts, self._streams, strict=True):
            self._model.begin(ids, stream)
            self._model.go(rows)
            self._model.end(stream)
            self._advance(share)

    def _head(self) -> None:
        """What the head reads of every token. Its weights, often the largest matrix, are not needed for that."""
        inputs, rows = self._inputs["head"], self._model.plan.sections["head"]
        tokens = self.texts.shape[1]
        moments = [self._moments(i) for i in inputs]
        for ids, stream in zip(self.texts, self._streams, strict=True):
            self._room(moments)
            self._model.begin(ids, stream)
            for start in range(0, tokens, OUTPUTS):
                outputs = list(range(start, min(start + OUTPUTS, tokens)))
                first = rows.start
                for each, sums in zip(inputs, moments, strict=True):
                    self._model.go_head(outputs, Section(first, each.row))
                    self._take(each, sums, len(outputs))
                    first = each.row
            self._advance(self._cost("head"))
        self._give(inputs, moments)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _moments(self, each: MatrixInput) -> list[InputSums]:
        """One for each matrix."""
        return [InputSums(each.columns, self._make_gram(each), self._model.tokens) for _ in range(each.matrices)]

    def _room(self, moments: list[list[InputSums]]) -> None:
        """Makes room for a chunk."""
        if any(m.full(self._model.tokens) for m in chain(*moments)):
            flush(chain(*moments), self._pool)

    def _take(self, each: MatrixInput, moments: list[InputSums], tokens: int | None = None) -> None:
        tokens = tokens or self._model.tokens
        if each.groups is None:
            read_panels(each.buffer.array, tokens, each.columns, moments[0].space(tokens))
            return
        groups = each.groups.array[: each.matrices * GROUP_BYTES].view(np.int64).reshape(each.matrices, -1)
        for sums, (start, count) in zip(moments, groups.tolist(), strict=True):
            panels = each.buffer.array[panel_bytes("f32", start, each.columns) :]
            read_panels(panels, count, each.columns, sums.space(count))

    def _give(self, inputs: list[MatrixInput], moments: list[list[InputSums]]) -> Replacement | None:
        flush(chain(*moments), self._pool)
        found = []
        for each, matrices in zip(inputs, moments, strict=True):
            for matrix, sums in enumerate(matrices):
                sums.finish()
                if not np.isfinite(sums.sums).all():
                    problem = "is not finite: the model's weights overflow, or are damaged before it"
                    raise ActivationError(f"what {each.names[0]} reads {problem}")
                found.append(InputStatistics(each.names, each.section, each.columns, sums.count, sums.sums, sums.gram, matrix))
        moments.clear()
        return self._consumer(found)

    def _cost(self, section: str) -> float:
        """Multiplications of a chunk in a section."""
        tokens = self.texts.shape[1]
        weights = 0.0 if section == "head" else float(sum(m.size for m in self._model.matrices(section)))
        if section == self._model.sections[0]:
            weights = self._model.stream_columns
        for each in self._inputs[section]:
            weights += each.columns * (each.columns / 2 if self._make_gram(each) else 1)
        return tokens * weights

    def _advance(self, cost: float) -> None:
        self._done += cost
        self._progress("text", min(self._done, self._total), self._total)
