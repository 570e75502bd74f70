"""How far a model's predictions are from a reference's, for many models of one reference: it is run once, and its streams are kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

import numpy as np

from ...formats.checkpoint import Checkpoint
from ..run.workers import Workers
from .predictions import LogitMeter
from .streaming import OUTPUTS, Stage, StreamedModel, StreamedWeights, load
from .token_errors import scored_positions

Progress = Callable[[str, float, float], None]
"""progress(what, done, total): "kernels" in number, "measuring" in multiplications of one run."""


class DivergenceMeter:
    """A reference in float32 over a text; `measure` runs models as they are used, with int8 activations. A context manager.

    ids: int[n] tokens, whose whole chunks of `chunk` are run; the second half of each is scored, as in report.py. Raises as report.py.
    """

    def __init__(
        self,
        reference: Checkpoint,
        ids: np.ndarray,
        chunk: int,
        threads: int | None = None,
        progress: Progress = lambda what, done, total: None,
    ):
        chunks = ids.size // chunk
        self._texts, self._progress = ids[: chunks * chunk].reshape(chunks, chunk), progress
        self._scored = range(*scored_positions(chunk).indices(chunk))
        with ExitStack() as stack:
            self._workers = Workers(threads)
            stack.callback(self._workers.close)
            self._reference = self._model(reference, "f32")
            self._closing = stack.pop_all()
        self._streams = self._reference.new_stream(chunks)
        self._through(self._reference, self._streams)

    def measure(self, model: Checkpoint) -> float:
        """Mean KL divergence of a model's predictions from the reference's, nats per token."""
        run = self._model(model, "int8")
        streams = run.new_stream(len(self._texts))
        self._through(run, streams)
        rows = min(OUTPUTS, self._texts.shape[1])
        meter = LogitMeter(self._workers, self._reference.logits, run.logits, run.vocabulary, rows)
        heads = {id(m): m for each in (self._reference, run) for m in each.matrices("head")}.values()
        try:
            load(heads, self._workers.count)
            for each in (self._reference, run):
                each.relink("head")
            for c, ids in enumerate(self._texts):
                for start in range(0, len(self._scored), rows):
                    block = self._scored[start : start + rows]
                    self._reference.head(self._streams[c], block)
                    run.head(streams[c], block)
                    meter.add(ids[block.start + 1 : block.stop + 1])
        finally:
            for matrix in heads:
                matrix.release()
        return meter.result().kl_mean

    def close(self) -> None:
        """Ends the workers."""
        self._closing.close()

    def __enter__(self) -> DivergenceMeter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _model(self, checkpoint: Checkpoint, compute: str) -> StreamedModel:
        weights = StreamedWeights(checkpoint, self._workers.count, exact=compute == "f32")
        chunk = self._texts.shape[1]
        return StreamedModel(checkpoint, weights, self._workers, compute, chunk, lambda a, b: self._progress("kernels", a, b))  # type: ignore[arg-type]

    def _through(self, model: StreamedModel, streams: np.ndarray) -> None:
        """Takes the text through everything before the head."""
        costs = [float(sum(m.rows * m.columns for m in model.matrices(section))) for section in model.sections]
        done = 0.0
        for section, cost in zip(model.sections[:-1], costs, strict=False):
            matrices = model.matrices(section)
            try:
                load(matrices, self._workers.count)
                model.relink(section)
                for ids, stream in zip(self._texts, streams, strict=True):
                    model.run(Stage(section, model.plan.sections[section]), ids, stream)
            finally:
                for matrix in matrices:
                    matrix.release()
            done += cost
            self._progress("measuring", done, sum(costs))
