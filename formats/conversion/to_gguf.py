"""A checkpoint as a GGUF file that llama.cpp and others load: the same values, bit for bit, wherever GGUF has the type."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ... import __version__
from ...quant.block import format_names, get_format
from ..checkpoint import Checkpoint
from ..gguf.values import ValueType
from ..gguf.writer import GGUFWriter
from ..rope import DYNAMIC_FACTOR
from ..tensor import Tensor, block_format
from ..tensor_types import BY_NAME
from ..tokenizer.to_gguf import gguf_keys
from .convert import ConversionResult, beyond_f16, files_nbytes, inputs, plan, replacement_note, requantization_note
from .recipe import Choice, Recipe, RecipeError
from .stream import Job, can_widen
from .targets import by_parts, main_format, planned, targets, write_tensors

_KEPT = ("halfbyte.rope.", "halfbyte.eos_token_ids")
"""Keys of ours that say what GGUF has no word for; other programs pass over them."""


def export_gguf(
    checkpoint: Checkpoint,
    output: str | os.PathLike[str],
    recipe: Recipe | None = None,
    *,
    threads: int | None = None,
    allow_nonfinite: bool = False,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> ConversionResult:
    """Writes a checkpoint as a GGUF file, whole or not at all. Without a recipe every tensor keeps its format if GGUF has it.

    Arguments and errors as in `convert.convert`; RecipeError also for weights without an architecture.
    """
    if checkpoint.family is None:
        raise RecipeError(f"{checkpoint.path.name}: holds weights only; a GGUF file needs the config.json and tokenizer.json of its model")
    if recipe is not None:
        recipe.check_without_inputs()
    found = targets(checkpoint, "gguf")
    jobs = [planned(target, lambda tensor: _plan(tensor, recipe)) for target in found]
    main = recipe.asked if recipe else main_format(jobs)
    result = ConversionResult(Path(output), "gguf", main, files_nbytes(checkpoint))
    result.notes += requantization_note(by_parts(found, jobs))
    metadata = gguf_metadata(checkpoint, main, result.notes)
    with GGUFWriter(output, inputs=inputs(checkpoint)) as writer:
        for key, value in metadata.items():
            writer.add(key, value, *_type(key))
        for job, _ in jobs:
            writer.declare(job.tensor.name, job.tensor.shape, _gguf_type(job.format))
        write_tensors(writer, found, jobs, result, threads, allow_nonfinite, advance)
    result.bytes_after = os.stat(output).st_size
    result.notes += replacement_note(result)
    return result


def _plan(tensor: Tensor, recipe: Recipe | None) -> tuple[Job, Choice]:
    job, choice = plan(tensor, recipe) if recipe else _as_it_is(tensor)
    method = job.method
    if _gguf_type(choice.format, missing="") == "" or (not tensor.vector and tensor.columns % BY_NAME[_gguf_type(choice.format)].block):
        choice, method = _instead(tensor, choice), None
    return Job(tensor, choice.format, choice.kept, method, "rows"), choice


def _as_it_is(tensor: Tensor) -> tuple[Job, Choice]:
    """The format that a tensor has, if it is one of ours; else the next that loses nothing, or f16."""
    if tensor.vector:
        choice = Choice("f32", "one dimension: float32", kept=tensor.format == "f32")
    elif block_format(tensor.format) is not None:
        choice = Choice(tensor.format, kept=True)
    elif tensor.format == "f64" or beyond_f16(tensor):
        choice = Choice("f32", f"{tensor.format} in the source")
    else:
        choice = Choice("f16", f"{tensor.format} in the source")
    return Job(tensor, choice.format, choice.kept), choice


def _instead(tensor: Tensor, choice: Choice) -> Choice:
    """What a tensor gets whose format GGUF does not have, or does not have for so many columns."""
    form = get_format(choice.format)
    fits = tensor.columns % get_format("q8_0").block_columns == 0
    missing = f"GGUF has no {form.name}"
    if form.gguf_type is None and form.integers and fits:
        others = [get_format(name) for name in reversed(format_names())]  # from the narrowest
        found = next((other.name for other in others if other.gguf_type is not None and can_widen(form, other)), None)
        if choice.kept:
            if found is None:
                return Choice("q8_0", f"{missing}: quantized again to 8 bits")
            exact = type(form.scales) is type(get_format(found).scales)
            return Choice(found, f"{missing}: the same {'values' if exact else 'codes, scales as f16'} in {found}", kept=True)
        if found is None and np.isin(form.levels, get_format("iq4_nl").levels).all():
            found = "iq4_nl"
        return Choice(found or "q8_0", f"{choice.reason}; {missing}".removeprefix("; "))
    why = missing if form.gguf_type is None else f"rows of {tensor.columns} are not whole blocks of {form.name}"
    return Choice("f32" if beyond_f16(tensor) else "f16", why, kept=False)


def _gguf_type(name: str, missing: str | None = None) -> str:
    found = get_format(name).gguf_type
    if found is None and missing is None:
        raise AssertionError(f"{name} has no GGUF type")
    return (found or missing or "").lower()


def _type(key: str) -> tuple[ValueType, ...]:
    """Types that readers insist on and that a Python value does not tell."""
    if key == "general.sampling.top_k":
        return (ValueType.I32,)
    return ()


def gguf_metadata(checkpoint: Checkpoint, main: str, notes: list[str]) -> dict[str, Any]:
    """GGUF's metadata: the checkpoint's without our own keys, the tokenizer's from tokenizer.json if GGUF's are not there."""
    own = ("halfbyte.", "tokenizer.huggingface.", "general.alignment", "split.")
    metadata = checkpoint.metadata
    keys: dict[str, Any] = {"general.architecture": checkpoint.architecture, "general.type": "model"}
    keys |= {key: metadata[key] for key in metadata if not key.startswith(own) or key.startswith(_KEPT)}
    tokenizer = checkpoint.tokenizer
    if tokenizer.json is not None and "tokenizer.ggml.tokens" not in metadata:
        generation = {
            "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": metadata.get("halfbyte.eos_token_ids", metadata.get("tokenizer.ggml.eos_token_id")),
            "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        }
        generation = {key: list(value) if isinstance(value, (list, np.ndarray)) else value for key, value in generation.items()}
        keys |= gguf_keys(
            tokenizer.json,
            tokenizer.config,
            generation=generation,
            chat_template=tokenizer.chat_template,
            vocabulary_size=metadata.count(f"{checkpoint.architecture}.vocab_size"),
            notes=notes,
        )
    elif "tokenizer.ggml.tokens" not in metadata:
        notes.append("there is no tokenizer: other programs will not run the file")
    if DYNAMIC_FACTOR in metadata:
        notes.append("GGUF has no dynamic rotary scaling: it is left out, so texts beyond the trained context will read otherwise")
    keys["general.quantized_by"] = f"Halfbyte {__version__}"
    keys["general.quantization_version"] = 2
    keys["general.file_type"] = get_format(main if get_format(main).gguf_type else "f16").gguf_file_type
    return keys
