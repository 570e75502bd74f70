"""A report on what quantization did to models: tensors, residual streams layer by layer, and predictions token by token.

Runs over the same text go side by side, section by section of their plans (see streaming.py): that of the reference, and for every model

    weights     its weights alone, nothing else rounded
    model       the model as it is used: with int8 activations and an f16 KV cache too

What separates the reference from the first is the error of the weights, what separates the two that of the activations.
docs/accuracy.md says what each figure means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from ...formats.checkpoint import Checkpoint
from ..model import Compute
from ..run.workers import Workers
from .compare import ReportError, TensorReport, check_comparable, compare_tensors, tensor_pairs
from .predictions import LogitMeter
from .streaming import OUTPUTS, StreamedModel, StreamedWeights, load
from .token_errors import TokenErrors, scored_positions

CHUNK = 512
"""Tokens of a text that are one context: what llama-perplexity has by default."""
SMALLEST_CHUNK = 4

Progress = Callable[[str, float, float], None]
"""progress(what, done, total): "tensors" in weights, "kernels" in number, "text" in multiplications."""


@dataclass(frozen=True)
class Distance:
    """How far activations are from others. cosine: mean over tokens of the cosine similarity; cosine_min: of the worst token;
    error: mean over tokens of |difference| / |reference|.
    """

    cosine: float
    cosine_min: float
    error: float


@dataclass(frozen=True)
class Comparison:
    """One place in the model. total: model against reference; weights: without rounding of activations; activations: model against that.

    `weights` and `activations` are None if the model was run without rounding activations: then all error is that of the weights.
    """

    total: Distance
    weights: Distance | None = None
    activations: Distance | None = None


@dataclass(frozen=True)
class LayerReport:
    """One layer: the residual stream after it, and what its parts add to the stream ("attention", "ffn")."""

    layer: int
    stream: Comparison
    parts: dict[str, Comparison]


@dataclass(frozen=True)
class TokenReport:
    """Predictions. total, weights, activations: as in Comparison, each over the same tokens.

    divergences: float64[count], KL divergence of each token from the reference; chunks: contexts of `chunk` tokens.
    """

    chunks: int
    chunk: int
    total: TokenErrors
    weights: TokenErrors | None
    activations: TokenErrors | None
    divergences: np.ndarray

    @property
    def standard_error(self) -> float:
        """Of the mean KL divergence, as if tokens were independent."""
        n = self.divergences.size
        return float(self.divergences.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan


@dataclass
class Report:
    """Everything. layers and tokens are empty and None if there was nothing to run."""

    model: Checkpoint
    reference: Checkpoint
    compute: Compute
    tensors: list[TensorReport]
    layers: list[LayerReport] = field(default_factory=list)
    tokens: TokenReport | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the model's tensors."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Bits of all tensors over the number of weights, tied ones counted once."""
        weights = sum(t.weights for t in self.tensors if t.nbytes)
        return 8 * self.nbytes / weights if weights else 0.0


def make_report(
    model: Checkpoint,
    reference: Checkpoint,
    ids: np.ndarray | None = None,
    compute: Compute = "int8",
    threads: int | None = None,
    chunk: int = CHUNK,
    progress: Progress = lambda what, done, total: None,
) -> Report:
    """Compares one model with its reference; see make_reports."""
    return make_reports([model], reference, ids, compute, threads, chunk, progress)[0]


def make_reports(
    models: Sequence[Checkpoint],
    reference: Checkpoint,
    ids: np.ndarray | None = None,
    compute: Compute = "int8",
    threads: int | None = None,
    chunk: int = CHUNK,
    progress: Progress = lambda what, done, total: None,
) -> list[Report]:
    """Compares models with their reference, which is run once for all of them; a report for each, in the order of the models.

    ids      int[n]: tokens of a text whose whole chunks are run; None: only tensors are compared
    compute  how the models are run: "int8" as usual, or "f32", without rounding activations

    In memory at a time: a layer of the reference and of every model, and the residual streams of the text, one for the reference and two
    for each model (with "f32" one). Figures do not depend on what other models are compared.
    Raises ReportError for checkpoints or texts that cannot be compared, and what the readers raise.
    """
    for model in models:
        check_comparable(model, reference)
    if ids is not None and (chunk < SMALLEST_CHUNK or ids.size < chunk):
        raise ReportError(f"{ids.size} tokens are less than one chunk, and a chunk has at least {SMALLEST_CHUNK}")
    if ids is not None:
        for model in models:
            _check_ids(model, ids)
    total = sum(ours.size for model in models for _, ours, _ in tensor_pairs(model, reference))
    done = 0

    def advance(weights: int) -> None:
        nonlocal done
        done += weights
        progress("tensors", done, total)

    reports = [Report(model, reference, compute, compare_tensors(model, reference, threads, advance)) for model in models]
    if ids is not None and reports:
        workers = Workers(threads)
        try:
            found = _run(models, reference, ids, compute, workers, chunk, progress)
        finally:
            workers.close()
        for report, (layers, tokens) in zip(reports, found, strict=True):
            report.layers, report.tokens = layers, tokens
    return reports


def why_not_run(checkpoint: Checkpoint) -> str | None:
    """Why a checkpoint cannot be run, so that only its tensors can be compared; None if it can."""
    if checkpoint.architecture is None:
        return f"{checkpoint.path.name} holds weights only, no config.json and tokenizer.json: only tensors are compared"
    return None


def _check_ids(model: Checkpoint, ids: np.ndarray) -> None:
    """Token ids are rows of the embedding, which nobody checks later."""
    assert model.architecture is not None
    vocabulary = model.model.vocabulary
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise ReportError(f"{model.path}: its tokenizer gives token {int(ids.max())}, but the model has only {vocabulary} tokens")


# ---- running side by side --------------------------------------------------------------------------------------------


def _run(
    models: Sequence[Checkpoint],
    reference: Checkpoint,
    ids: np.ndarray,
    compute: Compute,
    workers: Workers,
    chunk: int,
    progress: Progress,
) -> list[tuple[list[LayerReport], TokenReport]]:
    chunks = ids.size // chunk
    texts = ids[: chunks * chunk].reshape(chunks, chunk)

    def kernels(done: int, total: int) -> None:
        progress("kernels", done, total)

    base = StreamedModel(reference, StreamedWeights(reference, workers.count, exact=True), workers, "f32", chunk, kernels)
    computes: tuple[Compute, ...] = ("f32", "int8") if compute == "int8" else ("f32",)
    runs, groups = [base], []  # a group: numbers of the runs that are compared for a model, the reference's first
    for model in models:
        weights = StreamedWeights(model, workers.count)
        groups.append([0, *range(len(runs), len(runs) + len(computes))])
        runs += [StreamedModel(model, weights, workers, each, chunk, kernels) for each in computes]
    streams = [run.new_stream(chunks) for run in runs]
    meter = _Work(runs, chunks, chunk, progress)
    layers: list[list[LayerReport]] = [[] for _ in models]
    for section in base.sections[:-1]:
        with _loaded(runs, section, workers.count):
            found = _section(runs, groups, section, texts, streams, meter)
        if section.startswith("layer."):
            for parts, each in zip(found, layers, strict=True):
                each.append(LayerReport(int(section.removeprefix("layer.")), parts.pop("stream"), parts))
    with _loaded(runs, "head", workers.count):
        tokens = _predictions(runs, groups, texts, streams, workers, meter)
    return list(zip(layers, tokens, strict=True))


@contextmanager
def _loaded(runs: list[StreamedModel], section: str, threads: int) -> Iterator[None]:
    """The section's matrices are in memory as long as this lasts; plans that share a checkpoint share its matrices."""
    matrices = {id(m): m for run in runs for m in run.matrices(section)}.values()
    try:
        load(matrices, threads)
        for run in runs:
            run.relink(section)
        yield
    finally:
        for matrix in matrices:
            matrix.release()


class _Work:
    """How much is done, in multiplications, for `progress`."""

    def __init__(self, runs: list[StreamedModel], chunks: int, chunk: int, progress: Progress):
        scored = scored_positions(chunk)
        self._progress, self._done = progress, 0
        self._cost = {}
        for section in runs[0].sections:
            rows = scored.stop - scored.start if section == "head" else chunk
            matrices = [m for run in runs for m in run.matrices(section)]
            # The embedding is looked up, not multiplied with.
            weights = sum(m.columns if section == "embed" else m.rows * m.columns for m in matrices)
            self._cost[section] = rows * weights
        self._total = chunks * sum(self._cost.values())
        progress("text", 0, self._total)

    def chunk(self, section: str, share: float = 1.0) -> None:
        """One chunk (or that share of it) has been through a section."""
        self._done += round(self._cost[section] * share)
        self._progress("text", self._done, self._total)


def _section(
    runs: list[StreamedModel], groups: list[list[int]], section: str, texts: np.ndarray, streams: list[np.ndarray], meter: _Work
) -> list[dict[str, Comparison]]:
    """Takes all streams through a section. For each model what its stages add is compared, and the stream behind it ("stream")."""
    stages = [run.stages(section) for run in runs]
    if len({tuple(s.name for s in each) for each in stages}) > 1:
        raise ReportError(f"the plans of reference and model differ in section {section!r}: {[[s.name for s in each] for each in stages]}")
    meters = [{name: [_DistanceMeter() for _ in range(3)] for name in (*(s.name for s in stages[0]), "stream")} for _ in groups]
    for c, ids in enumerate(texts):
        for i, stage in enumerate(stages[0]):
            added = []
            for run, stream, own in zip(runs, streams, stages, strict=True):
                before = stream[c].copy()
                run.run(own[i], ids, stream[c])
                added.append(stream[c] - before)
            for group, places in zip(groups, meters, strict=True):
                _measure(places[stage.name], [added[run] for run in group])
        for group, places in zip(groups, meters, strict=True):
            _measure(places["stream"], [streams[run][c] for run in group])
        meter.chunk(section)
    return [
        {name: _comparison(three, len(group)) for name, three in places.items()} for group, places in zip(groups, meters, strict=True)
    ]


def _measure(meters: list[_DistanceMeter], values: list[np.ndarray]) -> None:
    """values: what the runs of a group gave, the reference's first."""
    reference, weights, *model = values
    meters[0].add(reference, values[-1])
    if model:
        meters[1].add(reference, weights)
        meters[2].add(weights, values[-1])


def _comparison(meters: list[_DistanceMeter], runs: int) -> Comparison:
    total, weights, activations = (m.result() for m in meters)
    return Comparison(total, weights, activations) if runs == 3 else Comparison(total)


class _DistanceMeter:
    """Accumulates a Distance over tokens."""

    def __init__(self) -> None:
        self._count, self._cosine, self._worst, self._error = 0, 0.0, 1.0, 0.0

    def add(self, reference: np.ndarray, values: np.ndarray) -> None:
        """float32[tokens, columns] twice."""
        difference = values - reference
        rr, vv, dd = (np.einsum("ij,ij->i", x, x).astype(np.float64) for x in (reference, values, difference))
        r, v = np.sqrt(rr), np.sqrt(vv)
        with np.errstate(invalid="ignore", divide="ignore"):
            # 1 - cosine from the difference, which keeps its digits where the cosine is nearly 1.
            cosine = np.where(r * v > 0, 1 - np.maximum(dd - (r - v) ** 2, 0) / (2 * r * v), np.where(r + v == 0, 1.0, 0.0))
            cosine = np.where(np.isnan(rr + vv), np.nan, np.maximum(cosine, -1.0))
            error = np.where(rr > 0, np.sqrt(dd) / r, np.where(dd == 0, 0.0, np.inf))
        self._count += rr.size
        self._cosine += float(cosine.sum())
        self._error += float(error.sum())
        self._worst = float(np.minimum(self._worst, cosine.min()))

    def result(self) -> Distance:
        n = max(self._count, 1)
        return Distance(self._cosine / n, self._worst, self._error / n)


def _predictions(
    runs: list[StreamedModel], groups: list[list[int]], texts: np.ndarray, streams: list[np.ndarray], workers: Workers, meter: _Work
) -> list[TokenReport]:
    """Logits of the scored positions, a few at a time, compared where they lie."""
    chunk = texts.shape[1]
    scored = range(*scored_positions(chunk).indices(chunk))
    rows = min(OUTPUTS, chunk)
    meters = []
    for group in groups:
        reference, weights, model = runs[group[0]], runs[group[1]], runs[group[-1]]
        pairs = [(reference, model)] if len(group) == 2 else [(reference, model), (reference, weights), (weights, model)]
        meters.append([LogitMeter(workers, a.logits, b.logits, reference.vocabulary, rows) for a, b in pairs])
    for c, ids in enumerate(texts):
        for start in range(0, len(scored), rows):
            positions = scored[start : start + rows]
            for run, stream in zip(runs, streams, strict=True):
                run.head(stream[c], positions)
            for each in chain.from_iterable(meters):
                each.add(ids[positions.start + 1 : positions.stop + 1])
            meter.chunk("head", len(positions) / len(scored))
    found = []
    for own in meters:
        total, *others = (each.result() for each in own)
        first, second = others or (None, None)
        found.append(TokenReport(len(texts), chunk, total, first, second, own[0].divergences))
    return found
