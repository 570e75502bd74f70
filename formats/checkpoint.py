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
from pathlib import Path
from types import TracebackType
from typing import Any

from .errors import FileFormatError, TensorError, some
from .family import Family, TensorSpec
from .metadata import CheckpointError, Metadata, MetadataTypeError, MissingKeyError
from .tensor import Tensor

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

    def __init__(self, path: str | os.PathLike[str], architecture: str, missing: Iterable[str], unused: Iterable[str], hint: str = ""):
        self.missing, self.unused = list(missing), list(unused)
        parts = []
        if self.missing:
            parts.append(f"missing {len(self.missing)} ({some(self.missing, 40)})")
        if self.unused:
            parts.append(f"not used {len(self.unused)} ({some(self.unused, 40)})")
        super().__init__(path, f"tensors do not fit the architecture {architecture}: {'; '.join(parts)}{hint}")


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


def bind(
    path: Path,
    family: Family,
    specs: list[TensorSpec],
    names: Iterable[str],
    spelled: Callable[[TensorSpec], tuple[str, ...]] = lambda spec: (spec.name,),
    hint: str = "",
) -> list[TensorSpec]:
    """The specs whose tensors are there. Every required one must be, so must the rest of a group, and no tensor may be left over.

    names     the tensors of the file
    spelled   what the tensors are called there that a spec's tensor is made of; () if such files do not hold it
    Raises TensorListError with both lists.
    """
    there = set(names)
    groups = {spec.group for spec in specs if spec.group and (parts := spelled(spec)) and there.issuperset(parts)}
    found: list[TensorSpec] = []
    missing: list[str] = []
    used: set[str] = set()
    for spec in specs:
        parts = spelled(spec)
        if parts and there.issuperset(parts):
            found.append(spec)
            used.update(parts)
        elif not spec.optional or spec.group in groups:
            missing += [name for name in parts if name not in there]
    ignored = [re.compile(pattern) for pattern in family.ignored]
    unused = [name for name in names if name not in used and not any(pattern.fullmatch(name) for pattern in ignored)]
    if missing or unused:
        raise TensorListError(path, family.name, missing, unused, hint)
    return found


def check_shape(path: Path, shape: tuple[int, ...], spec: TensorSpec, name: str) -> None:
    """Raises FileFormatError if a tensor has not the shape that the metadata call for."""
    if shape != spec.shape:
        raise TensorError(path, f"has shape {list(shape)}; the metadata call for {list(spec.shape)}", where=name)
