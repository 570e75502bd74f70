"""What a command line of qconvert asks for: blocks by a rule, by what matrices read, or a mix of formats that meets a goal."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..terminal.console import UsageError

if TYPE_CHECKING:
    from ...engine.convert.mix import Goal
    from ...formats.checkpoint import Checkpoint
    from ...formats.conversion.recipe import Recipe

BITS = 4.75
"""Bits per weight, all tensors and scales counted, of what --bits 4 gives: nl4 has 4.25, nl5 5.25, and half a bit is room for what is
worth more."""
RULE = ((r"attn_[kv]\.weight$", "q6_r"),)
"""What nl4 is mixed with where nothing is measured: keys and values, few weights that cost much in every model we have looked at."""
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


@dataclass(frozen=True)
class Wishes:
    """The options that say how to quantize."""

    to: str = "hbf"
    bits: int | None = None
    format: str | None = None
    method: str | None = None
    size: str | None = None
    bpw: float | None = None
    max_kl: float | None = None
    fast: bool = False
    calibrate: str | None = None
    tensors: tuple[str, ...] = ()
    recipe: Path | None = None


@dataclass(frozen=True)
class Task:
    """What is to be done.

    recipe  None to write the weights as they are
    way     "plain" (formats.convert), "inputs" (engine.convert_feedback) or "goal" (engine.convert_mix)
    goal    for way "goal"
    label   what the output is named after
    """

    recipe: Recipe | None
    way: Literal["plain", "inputs", "goal"]
    goal: Goal | None = None
    label: str = ""
    notes: list[str] = field(default_factory=list)


def make_task(checkpoint: Checkpoint, wishes: Wishes) -> Task:
    """Raises UsageError for options that do not go together, RecipeError and InputError for what they name."""
    from ...formats.conversion.recipe import Recipe

    recipe = read_wishes(checkpoint, wishes)
    goal = _goal(wishes)
    if goal is not None:
        _check_goal(wishes)
        return Task(Recipe(method="feedback", tensors=recipe.tensors if recipe else ()), "goal", goal, goal_label(wishes))
    if recipe is None:
        return Task(None, "plain", label="dequantized" if wishes.to == "safetensors" else _main_format(checkpoint))
    if wishes.fast and (recipe.method == "feedback" or wishes.calibrate is not None):
        raise UsageError("--fast looks at no text: leave out --calibrate and --method feedback, or --fast")
    if recipe.method == "nearest" and wishes.calibrate is not None:
        raise UsageError("--method nearest looks at no text: leave --calibrate out, or choose search or feedback")
    if recipe.method == "feedback" or (recipe.method is None and wishes.calibrate is not None):
        return _by_inputs(recipe, wishes)
    if wishes.calibrate is not None:
        return Task(recipe, "inputs", label=recipe.asked)
    if recipe.method is not None or not _few_bits(recipe) or _has_lost(checkpoint):
        return Task(recipe, "plain", label=recipe.asked)
    reason = None if wishes.fast else _why_not_run(checkpoint)
    if wishes.fast or reason is not None:
        notes = [f"{reason}: quantized without looking at what the weights do"] if reason else []
        if _free(recipe, wishes):
            return Task(Recipe(format="nl4", tensors=(*RULE, *recipe.tensors)), "plain", label="int4", notes=notes)
        return Task(recipe, "plain", label=recipe.asked, notes=notes)
    return _by_inputs(recipe, wishes)


def _free(recipe: Recipe, wishes: Wishes) -> bool:
    """True if nothing but four bits was asked for, and any formats will do."""
    return recipe.format is None and recipe.bits == 4 and wishes.to == "hbf"


def _by_inputs(recipe: Recipe, wishes: Wishes) -> Task:
    """The best way: a mix where just a number of bits is asked for, else error feedback in what is asked for."""
    from ...engine.convert.mix import Goal
    from ...formats.conversion.recipe import Recipe
    from .calibrated import holds_statistics

    if _free(recipe, wishes):
        if wishes.calibrate is None or not holds_statistics(wishes.calibrate):
            return Task(Recipe(method="feedback", tensors=recipe.tensors), "goal", Goal(bits_per_weight=BITS), "int4")
        # Statistics cannot tell what a matrix is worth.
        return Task(Recipe(format="nl4", method="feedback", tensors=(*RULE, *recipe.tensors)), "inputs", label="int4")
    if wishes.to == "gguf" and recipe.format is None and recipe.bits == 4:
        recipe = replace(recipe, bits=None, format="iq4_nl")  # as large as q4_0, and far better
    return Task(replace(recipe, method="feedback"), "inputs", label=recipe.asked)


def _few_bits(recipe: Recipe) -> bool:
    """True if error feedback is worth its time: at 8 bits rounding costs less than int8 activations do."""
    from ...quant.block import get_format

    form = get_format(recipe.asked)
    return form.integers and form.bits_per_weight() < 8


def _has_lost(checkpoint: Checkpoint) -> bool:
    """True for a source of fewer than 8 bits: it has lost what error feedback could save, and what it still has is kept."""
    from ...formats.conversion.convert import is_quantized

    return any(is_quantized(tensor.format) and tensor.nbytes < tensor.size for tensor in checkpoint.tensors.values())


def _why_not_run(checkpoint: Checkpoint) -> str | None:
    """Why the model cannot be run to quantize it; None if it can."""
    name = checkpoint.path.name
    if checkpoint.architecture is None:
        return f"{name} holds weights only, no config.json and tokenizer.json"
    return None if checkpoint.tokenizer else f"{name} has no tokenizer, so no text can be run"


def _goal(wishes: Wishes) -> Goal | None:
    given = [name for name, value in (("--size", wishes.size), ("--bpw", wishes.bpw), ("--max-kl", wishes.max_kl)) if value is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)}: give one of them")
    if not given:
        return None
    from ...engine.convert.mix import Goal

    if wishes.size is not None:
        return Goal(nbytes=parse_size(wishes.size))
    return Goal(bits_per_weight=wishes.bpw) if wishes.bpw is not None else Goal(kl=wishes.max_kl)


def _check_goal(wishes: Wishes) -> None:
    name = "--size" if wishes.size is not None else "--bpw" if wishes.bpw is not None else "--max-kl"
    from .calibrated import holds_statistics

    for option, given in (("--bits", wishes.bits), ("--format", wishes.format), ("--fast", wishes.fast or None)):
        if given is not None:
            raise UsageError(f"{name} and {option}: give one of them")
    if wishes.method not in (None, "feedback"):
        raise UsageError(f"{name} goes with --method feedback only")
    if wishes.to != "hbf":
        raise UsageError(f"{name}: a mix of formats is written as .hbf; for --to {wishes.to} choose --format, such as iq4_nl")
    if wishes.calibrate is not None and holds_statistics(wishes.calibrate):
        raise UsageError(f"{name}: needs a text that the model can be run on; {wishes.calibrate} holds statistics")


def parse_size(text: str) -> int:
    """Bytes of "90MB", "1.2 GB", "85MiB" or "90000000". Raises UsageError."""
    from ...formats.errors import printable

    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or len(text) > 40:
        raise UsageError(f"--size {printable(text, 60)}: must be a number of bytes, such as 90MB or 1.2GB")
    return int(float(found[1]) * unit)


def goal_label(wishes: Wishes) -> str:
    """What a file made for a goal is named after: "90MB", "4.6bpw", "kl0.05"."""
    if wishes.size is not None:
        return f"{parse_size(wishes.size) / 1e6:.6g}MB"
    return f"{wishes.bpw:g}bpw" if wishes.bpw is not None else f"kl{wishes.max_kl:g}"


def read_wishes(checkpoint: Checkpoint, wishes: Wishes) -> Recipe | None:
    """What was asked for, on the command line before what is in a recipe file; None to write the weights as they are."""
    from ...formats.conversion.recipe import Recipe
    from ...formats.conversion.recipe_file import read_recipe

    found = Recipe() if wishes.recipe is None else read_recipe(wishes.recipe)
    if wishes.bits is not None or wishes.format is not None:
        found = replace(found, bits=wishes.bits, format=wishes.format)
    if wishes.method is not None:
        found = replace(found, method=wishes.method)
    named = []
    for text in wishes.tensors:
        pattern, equals, name = text.rpartition("=")
        if not equals or not pattern:
            raise UsageError(f"--tensor {text}: must be REGEX=FORMAT, such as 'attn_v=q6_r'")
        named.append((pattern, name))
    found = replace(found, tensors=(*found.tensors, *named))
    if found.bits is None and found.format is None:
        as_it_is = wishes.to == "safetensors" or (wishes.to == "gguf" and checkpoint.kind == "hbf")
        if as_it_is and found.method is not None:
            raise UsageError("--method: says how to quantize; give --bits or --format with it")
        if as_it_is and found.tensors:
            raise UsageError("--tensor: says how to quantize; give --bits or --format with it")
        if as_it_is:
            return None
        found = replace(found, bits=4)
    return found


def _main_format(checkpoint: Checkpoint) -> str:
    """The format that most weights have."""
    weights: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        weights[tensor.format] = weights.get(tensor.format, 0) + tensor.size
    return max(weights, key=lambda name: weights[name])
