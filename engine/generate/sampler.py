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
  min-p: those at least p times as likely as the likeliest (Nguyen et al. 2024);
* draw: the kept tokens' weights e^(logit / temperature) are added up in order of id until they exceed the random number's share of all.

Temperature 0 is greedy: the largest logit after bias and penalties. Equal logits go to the lowest id, everywhere.

Log-probabilities are those of the model itself (temperature 1, no bias, no penalty, nothing cut off), as the OpenAI API and
vLLM's `raw_logprobs` have it.

All this is done by compiled code where the logits lie (engine/kernels/sample_*.py); a Sampler says what it wants (`request`) and takes
what came of it (`sampled`). `sample` is the same in NumPy, and its definition: weights are rounded so that their sums are exact
(weights.py), hence both choose the same tokens, always.

Randomness is a function of the seed and of how many tokens the answer has: number n of an answer is the n-th output of SplitMix64
(Steele, Lea and Flood 2014). So an answer depends on its seed alone: not on threads, on what else runs, on the answer being taken
back by a few tokens and resumed, or on the version of a library; and start-up does not pay for importing numpy.random.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...quant.errors import HalfbyteError
from ..run.token_choice import SampleRequest, allowed, likeliest, refusal, scale_of
from .params import SamplingError, SamplingParams
from .penalties import PenalizedTokens

if TYPE_CHECKING:
    from ..run.token_choice import Choice

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


class LogitsError(HalfbyteError):
    """The model gave logits that no token can be drawn from: NaN or infinite."""


class Sampled(NamedTuple):
    """One chosen token. `logprob` and `top` are None unless log-probabilities were asked for; `top` is likeliest first."""

    id: int
    logprob: float | None
    top: list[tuple[int, float]] | None


class Sampler:
    """Chooses the tokens of one answer.

    seed: the seed in use: that of the parameters, or one drawn from the operating system.
    history: the ids of the prompt and of the answer so far; the first `prompt_length` of them are the prompt.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int] = ()):
        self.params = params
        self.seed = int.from_bytes(os.urandom(8), "little") if params.seed is None else params.seed
        self.history = list(prompt)
        self.prompt_length = len(self.history)
        self._stream = _mix(self.seed & _MASK)
        self._request: SampleRequest | None = None
        self._penalized: PenalizedTokens | None = None

    def push(self, id: int) -> None:
        """The answer has one token more."""
        self.history.append(id)
        if self._penalized is not None:
            self._penalized.push(id)

    def take_back(self, count: int) -> None:
        """The answer's last `count` tokens were not said after all."""
        del self.history[max(len(self.history) - count, self.prompt_length) :]
        self._request = self._penalized = None

    # ---- by compiled code --------------------------------------------------------------------------------------------

    def request(self, vocabulary: int, mask: np.ndarray | None = None) -> SampleRequest:
        """What is wanted of the logits after the history: the same object each time, changed. mask: see SampleRequest.mask.

        Raises SamplingError if logit_bias names an id outside the vocabulary.
        """
        if self._request is None:
            params = self.params
            self._check(vocabulary)
            self._request = SampleRequest(
                params.temperature, params.top_k, params.top_p, params.min_p,
                params.repetition_penalty, params.frequency_penalty, params.presence_penalty, params.logprobs,
            )  # fmt: skip
            if params.penalizes or params.logit_bias:
                self._penalized = PenalizedTokens(params, self.history, self.prompt_length)
                self._request.adjusted = self._penalized
        self._request.number = self.uniform(len(self.history) - self.prompt_length)
        self._request.mask = mask
        return self._request

    def sampled(self, choice: Choice) -> Sampled:
        """The next token, from what came of the request. Raises LogitsError as `sample` does."""
        if choice.refusal is not None:
            raise LogitsError(choice.refusal)
        if self.params.logprobs is None:
            return Sampled(choice.id, None, None)
        return Sampled(choice.id, choice.logit - choice.log_sum, [(id, logit - choice.log_sum) for id, logit in choice.top])

    # ---- in NumPy ----------------------------------------------------------------------------------------------------

    def sample(
        self, logits: np.ndarray, history: Sequence[int] | None = None, prompt_length: int = 0, mask: np.ndarray | None = None
    ) -> Sampled:
        """The next token.

        logits: float32[vocabulary], left unchanged. history: the ids of the prompt and of the answer so far, of which the first
        `prompt_length` are the prompt; None: the sampler's own. Raises LogitsError for NaN, for +inf, or if no token is left;
        SamplingError if logit_bias names an id outside the vocabulary.
        """
        if history is None:
            history, prompt_length = self.history, self.prompt_length
        params = self.params
        scores = logits
        if params.penalizes or params.logit_bias or mask is not None:
            scores = self._adjusted(logits, history, prompt_length)
        if mask is not None:
            scores[~allowed(mask, scores.size)] = -np.inf
        best = int(scores.argmax())
        if not math.isfinite(scores[best]):
            raise LogitsError(refusal(logits, scores))
        id = best if params.temperature == 0.0 else self._draw(scores, scores[best], len(history) - prompt_length)
        if params.logprobs is None:
            return Sampled(id, None, None)
        from .weights import weights

        peak = logits.max()
        log_sum = float(peak) + math.log(float(weights(logits, peak, 1.0).sum()))
        top = [(int(i), float(logits[i]) - log_sum) for i in likeliest(logits, params.logprobs)] if params.logprobs else []
        return Sampled(id, float(logits[id]) - log_sum, top)

    def uniform(self, n: int) -> float:
        """Number n of this answer's random numbers, in [0, 1): 53 bits of SplitMix64."""
        return (_mix((self._stream + (n + 1) * _GAMMA) & _MASK) >> 11) * 2.0**-53

    def _check(self, vocabulary: int) -> None:
        if self.params.logit_bias and max(self.params.logit_bias) >= vocabulary:
            worst = max(self.params.logit_bias)
            raise SamplingError("logit_bias", f"token id {worst} is outside the vocabulary of {vocabulary}")

    @np.errstate(over="ignore", divide="ignore", invalid="ignore")  # what becomes infinite is refused by name, or is never chosen
    def _adjusted(self, logits: np.ndarray, history: Sequence[int], prompt_length: int) -> np.ndarray:
        params = self.params
        self._check(logits.size)
        scores = logits.astype(np.float32, copy=True)
        for id, bias in params.logit_bias.items():
            scores[id] += np.float32(bias)
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

    def _draw(self, scores: np.ndarray, peak: np.floating, n: int) -> int:
        """Cuts off by top-k, top-p and min-p, and draws from what is left at the temperature."""
        from .weights import weights

        params = self.params
        shares = weights(scores, peak, scale_of(params.temperature))
        if params.top_k or params.top_p < 1.0 or params.min_p:
            order = likeliest(scores, params.top_k or scores.size)
            if params.top_p < 1.0:
                reached = np.cumsum(weights(scores[order], peak, 1.0))
                order = order[: int(np.searchsorted(reached, params.top_p * reached[-1])) + 1]
            if params.min_p:
                order = order[scores[order] >= np.float32(float(peak) + math.log(params.min_p))]
            kept = np.zeros_like(shares)
            kept[order] = shares[order]
            shares = kept
        reached = np.cumsum(shares)
        return int(np.searchsorted(reached, self.uniform(n) * reached[-1], side="right"))


def _mix(z: int) -> int:
    """SplitMix64's output function, a permutation of 64-bit integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
