"""A checkpoint as a Hugging Face folder: plain floats in safetensors, config.json and the tokenizer's files; transformers loads it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...quant.block import get_format
from ..atomic import atomic_folder
from ..checkpoint import EOS_IDS, Checkpoint
from ..decoder import HEAD
from ..errors import OutputError
from ..family import Family
from ..metadata import Metadata
from ..safetensors.writer import ShardedWriter
from ..tensor import Tensor
from ..tokenizer.from_gguf import checked, dumps, from_gguf
from .convert import ConversionResult, beyond_f16, files_nbytes, inputs, replacement_note, requantization_note
from .recipe import Choice, Recipe, RecipeError, method_of
from .stream import Job
from .targets import by_parts, main_format, planned, targets, write_tensors

PLAIN = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
"""Formats that weights can have in the folder, and what config.json calls them."""
SHARD_BYTES = 5_000_000_000
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def export_huggingface(
    checkpoint: Checkpoint,
    output: str | os.PathLike[str],
    recipe: Recipe | None = None,
    *,
    threads: int | None = None,
    allow_nonfinite: bool = False,
    advance: Callable[[int], None] = lambda nbytes: None,
    shard_bytes: int = SHARD_BYTES,
) -> ConversionResult:
    """Writes a checkpoint as a Hugging Face folder, whole or not at all.

    Plain weights keep their type; quantized ones are written as f16 (f32 if f16 cannot hold them), 8-bit floats as bf16. A recipe
    with a plain format (--bits 16, --format f32) says which type matrices get; one with integers quantizes them first, so that the
    folder holds what the quantized file would hold. Arguments and errors as in `convert.convert`.
    """
    found = checkpoint.family
    if found is None:
        raise RecipeError(f"{checkpoint.path.name}: holds weights only; a folder needs the config.json and tokenizer.json of their model")
    if recipe is not None:
        recipe.check_without_inputs()
    made = targets(checkpoint, "huggingface", _spelled)
    jobs = [planned(target, lambda tensor: _plan(tensor, recipe)) for target in made]
    main = main_format(jobs)
    result = ConversionResult(Path(output), "safetensors", recipe.asked if recipe else main, files_nbytes(checkpoint))
    result.notes += requantization_note(by_parts(made, jobs))
    config = config_json(checkpoint, found, PLAIN[main])
    files = tokenizer_json_files(checkpoint)
    with atomic_folder(output, inputs=inputs(checkpoint)) as folder:
        with ShardedWriter(folder, shard_bytes=shard_bytes) as writer:
            for job, _ in jobs:
                writer.declare(job.tensor.name, job.tensor.shape, job.format)
            write_tensors(writer, made, jobs, result, threads, allow_nonfinite, advance)
        for name, value in {"config.json": config, "generation_config.json": generation_json(checkpoint), **files}.items():
            _write(folder / name, value)
        result.bytes_after = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    result.notes += replacement_note(result)
    return result


def _plan(tensor: Tensor, recipe: Recipe | None) -> tuple[Job, Choice]:
    choice = Choice(_plain_type(tensor), "one dimension: as it is" if tensor.vector else "")
    through = method = None
    if recipe is not None and not tensor.vector:
        wanted = recipe.choose(tensor)
        form = get_format(wanted.format)
        if form.integers:
            if not wanted.kept:
                through, method = wanted.format, method_of(form, recipe)
            choice = Choice(choice.format, wanted.reason)
        elif wanted.format in PLAIN:
            choice = Choice(wanted.format, wanted.reason)
    if choice.format == "f16" and tensor.format != "f16" and beyond_f16(tensor):
        choice = Choice("f32", "holds weights beyond f16's range")
    kept = through is None and tensor.format == choice.format
    return Job(tensor, choice.format, kept, method, "rows", through=through), choice


def _plain_type(tensor: Tensor) -> str:
    if tensor.format in PLAIN:
        return tensor.format
    if tensor.vector or tensor.format == "f64":
        return "f32"
    return "bf16" if tensor.format.startswith("f8") else "f16"


def _spelled(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


def config_json(checkpoint: Checkpoint, found: Family, dtype: str) -> dict[str, Any]:
    """config.json: the source's own if it has one, else what the family makes of the metadata."""
    if checkpoint.config is not None and "text_config" not in checkpoint.config:
        config = {
            key: value for key, value in checkpoint.config.items() if key not in ("quantization_config", "compression_config", "dtype")
        }
        config["tie_word_embeddings"] = HEAD not in checkpoint.tensors
    else:
        config = found.to_huggingface(checkpoint.metadata, checkpoint.tensors) | _token_ids(checkpoint.metadata)
    return config | {"torch_dtype": dtype}


def generation_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """generation_config.json: special tokens, and how the model's makers sample from it if they said."""
    metadata = checkpoint.metadata
    sampling = {
        theirs: metadata[f"general.sampling.{ours}"] for ours, theirs in _SAMPLING.items() if f"general.sampling.{ours}" in metadata
    }
    return _token_ids(metadata) | ({"do_sample": True, **sampling} if sampling else {})


def _token_ids(metadata: Metadata) -> dict[str, Any]:
    ids: dict[str, Any] = {}
    for ours, theirs in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
        if metadata.has(f"tokenizer.ggml.{ours}_token_id"):
            ids[theirs] = metadata.count(f"tokenizer.ggml.{ours}_token_id", low=0)
    ends = [int(number) for number in metadata.get(EOS_IDS, [], list)]
    if len(ends) > 1:
        ids["eos_token_id"] = ends
    return ids


def tokenizer_json_files(checkpoint: Checkpoint) -> dict[str, Any]:
    """tokenizer.json (bytes) and tokenizer_config.json (a dict); {} for a checkpoint without a tokenizer."""
    tokenizer, metadata = checkpoint.tokenizer, checkpoint.metadata
    if tokenizer.json is not None:
        raw, config = checked(tokenizer.json), dict(tokenizer.config)
    elif "tokenizer.ggml.tokens" in metadata:
        raw, config = dumps(from_gguf(metadata)), _tokenizer_config(metadata)
    else:
        return {}
    config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    template = tokenizer.chat_template
    if isinstance(template, str):
        config["chat_template"] = template
    elif isinstance(template, dict):
        config["chat_template"] = [{"name": name, "template": text} for name, text in template.items()]
    return {"tokenizer.json": raw, "tokenizer_config.json": config}


def _tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    for ours, theirs in _SPECIAL.items():
        number = metadata.count(f"tokenizer.ggml.{ours}_token_id", low=0, default=None)
        if number is not None and number < len(tokens):
            config[theirs] = tokens[number]
    if metadata.has("tokenizer.ggml.add_bos_token"):
        config["add_bos_token"] = metadata.require("tokenizer.ggml.add_bos_token", bool)
    architecture = metadata.get("general.architecture", "", str)
    length = metadata.count(f"{architecture}.context_length", default=None)
    return config | ({} if length is None else {"model_max_length": length})


def _write(path: Path, value: bytes | Mapping[str, Any]) -> None:
    if isinstance(value, bytes):
        data = value
    else:
        data = json.dumps(value, indent=2, ensure_ascii=False, default=_number).encode("utf-8", "backslashreplace") + b"\n"
    try:
        path.write_bytes(data)
    except OSError as error:
        raise OutputError(path.parent, f"cannot be written: {error.strerror or error}", needed=len(data)) from None


def _number(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} in JSON")
