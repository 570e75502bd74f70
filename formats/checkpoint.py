"""Every checkpoint seen one way, whatever file it came from (opening.py tells the kinds apart).

Whatever the source, metadata keys and tensor names are GGUF's, the rotary rows of q and k lie in halves as Hugging Face has
them, and norm weights are what they multiply by. See docs/architecture.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np

from .errors import FileFormatError, TensorError, some
from .expression import Find, evaluate, respelled, sources
from .family import Family, TensorSpec
from .layers import ModelSpec
from .metadata import CheckpointError, Metadata, MetadataTypeError, MissingKeyError
from .tensor import ArrayTensor, Tensor

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Metadata",
    "MetadataTypeError",
    "MissingKeyError",
    "Tensor",
    "TensorListError",
    "TokenizerFiles",
]

EOS_IDS = "halfbyte.eos_token_ids"
"""Every token id that ends a text, where a checkpoint names several; `tokenizer.ggml.eos_token_id` is the first of them."""

_GIB = 1 << 30


class TensorListError(FileFormatError):
    """The tensors of a file are not those of its architecture. Attributes: missing, unused (lists of names)."""

    def __init__(self, path: str | os.PathLike[str], architecture: str, missing: Iterable[str], unused: Iterable[str]):
        self.missing, self.unused = list(missing), list(unused)
        parts = []
        if self.missing:
            parts.append(f"missing {len(self.missing)} ({some(self.missing, 40)})")
        if self.unused:
            parts.append(f"not used {len(self.unused)} ({some(self.unused, 40)})")
        super().__init__(path, f"tensors do not fit the architecture {architecture}: {'; '.join(parts)}")


@dataclass(frozen=True)
class TokenizerFiles:
    """What a checkpoint says about text, unparsed; `engine.tokenizer` makes sense of it.

    json           bytes of tokenizer.json, or None
    config         tokenizer_config.json, or {}
    chat_template  the template, or a dict of them by name, or None
    gguf           the checkpoint's metadata, whose keys that begin with "tokenizer." are GGUF's
    """

    json: bytes | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | dict[str, str] | None = None
    gguf: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.json is not None or "tokenizer.ggml.tokens" in self.gguf


class Checkpoint:
    """A checkpoint in canonical form; a context manager. See docs/architecture.md for what the attributes promise.

    path          what was opened: a file, or a folder
    kind          "hbf", "gguf" or "safetensors"
    architecture  GGUF's name, None for a lone .safetensors
    family        the family of that architecture, or None
    metadata      GGUF's keys, completed with what may be left out
    tensors       by GGUF's names, in the order in which the model uses them (a lone .safetensors: names and order of the file)
    tokenizer     TokenizerFiles
    files         the files that hold weights
    config        config.json as it was read, for checkpoints that have one, else None
    notes         what the user should know, a sentence each
    """

    def __init__(
        self,
        path: Path,
        kind: str,
        metadata: Metadata,
        tensors: dict[str, Tensor],
        *,
        family: Family | None = None,
        tokenizer: TokenizerFiles | None = None,
        files: Iterable[Path] = (),
        config: dict[str, Any] | None = None,
        notes: Iterable[str] = (),
        closing: ExitStack | None = None,
        prefetch: Callable[[], None] | None = None,
    ) -> None:
        self.path, self.kind, self.metadata, self.tensors, self.family = path, kind, metadata, tensors, family
        self.architecture = family.name if family else None
        self.tokenizer = tokenizer or TokenizerFiles()
        self.files, self.config, self.notes = list(files), config, list(notes)
        self._closing = closing or ExitStack()
        self._prefetch = prefetch

    def prefetch(self) -> None:
        """Has the file's pages mapped before they are used, where weights are used where they lie. Returns when that is done."""
        if self._prefetch is not None:
            self._prefetch()

    @cached_property
    def model(self) -> ModelSpec:
        """What the model is made of. Raises CheckpointError for weights without an architecture."""
        if self.family is None:
            raise CheckpointError(f"{self.path} holds weights only, no config.json and tokenizer.json: it is no model")
        return self.family.model(self.metadata)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the file."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Checkpoint:
        """The same checkpoint with these tensors in the place of its own, by name. Valid as long as this one is open."""
        return Checkpoint(
            self.path,
            self.kind,
            self.metadata,
            {**self.tensors, **tensors},
            family=self.family,
            tokenizer=self.tokenizer,
            files=self.files,
            config=self.config,
            notes=self.notes,
        )

    def close(self) -> None:
        """Closes the files. Arrays that were handed out stay valid."""
        self._closing.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path} ({self.kind}, {self.architecture}): {len(self.tensors)} tensors, {self.nbytes / _GIB:.2f} GiB>"


def model_name(path: Path) -> str:
    """What a model at a path is called: the folder's or file's name; in the hub's cache the model's name, not the revision's."""
    path = Path(os.path.abspath(path))
    parts = path.parts
    if len(parts) > 3 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].rsplit("--", 1)[-1]
    return path.name


def assemble(
    path: Path,
    family: Family,
    specs: list[TensorSpec],
    kind: Literal["gguf", "huggingface"],
    names: Iterable[str],
    find: Find,
    *,
    spell: Callable[[str], str] = lambda name: name,
    computed: Mapping[str, np.ndarray] | None = None,
) -> dict[str, Tensor]:
    """The canonical tensors of a file, in the order of the specs, each made of the file's by its spec's expression.

    names     the tensors of the file; every required one must be there, so must the rest of a group, and no one may be left over
    find      the tensor of a name in the file
    spell     what a tensor of an expression is called in this very file
    computed  tensors that follow from the configuration where the file does not hold them
    Raises TensorListError with both lists, and TensorError for a shape that the metadata do not call for.
    """
    made = {spec.name: None if (e := spec.made_of(kind)) is None else respelled(e, spell) for spec in specs}
    present = bind(path, family, specs, names, {name: sources(e) if e is not None else () for name, e in made.items()})
    tensors: dict[str, Tensor] = {}
    for spec in specs:
        expression = made[spec.name]
        if spec.name in present and expression is not None:
            tensor = evaluate(expression, spec.name, find, path)
            check_shape(path, tensor.shape, spec, sources(expression)[0])
        elif computed and spec.name in computed:
            tensor = ArrayTensor(spec.name, computed[spec.name])
        else:
            continue
        tensors[spec.name] = tensor
    return tensors


def bind(path: Path, family: Family, specs: list[TensorSpec], names: Iterable[str], parts: Mapping[str, tuple[str, ...]]) -> set[str]:
    """Names of the specs whose tensors are there.

    names   the tensors of the file
    parts   by a spec's name: the tensors of the file that it is made of; () if such files do not hold it
    Raises TensorListError with both lists.
    """
    there = set(names)
    groups = {spec.group for spec in specs if spec.group and parts[spec.name] and there.issuperset(parts[spec.name])}
    found: set[str] = set()
    missing: list[str] = []
    used: set[str] = set()
    for spec in specs:
        needed = parts[spec.name]
        if needed and there.issuperset(needed):
            found.add(spec.name)
            used.update(needed)
        elif not spec.optional or spec.group in groups:
            missing += [name for name in needed if name not in there and name not in missing]
    ignored = [re.compile(pattern) for pattern in family.ignored]
    unused = [name for name in names if name not in used and not any(pattern.fullmatch(name) for pattern in ignored)]
    if missing or unused:
        raise TensorListError(path, family.name, missing, unused)
    return found


def check_shape(path: Path, shape: tuple[int, ...], spec: TensorSpec, name: str) -> None:
    """Raises FileFormatError if a tensor has not the shape that the metadata call for."""
    if shape != spec.shape:
        raise TensorError(path, f"has shape {list(shape)}; the metadata call for {list(spec.shape)}", where=name)
