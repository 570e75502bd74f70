"""How an answer is to be made: what a caller may ask for, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...quant.errors import HalfbyteError

MOST_SEED = (1 << 64) - 1


class SamplingError(HalfbyteError):
    """A sampling parameter is out of range or of the wrong type. `field` names it."""

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


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
            if self.seed > MOST_SEED:
                raise SamplingError("seed", f"must be between -2^63 and 2^64 - 1, not {self.seed}")
        if not isinstance(self.ignore_eos, bool):
            raise SamplingError("ignore_eos", f"must be true or false, not {self.ignore_eos!r}")
        self.stop = _strings("stop", self.stop)
        self.stop_ids = _ids("stop_ids", self.stop_ids)
        self.logit_bias = _biases(self.logit_bias)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalizes(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


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
