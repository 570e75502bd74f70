"""Conversion to a goal: a size, bits per weight, or a KL divergence. Every matrix gets the format that is worth its bytes.

    candidates   every matrix in several formats, and what each would cost the predictions (candidates.py)
    allocation   the choice that is best for the goal (allocation.py)
    output       the chosen candidates as a .hbf file (formats/conversion/convert.py), and the plan as a recipe that gives them again

For a divergence, what the choice really costs is measured, by running it as the engine does, and the choice is corrected until it is
just below what was asked.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...formats.atomic import check_output
from ...formats.checkpoint import Checkpoint
from ...formats.conversion.convert import (
    ConversionResult,
    convert,
    file_nbytes,
    files_nbytes,
    inputs,
    is_quantized,
    plan,
    replacement_note,
    usable,
)
from ...formats.conversion.recipe import Recipe, RecipeError, patterns
from ...formats.conversion.tile_store import TileStore
from ...formats.errors import OutputError
from ...formats.hbf.structure import PAGE
from ...formats.tensor import Tensor
from ...formats.tile_tensor import tiles_nbytes
from ...quant.block import get_format
from ..measure.divergence import DivergenceMeter
from .allocation import Option, Options, allocate, allocate_cost, smallest, total
from .candidates import Candidate, Candidates, make_candidates
from .non_finite import finite_checkpoint

LADDER = ("nl4", "nl5", "q6_r", "q8_0")
"""Formats that are mixed, from the smallest, which is the one that is probed."""
_FINE_BITS = 6.0
"""Average bits from which on q8_0 is worth trying: below, no matrix gets it."""
_FINE_KL = 0.02
"""Nats up to which it is tried at once: there six bits everywhere may not be enough."""
_WITHIN = 0.99
"""Share of a goal that must be reached."""
_MOST_TRIES = 10
"""Plans that are measured for a divergence, besides the finest and the coarsest."""

Progress = Callable[[str, float, float], None]
"""progress(what, done, total): "kernels" in number, "layers" and "measuring" in multiplications."""


@dataclass(frozen=True)
class Goal:
    """What the file is to be, one of these. nbytes: its size; bits_per_weight: of all tensors; kl: mean KL divergence, nats per token."""

    nbytes: int | None = None
    bits_per_weight: float | None = None
    kl: float | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.nbytes, self.bits_per_weight, self.kl) if value is not None]
        if len(given) != 1:
            raise RecipeError("one goal is needed: a size, bits per weight, or a KL divergence")
        if not 0 < given[0] < 1 << 62:
            raise RecipeError(f"{self}: must be {'more than nothing' if not given[0] > 0 else 'less than that'}")

    def __str__(self) -> str:
        if self.nbytes is not None:
            return f"a file of {self.nbytes / 1e6:.6g} MB"
        return f"{self.bits_per_weight:.4g} bits per weight" if self.bits_per_weight is not None else f"a KL divergence of {self.kl:.4g}"


@dataclass(frozen=True)
class Planned:
    """One matrix of the plan. costs: KL divergence, nats per token, that each format would add; nbytes: what each would take."""

    name: str
    format: str
    costs: dict[str, float]
    nbytes: dict[str, int]


@dataclass
class MixResult:
    """What a conversion to a goal did.

    recipe     gives the same formats again
    planned    every matrix that was chosen for
    predicted  summed cost of the plan: KL divergence by weights alone, as far as the costs of single matrices add up
    measured   KL divergence of the model as it is used, where that was the goal
    """

    conversion: ConversionResult
    recipe: Recipe
    planned: list[Planned]
    predicted: float
    measured: float | None = None
    notes: list[str] = field(default_factory=list)


def convert_to_goal(
    checkpoint: Checkpoint,
    output: str | os.PathLike[str],
    recipe: Recipe,
    goal: Goal,
    texts: np.ndarray,
    *,
    ids: np.ndarray | None = None,
    chunk: int = 512,
    provenance: Mapping[str, Any] | None = None,
    threads: int | None = None,
    allow_nonfinite: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> MixResult:
    """Writes a checkpoint as a .hbf file that meets a goal as closely as its matrices allow, and never passes it.

    recipe  its patterns give matrices a format of their own; its bits, format and method are not looked at
    texts   int[chunks, tokens] ids to calibrate and to probe with, see calibration_text.calibration_tokens
    ids     int[n] ids of the text on which a divergence is measured, in chunks of `chunk` tokens (needed for that goal)
    The rest as in formats.convert.convert. Needed on disk beside the output are all candidates: about as much as the weights in bf16, half
    as much again with q8_0. A divergence that turns out to need q8_0, where it was not tried, makes a second pass over everything.

    Raises RecipeError for a goal that cannot be reached, saying what can be; CalibrationError for a model that cannot be run; and as
    convert.
    """
    if goal.kl is not None and ids is None:
        raise RecipeError("a KL divergence can only be reached where a text is given to measure it on")
    mix = _Mix(checkpoint, output, recipe, goal, provenance, threads, allow_nonfinite, progress)
    mix.check()
    try:
        return mix.run(texts, ids, chunk)
    except _CoarseError:
        mix.formats = _formats(checkpoint, recipe, LADDER)
        return mix.run(texts, ids, chunk)


def candidate_formats(checkpoint: Checkpoint, recipe: Recipe, goal: Goal) -> dict[str, tuple[str, ...]]:
    """By names of the matrices that are chosen for, the formats that they may get."""
    fine = (goal.bits_per_weight is not None and goal.bits_per_weight >= _FINE_BITS) or (goal.kl is not None and goal.kl <= _FINE_KL)
    if goal.nbytes is not None:
        weights = sum(tensor.size for tensor in checkpoint.tensors.values())
        fine = 8 * goal.nbytes >= _FINE_BITS * weights
    return _formats(checkpoint, recipe, LADDER if fine else LADDER[:-1])


def _formats(checkpoint: Checkpoint, recipe: Recipe, ladder: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The same for any ladder of formats."""
    found: dict[str, tuple[str, ...]] = {}
    for tensor in usable(checkpoint)[0]:
        job, _ = plan(tensor, replace(recipe, bits=None, format=LADDER[0]))
        if not tensor.vector and get_format(job.format).integers:
            _, named = recipe.named(tensor.name)
            found[tensor.name] = ladder if named is None else (named,)
    return found


class _CoarseError(RecipeError):
    """The finest formats that were tried are too coarse for the goal, and there are finer ones."""


class _Mix:
    """One conversion to a goal."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        output: str | os.PathLike[str],
        recipe: Recipe,
        goal: Goal,
        provenance: Mapping[str, Any] | None,
        threads: int | None,
        allow_nonfinite: bool,
        progress: Progress,
    ):
        self._checkpoint, self._output, self._goal, self._recipe = checkpoint, output, goal, recipe
        self._threads, self._allow, self._progress = threads, allow_nonfinite, progress
        self._provenance = {"halfbyte.calibration": json.dumps(dict(provenance or {}) | {"goal": str(goal)})}
        self.formats = candidate_formats(checkpoint, recipe, goal)
        if not self.formats:
            raise RecipeError(f"{checkpoint.path.name} has no matrix whose format could be chosen")

    def run(self, texts: np.ndarray, ids: np.ndarray | None, chunk: int) -> MixResult:
        """All of it, with the formats that there are now."""
        with TileStore(Path(os.path.abspath(self._output)).parent) as store:
            candidates = make_candidates(
                self._checkpoint, self.formats, texts, store, threads=self._threads, allow_nonfinite=self._allow, progress=self._progress
            )
            if ids is None or self._goal.kl is None:
                return self.write(self.for_bytes(candidates), candidates)
            return self.write(*self.for_kl(candidates, ids, chunk))

    # ---- goals -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises RecipeError for a size or a number of bits that no choice can have, and OutputError, before any work is done."""
        check_output(self._output, inputs=inputs(self._checkpoint))
        if os.path.isdir(self._output):
            raise OutputError(self._output, "is a folder; a file is to be written")
        if self._goal.kl is not None:
            return
        tensors = self._checkpoint.tensors
        options = {
            name: [Option(form, self._nbytes(tensors[name], form), -get_format(form).bits_per_weight()) for form in forms]
            for name, forms in self.formats.items()
        }
        self._allocate(options, allocate)

    def for_bytes(self, candidates: Candidates) -> dict[str, Option]:
        """The best choice for a size or a number of bits."""
        return self._allocate(self._options(candidates), allocate)

    def _allocate(self, options: Options, choose: Callable[[Options, int], dict[str, Option]]) -> dict[str, Option]:
        goal = self._goal
        if goal.bits_per_weight is not None:
            rest, weights = self._fixed()
            budget = int(goal.bits_per_weight * weights / 8) - rest
            if budget < smallest(options):
                bits = 8 * (smallest(options) + rest) / weights
                raise RecipeError(f"{goal} cannot be reached: in {LADDER[0]}, the smallest format, the model has {rounded_up(bits, 4)}")
            return choose(options, budget)
        assert goal.nbytes is not None
        least = {name: min(each, key=lambda option: option.nbytes) for name, each in options.items()}
        beside = self._file_nbytes(least) - smallest(options)
        if goal.nbytes < beside + smallest(options):
            least_size = rounded_up((beside + smallest(options)) / 1e6, 6)
            raise RecipeError(f"{goal} cannot be reached: in {LADDER[0]}, the smallest format, the file has {least_size} MB")
        while True:
            # A plan of many formats is longer than one of few, by some kilobytes of the file's head. The smallest choice fits: see above.
            chosen = choose(options, max(goal.nbytes - beside, smallest(options)))
            over = self._file_nbytes(chosen) - goal.nbytes
            if over <= 0:
                return chosen
            beside += max(over, PAGE)

    def for_kl(self, candidates: Candidates, ids: np.ndarray, chunk: int) -> tuple[dict[str, Option], Candidates, float]:
        """(the smallest choice found whose measured divergence is at most what was asked, …, the divergence)."""
        wanted = self._goal.kl
        assert wanted is not None
        options = self._options(candidates)
        finest = {name: min(each, key=lambda option: option.cost) for name, each in options.items()}
        coarsest = {name: min(each, key=lambda option: option.nbytes) for name, each in options.items()}
        run = finite_checkpoint(self._checkpoint) if self._allow else self._checkpoint
        with DivergenceMeter(run, ids, chunk, self._threads, self._progress) as meter:

            def measure(chosen: dict[str, Option]) -> float:
                return meter.measure(run.with_tensors(self._tensors(chosen, candidates)))

            best, reached = finest, measure(finest)
            if not reached <= wanted:
                if LADDER[:-1] in self.formats.values():
                    raise _CoarseError(f"{self._goal} cannot be reached without {LADDER[-1]}")
                formats = " and ".join(sorted({option.format for option in finest.values()}))
                least = rounded_up(reached, 4)
                raise RecipeError(f"{self._goal} cannot be reached: the model in {formats}, with int8 activations, has {least}")
            found = measure(coarsest)
            if found <= wanted:
                return coarsest, candidates, found
            # Divergences grow nearly in proportion with the sum of the costs. Between a sum that is too little and one that is too much the
            # next is where the line through both meets the goal; in the middle, if that has not helped.
            low, high = (total(finest), reached), (total(coarsest), found)
            for attempt in range(_MOST_TRIES):
                aim = wanted * (_WITHIN + 1) / 2
                share = (aim - low[1]) / (high[1] - low[1]) if attempt % 3 < 2 else 0.5
                sum_wanted = low[0] + min(max(share, 0.02), 0.98) * (high[0] - low[0])
                chosen = allocate_cost(options, sum_wanted)
                found = measure(chosen)
                if found <= wanted:
                    low = (total(chosen), found)
                    if found > reached:
                        best, reached = chosen, found
                    if found >= _WITHIN * wanted:
                        break
                else:
                    high = (total(chosen), found)
        return best, candidates, reached

    # ---- output ------------------------------------------------------------------------------------------------------

    def write(self, chosen: dict[str, Option], candidates: Candidates, measured: float | None = None) -> MixResult:
        """Writes the chosen candidates."""
        recipe = self._chosen_recipe(chosen)
        result = convert(
            self._checkpoint.with_tensors(self._tensors(chosen, candidates)),
            self._output,
            replace(recipe, method=None),  # what is chosen is kept as it is; nothing is left that the model would be run for
            threads=self._threads,
            allow_nonfinite=self._allow,
            provenance=self._provenance | {"halfbyte.recipe": json.dumps(recipe.to_dict())},
        )
        result.bytes_before = files_nbytes(self._checkpoint)
        again = sorted({t.format for name in chosen if is_quantized((t := self._checkpoint.tensors[name]).format)})
        if again:
            result.notes.append(f"the source is quantized already ({', '.join(again)}): convert the original if you can")
        for done in result.tensors:
            if done.name in candidates.by_name:
                picked = _candidate(candidates, done.name, done.format)
                done.source, done.kept, done.replaced = self._checkpoint.tensors[done.name].format, False, picked.replaced
                done.reason = "chosen for the goal" if done.format != result.asked else ""
        result.notes = list(dict.fromkeys([*result.notes, *replacement_note(result)]))
        planned = [
            Planned(
                name,
                option.format,
                {each.tensor.format: each.cost for each in candidates.by_name[name]},
                {each.tensor.format: each.tensor.nbytes for each in candidates.by_name[name]},
            )
            for name, option in chosen.items()
        ]
        return MixResult(result, recipe, planned, total(chosen), measured, self._far(result, measured))

    def _far(self, result: ConversionResult, measured: float | None) -> list[str]:
        """A note where the goal is not reached within a hundredth, because the matrices do not allow it."""
        goal = self._goal
        reached = measured if goal.kl is not None else result.bits_per_weight if goal.bits_per_weight is not None else result.bytes_after
        wanted = goal.kl or goal.bits_per_weight or goal.nbytes
        assert reached is not None and wanted is not None
        if reached >= _WITHIN * wanted:
            return []
        return [f"{goal} was asked for; the nearest that these matrices allow is {reached:.6g}"]

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _options(self, candidates: Candidates) -> dict[str, list[Option]]:
        return {
            name: [Option(c.tensor.format, self._nbytes(c.tensor, c.tensor.format), c.cost) for c in each]
            for name, each in candidates.by_name.items()
        }

    def _nbytes(self, tensor: Tensor, form: str) -> int:
        nbytes = tiles_nbytes(get_format(form), tensor.shape)
        return -(-nbytes // PAGE) * PAGE if self._goal.nbytes is not None else nbytes

    def _fixed(self) -> tuple[int, int]:
        """(bytes of the tensors that are not chosen for, weights of all tensors)."""
        kept = usable(self._checkpoint)[0]
        recipe = replace(self._recipe, bits=None, format=LADDER[0])
        jobs = [plan(tensor, recipe)[0] for tensor in kept if tensor.name not in self.formats]
        rest = sum(
            4 * job.tensor.size if job.tensor.vector else tiles_nbytes(get_format(job.format), job.tensor.shape)
            for job in jobs
        )
        return rest, sum(tensor.size for tensor in kept)

    def _file_nbytes(self, chosen: Mapping[str, Option]) -> int:
        return file_nbytes(self._checkpoint, self._chosen_recipe(chosen), self._provenance)

    def _chosen_recipe(self, chosen: Mapping[str, Option]) -> Recipe:
        """The plan, and behind it the patterns that were given, which also speak of matrices that were not chosen for."""
        given = self._recipe.tensors
        free = {name: option.format for name, option in chosen.items() if self._recipe.named(name)[1] is None}
        form, named = patterns(free) if free else (LADDER[0], ())
        return Recipe(format=form, method="feedback", tensors=(*named, *given))

    def _tensors(self, chosen: Mapping[str, Option], candidates: Candidates) -> dict[str, Tensor]:
        """The chosen candidates, which take the place of the checkpoint's matrices."""
        return {name: _candidate(candidates, name, option.format).tensor for name, option in chosen.items()}


def rounded_up(value: float, digits: int) -> str:
    """So many digits of a number above 0 that are no less than it, so that what a message says can be had is had when it is asked for."""
    text = f"{value:.{digits}g}"
    if float(text) >= value or not math.isfinite(value):
        return text
    return f"{float(text) + 10.0 ** (math.floor(math.log10(value)) + 1 - digits):.{digits}g}"


def _candidate(candidates: Candidates, name: str, form: str) -> Candidate:
    return next(each for each in candidates.by_name[name] if each.tensor.format == form)
