"""Error measures of predictions: KL divergence, top-1 agreement, perplexity, counted as llama.cpp's llama-perplexity counts them.

They are accumulated piece by piece, so that a text's logits need not be in memory at once. All sums are float64.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np

from ...quant.errors import FormatError
from ...quant.measures import cosine, plain_numbers


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float[..., vocabulary] -> float64[..., vocabulary]: natural logarithm of the probabilities."""
    shifted = np.asarray(logits, np.float64) - np.max(logits, axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def kl_divergence(reference_logits: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """float[..., vocabulary] twice -> float64[...], in nats: sum p_reference · (log p_reference - log p).

    Tokens to which the reference gives no probability add nothing. Rounding may leave a value just below 0, as in llama.cpp.
    """
    return _kl(log_softmax(reference_logits), log_softmax(logits))


def _kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.where(np.isneginf(p), 0.0, np.exp(p) * (p - q)).sum(axis=-1)


def scored_positions(chunk: int) -> slice:
    """Positions of a chunk of text whose predictions count, as llama-perplexity has it: the second half, whose context is long
    enough, and not the last position, whose next token is not in the chunk. 512 -> slice(256, 511).
    """
    return slice(chunk // 2, chunk - 1)


@dataclass(frozen=True)
class TokenErrors:
    """How far predictions are from the reference's, over `count` positions. All are NaN if count is 0.

    kl_mean, kl_median, kl_p99, kl_max  KL divergence from the reference, nats
    top1                                share of positions where both have the same most likely token, 0..1
    ppl, ppl_reference                  perplexity: exp of the mean negative log-likelihood of the true next token
    cosine_mean                         mean cosine similarity of the logits
    """

    count: int
    kl_mean: float
    kl_median: float
    kl_p99: float
    kl_max: float
    top1: float
    ppl: float
    ppl_reference: float
    cosine_mean: float

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON. A measure that is not finite becomes a string, "nan" or "inf"."""
        return plain_numbers(asdict(self))


class TokenMeter:
    """Accumulates predictions against a reference's. Keeps one KL divergence per position, nothing as large as the vocabulary."""

    def __init__(self) -> None:
        self._kl: list[np.ndarray] = []
        self._count = self._same = 0
        self._nll = self._nll_reference = self._cosine = 0.0

    def add(self, reference_logits: np.ndarray, logits: np.ndarray, targets: np.ndarray) -> None:
        """float[n, vocabulary] twice and int[n], the ids of the tokens that really came next.

        Raises FormatError if the shapes differ or an id is not in the vocabulary.
        """
        targets = np.asarray(targets)
        if reference_logits.shape != logits.shape or logits.ndim != 2 or targets.shape != logits.shape[:1]:
            shapes = f"{list(reference_logits.shape)}, {list(logits.shape)} and {list(targets.shape)}"
            raise FormatError(f"logits of reference and model and next tokens do not fit each other: shapes {shapes}")
        if targets.size and (targets.min() < 0 or targets.max() >= logits.shape[1]):
            found = f"{targets.min()}..{targets.max()}"
            raise FormatError(f"a next token's id lies outside the vocabulary of {logits.shape[1]}: {found}")
        step = max(1, (1 << 20) // max(logits.shape[1], 1))
        for first in range(0, logits.shape[0], step):
            run = slice(first, first + step)
            self._add(reference_logits[run], logits[run], targets[run])

    def _add(self, reference_logits: np.ndarray, logits: np.ndarray, targets: np.ndarray) -> None:
        p, q = log_softmax(reference_logits), log_softmax(logits)
        self._kl.append(_kl(p, q))
        self._same += int((p.argmax(axis=1) == q.argmax(axis=1)).sum())
        self._nll_reference -= float(p[np.arange(targets.size), targets].sum())
        self._nll -= float(q[np.arange(targets.size), targets].sum())
        self._cosine += float(cosine(reference_logits, logits).sum())
        self._count += targets.size

    def add_measures(
        self, kl: np.ndarray, same: np.ndarray, nll_reference: np.ndarray, nll: np.ndarray, cosines: np.ndarray
    ) -> None:
        """The next positions by measures that a kernel made, each float64[n] (same: bool[n]): KL divergence, whether both have
        the same most likely token, negative log-likelihood of the next token under reference and model, cosine of the logits.
        """
        self._kl.append(kl)
        self._same += int(same.sum())
        self._nll_reference += float(nll_reference.sum())
        self._nll += float(nll.sum())
        self._cosine += float(cosines.sum())
        self._count += kl.size

    @property
    def divergences(self) -> np.ndarray:
        """float64[count]: the KL divergence at each position, in the order of adding."""
        return np.concatenate(self._kl) if self._kl else np.zeros(0)

    def result(self) -> TokenErrors:
        """The measures of everything added so far."""
        n = self._count
        if n == 0:
            return TokenErrors(0, *[math.nan] * 8)
        kl = np.concatenate(self._kl)
        median, p99 = (float(v) for v in np.quantile(kl, [0.5, 0.99]))
        return TokenErrors(
            count=n,
            kl_mean=float(kl.mean()),
            kl_median=median,
            kl_p99=p99,
            kl_max=float(kl.max()),
            top1=self._same / n,
            ppl=_exp(self._nll / n),
            ppl_reference=_exp(self._nll_reference / n),
            cosine_mean=self._cosine / n,
        )


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
