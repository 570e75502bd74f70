"""From one row of logits to one token.

The order of operations is that of llama.cpp's default chain (`common_params_sampling::samplers` in common/common.h):

    logit bias → repetition, frequency and presence penalties → top-k → top-p → min-p → temperature → draw

So top-k, top-p and min-p look at the distribution at temperature 1, and a high temperature spreads the choice among the tokens
that they left, never beyond them. (vLLM and transformers divide by the temperature first.) What each step does:

* repetition penalty r: the logit of every token in the prompt or the answer is divided by r when positive and multiplied by it
  otherwise (Keskar et al. 2019, CTRL); `repetition_window` limits it to the last tokens, as llama.cpp's --repeat-last-n does;
* frequency and presence penalties f, p: a token that the answer holds c > 0 times loses c·f + p (OpenAI's; the prompt does not
  count);
* top-k: the k likeliest; top-p: the shortest list of likeliest tokens whose probabilities reach p (Holtzman et al. 2019);
  min-p: those at least p times as likely as the likeliest (Nguyen et al. 2024).

Temperature 0 is greedy: the largest logit after bias and penalties. Equal logits go to the lowest id, everywhere.

Log-probabilities are those of the model itself (temperature 1, no bias, no penalty, nothing cut off), as the OpenAI API and
vLLM's `raw_logprobs` have it.

Randomness is a function of the seed and of how many tokens the answer has: number n of an answer is the n-th output of SplitMix64
(Steele, Lea and Flood 2014). So an answer depends on its seed alone: not on threads, on what else runs, on the answer being taken
back by a few tokens and resumed, or on the version of a library; and start-up does not pay for importing numpy.random.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ...quant.errors import HalfbyteError

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


class SamplingError(HalfbyteError):
    """A sampling parameter is out of range or of the wrong type. `field` names it."""

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


class LogitsError(HalfbyteError):
    """The model gave logits that no token can be drawn from: NaN or infinite."""


@dataclass(slots=True)
class SamplingParams:
    """How tokens are chosen and when an answer ends. The defaults: greedy, until the model stops or the context is full.

    temperature         0: greedy; 1: the model's own distribution
    top_k               keep the k likeliest tokens; 0: all
    top_p               keep the likeliest tokens that together reach this probability; 1: all
    min_p               keep tokens at least this many times as likely as the likeliest; 0: all
    repetition_penalty  1: none; above 1 discourages tokens of the prompt and the answer
    repetition_window   how many of the last tokens the repetition penalty looks at; 0: all
    frequency_penalty   subtracted once per occurrence in the answer; 0: none
    presence_penalty    subtracted once if the answer holds the token; 0: none
    logit_bias          token id → number added to its logit (-inf bans it)
    seed                0 to 2^64 - 1, or negative down to -2^63; None: drawn anew for each answer
    stop                strings that end the answer; they are not part of it. One string, or several
    stop_ids            token ids that end the answer, besides the model's own end-of-text tokens; not part of it
    max_tokens          the most tokens an answer has; None: as many as the context holds
    logprobs            None: none; n: the log-probability of each token, and the n likeliest alternatives
    ignore_eos          do not end at the model's end-of-text tokens

    Raises SamplingError, whose `field` is the name above, for a value out of range or of the wrong type.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_window: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: Sequence[str] | str = ()
    stop_ids: Sequence[int] = ()
    max_tokens: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        self.temperature = _number("temperature", self.temperature, 0.0, math.inf, "a finite number, 0 or more")
        self.top_p = _number("top_p", self.top_p, 0.0, 1.0, "above 0 and at most 1")
        if self.top_p == 0.0:
            raise SamplingError("top_p", "must be above 0 and at most 1, not 0 (for greedy choice set temperature to 0)")
        self.min_p = _number("min_p", self.min_p, 0.0, 1.0, "between 0 and 1")
        self.repetition_penalty = _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, "a finite number above 0")
        if self.repetition_penalty == 0.0:
            raise SamplingError("repetition_penalty", "must be above 0 (1 is no penalty), not 0")
        self.frequency_penalty = _number("frequency_penalty", self.frequency_penalty, -math.inf, math.inf, "a finite number")
        self.presence_penalty = _number("presence_penalty", self.presence_penalty, -math.inf, math.inf, "a finite number")
        self.top_k = _integer("top_k", self.top_k, 0, "0 (all) or more")
        self.repetition_window = _integer("repetition_window", self.repetition_window, 0, "0 (all) or more")
        if self.max_tokens is not None:
            self.max_tokens = _integer("max_tokens", self.max_tokens, 0, "0 or more")
        if self.logprobs is not None:
            self.logprobs = _integer("logprobs", self.logprobs, 0, "0 or more")
        if self.seed is not None:
            self.seed = _integer("seed", self.seed, -(1 << 63), "between -2^63 and 2^64 - 1")
            if self.seed > _MASK:
                raise SamplingError("seed", f"must be between -2^63 and 2^64 - 1, not {self.seed}")
        if not isinstance(self.ignore_eos, bool):
            raise SamplingError("ignore_eos", f"must be true or false, not {self.ignore_eos!r}")
        self.stop = _strings("stop", self.stop)
        self.stop_ids = _ids("stop_ids", self.stop_ids)
        self.logit_bias = _biases(self.logit_bias)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


class Sampled(NamedTuple):
    """One chosen token. `logprob` and `top` are None unless log-probabilities were asked for; `top` is likeliest first."""

    id: int
    logprob: float | None
    top: list[tuple[int, float]] | None


class Sampler:
    """Chooses the tokens of one answer. Holds no state but its seed, so the same arguments always give the same token.

    seed: the seed in use: that of the parameters, or one drawn from the operating system.
    """

    @np.errstate(over="ignore")
    def __init__(self, params: SamplingParams):
        self.params = params
        self.seed = int.from_bytes(os.urandom(8), "little") if params.seed is None else params.seed
        self._stream = _mix(self.seed & _MASK)
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
        self._bias = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        self._penalizes = params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0

    def sample(self, logits: np.ndarray, history: Sequence[int] = (), prompt_length: int = 0) -> Sampled:
        """The next token.

        logits: float32[vocabulary], left unchanged. history: the ids of the prompt and of the answer so far; the first
        `prompt_length` of them are the prompt. Raises LogitsError for NaN, for +inf, or if no token is left; SamplingError if
        logit_bias names an id outside the vocabulary.
        """
        params = self.params
        scores = self._adjusted(logits, history, prompt_length) if self._penalizes or self._bias.size else logits
        best = int(scores.argmax())
        peak = float(scores[best])
        if not math.isfinite(peak):
            _refuse(logits, best, peak)
        id = best if params.temperature == 0.0 else self._draw(scores, peak, len(history) - prompt_length)
        if params.logprobs is None:
            return Sampled(id, None, None)
        logprob, top = _logprobs(logits, id, params.logprobs)
        return Sampled(id, logprob, top)

    def uniform(self, n: int) -> float:
        """Number n of this answer's random numbers, in [0, 1): 53 bits of SplitMix64."""
        return (_mix((self._stream + (n + 1) * _GAMMA) & _MASK) >> 11) * 2.0**-53

    @np.errstate(over="ignore", divide="ignore", invalid="ignore")  # what becomes infinite is refused by name, or is never chosen
    def _adjusted(self, logits: np.ndarray, history: Sequence[int], prompt_length: int) -> np.ndarray:
        params = self.params
        scores = logits.astype(np.float32, copy=True)
        try:
            if self._bias.size:
                scores[self._bias_ids] += self._bias
        except IndexError:
            worst = int(self._bias_ids.max())
            raise SamplingError("logit_bias", f"token id {worst} is outside the vocabulary of {scores.size}") from None
        if params.repetition_penalty != 1.0 and history:
            seen = set(history[-params.repetition_window :] if params.repetition_window else history)
            ids = np.fromiter(seen, np.int64, len(seen))
            values, penalty = scores[ids], np.float32(params.repetition_penalty)
            scores[ids] = np.where(values > 0, values / penalty, values * penalty)
        if (params.frequency_penalty or params.presence_penalty) and len(history) > prompt_length:
            counts = Counter(history[prompt_length:])
            ids = np.fromiter(counts.keys(), np.int64, len(counts))
            times = np.fromiter(counts.values(), np.float32, len(counts))
            scores[ids] -= times * np.float32(params.frequency_penalty) + np.float32(params.presence_penalty)
        return scores

    def _draw(self, scores: np.ndarray, peak: float, n: int) -> int:
        """Cuts off by top-k, top-p and min-p, and draws from what is left at the temperature."""
        params, ids = self.params, None
        if 0 < params.top_k < scores.size:
            ids = _likeliest(scores, params.top_k)
        if params.top_p < 1.0:
            ids = _nucleus(scores, peak, params.top_p, ids)
        floor = peak + math.log(params.min_p) if params.min_p > 0.0 else -math.inf
        if ids is None:
            if params.min_p > 0.0:
                ids = np.flatnonzero(scores >= floor)
        elif params.min_p > 0.0:
            ids = ids[scores[ids] >= floor]
        kept = scores if ids is None else scores[ids]
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the peak to exp(-inf) = 0
            weights = (kept - np.float32(peak)) / np.float32(max(params.temperature, 1e-30))
            np.exp(weights, out=weights)
        chosen = _inverse_cdf(weights, self.uniform(n))
        return chosen if ids is None else int(ids[chosen])


def _mix(z: int) -> int:
    """SplitMix64's output function, a permutation of 64-bit integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _likeliest(scores: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k largest, largest first; equal ones in order of id, also at the cut."""
    if k >= scores.size:
        ids = np.arange(scores.size)
    else:
        smallest = np.partition(scores, scores.size - k)[scores.size - k]
        ids = np.flatnonzero(scores >= smallest)
    return ids[np.argsort(-scores[ids], kind="stable")][:k]


def _nucleus(scores: np.ndarray, peak: float, p: float, ids: np.ndarray | None) -> np.ndarray:
    """The shortest prefix of the likeliest tokens (of `ids`, sorted; None: of all) whose probabilities reach p."""
    if ids is not None:
        cumulated = np.cumsum(np.exp(scores[ids] - np.float32(peak), dtype=np.float64))
        return ids[: int(np.searchsorted(cumulated, p * cumulated[-1])) + 1]
    shares = scores - np.float32(peak)
    total = float(np.exp(shares, out=shares).sum(dtype=np.float64))
    k = 256  # sorting a whole vocabulary costs ten times the rest: take more only while the mass is not reached
    while True:
        ids = _likeliest(scores, k)
        cumulated = np.cumsum(np.exp(scores[ids] - np.float32(peak), dtype=np.float64))
        count = int(np.searchsorted(cumulated, p * total)) + 1
        if count <= ids.size or ids.size == scores.size:
            return ids[:count]
        k *= 8


def _inverse_cdf(weights: np.ndarray, u: float) -> int:
    """The index that u in [0, 1) falls on, by weights float32[n] >= 0."""
    run = 256  # sums of runs first, then inside one run: a running sum over a whole vocabulary takes ten times as long
    whole = weights.size // run * run
    sums = weights[:whole].reshape(-1, run).sum(axis=1, dtype=np.float64)
    if whole < weights.size:
        sums = np.append(sums, weights[whole:].sum(dtype=np.float64))
    bounds = np.cumsum(sums)
    target = u * bounds[-1]
    i = min(int(np.searchsorted(bounds, target, side="right")), sums.size - 1)
    inner = np.cumsum(weights[i * run : (i + 1) * run], dtype=np.float64)
    left = target - (bounds[i - 1] if i else 0.0)
    j = int(np.searchsorted(inner, left, side="right"))
    if j >= inner.size:  # rounding: the two sums of a run differ in the last bit; the last token with any weight is meant
        j = int(np.flatnonzero(weights[i * run : (i + 1) * run])[-1])
    return i * run + j


def _logprobs(logits: np.ndarray, id: int, n: int) -> tuple[float, list[tuple[int, float]]]:
    peak = logits.max()
    normalizer = float(peak) + math.log(float(np.exp(logits - peak, dtype=np.float32).sum(dtype=np.float64)))
    top = [(int(i), float(logits[i]) - normalizer) for i in _likeliest(logits, n)] if n else []
    return float(logits[id]) - normalizer, top


def _refuse(logits: np.ndarray, id: int, value: float) -> None:
    bad = np.flatnonzero(np.isnan(logits) | np.isposinf(logits))
    if bad.size:
        raise LogitsError(
            f"the model's logits are not finite: {bad.size} of {logits.size}, first token id {int(bad[0])} ({logits[bad[0]]}); "
            "the weights may be damaged (qinspect --verify), or its values may overflow (try --compute f32)"
        )
    if value == -math.inf:
        raise LogitsError("no token is left to choose from: every logit is -inf, or logit_bias bans the whole vocabulary")
    raise LogitsError(f"bias and penalties make the logit of token id {id} {value}: choose smaller ones")


def _number(name: str, value: object, low: float, high: float, rule: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise SamplingError(name, f"must be {rule}, not {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high:
        raise SamplingError(name, f"must be {rule}, not {value}")
    return number


def _integer(name: str, value: object, low: int, rule: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise SamplingError(name, f"must be a whole number, {rule}, not {value!r}")
    if value < low:
        raise SamplingError(name, f"must be {rule}, not {value}")
    return int(value)


def _strings(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, (list, tuple)) or not all(isinstance(s, str) for s in value):
        raise SamplingError(name, f"must be a string or a list of strings, not {value!r}")
    if "" in value:
        raise SamplingError(name, "an empty string would end every answer at once; leave it out")
    return tuple(dict.fromkeys(value))


def _ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise SamplingError(name, f"must be a list of token ids, not {value!r}")
    return tuple(_id(name, v) for v in value)


def _id(name: str, value: object) -> int:
    id = _integer(name, value, 0, "a token id, 0 or more")
    if id >= 1 << 31:
        raise SamplingError(name, f"must be a token id, below 2^31, not {id}")
    return id


def _biases(value: object) -> dict[int, float]:
    name = "logit_bias"
    if not isinstance(value, Mapping):
        raise SamplingError(name, f"must map token ids to numbers, not {value!r}")
    biases = {}
    for id, bias in value.items():
        id = _id(name, id)
        biases[id] = -math.inf if bias == -math.inf else _number(name, bias, -math.inf, math.inf, "a finite number or -inf")
    return biases
