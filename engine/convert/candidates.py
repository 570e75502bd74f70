"""Candidates: every matrix of a model in several formats, with what each of them would cost the model's predictions.

One pass over the model. A calibration (calibrate.py) hands over what a layer's matrices read; each matrix is quantized by error feedback in
every format, and the tiles wait on disk. In the first format, the probe, it takes the matrix's place in a run over a short text
(sensitivity.py), and what the predictions lose is measured. In the other formats they lose as much less as the expected squared output
error d H dᵀ is less.

An embedding is probed as what it is at the input, by the squared error of its weights; one that is also the head is probed again there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...formats.checkpoint import Checkpoint
from ...formats.conversion.tile_store import TileStore
from ...formats.decoder import EMBEDDING, HEAD
from ...formats.tensor import Tensor
from ...formats.tile_tensor import TileTensor
from ...quant.feedback import DAMPING
from ...quant.methods import TIED_DAMPING, Inputs
from ...quant.processors import logical_processors
from ..measure.sensitivity import CHUNK, Probes, probing_tokens
from .calibration import Calibration, InputStatistics, stacks
from .feedback import known_inputs, quantizing_multiplications
from .non_finite import finite_checkpoint, naming_weights
from .quantize_tensor import TensorQuantizer

_HEAD = "the head"
_RUINED = 100.0

Progress = Callable[[str, float, float], None]
"""progress(what, done, total): "kernels" in number, "layers" in multiplications."""


@dataclass
class Candidate:
    """A matrix in one format.

    loss          expected squared error: d H dᵀ over all rows, or the squared error of the weights where H is not known
    weight_error  squared error of the weights
    replaced      weights that were not finite
    cost          what it costs the predictions: KL divergence, nats per token, when all else is unchanged
    """

    tensor: TileTensor
    loss: float
    weight_error: float
    replaced: int
    cost: float = 0.0


@dataclass(frozen=True)
class Candidates:
    """What `make_candidates` has found. by_name: for each matrix its candidates, the probe first; tokens: how many were probed with."""

    by_name: dict[str, list[Candidate]]
    tokens: int


def make_candidates(
    checkpoint: Checkpoint,
    formats: Mapping[str, Sequence[str]],
    texts: np.ndarray,
    store: TileStore,
    *,
    threads: int | None = None,
    allow_nonfinite: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Candidates:
    """Quantizes the named matrices in their formats, the first of which is the probe, and measures what each costs.

    texts: int[chunks, tokens] ids; some of the chunks are kept for probing, so that what is measured was not calibrated for.
    Raises CalibrationError, NonFiniteError, OutputError and what running a checkpoint raises.
    """
    seen, probed = split_texts(checkpoint, texts)
    run = finite_checkpoint(checkpoint) if allow_nonfinite else checkpoint
    with ExitStack() as stack:
        stack.enter_context(naming_weights(checkpoint))
        probes = stack.enter_context(Probes(run, probed, threads, progress))
        work = _Pass(checkpoint, formats, store, probes, threads or logical_processors(), allow_nonfinite, progress)
        calibration = stack.enter_context(Calibration(run, seen, threads=threads, progress=work.ran))
        return Candidates(work.run(calibration), int(probed.size))


def split_texts(checkpoint: Checkpoint, texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(chunks to calibrate with, int[n, CHUNK] ids to probe with: beginnings of other chunks). A single chunk serves both."""
    chunks, tokens = texts.shape
    wanted = min(max(1, probing_tokens(checkpoint) // min(tokens, CHUNK)), max(1, chunks // 8))
    at = ((np.arange(wanted) + 0.5) * chunks / wanted).astype(int)
    seen = np.delete(texts, at, axis=0) if chunks > wanted else texts
    return seen, texts[at, :CHUNK]


def estimated_multiplications(checkpoint: Checkpoint, formats: Mapping[str, Sequence[str]], texts: np.ndarray) -> float:
    """About how many multiplications `make_candidates` takes, in those of a float32 matrix product. For telling how long."""
    seen, probed = split_texts(checkpoint, texts)
    tensors = checkpoint.tensors
    layers = [t for t in tensors.values() if not t.vector and t.name not in (EMBEDDING, HEAD)]
    body = float(sum(t.size for t in layers))
    head = tensors.get(HEAD) or tensors[EMBEDDING]
    run = seen.size * (body + sum(t.columns**2 / 2 for t in layers) / 2)  # about two matrices share an input
    probing = probed.size * (len(layers) / 2 * body + len(layers) * 0.4 * head.size)
    return run + probing + _quantizing(formats, tensors)


def _quantizing(formats: Mapping[str, Sequence[str]], tensors: Mapping[str, Tensor]) -> float:
    """Multiplications of quantizing matrices in several formats each."""
    return sum(quantizing_multiplications(tensors[name], _has_inputs(name, tensors)) * len(each) for name, each in formats.items())


def _has_inputs(name: str, tensors: Mapping[str, Tensor]) -> bool:
    return name != EMBEDDING or HEAD not in tensors


class _Pass:
    """The one pass."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        formats: Mapping[str, Sequence[str]],
        store: TileStore,
        probes: Probes,
        threads: int,
        allow_nonfinite: bool,
        progress: Progress,
    ):
        self._tensors, self._formats, self._store, self._probes = checkpoint.tensors, formats, store, probes
        self._threads, self._allow, self._progress = threads, allow_nonfinite, progress
        self._tied = HEAD not in checkpoint.tensors
        self._found: dict[str, list[Candidate]] = {}
        self._waiting = list(probes.sections[:-1])
        self._divergences: dict[str, float] = {}
        self._input_error = 0.0
        self._streams = 1
        self._ran = self._to_run = self._done = 0.0
        self._to_do = self._expected()

    def run(self, calibration: Calibration) -> dict[str, list[Candidate]]:
        if EMBEDDING in self._formats:
            self._embedding()
        calibration.run(self._consume, lambda each: any(name in self._formats for name in each.names))
        self._price()
        return {name: self._found[name] for name in self._formats if name in self._found}

    # ---- sections ----------------------------------------------------------------------------------------------------

    def _embedding(self) -> None:
        """What the embedding costs as a table of inputs. Its inputs are not known yet, or never will be: it is searched."""
        tensor, formats = self._tensors[EMBEDDING], self._formats[EMBEDDING]
        if self._tied:
            probe = self._quantized(tensor, formats[0], Inputs(), "search")
            self._input_error = probe.weight_error
            changes = [probe.tensor]
        else:
            self._found[EMBEDDING] = [self._quantized(tensor, name, Inputs(), "search") for name in formats]
            changes = [self._found[EMBEDDING][0].tensor]
        self._pass_sections("embed", changes)

    def _consume(self, inputs: list[InputStatistics]) -> None:
        section = inputs[0].section
        changes: list[Tensor] = []
        for each in stacks(inputs):
            names = each[0].names
            tied = self._tied and EMBEDDING in names
            known = [known_inputs(one, TIED_DAMPING if tied else DAMPING) for one in each]
            for name in names:
                if name in self._formats and name not in self._found:
                    tensor = self._tensors[name]
                    self._found[name] = [self._quantized(tensor, form, known, "feedback") for form in self._formats[name]]
                    changes.append(self._found[name][0].tensor)
                    tensor.release()
        if section == "head":
            self._pass_sections(None)
            self._divergences = self._probes.head({_HEAD: (None, changes[0])} if changes else None, self._advance)
        else:
            self._pass_sections(section, changes)

    def _pass_sections(self, last: str | None, changes: Iterable[Tensor] = ()) -> None:
        """Takes the probes through all sections up to the named one, in which matrices change; None: through all that are left."""
        changes = list(changes)
        while self._waiting:
            section = self._waiting.pop(0)
            here = changes if section == last else []
            self._probes.section(section, here)
            self._streams += len(here)
            self._advance(self._probes.cost(section, self._streams))
            for change in here:
                change.release()
            if section == last:
                return

    def _quantized(self, tensor: Tensor, form: str, known: Inputs | list[Inputs], method: str) -> Candidate:
        made = TensorQuantizer(tensor, form, known, method, threads=self._threads, allow_nonfinite=self._allow)
        recorded: dict[str, Any] = {"source": tensor.format}
        cost = quantizing_multiplications(tensor, method == "feedback") / tensor.size
        stored = self._store.put(tensor.name, tensor.shape, form, made.pieces(lambda n: self._advance(n * cost)), recorded)
        recorded |= {"cosine": made.measure.cosine, "nmse": made.measure.nmse, "method": made.method}
        stored.release()
        loss = made.measure.error if made.loss is None else made.loss
        return Candidate(stored, loss, made.measure.error, made.measure.replaced)

    # ---- what it costs -----------------------------------------------------------------------------------------------

    def _price(self) -> None:
        """From the probe's divergence to that of the other formats."""
        for name, candidates in self._found.items():
            tied = self._tied and name == EMBEDDING
            measured = self._divergence(_HEAD if tied or name == HEAD else name)
            probe = candidates[0]
            for each in candidates:
                each.cost = measured * each.loss / probe.loss if probe.loss > 0 else 0.0
                if tied and self._input_error > 0:
                    each.cost += self._divergence(name) * each.weight_error / self._input_error

    def _divergence(self, name: str) -> float:
        """What was measured: 0 where rounding makes it less, and more than any that a model has where predictions have become NaN."""
        found = self._divergences.get(name, 0.0)
        return max(found, 0.0) if np.isfinite(found) else _RUINED

    # ---- how far -----------------------------------------------------------------------------------------------------

    def ran(self, what: str, done: float, total: float) -> None:
        """Called by the calibration."""
        if what == "text":
            self._ran, self._to_run = done, total
            self._advance(0)
        else:
            self._progress(what, done, total)

    def _expected(self) -> float:
        """All that `_advance` will be called with."""
        total, streams = 0.0, 1
        for section in self._probes.sections:
            names = [name for name in self._probes.names(section) if name in self._formats]
            streams += 0 if section == "head" else len(names)
            total += self._probes.cost(section, streams)
        return total + _quantizing(self._formats, self._tensors)

    def _advance(self, cost: float) -> None:
        self._done += cost
        total = self._to_run + self._to_do
        self._progress("layers", min(self._ran + self._done, total), total)
