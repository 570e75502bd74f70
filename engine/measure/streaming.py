"""A model of any size run on many texts at once: section by section of its plan, with only that section's matrices in memory.

The residual streams of all texts are kept instead, and go through the sections together: embedding, layer after layer, head. The
numbers are those of `Model.step` bit for bit: it is the same plan, run by the same workers. What passes from section to section is the
residual stream alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ...formats.checkpoint import Checkpoint
from ...formats.tensor import Tensor
from ...formats.tile_tensor import tiles_nbytes
from ...quant.block import get_format
from ..kernels.structs import PAGE
from ..model import Compute, ModelError, write_plan
from ..plan.builder import Builder, Limits
from ..plan.plan import Buffer, Plan, Section
from ..run.cache import PagedCache, Sequence
from ..run.rope import rope_tables
from ..run.weights import Matrix, Weights, make_matrix, run_format
from ..run.workers import Workers

OUTPUTS = 60
"""Most tokens that one run of the head gives logits for: whole panels of 6, and few enough that logits of a large vocabulary stay small."""

STAGES = {"attn_output": "attention", "ffn_down": "ffn", "ffn_down_exps": "ffn"}
"""Names of what is added to the residual stream, by the last matrix on the way there; others go by the matrix's own name."""


class StreamedMatrix:
    """A matrix of a plan that is in memory only between `load` and `release`. It stands where a weights.Matrix stands."""

    def __init__(self, tensor: Tensor, exact: bool):
        self._tensor = tensor
        self._loaded: Matrix | None = None
        self.name, self.shape, self.size = tensor.name, tensor.shape, tensor.size
        self.matrices, self.rows_each, self.rows, self.columns = tensor.matrices, tensor.rows_each, tensor.rows, tensor.columns
        self.format = tensor.format if tensor.tiles() is not None else run_format(tensor.format, tensor.name)
        if exact and self.format != tensor.format:
            self.format = "f32"

    @property
    def integers(self) -> bool:
        """True if the format is multiplied as integers."""
        return get_format(self.format).integers

    @property
    def address(self) -> int:
        """Where the tiles lie; 0 while they are not in memory."""
        return self._loaded.address if self._loaded else 0

    @property
    def matrix_nbytes(self) -> int:
        """Bytes of the tiles from one matrix to the next."""
        return tiles_nbytes(get_format(self.format), self.shape[-2:])

    def load(self) -> None:
        """Makes the tiles, or finds them in the mapped file."""
        if self._loaded is None:
            self._loaded = make_matrix(self._tensor, self.format)
            if self._tensor.tiles() is None:
                self._tensor.release()  # what was read to make the tiles is not needed beside them

    def release(self) -> None:
        """Gives the memory back."""
        self._loaded = None
        self._tensor.release()


class StreamedWeights(Weights):
    """The weights of a checkpoint as StreamedMatrix, for one or several plans. Vectors, which are small, stay in memory.

    exact: what no kernel reads becomes f32, which loses nothing, not the format in which it is run otherwise (see weights.CONVERTED).
    """

    def __init__(self, checkpoint: Checkpoint, threads: int, exact: bool = False):
        super().__init__(checkpoint, threads)
        self._exact = exact
        self._streamed: dict[str, StreamedMatrix] = {}

    def matrix(self, name: str) -> StreamedMatrix:  # type: ignore[override]
        """The matrix of that name, not loaded; it must exist."""
        if name not in self._streamed:
            self._streamed[name] = StreamedMatrix(self._tensors[name], self._exact)
        return self._streamed[name]


@dataclass(frozen=True)
class Stage:
    """A part of a section that ends with an addition to the residual stream, or with the section.

    name: what is added, "attention" or "ffn".
    """

    name: str
    rows: Section


class StreamedModel:
    """A plan over StreamedWeights for texts of `tokens` tokens each.

    compute: "int8" (activations are rounded, the KV cache is f16) or "f32" (neither). Before a section runs, `load` its matrices and
    `relink` it. Raises ModelError for a checkpoint that cannot be run, or whose context is shorter than `tokens`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        weights: StreamedWeights,
        workers: Workers,
        compute: Compute,
        tokens: int,
        report: Callable[[int, int], None] | None = None,
    ):
        if checkpoint.architecture is None:
            raise ModelError(f"{checkpoint.path} holds weights only, no config.json and tokenizer.json: it cannot be run")
        model = checkpoint.model
        if tokens > model.context:
            raise ModelError(f"{checkpoint.path} takes at most {model.context} tokens, not {tokens}; use a smaller --chunk")
        self.vocabulary, self.compute, self.tokens = model.vocabulary, compute, tokens
        self._workers = workers
        limits = Limits(tokens, min(OUTPUTS, tokens), 1, tokens, workers.count)
        cache = PagedCache.of(model, "f16" if compute == "int8" else "f32", -(-tokens // PAGE) + 1, shared=True)
        self._rope = rope_tables(checkpoint, tokens)
        self._rope.reach(tokens)
        self._builder = Builder(weights, cache, limits, "int8" if compute == "int8" else "f32")
        write_plan(self._builder, checkpoint, self._rope)
        self.plan: Plan = self._builder.plan
        self.plan.link(report)
        self._stream: Buffer = self.plan.results["stream"]
        self.logits: Buffer = self.plan.results["logits"]
        sequence = Sequence()
        cache.reserve(sequence, tokens)
        sequence.length = tokens
        self._sequence = sequence  # the plan reads its block tables
        step = self._builder.step
        step.positions[:tokens] = np.arange(tokens)
        step.place(0, sequence.addresses, 0, tokens, 0)
        step.set(tokens, 1)

    @property
    def sections(self) -> list[str]:
        """ "embed", the layers, "head"."""
        return list(self.plan.sections)

    @property
    def stream_columns(self) -> int:
        """Floats of a token's residual stream in memory, padding included."""
        return self._stream.width // 4

    def new_stream(self, texts: int) -> np.ndarray:
        """float32[texts, tokens, stream_columns] of zeros, for `run`."""
        return np.zeros((texts, self.tokens, self.stream_columns), np.float32)

    def matrices(self, section: str) -> list[StreamedMatrix]:
        """The matrices that a section reads."""
        rows = self.plan.sections[section]
        found = {
            value.name: value
            for op in self.plan.ops[rows.start : rows.stop]
            for value in op.arguments.values()
            if isinstance(value, StreamedMatrix)
        }
        return list(found.values())

    def relink(self, section: str) -> None:
        """Tells the plan where the section's matrices lie now."""
        self.plan.relink(self.plan.sections[section])

    def stages(self, section: str) -> list[Stage]:
        """The section cut after every addition to the residual stream."""
        whole = self.plan.sections[section]
        found, start = [], whole.start
        for row in range(whole.start, whole.stop):
            op = self.plan.ops[row]
            if op.arguments.get("out") is self._stream:
                part = op.label.removesuffix(".weight").rpartition(".")[2]
                found.append(Stage(STAGES.get(part, part), Section(start, row + 1)))
                start = row + 1
        if start < whole.stop:
            found.append(Stage(section, Section(start, whole.stop)))
        return found

    def run(self, stage: Stage, ids: np.ndarray, stream: np.ndarray) -> None:
        """Runs a stage on one text, int[tokens] ids. float32[tokens, stream_columns], its residual stream, becomes what comes out."""
        self.begin(ids, stream)
        self.go(stage.rows)
        self.end(stream)

    def begin(self, ids: np.ndarray, stream: np.ndarray) -> None:
        """Puts a text and its residual stream in place, for rows that are run one part after another with `go`."""
        self._builder.step.ids[: self.tokens] = ids
        self._stream.floats(self.tokens)[:] = stream

    def go(self, rows: Section) -> None:
        """Runs rows of the plan on what is in its buffers."""
        self._workers.run(self.plan, self.tokens, rows)

    def end(self, stream: np.ndarray) -> None:
        """Takes the residual stream out again."""
        stream[:] = self._stream.floats(self.tokens)

    def head(self, stream: np.ndarray, rows: Iterable[int]) -> np.ndarray:
        """float32[rows, vocabulary], a view: logits of those tokens of a text, at most OUTPUTS, valid until the next run."""
        rows = list(rows)
        self._stream.floats(self.tokens)[:] = stream
        self.go_head(rows, self.plan.sections["head"])
        return self.logits.floats(len(rows))[:, : self.vocabulary]

    def go_head(self, outputs: list[int], rows: Section) -> None:
        """Runs rows of the section "head" for some tokens of the text, at most OUTPUTS."""
        self._builder.outputs.ids[: len(outputs)] = outputs
        self._builder.outputs.set(len(outputs))
        self._workers.run(self.plan, max(len(outputs), 2), rows)


def load(matrices: Iterable[StreamedMatrix], threads: int) -> None:
    """Loads matrices side by side."""
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda matrix: matrix.load(), matrices):
            pass
