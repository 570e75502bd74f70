"""What is in a model file or folder, as it lies there: also for architectures that cannot be run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..quant.errors import HalfbyteError
from ..quant.scales import check_finite
from .errors import InputError
from .file_keys import LAYOUT
from .file_kinds import HEAD_BYTES, kind_of
from .gguf.reader import GGUFFile
from .gguf.values import TypedValues
from .hbf.reader import NativeFile
from .huggingface.folder import CONFIG
from .json_file import is_there, read_object
from .mapped import MappedFile
from .opening import open_checkpoint
from .safetensors.reader import SafetensorsFolder

LONG_LIST, LONG_TEXT = 64, 16384
"""Longer lists and texts are told by their length and beginning."""
_CHUNK = 1 << 20


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as the file has it; `recorded` is what was measured when it was quantized, or {}."""

    name: str
    shape: tuple[int, ...]
    format: str
    nbytes: int
    offset: int
    recorded: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of weights."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass
class Inspection:
    """What is in a file or folder.

    nbytes        of the weight files
    header        version, alignment, offset of the data and the like
    metadata      as the file has it, long values shortened (see `shorten`); of a folder, config.json
    architecture  as the file calls it, or None
    runs          True if Halfbyte can run it
    """

    path: Path
    kind: str
    nbytes: int
    header: dict[str, Any]
    metadata: dict[str, Any]
    architecture: str | None
    tensors: list[TensorEntry]
    runs: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def weights(self) -> int:
        return sum(tensor.size for tensor in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Bits of all tensors over the number of weights."""
        return 8 * sum(tensor.nbytes for tensor in self.tensors) / self.weights if self.weights else 0.0


def inspect(path: Path, verify: bool = False, progress: Callable[[int], None] = lambda nbytes: None) -> Inspection:
    """Looks into a .hbf, .gguf or .safetensors file, or a Hugging Face folder.

    verify: read all tensors: a .hbf against its checksums, and in files of any kind every weight must be finite.
    progress: called with bytes that were verified. Raises FileFormatError, ChecksumError, NonFiniteError.
    """
    with ExitStack() as stack:
        file = _open(path)
        stack.callback(file.close)
        found = _inspection(path, file)
        if verify:
            if isinstance(file, NativeFile):
                file.verify()
            _check_weights(file, progress)
    try:
        with open_checkpoint(path) as checkpoint:
            found.runs = checkpoint.family is not None
            found.notes += [note for note in checkpoint.notes if note not in found.notes]
    except HalfbyteError as error:
        found.notes.append(f"cannot be run: {error}")
    return found


def _open(path: Path) -> GGUFFile | NativeFile | SafetensorsFolder:
    if path.is_dir():
        return SafetensorsFolder(path)
    with MappedFile(path) as file:
        kind = kind_of(file.bytes[:HEAD_BYTES].tobytes(), path)
    if kind == "gguf":
        return GGUFFile(path)
    if kind == "hbf":
        return NativeFile(path)
    if kind == "safetensors":
        return SafetensorsFolder(path)
    raise InputError(path, "not a model file: expected .hbf, .gguf, .safetensors or a Hugging Face folder")


def _inspection(path: Path, file: GGUFFile | NativeFile | SafetensorsFolder) -> Inspection:
    if isinstance(file, SafetensorsFolder):
        folder = path if path.is_dir() else path.parent
        config = read_object(folder / CONFIG) if is_there(folder / CONFIG) else {}
        tensors = [TensorEntry(t.name, t.shape, t.dtype, t.nbytes, t.offset) for t in file.tensors.values()]
        header: dict[str, Any] = {
            "files": [shard.path.name for shard in file.files],
            **{f"metadata.{key}": value for key, value in file.metadata.items()},
        }
        kind = config.get("model_type")
        return Inspection(
            path,
            "safetensors",
            sum(shard.size for shard in file.files),
            header,
            {key: shorten(value) for key, value in config.items()},
            kind if isinstance(kind, str) else None,
            tensors,
            notes=list(file.notes),
        )
    values = file.metadata
    metadata = {key: _value(values, key) for key in values if key not in LAYOUT}  # which the list of tensors says better
    kind = metadata.get("general.architecture")
    architecture = kind if isinstance(kind, str) else None
    if isinstance(file, GGUFFile):
        header = {"version": file.version, "alignment": file.alignment, "data offset": file.data_offset}
        tensors = [TensorEntry(t.name, t.shape, t.type, t.nbytes, t.offset) for t in file.tensors.values()]
        return Inspection(path, "gguf", file.size, header, metadata, architecture, tensors)
    header = {"version": file.version, "formats": file.formats, "data offset": file.data_offset}
    tensors = [TensorEntry(t.name, t.shape, t.format, t.nbytes, t.offset, t.recorded) for t in file.tensors.values()]
    return Inspection(path, "hbf", file.size, header, metadata, architecture, tensors)


def _value(values: TypedValues, key: str) -> Any:
    """A metadata value, shortened; long arrays of text are not decoded for that if they need not be."""
    if values.item_type(key) is not None and values.length(key) > LONG_LIST and values.length(key) > 1 << 22:
        return {"items": values.length(key)}
    return shorten(values[key])


def shorten(value: Any) -> Any:
    """A value with long lists and texts told by their length and their beginning: {"items": n, "first": […]}."""
    if isinstance(value, np.ndarray):
        value = value.tolist() if len(value) <= LONG_LIST else {"items": len(value), "first": value[:8].tolist()}
    elif isinstance(value, list) and len(value) > LONG_LIST:
        value = {"items": len(value), "first": value[:8]}
    elif isinstance(value, str) and len(value) > LONG_TEXT:
        value = {"characters": len(value), "first": value[:200]}
    return value


def _check_weights(file: GGUFFile | NativeFile | SafetensorsFolder, progress: Callable[[int], None]) -> None:
    for tensor in file.tensors.values():
        if 0 in tensor.shape:
            continue
        if len(tensor.shape) < 2:
            check_finite(np.atleast_1d(tensor.float32()), tensor.name)
        else:
            step = max(16, _CHUNK // tensor.columns // 16 * 16)
            for start in range(0, tensor.rows, step):
                check_finite(tensor.float32(slice(start, start + step)), tensor.name, start)
        progress(tensor.nbytes)
        owner = file if not isinstance(file, SafetensorsFolder) else tensor.file  # type: ignore[union-attr]
        owner.release(tensor.offset, tensor.nbytes)
