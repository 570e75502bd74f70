"""What choosing a token costs, beside what it would cost in NumPy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine import Engine
from ..generate.params import SamplingParams
from ..generate.sampler import Sampler
from ..model import Work
from ..plan.builder import StepState
from ..plan.plan import Plan
from ..run.token_choice import TokenChoice
from ..run.workers import Workers

ROWS = (1, 32)
"""Sequences at once."""

HISTORY = 32768
"""Tokens of the text of which the penalties are."""


@dataclass
class SamplingSpeed:
    """One way of choosing, over `rows` sequences at once. Milliseconds per step of all of them, a number for each round.

    compiled: the engine's way, Python around it included. numpy: Sampler.sample, row after row.
    """

    name: str
    rows: int
    compiled: list[float]
    numpy: list[float]

    @property
    def medians(self) -> tuple[float, float]:
        """Of both."""
        return float(np.median(self.compiled)), float(np.median(self.numpy))


def cases() -> dict[str, tuple[SamplingParams, bool]]:
    """Names, parameters, and whether the logits are nearly flat, so that thousands of tokens are kept."""
    penalties: dict[str, Any] = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1}
    return {
        "greedy": (SamplingParams(), False),
        "temperature 0.8": (SamplingParams(temperature=0.8, seed=1), False),
        "top-k 40, top-p 0.95, min-p 0.05, temperature 0.8": (
            SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=1), False,
        ),
        "top-p 0.95": (SamplingParams(temperature=1.0, top_p=0.95, seed=1), False),
        "top-p 0.95, flat logits": (SamplingParams(temperature=1.0, top_p=0.95, seed=1), True),
        f"penalties, text of {HISTORY} tokens": (SamplingParams(**penalties), False),
        "all of them": (SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=1, **penalties), False),
    }  # fmt: skip


def decode_step(engine: Engine, rows: int, rounds: int) -> float:
    """Median milliseconds of a step with one token of each of `rows` sequences, without choosing any."""
    sequences = [engine.open_sequence() for _ in range(rows)]
    try:
        work = [Work(sequence, [0]) for sequence in sequences]
        times = [_timed(lambda: engine.step(work)) for _ in range(8 * rounds)]
    finally:
        for sequence in sequences:
            engine.close_sequence(sequence)
    return float(np.median(times[rounds:]))


def measure(vocabulary: int, threads: int | None, rounds: int, rows: tuple[int, ...] = ROWS) -> Iterator[SamplingSpeed]:
    """Times every case, for each number of rows; the compiled way and NumPy take turns, after a round that does not count."""
    workers = Workers(threads)
    try:
        most = max(rows)
        plan, width = Plan(), 4 * -(-vocabulary // 32) * 32
        logits = plan.buffer("logits", most * width, width)
        step = StepState(most, 0)
        choice = TokenChoice(workers, step, logits, vocabulary, most)
        choice.add_to(plan)
        plan.link()
        random = np.random.default_rng(0)
        for name, (params, flat) in cases().items():
            for count in rows:
                step.set(count)
                values = logits.floats(count)[:, :vocabulary]
                samplers = []
                for row in range(count):
                    values[row] = random.standard_normal(vocabulary, np.float32) * np.float32(0.05 if flat else 2.0)
                    if not flat:
                        values[row, random.integers(0, vocabulary, 100)] += np.linspace(4, 12, 100, dtype=np.float32)
                    text = random.integers(0, vocabulary, HISTORY if params.penalizes else 0).tolist()
                    samplers.append(Sampler(params, text[: len(text) // 2]))
                    samplers[-1].history += text[len(text) // 2 :]
                speed = SamplingSpeed(name, count, [], [])
                kept = values.copy()
                for number in range(rounds + 1):
                    values[:] = kept
                    spent = _timed(lambda: _compiled(workers, plan, choice, samplers))  # noqa: B023
                    slow = _timed(lambda: [sampler.sample(row) for sampler, row in zip(samplers, kept, strict=True)])  # noqa: B023
                    if number:
                        speed.compiled.append(spent)
                        speed.numpy.append(slow)
                yield speed
    finally:
        workers.close()


def _compiled(workers: Workers, plan: Plan, choice: TokenChoice, samplers: list[Sampler]) -> None:
    requests = [sampler.request(choice.columns) for sampler in samplers]
    simple = choice.put(requests)
    if simple:
        workers.run(plan, len(samplers))
    for sampler, chosen in zip(samplers, choice.choose(requests, simple), strict=True):
        sampler.sampled(chosen)


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)
