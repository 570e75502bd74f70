"""Tokens chosen from rows of logits by compiled code: what is asked of a row, what comes of it, and the plans that do it.

A row that only wants its largest logit is served by the section "sample" of the model's own plan, in the same call as the step. What
else there is (bias, penalties, masks, draws, log-probabilities) is a plan of its own over the same rows, and rows of which more tokens
are kept than a list of the best holds get a third; both are linked when they are first needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...quant.errors import HalfbyteError
from ...quant.jit.arguments import parse
from ..kernels import structs
from ..kernels.structs import SAMPLE, SAMPLE_BEST, SAMPLED, SAMPLED_BYTES, SAMPLED_LISTS, WANT_BEST, WANT_DRAW, WANT_SPREAD, WANT_SUM
from ..plan.builder import StepState
from ..plan.plan import Buffer, Plan
from .workers import Workers

_FIELD = {name: i for i, (name, _) in enumerate(parse(SAMPLE))}
_RESULT = {name: i for i, (name, _) in enumerate(parse(SAMPLED))}
_STATUS, _ID = _RESULT["status"], _RESULT["id"]
_LARGEST, _TOTAL, _BEST = _RESULT["largest"], _RESULT["total"], _RESULT["best"]


class SampleError(HalfbyteError):
    """A request that does not fit the rows of a step: too few or too many, or a mask of another size than the vocabulary."""


class AdjustedTokens(Protocol):
    """Tokens whose logits have a bias or a penalty, each listed once: `count` of them.

    ids: int32, raw: float32; addresses: of ids, bias, seen, said and raw, as kernels.structs.SAMPLE has them. Arrays may be longer.
    """

    count: int
    ids: np.ndarray
    raw: np.ndarray
    addresses: tuple[int, ...]


class SampleRequest:
    """What is asked of one row of logits. `number` and `adjusted` change from token to token.

    temperature, top_k, top_p, min_p, repetition, frequency, presence: as in SamplingParams.
    logprobs: None, or for how many of the likeliest tokens their log-probabilities are wanted beside the chosen one's.
    """

    def __init__(
        self,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition: float = 1.0,
        frequency: float = 0.0,
        presence: float = 0.0,
        logprobs: int | None = None,
    ):
        self.record = np.zeros(len(_FIELD), np.int64)
        self._doubles = self.record.view(np.float64)
        self.logprobs = logprobs
        self.adjusted: AdjustedTokens | None = None
        self._mask: np.ndarray | None = None
        single = self.record.view(np.float32)[::2]
        cuts = top_k > 0 or top_p < 1.0 or min_p > 0.0
        wants = 0 if logprobs is None else WANT_SUM
        if logprobs:
            wants |= WANT_BEST
        if temperature > 0.0:
            wants |= WANT_DRAW | (WANT_BEST if cuts else WANT_SPREAD) | (WANT_SUM if top_p < 1.0 else 0)
        with np.errstate(over="ignore"):
            for name, value in (("repetition", repetition), ("frequency", frequency), ("presence", presence)):
                single[_FIELD[name]] = value
            single[_FIELD["scale"]] = scale_of(temperature) if temperature > 0.0 else 0.0
        self.record[_FIELD["wants"]], self.record[_FIELD["top_k"]] = wants, min(top_k, 1 << 40)
        self._doubles[_FIELD["top_p"]] = top_p
        self._doubles[_FIELD["log_min_p"]] = math.log(min_p) if min_p > 0.0 else -math.inf

    @property
    def number(self) -> float:
        """The random number of the draw, in [0, 1)."""
        return float(self._doubles[_UNIFORM])

    @number.setter
    def number(self, value: float) -> None:
        self._doubles[_UNIFORM] = value

    @property
    def mask(self) -> np.ndarray | None:
        """uint32[vocabulary / 32, rounded up]: bit i % 32 of word i / 32 says that token i may be chosen. None: all may."""
        return self._mask

    @mask.setter
    def mask(self, mask: np.ndarray | None) -> None:
        if mask is not None and (mask.dtype != np.uint32 or mask.ndim != 1 or not mask.flags.c_contiguous):
            raise SampleError("a mask of tokens is a contiguous uint32 array, a bit for each token")
        self._mask = mask
        self.record[_MASK] = 0 if mask is None else mask.ctypes.data

    @property
    def changes(self) -> bool:
        """Whether the row is not judged by the model's own logits."""
        return self._mask is not None or (self.adjusted is not None and self.adjusted.count > 0)


_UNIFORM, _MASK, _LOGITS, _WANTS, _TOUCHED = (_FIELD[k] for k in ("uniform", "mask", "logits", "wants", "touched"))


def scale_of(temperature: float) -> float:
    """What logits are multiplied by before a draw. A tiny temperature leaves the largest alone with a weight."""
    return 1.0 / max(temperature, 1e-30)


class Choice(NamedTuple):
    """What came of a request. The numbers are the model's own, without bias, penalties or mask; nan and [] unless logprobs were wanted.

    id       the token; -1 if there is none
    logit    its logit
    log_sum  the natural logarithm of the sum of e^logit over the vocabulary
    top      ids and logits of the likeliest tokens, likeliest first
    refusal  why there is no token, or None
    """

    id: int
    logit: float = math.nan
    log_sum: float = math.nan
    top: tuple[tuple[int, float], ...] = ()
    refusal: str | None = None


class TokenChoice:
    """Chooses tokens from the rows of a buffer of logits.

    step: its tokens are the rows that are there; logits: a row per token; columns: the vocabulary; rows: the most there are.
    """

    def __init__(self, workers: Workers, step: StepState, logits: Buffer, columns: int, rows: int):
        self._workers, self._step, self._logits, self.columns = workers, step, logits, columns
        runs = -(-columns // structs.SAMPLE_RUN)
        own, width = Plan(), runs * structs.SAMPLE_RUN_BYTES
        self._table = np.zeros((rows, len(_FIELD)), np.int64)
        self._rows = logits.address + logits.width * np.arange(rows)
        self._table[:, _LOGITS] = self._rows
        work, results = own.buffer("sample.work", rows * width, width), own.buffer("sample.results", rows * SAMPLED_BYTES, SAMPLED_BYTES)
        self._shared: dict[str, Any] = {
            "step": step.address, "table": self._table.ctypes.data, "columns": columns, "work": work, "work_row": width
        }  # fmt: skip
        self._results: dict[str, Any] = {"results": results}
        self._scratch: dict[str, Any] = {
            "scratch": own.buffer("sample.scratch", workers.count * structs.SAMPLE_SCRATCH), "scratch_worker": structs.SAMPLE_SCRATCH
        }  # fmt: skip
        self._out = results.array[: rows * SAMPLED_BYTES].view(np.int64).reshape(rows, -1)
        self._largest, self._total = self._out.view(np.float32)[:, 2 * _LARGEST], self._out.view(np.float64)[:, _TOTAL]
        lists = results.array[: rows * SAMPLED_BYTES].reshape(rows, -1)[:, SAMPLED_LISTS:]
        self._best_ids = lists[:, : 4 * SAMPLE_BEST].view(np.int32)
        self._best_logits = lists[:, 4 * SAMPLE_BEST :].view(np.float32)
        self._whole: Plan | None = None
        self._wide: Plan | None = None

    def add_to(self, plan: Plan) -> None:
        """Adds the section "sample" to a plan that makes the logits: the largest of each row."""
        plan.begin("sample")
        self._add_largest(plan)

    def check(self, requests: Sequence[SampleRequest], outputs: int) -> None:
        """Raises SampleError if requests do not fit a step with that many outputs."""
        if len(requests) != outputs or len({id(request) for request in requests}) != outputs:
            raise SampleError(f"{len(requests)} requests, or fewer different ones, do not fit a step with {outputs} outputs")
        for request in requests:
            if request.mask is not None and request.mask.size != -(-self.columns // 32):
                raise SampleError(f"a mask of {request.mask.size} words is not that of a vocabulary of {self.columns} tokens")

    def put(self, requests: Sequence[SampleRequest]) -> bool:
        """Writes down what is asked of the first rows. True if the section "sample" is all that it takes."""
        simple = True
        for t, request in enumerate(requests):
            row = self._table[t]
            row[:] = request.record
            row[_LOGITS] = self._rows[t]
            adjusted = request.adjusted
            if adjusted is not None and adjusted.count:
                row[_TOUCHED : _TOUCHED + 6] = (adjusted.count, *adjusted.addresses)
            simple = simple and not row[_WANTS] and not request.changes
        return simple

    def choose(self, requests: Sequence[SampleRequest], done: bool) -> list[Choice]:
        """The choices for the first rows, after `put`. done: the section "sample" has run, and is all that it takes.

        Rows that are adjusted do not hold the model's own logits afterwards, unless log-probabilities were wanted.
        """
        raw: dict[int, tuple[float, tuple[tuple[int, float], ...]]] = {}
        if not done:
            changed = [t for t, request in enumerate(requests) if request.logprobs is not None and request.changes]
            if changed:
                kept = self._table[: len(requests)].copy()
                self._table[: len(requests), [_WANTS, _TOUCHED, _MASK]] = 0
                self._table[changed, _WANTS] = WANT_SUM | WANT_BEST
                self._run()
                raw = {t: self._distribution(t, requests[t].logprobs or 0) for t in changed if not self._out[t, _STATUS]}
                self._table[: len(requests)] = kept
            self._run()
        found = self._out[: len(requests), _STATUS : _ID + 1].tolist()
        return [self._choice(t, status, id, requests[t], raw.get(t)) for t, (status, id) in enumerate(found)]

    def _choice(
        self, t: int, status: int, id: int, request: SampleRequest, raw: tuple[float, tuple[tuple[int, float], ...]] | None
    ) -> Choice:
        wanted = request.logprobs is not None
        if status or (wanted and request.changes and raw is None):
            return Choice(-1, refusal=self._refusal(t, request))
        if not wanted:
            return Choice(id)
        self._restore(t, request)
        log_sum, top = raw or self._distribution(t, request.logprobs or 0)
        return Choice(id, float(self._row(t)[id]), log_sum, top)

    def _row(self, t: int) -> np.ndarray:
        return self._logits.floats(t + 1)[t, : self.columns]

    def _distribution(self, t: int, count: int) -> tuple[float, tuple[tuple[int, float], ...]]:
        """The logarithm of the row's sum, and its likeliest tokens."""
        log_sum = float(self._largest[t]) + math.log(float(self._total[t]))
        if count > SAMPLE_BEST:
            row = self._row(t)
            ids = likeliest(row, count)
            return log_sum, tuple(zip(ids.tolist(), row[ids].tolist(), strict=True))
        count = min(count, int(self._out[t, _BEST]))
        return log_sum, tuple(zip(self._best_ids[t, :count].tolist(), self._best_logits[t, :count].tolist(), strict=True))

    def _restore(self, t: int, request: SampleRequest) -> None:
        """Puts back the model's own logits."""
        adjusted = request.adjusted
        if adjusted is not None:
            self._row(t)[adjusted.ids[: adjusted.count]] = adjusted.raw[: adjusted.count]

    def _refusal(self, t: int, request: SampleRequest) -> str:
        scores = self._row(t).copy()
        if request.mask is not None:
            scores[~allowed(request.mask, self.columns)] = -np.inf
        self._restore(t, request)
        return refusal(self._row(t), scores)

    # ---- plans -------------------------------------------------------------------------------------------------------

    def _add_largest(self, plan: Plan) -> None:
        plan.add("sample_maxima", **self._shared)
        plan.add("sample_largest", **self._shared, **self._results)

    def _run(self) -> None:
        if self._whole is None:
            self._whole = Plan()
            self._whole.add("sample_adjust", step=self._shared["step"], table=self._shared["table"])
            self._add_largest(self._whole)
            self._whole.add("sample_sums", **self._shared)
            self._whole.add("sample_choose", **self._shared, **self._results, **self._scratch)
            self._whole.link()
        rows = self._step.tokens
        self._workers.run(self._whole, rows)
        if (self._out[:rows, _STATUS] == structs.SAMPLED_WIDE).any():
            if self._wide is None:
                self._wide = Plan()
                self._wide.add("sample_widely", **self._shared, **self._results, **self._scratch)
                self._wide.link()
            self._workers.run(self._wide, rows)


def likeliest(scores: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k largest, largest first; equal ones in order of id, also at the cut."""
    if k >= scores.size:
        ids = np.arange(scores.size)
    else:
        smallest = np.partition(scores, scores.size - k)[scores.size - k]
        ids = np.flatnonzero(scores >= smallest)
    return ids[np.argsort(-scores[ids], kind="stable")][:k]


def allowed(mask: np.ndarray, columns: int) -> np.ndarray:
    """bool[columns] of a mask's bits."""
    return np.unpackbits(mask.view(np.uint8), bitorder="little")[:columns].astype(bool)


def refusal(logits: np.ndarray, scores: np.ndarray) -> str:
    """Why no token can be chosen. scores: the logits with bias, penalties and mask."""
    bad = np.flatnonzero(np.isnan(logits) | np.isposinf(logits))
    if bad.size:
        return (
            f"the model's logits are not finite: {bad.size} of {logits.size}, first token id {int(bad[0])} ({logits[bad[0]]}); "
            "the weights may be damaged (qinspect --verify), or its values may overflow (try --compute f32)"
        )
    best = int(scores.argmax())
    if scores[best] == -math.inf:
        return "no token is left to choose from: every logit is -inf, or logit_bias or a mask bans the whole vocabulary"
    return f"bias and penalties make the logit of token id {best} {float(scores[best])}: choose smaller ones"
