"""Speed of a model as it is used: prefill and decode in tokens per second, and how near decoding comes to the memory's own speed."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from ..engine import Engine
from ..generate.answer import Answer
from ..generate.params import SamplingParams
from ..model import Work
from ..plan.plan import Plan
from ..run.cache import Sequence

READ_BYTES = 1 << 29
"""Memory read to measure its speed: far more than any cache holds."""


@dataclass
class Benchmark:
    """Results; lists have one entry per repetition. kv_bytes_per_token: what a token takes in the KV cache, of type kv_type."""

    prefill_tok_s: list[float]
    decode_tok_s: list[float]
    weight_bytes_per_token: int
    memory_read_gb_s: float
    threads: int
    kv_type: str
    kv_bytes_per_token: float

    @property
    def decode(self) -> float:
        """Median tokens per second."""
        return float(np.median(self.decode_tok_s)) if self.decode_tok_s else 0.0

    @property
    def share_of_memory_limit(self) -> float:
        """Weights read per second in decoding, as a share of what a pure read reaches. Above 1 where caches hold part of the model."""
        return self.decode * self.weight_bytes_per_token / (self.memory_read_gb_s * 1e9)


def benchmark(engine: Engine, prompt: int, tokens: int, repetitions: int) -> Benchmark:
    """Times `prompt` tokens of prefill and `tokens` of decode, each `repetitions` times after one warm-up; 0 leaves one out.

    Decode is the whole loop: step, sampler, detokenizer, from an empty context, as text is generated.
    """
    ids = np.random.default_rng(0).integers(0, engine.model.vocabulary, max(prompt, 1)).tolist()
    read = MemoryRead(engine)
    speeds = [read.gb_per_s()]
    prefill = [_prefill(engine, ids) for _ in range(repetitions + 1)][1:] if prompt else []
    decode = []
    for repetition in range(repetitions + 1 if tokens else 0):
        speed = _decode(engine, ids[:1], tokens if repetition else min(tokens, 16))
        if repetition:
            decode.append(speed)
            speeds.append(read.gb_per_s())
    model = engine.model
    return Benchmark(
        prefill, decode, weight_bytes_per_token(engine), float(np.median(speeds)), model.workers.count, model.kv_type,
        model.cache.bytes_per_position,
    )  # fmt: skip


def weight_bytes_per_token(engine: Engine) -> int:
    """Bytes of matrices that a step with one token reads."""
    return sum(
        int(matrix.nbytes)
        for matrix in engine.model.weights.matrices()
        if any(op.kernel == "matmul" and op.arguments["weights"] is matrix for op in engine.model.plan.ops)
    )


def _prefill(engine: Engine, ids: list[int]) -> float:
    sequence = Sequence()
    try:
        start = time.perf_counter()
        engine.step([Work(sequence, ids)])
        return len(ids) / (time.perf_counter() - start)
    finally:
        engine.close_sequence(sequence)


def _decode(engine: Engine, prompt: list[int], tokens: int) -> float:
    answer = Answer(engine, prompt, SamplingParams(max_tokens=tokens + 1, ignore_eos=True), continues=True)
    for _ in answer:
        pass
    return tokens / answer.timings.decode_s


class MemoryRead:
    """A pure read by the engine's own workers."""

    def __init__(self, engine: Engine):
        self._workers = engine.model.workers
        self.memory = np.ones(READ_BYTES // 8, np.float64)  # written, so that every page is there
        self._out = np.zeros(16 * self._workers.count, np.int32)
        self._plan = Plan()
        self._plan.add("read_memory", address=self.memory.ctypes.data, nbytes=self.memory.nbytes, out=self._out.ctypes.data)
        self._plan.link()

    def gb_per_s(self) -> float:
        """Gigabytes (1e9) per second, the better of two reads."""
        best = 0.0
        for _ in range(2):
            start = time.perf_counter()
            self._workers.run(self._plan, 1)
            best = max(best, self.memory.nbytes / (time.perf_counter() - start) / 1e9)
        return best
