"""Predictions of two models compared token by token: KL divergence, agreement and likelihood, from logits where they lie."""

from __future__ import annotations

import numpy as np

from ...quant.errors import FormatError
from ..kernels.structs import LOGIT_RUN, LOGIT_SUMS
from ..plan.builder import StepState
from ..plan.plan import Buffer, Plan
from ..run.workers import Workers
from .token_errors import TokenErrors, TokenMeter


class LogitMeter:
    """A TokenMeter that reads the logits of two plans; the sums over the vocabulary are compiled and shared by the workers.

    reference, model: buffers with float32 logits, a row per token. vocabulary: logits that count. rows: most that are compared at once.
    """

    def __init__(self, workers: Workers, reference: Buffer, model: Buffer, vocabulary: int, rows: int):
        if reference.width != model.width:
            raise FormatError(f"logits of {reference.width // 4} and of {model.width // 4} columns cannot be compared")
        self._workers, self._reference, self._model, self._vocabulary = workers, reference, model, vocabulary
        self._meter = TokenMeter()
        self._step = StepState(0, 0)
        runs = -(-vocabulary // LOGIT_RUN)
        self._plan = Plan()
        self._maxima = self._plan.buffer("maxima", 8 * rows, 8)
        self._sums = self._plan.buffer("sums", 4 * LOGIT_SUMS * runs * rows, 4 * LOGIT_SUMS * runs)
        self._plan.add(
            "logit_errors", step=self._step.address, reference=reference, model=model, stride=reference.width,
            columns=vocabulary, maxima=self._maxima, out=self._sums, out_stride=self._sums.width,
        )  # fmt: skip
        self._plan.link()

    def add(self, targets: np.ndarray) -> None:
        """Compares the first rows of both buffers; int[n] targets are the tokens that really came next."""
        self._meter.add_measures(*self.measure(targets))

    def measure(self, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The same without adding it up: what TokenMeter.add_measures takes, the KL divergences first."""
        n, at = targets.size, np.arange(targets.size)
        reference, model = (b.floats(n)[:, : self._vocabulary] for b in (self._reference, self._model))
        best_reference, best = reference.argmax(axis=1), model.argmax(axis=1)
        maxima = self._maxima.floats(n)
        maxima[:, 0], maxima[:, 1] = reference[at, best_reference], model[at, best]
        self._step.set(n)
        self._workers.run(self._plan, n)
        sums = self._sums.floats(n).reshape(n, -1, LOGIT_SUMS).sum(axis=1, dtype=np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            log_sum_reference = maxima[:, 0] + np.log(sums[:, 0])
            log_sum = maxima[:, 1] + np.log(sums[:, 1])
            # sum of p (log p - log q), with log p = r - log_sum_reference and log q = m - log_sum
            kl = sums[:, 2] / sums[:, 0] - log_sum_reference + log_sum
            norms = np.sqrt(sums[:, 3] * sums[:, 4])
            cosines = np.where(norms > 0, np.clip(sums[:, 5] / norms, -1, 1), np.where(norms == 0, 1.0, np.nan))
        return kl, best_reference == best, log_sum_reference - reference[at, targets], log_sum - model[at, targets], cosines

    @property
    def divergences(self) -> np.ndarray:
        """float64[count]: the KL divergence of each token, nats."""
        return self._meter.divergences

    def result(self) -> TokenErrors:
        """The measures of everything added so far."""
        return self._meter.result()
