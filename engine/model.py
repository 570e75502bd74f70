"""A model ready to run: weights, plan, KV cache, workers. Token ids in, logits out; nothing here knows about text."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np

from ..formats.checkpoint import Checkpoint
from ..formats.families import built_in_names
from ..quant.errors import HalfbyteError
from .kernels.cache_layouts import get_layout
from .kernels.structs import PAGE, SPLIT
from .plan.builder import Builder, Limits, split_sequences
from .plan.plan import Plan, Section
from .run.cache import PagedCache, Sequence
from .run.rope import RopeTables, rope_tables
from .run.token_choice import Choice, SampleRequest, TokenChoice
from .run.weights import Weights
from .run.workers import Workers

Compute = Literal["int8", "f32"]
COMPUTES = ("int8", "f32")
OUTPUTS = ("last", "all", "none")

STEP_TOKENS = 512
"""Most tokens that one run of the plan takes; longer steps are run in parts. More are no faster, and buffers grow with it."""
STEP_OUTPUTS = 32
"""Most tokens that one run of the head gives logits for."""
STEP_SEQUENCES = 256

Report = Callable[[str, int, int], None]
"""report(what, done, total) while a model loads: "weights" in bytes, "kernels" in number."""


class ModelError(HalfbyteError):
    """A model cannot be run as asked."""


class TokenError(HalfbyteError):
    """Token ids that the model does not have, or a step without any."""


class ContextError(HalfbyteError):
    """More tokens than the context holds."""


@dataclass
class Work:
    """What a step does for one sequence: `ids` follow what is in the cache. outputs: which of them get logits."""

    sequence: Sequence
    ids: Ids[int]
    outputs: Literal["last", "all", "none"] = "last"


class Model:
    """Runs a checkpoint. See Engine for the public face.

    checkpoint: must stay open as long as the model. compute: "int8" activations, or "f32". threads: None = all physical cores.
    context: most positions of a sequence (None: the model's own). capacity: positions that the KV cache holds in all (None: one context).
    kv_type: how keys and values are kept (kernels/cache_layouts); None: "f16", or "f32" with compute "f32".
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        compute: Compute = "int8",
        threads: int | None = None,
        context: int | None = None,
        capacity: int | None = None,
        report: Report | None = None,
        kv_type: str | None = None,
    ):
        if compute not in COMPUTES:
            raise ModelError(f"compute must be one of {', '.join(COMPUTES)}, not {compute!r}")
        # Accuracy is measured with a cache that adds no error of its own.
        self.kv_type = get_layout(kv_type or ("f16" if compute == "int8" else "f32")).name
        arch = checkpoint.architecture
        if arch is None:
            raise ModelError(f"{checkpoint.path} holds weights only, no config.json and tokenizer.json: it can be inspected, not run")
        self.architecture, self.compute = arch, compute
        spec = self.spec = checkpoint.model
        self.vocabulary = spec.vocabulary
        self.lock = threading.RLock()
        self._closed = False
        for name, value in (("context", context), ("capacity", capacity)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1):
                raise ModelError(f"the {name} must be a whole number, at least 1 token, not {value!r}")
        self.context = spec.context if context is None else context
        capacity = max(self.context, capacity or 0)
        self.workers = Workers(threads)
        try:
            limits = Limits(min(STEP_TOKENS, max(self.context, 1)), STEP_OUTPUTS, STEP_SEQUENCES, self.context, self.workers.count)
            self._limits = limits
            pages = -(-capacity // PAGE) + limits.sequences
            self.cache = PagedCache.of(spec, self.kv_type, pages)
            self._rope = rope_tables(checkpoint, self.context)
            self.context = min(self.context, self._rope.context)
            self.weights = Weights(checkpoint, self.workers.count)
            matrices = [t.name for t in checkpoint.tensors.values() if not t.vector]
            self.weights.load(matrices, report and (lambda done, total: report("weights", done, total)))
            self.builder = Builder(self.weights, self.cache, limits, "int8" if compute == "int8" else "f32")
            write_plan(self.builder, checkpoint, self._rope)
            self.plan: Plan = self.builder.plan
            self._logits = self.plan.results["logits"]
            self._chooser = TokenChoice(self.workers, self.builder.outputs, self._logits, self.vocabulary, limits.outputs)
            self._chooser.add_to(self.plan)
            self.plan.link(report and (lambda done, total: report("kernels", done, total)))
        except BaseException:
            self.workers.close()
            raise
        sections = list(self.plan.sections)
        self._first = sections[0]
        self._body = self.plan.span(self._first, sections[sections.index("head") - 1])

    def step(self, work: Iterable[Work]) -> np.ndarray:
        """Runs tokens of any number of sequences, prefill and decode mixed; their keys and values are then in the cache.

        Returns float32[outputs, vocabulary], the logits in the order of the work, valid until the next step (copy what is to be kept).
        Logits do not depend on what else is in the step, on how a prompt is cut into steps, or on the number of threads: bit for bit.
        Steps of several threads wait for one another; a thread that needs the logits whole after that holds `lock` until it has copied
        them. Raises TokenError, ContextError, CacheFullError, SequenceError, ModelError before anything is run. Whatever is raised, also
        in the middle, the sequences are left as they were.
        """
        with self.lock:
            kept = self._step(work, None)
            if len(kept) == 1:
                return kept[0]
            return np.concatenate(kept) if kept else np.zeros((0, self.vocabulary), np.float32)

    def sample(self, work: Iterable[Work], requests: Iterable[SampleRequest]) -> list[Choice]:
        """Runs a step as `step` does, and chooses a token from each of its outputs where they lie.

        requests: what is wanted of each output, in order; an object for each. Like logits, choices do not depend on what else is in the
        step. Logits that no token can be chosen from are no error of the step: their Choice says so. Raises what `step` raises, and
        SampleError, before anything is run or kept.
        """
        with self.lock:
            jobs, wanted = list(work), list(requests)
            self._chooser.check(wanted, sum({"last": 1, "all": np.size(job.ids)}.get(job.outputs, 0) for job in jobs))
            return [choice for choices in self._step(jobs, iter(wanted)) for choice in choices]

    def _step(self, work: Iterable[Work], requests: Iterator[SampleRequest] | None) -> list[Any]:
        """What `_take` gives for each run of the head. Logits are copied where there are several."""
        if self._closed:
            raise ModelError("the model is closed: open it again")
        jobs: list[_Slice] = [(w.sequence, self._checked(w), w.outputs) for w in work]
        if len({id(sequence) for sequence, _, _ in jobs}) < len(jobs):
            raise ModelError("a sequence can be in a step only once: give its tokens together")
        before = [(sequence, sequence.length) for sequence, _, _ in jobs]
        try:
            for sequence, ids, _ in jobs:
                self.cache.reserve(sequence, sequence.length + len(ids))
            parts = list(_parts(jobs, self._limits.tokens, self._limits.sequences))
            kept: list[Any] = []
            for part in parts:
                kept += self._run(part, requests, len(parts) > 1)
        except BaseException:
            for sequence, length in before:
                if sequence.cache is self.cache:
                    self.cache.truncate(sequence, length)
            raise
        for sequence, _, _ in jobs:
            self.cache.slide(sequence)
        return kept

    def release(self, sequence: Sequence) -> None:
        """Frees the pages of a sequence."""
        self.truncate(sequence, 0)

    def truncate(self, sequence: Sequence, length: int) -> int:
        """Forgets all but the first `length` tokens of a sequence. Returns how many are left: 0 instead of `length` if the sequence went
        on so far that a window of the model left these behind (see PagedCache.truncate)."""
        with self.lock:
            return self.cache.truncate(sequence, length)

    def close(self) -> None:
        """Ends the workers, after the step that runs, if any. Later steps raise ModelError."""
        with self.lock:
            self._closed = True
            self.workers.close()

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _checked(self, work: Work) -> np.ndarray:
        if not isinstance(work.sequence, Sequence):
            raise ModelError(f"a step works on sequences from open_sequence, not on {type(work.sequence).__name__}")
        if work.outputs not in OUTPUTS:
            raise ModelError(f"outputs must be one of {', '.join(OUTPUTS)}, not {work.outputs!r}")
        try:
            ids = np.asarray(work.ids).reshape(-1)
        except (TypeError, ValueError):
            raise TokenError("token ids must be whole numbers") from None
        if ids.size == 0:
            raise TokenError("a step needs at least one token of each sequence")
        if ids.dtype.kind not in "iu":
            raise TokenError("token ids must be whole numbers")
        ids = ids.astype(np.int64)
        if ids.size > 1 or not 0 <= ids[0] < self.vocabulary:
            bad = np.flatnonzero((ids < 0) | (ids >= self.vocabulary))
            if bad.size:
                raise TokenError(f"token id {ids[bad[0]]} at position {bad[0]} is not below the vocabulary's size {self.vocabulary}")
        if work.sequence.length + ids.size > self.context:
            raise ContextError(f"{work.sequence.length + ids.size} tokens do not fit the context of {self.context}")
        return ids

    def _run(self, part: list[_Slice], requests: Iterator[SampleRequest] | None, several: bool) -> list[Any]:
        """One run of the plan, and more of the head if there are many outputs. several: other runs follow, or came before."""
        step, first = self.builder.step, 0
        outputs: list[int] = []
        lone = len(part) <= split_sequences(self._limits)
        for i, (sequence, ids, wanted) in enumerate(part):
            count, start = ids.size, sequence.length
            step.ids[first : first + count] = ids
            step.positions[first : first + count] = np.arange(start, start + count) if count > 1 else start
            splits = -(-(start + 1) // SPLIT) if count == 1 and lone and start >= SPLIT else 0
            step.place(i, sequence.addresses, first, count, start, splits)
            self._rope.reach(start + count)
            if wanted == "all":
                outputs.extend(range(first, first + count))
            elif wanted == "last":
                outputs.append(first + count - 1)
            first += count
        step.set(first, len(part))
        for sequence, ids, _ in part:
            sequence.length += ids.size
        if not outputs:
            self._go(self._body, first)
            return []
        most = self._limits.outputs
        kept = [self._take(outputs[:most], self._first, first, requests, several or len(outputs) > most)]
        for at in range(most, len(outputs), most):
            rows = outputs[at : at + most]
            kept.append(self._take(rows, "head", max(len(rows), 2), requests, True))
        return kept

    def _take(self, rows: list[int], first: str, tokens: int, requests: Iterator[SampleRequest] | None, copy: bool) -> Any:
        """Runs the plan from a section on for these outputs: their logits, or the choices for the next requests."""
        self.builder.outputs.ids[: len(rows)] = rows
        self.builder.outputs.set(len(rows))
        if requests is None:
            self._go(self.plan.span(first, "head"), tokens)
            logits = self._logits.floats(len(rows))[:, : self.vocabulary]
            return logits.copy() if copy else logits
        wanted = list(islice(requests, len(rows)))
        simple = self._chooser.put(wanted)
        self._go(self.plan.span(first, "sample" if simple else "head"), tokens)
        return self._chooser.choose(wanted, simple)

    def _go(self, section: Section, tokens: int) -> None:
        self.workers.run(self.plan, tokens, section)


_Slice = tuple[Sequence, np.ndarray, str]


def _parts(jobs: list[_Slice], tokens: int, sequences: int) -> Iterable[list[_Slice]]:
    """Steps that fit the buffers. What is cut has no outputs in its first parts, unless all are wanted."""
    part: list[_Slice] = []
    room = tokens
    for sequence, ids, wanted in jobs:
        at = 0
        while at < ids.size:
            if room == 0 or len(part) == sequences:
                yield part
                part, room = [], tokens
            piece = ids[at : at + room]
            at += piece.size
            room -= piece.size
            part.append((sequence, piece, wanted if wanted != "last" or at == ids.size else "none"))
    if part:
        yield part


def write_plan(builder: Builder, checkpoint: Checkpoint, ropes: RopeTables) -> None:
    """Writes the plan of a model: as its layers say, or as another package does it, named after the architecture in the entry point group
    `halfbyte.architectures`: a function of the same arguments.
    """
    from .plan.layers import decoder

    if checkpoint.architecture not in built_in_names():
        from importlib.metadata import entry_points

        for point in entry_points(group="halfbyte.architectures"):
            if point.name == checkpoint.architecture:
                point.load()(builder, checkpoint.model, ropes)
                return
    decoder(builder, checkpoint.model, ropes)
