"""Error measures: of tensors (cosine, normalized error, worst block) and of predictions (KL divergence, top-1, perplexity).

Both kinds are accumulators, fed in pieces so that neither a tensor nor a text's logits need to be in memory at once. All sums
are float64. The measures of predictions are counted as llama.cpp's llama-perplexity counts them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np

from .errors import FormatError

BLOCK = 32
"""Columns over which the worst block is looked for, whatever the format."""


@dataclass(frozen=True)
class TensorErrors:
    """How far a tensor is from its reference.

    cosine             dot product over the norms; 1 for two zero tensors, 0 if one of them is zero
    nmse               sum of squared errors / sum of squared reference values; inf if only the reference is zero
    max_error          largest absolute error of one value
    worst_block        (row, block) of 32 columns with the largest squared error; (0, 0) for an empty tensor
    worst_block_error  root mean square error of that block / root mean square of the reference's values
    """

    cosine: float
    nmse: float
    max_error: float
    worst_block: tuple[int, int]
    worst_block_error: float

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON. A measure that is not finite becomes a string, "nan" or "inf"."""
        return {**_plain(asdict(self)), "worst_block": list(self.worst_block)}


class TensorMeter:
    """Accumulates the errors of a tensor that comes in runs of rows. A NaN makes the measures NaN, and its block the worst."""

    def __init__(self) -> None:
        self.count = 0
        self.dot = self.reference_energy = self.energy = self.error_energy = 0.0
        self.max_error = 0.0
        self.worst_block = (0, 0)
        self._worst = -1.0
        self._worst_count = 1
        self._rows = 0

    def add(self, reference: np.ndarray, values: np.ndarray) -> None:
        """Both float[rows, columns] (or a vector, as one row): the next rows. Raises FormatError if the shapes differ."""
        if reference.shape != values.shape:
            raise FormatError(f"cannot compare shapes {list(reference.shape)} and {list(values.shape)}")
        reference, values = np.atleast_2d(reference), np.atleast_2d(values)
        step = max(1, (1 << 13) // max(reference.shape[1], 1))  # temporary arrays that need no fresh pages
        for first in range(0, reference.shape[0], step):
            self._add(reference[first : first + step], values[first : first + step])

    def _add(self, reference: np.ndarray, values: np.ndarray) -> None:
        r, v = reference.astype(np.float64), values.astype(np.float64)
        rows, columns = r.shape
        first, self._rows = self._rows, self._rows + rows
        if r.size == 0:
            return
        with np.errstate(invalid="ignore", over="ignore"):
            error = v - r
            self.dot += _dot(r, v)
            self.reference_energy += _dot(r, r)
            self.energy += _dot(v, v)
            blocks = np.add.reduceat(error * error, np.arange(0, columns, BLOCK), axis=1)
        self.error_energy += float(blocks.sum())
        self.count += r.size
        self.max_error = max(self.max_error, float(np.abs(error).max()), key=lambda e: (math.isnan(e), e))
        row, block = divmod(int(np.where(np.isnan(blocks), np.inf, blocks).argmax()), blocks.shape[1])
        self.note_worst(first + row, block, float(blocks[row, block]), min(BLOCK, columns - block * BLOCK))

    def add_sums(self, rows: int, columns: int, sums: np.ndarray) -> None:
        """The next rows by sums that a kernel made: float64[groups, 8] over groups of rows, see encode_kernel.FIELDS."""
        groups = sums.shape[0]
        first, self._rows, self.count = self._rows, self._rows + rows, self.count + rows * columns
        if groups == 0:
            return
        # From the error, not from the values: a cosine of 0.99998 needs more digits than float32 sums of products have.
        energy, cross, error_energy = (float(v) for v in sums[:, :3].sum(axis=0))
        self.reference_energy, self.error_energy = self.reference_energy + energy, self.error_energy + error_energy
        self.dot, self.energy = self.dot + energy + cross, self.energy + energy + 2 * cross + error_energy
        self.max_error = max(self.max_error, float(sums[:, 4].max()))
        group = int(sums[:, 5].argmax())
        row, block = first + rows // groups * group + int(sums[group, 6]), int(sums[group, 7])
        self.note_worst(row, block, float(sums[group, 5]), min(BLOCK, columns - block * BLOCK))

    def note_worst(self, row: int, block: int, error_energy: float, columns: int) -> None:
        """Takes a block as the worst so far if its sum of squared errors is larger than that of the one before."""
        if math.isnan(self._worst) or not (error_energy > self._worst or math.isnan(error_energy)):
            return
        self.worst_block, self._worst, self._worst_count = (row, block), error_energy, columns

    def result(self) -> TensorErrors:
        """The measures of everything added so far."""
        if math.isnan(self.error_energy):
            return TensorErrors(math.nan, math.nan, math.nan, self.worst_block, math.nan)
        norms = math.sqrt(self.reference_energy) * math.sqrt(self.energy)
        same = 1.0 if self.reference_energy == self.energy else 0.0
        cosine = min(1.0, max(-1.0, self.dot / norms)) if norms > 0 else same
        mean_square = self.reference_energy / max(self.count, 1)
        worst = math.sqrt(max(self._worst, 0.0) / self._worst_count)
        return TensorErrors(
            cosine,
            _ratio(self.error_energy, self.reference_energy),
            self.max_error,
            self.worst_block,
            _ratio(worst, math.sqrt(mean_square)),
        )


def tensor_errors(reference: np.ndarray, values: np.ndarray) -> TensorErrors:
    """The measures of one whole tensor, float[rows, columns] or a vector."""
    meter = TensorMeter()
    meter.add(reference, values)
    return meter.result()


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """float[..., n] twice -> float64[...]: cosine similarity along the last axis; 1 for two zero vectors, 0 if one is zero."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    aa, bb, ab = (np.einsum("...i,...i->...", x, y) for x, y in ((a, a), (b, b), (a, b)))
    norms = np.sqrt(aa) * np.sqrt(bb)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(norms > 0, np.clip(ab / norms, -1, 1), np.where(aa == bb, 1.0, np.where(np.isnan(norms), np.nan, 0.0)))


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
        return _plain(asdict(self))


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


def _dot(a: np.ndarray, b: np.ndarray) -> float:
    """Sum of products. Not through BLAS: its threads would spin beside those of the caller."""
    return float(np.einsum("i,i->", a.reshape(-1), b.reshape(-1)))


def _plain(values: dict[str, object]) -> dict[str, object]:
    return {key: str(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}


def _ratio(error: float, reference: float) -> float:
    if reference > 0:
        return error / reference
    return 0.0 if error == 0 else math.inf


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
