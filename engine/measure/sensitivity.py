"""Sensitivity: how much a model's predictions change when one of its matrices does.

A short text is run through the model, section by section (streaming.py), and beside it once more for every change of a matrix. A change
begins its own residual streams where its matrix is, and they go through the rest of the model as it is. So each section is read
once, and n changes cost about n / 2 runs of the text. What is measured is the KL divergence of the predictions from those of the unchanged
model, in float32, in nats per token: not the error of a weight, and not that of a layer's output.

Small changes add up: the divergence of many at once is about the sum of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from types import TracebackType

import numpy as np

from ...formats.checkpoint import Checkpoint
from ...formats.decoder import EMBEDDING, HEAD
from ...formats.tensor import Tensor
from ..plan.plan import Buffer, Plan, Section
from ..run.workers import Workers
from .compare import row_slices
from .exchangeable import ReplaceableMatrix, ReplaceableWeights
from .predictions import LogitMeter
from .streaming import OUTPUTS, Stage, StreamedModel, load

CHUNK = 128
"""Tokens of a context: several short ones from different places say more than one long one."""
_FIRST = CHUNK // 4
"""The predictions from this one on count, every second of them: neighbours say nearly the same, and a large vocabulary costs time."""
_BOTH = "both uses of the embedding"
_STREAM_BYTES = 3 << 28
_MOST_TOKENS, _LEAST_TOKENS = 384, 128
"""Twice as many change the plan so little that the divergence of SmolLM2-135M falls by 1 %, in twice the time."""

Progress = Callable[[str, float, float], None]
"""progress(what, done, total): "kernels" in number, "text" in multiplications."""


def probing_tokens(checkpoint: Checkpoint, most: int = _MOST_TOKENS) -> int:
    """How many tokens to measure all matrices of a model with: as many as memory for their residual streams allows."""
    assert checkpoint.architecture is not None
    width = checkpoint.model.width
    changes = sum(not tensor.vector for tensor in checkpoint.tensors.values())
    fit = _STREAM_BYTES // max(1, 4 * width * changes)
    return max(_LEAST_TOKENS, min(most, fit) // CHUNK * CHUNK)


class Probes:
    """A text on its way through a model, beside itself with one matrix changed. A context manager.

    texts: int[chunks, tokens] ids. Take it through `sections` one after another with `section`, the last one with `head`.
    Raises ModelError and WeightError for checkpoints that cannot be run.
    """

    def __init__(
        self, checkpoint: Checkpoint, texts: np.ndarray, threads: int | None = None, progress: Progress = lambda what, done, total: None
    ):
        """progress: "kernels" only."""
        self._texts = texts
        tokens = texts.shape[1]
        with ExitStack() as stack:
            workers = self._workers = Workers(threads)
            stack.callback(workers.close)
            weights = ReplaceableWeights(checkpoint, workers.count)
            model = self._model = StreamedModel(
                checkpoint, weights, workers, "f32", tokens, lambda done, total: progress("kernels", done, total)
            )
            self._base = model.new_stream(len(texts))
            self._streams: dict[str, np.ndarray] = {}
            self._scored = range(min(_FIRST, tokens // 2), tokens - 1, 2)
            logits = model.logits
            self._reference = Plan().buffer("reference", logits.nbytes, logits.width)
            self._meter = LogitMeter(workers, self._reference, logits, model.vocabulary, min(OUTPUTS, tokens))
            self._closing = stack.pop_all()

    @property
    def sections(self) -> list[str]:
        """ "embed", the layers, "head"."""
        return self._model.sections

    def names(self, section: str) -> list[str]:
        """The matrices that a section reads."""
        return [m.name for m in self._model.matrices(section)]

    def cost(self, section: str, streams: int) -> float:
        """Multiplications of taking so many texts through a section."""
        tokens = len(self._scored) if section == "head" else self._texts.shape[1]
        matrices = self._model.matrices(section)
        return 0.0 if section == "embed" else float(len(self._texts) * tokens * streams * sum(m.rows * m.columns for m in matrices))

    def section(self, section: str, changes: Iterable[Tensor]) -> None:
        """Takes the text through "embed" or a layer, and begins a stream for each change: weights that stand in for those of their name."""
        matrices = {m.name: m for m in self._model.matrices(section)}
        load(matrices.values(), self._workers.count)
        try:
            self._model.relink(section)
            for stream in self._streams.values():
                self._through(section, stream)
            for change in changes:
                matrix = matrices[change.name]
                assert isinstance(matrix, ReplaceableMatrix)
                matrix.replace(change)
                self._model.relink(section)
                stream = self._base.copy()
                self._through(section, stream)
                self._streams[change.name] = stream
                matrix.restore()
                self._model.relink(section)
            self._through(section, self._base)
        finally:
            for matrix in matrices.values():
                matrix.release()

    def head(
        self,
        changes: Mapping[str, tuple[str | None, Tensor]] | None = None,
        advance: Callable[[float], None] = lambda multiplications: None,
    ) -> dict[str, float]:
        """Mean KL divergence, nats per token, of each stream that was begun, by the name of its matrix.

        changes: further ones, by names of their own: (a stream's name, None for the unchanged one, and weights in place of the head's).
        advance(multiplications): called as streams are done; `cost("head", number of them)` in all.
        """
        model, rows = self._model, min(OUTPUTS, self._texts.shape[1])
        (matrix,) = model.matrices("head")
        assert isinstance(matrix, ReplaceableMatrix)
        blocks = [self._scored[start : start + rows] for start in range(0, len(self._scored), rows)]
        sums = dict.fromkeys([*self._streams, *(changes or {})], 0.0)
        cost = self.cost("head", 1) / (len(self._texts) * len(blocks))
        try:
            for c, ids in enumerate(self._texts):
                matrix.load()
                model.relink("head")
                unchanged: list[np.ndarray] = []
                for block in blocks:
                    logits = model.head(self._base[c], block).copy()
                    if changes:
                        unchanged.append(logits)
                    self._refer(logits)
                    for name, stream in self._streams.items():
                        model.head(stream[c], block)
                        sums[name] += self._divergence(ids, block)
                        advance(cost)
                for name, (stream_name, change) in (changes or {}).items():
                    matrix.replace(change)
                    model.relink("head")
                    stream = self._base if stream_name is None else self._streams[stream_name]
                    for logits, block in zip(unchanged, blocks, strict=True):
                        self._refer(logits)
                        model.head(stream[c], block)
                        sums[name] += self._divergence(ids, block)
                        advance(cost)
                    matrix.restore()
        finally:
            matrix.release()
        count = len(self._texts) * len(self._scored)
        return {name: value / count for name, value in sums.items()}

    def close(self) -> None:
        """Ends the workers."""
        self._closing.close()

    def __enter__(self) -> Probes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _through(self, section: str, streams: np.ndarray) -> None:
        rows: Section = self._model.plan.sections[section]
        for ids, stream in zip(self._texts, streams, strict=True):
            self._model.run(Stage(section, rows), ids, stream)

    def _refer(self, logits: np.ndarray) -> None:
        """What divergences are from, from now on."""
        reference: Buffer = self._reference
        reference.floats(len(logits))[:, : logits.shape[1]] = logits

    def _divergence(self, ids: np.ndarray, block: range) -> float:
        return float(self._meter.measure(ids[[position + 1 for position in block]])[0].sum())


def measure_sensitivities(
    reference: Checkpoint,
    model: Checkpoint,
    texts: np.ndarray,
    *,
    threads: int | None = None,
    progress: Progress = lambda what, done, total: None,
) -> dict[str, float]:
    """By GGUF's names, in the order of the model: mean KL divergence of the predictions, nats per token, when that matrix alone is the
    model's and everything else is the reference's. An embedding that is also the head counts with both uses, a head that only the reference
    ties to its embedding as a matrix of its own.

    texts: int[chunks, tokens] ids. progress: "kernels" in number, "text" in multiplications.
    Raises what opening and running a checkpoint raises; ReportError has been raised before by whoever checked that both are the same model.
    """

    def changed(name: str) -> Tensor | None:
        found = model.tensors.get(name) or (model.tensors.get(EMBEDDING) if name == HEAD else None)
        return None if found is None or _same(found, reference.tensors.get(name)) else found

    done = 0.0

    def advance(multiplications: float) -> None:
        nonlocal done
        done += multiplications
        progress("text", min(done, total), total)

    with Probes(reference, texts, threads, progress) as probes:
        streams, costs = 0, []
        for section in probes.sections:
            costs.append(probes.cost(section, 1 + streams + len(probes.names(section))))
            streams += len(probes.names(section))
        total = sum(costs) or 1.0
        order: list[str] = []
        for section, cost in zip(probes.sections[:-1], costs, strict=False):
            changes = [tensor for name in probes.names(section) if (tensor := changed(name)) is not None]
            order += [tensor.name for tensor in changes]
            probes.section(section, changes)
            advance(cost)
        (head,) = probes.names("head")
        tensor = changed(head)
        if head == EMBEDDING and HEAD in model.tensors:  # tied in the reference alone: its uses are two matrices of the model
            head, own = HEAD, model.tensors[HEAD]
            tensor = None if _same(own, reference.tensors[EMBEDDING]) else own
        both = _BOTH if head == EMBEDDING else head
        found = probes.head({} if tensor is None else {both: (head if head == EMBEDDING else None, tensor)}, advance)
        progress("text", total, total)
        progress("text", total, total)
    if _BOTH in found:
        found[EMBEDDING] = found.pop(_BOTH)
    elif tensor is not None:
        order.append(head)
    return {name: found[name] for name in order}


def _same(ours: Tensor, theirs: Tensor | None) -> bool:
    """True if a tensor holds the reference's weights, so that nothing needs to be run to know what it costs."""
    if theirs is None or ours.format != theirs.format or ours.format not in ("f32", "f16", "bf16"):
        return False
    return all(np.array_equal(ours.float32(rows), theirs.float32(rows), equal_nan=True) for rows in row_slices(ours))
