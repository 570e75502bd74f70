"""A GGUF file as a Checkpoint: rotary rows put into halves where the family interleaves them, metadata completed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..chat_template import template_of
from ..checkpoint import EOS_IDS, Checkpoint, TokenizerFiles, assemble
from ..decoder import EMBEDDING
from ..errors import InputError, printable
from ..families import family
from ..family import Family
from ..metadata import Metadata
from ..tensor import RowsTensor, Tensor
from .reader import GGUFFile


def open_gguf(path: Path) -> Checkpoint:
    """Opens a .gguf of a known architecture. Raises FileFormatError and CheckpointError."""
    with ExitStack() as stack:
        file = stack.enter_context(GGUFFile(path))
        metadata = Metadata(file.metadata, path.name)
        kind = metadata.get("general.type", "model", str)
        if kind != "model":
            raise InputError(path, f"holds a GGUF {printable(kind, 40)!r}, not a model")
        if metadata.count("split.count", low=0, default=0) > 1:
            raise InputError(path, "is one part of a split model; join the parts first (llama-gguf-split --merge)")
        found = family(metadata.require("general.architecture", str), path.name)
        values, notes = with_defaults(found, metadata, file.tensors)
        tensors = assemble(path, found, found.tensors(values), "gguf", list(file.tensors), lambda name: _tensor(file, name))
        return Checkpoint(
            path,
            "gguf",
            values,
            tensors,
            family=found,
            tokenizer=TokenizerFiles(chat_template=template_of(values), gguf=values),
            files=[path],
            notes=notes,
            closing=stack.pop_all(),
        )


def _tensor(file: GGUFFile, name: str) -> Tensor:
    entry = file.tensors[name]
    return RowsTensor(name, entry.shape, entry.type, file, entry.raw())


def with_defaults(found: Family, metadata: Metadata, tensors: Mapping[str, Any]) -> tuple[Metadata, list[str]]:
    """Metadata with the values that files may leave out, and notes. tensors: anything with a shape, by name."""
    size = f"{found.name}.vocab_size"
    if not metadata.has(size) and EMBEDDING in tensors:
        metadata = metadata.updated({size: tensors[EMBEDDING].shape[0]})
    added, notes = found.defaults(metadata)
    if not metadata.has(EOS_IDS) and metadata.has("tokenizer.ggml.eos_token_id"):
        ids = [metadata.count(f"tokenizer.ggml.{name}_token_id", low=0, default=None) for name in ("eos", "eot", "eom")]
        added[EOS_IDS] = list(dict.fromkeys(number for number in ids if number is not None))
    return metadata.updated(added), notes
