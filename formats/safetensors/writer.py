"""Writing .safetensors files, tensor by tensor: one file, or shards with an index. Source: the safetensors format page."""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from ...quant.bf16 import to_bf16
from ..atomic import OutputFile, atomic_file
from ..errors import OutputError, printable, some
from .reader import DTYPES, INDEX_NAME

_STORED = {kind: (dtype, width) for dtype, (kind, width) in DTYPES.items()}


class SafetensorsWriter:
    """Writes one .safetensors file. A context manager: the file appears when the block ends well.

    with SafetensorsWriter("model.safetensors", inputs=[source]) as writer:
        writer.declare("model.norm.weight", (576,), "bf16")   # every tensor, before the first byte of data
        writer.write("model.norm.weight", bits)               # in any order
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        inputs: Iterable[str | os.PathLike[str]] = (),
        metadata: Mapping[str, str] | None = None,
    ):
        """metadata: the header's __metadata__; transformers wants {"format": "pt"}, which is what is written without it."""
        self.path = path
        self.metadata = {"format": "pt"} if metadata is None else dict(metadata)
        self._context = atomic_file(path, inputs=inputs)
        self._output: OutputFile | None = None
        self._declared: dict[str, tuple[str, tuple[int, ...], int]] = {}
        self._left: set[str] = set()
        self._offsets: dict[str, int] = {}

    def declare(self, name: str, shape: Sequence[int], dtype: str) -> None:
        """Declares a tensor; dtype lower case, as SafetensorsTensor.dtype has it. Raises OutputError."""
        if self._offsets:
            raise OutputError(self.path, "tensors cannot be declared after the first one was written")
        if name in self._declared or name == "__metadata__" or not name:
            raise OutputError(self.path, f"tensor {printable(name, 80)!r} is declared twice, or is no name")
        if dtype not in _STORED:
            raise OutputError(self.path, f"tensor {printable(name, 80)}: safetensors has no dtype {printable(dtype, 40)}")
        self._declared[name] = dtype, tuple(map(int, shape)), math.prod(shape) * _STORED[dtype][1]
        self._left.add(name)

    def write(self, name: str, data: np.ndarray | Iterable[np.ndarray]) -> None:
        """Writes the whole of a declared tensor: an array of its bytes, or an iterable of arrays that follow each other.

        A float32 array given for a tensor declared f16, bf16 or f64 is converted, to nearest even. Raises OutputError.
        """
        self._begin()
        assert self._output is not None
        dtype, _, nbytes = self._declared[name]
        if name not in self._left:
            raise OutputError(self.path, f"tensor {printable(name, 80)} is written twice")
        start = position = self._offsets[name]
        for piece in [np.asarray(data)] if isinstance(data, np.ndarray | np.generic) else data:
            view = np.ascontiguousarray(_convert(piece, dtype)).reshape(-1).view(np.uint8).data
            if position + len(view) - start > nbytes:
                position += len(view)
                break
            position += self._output.write_at(position, view)
        if position - start != nbytes:
            problem = f"{position - start} bytes were given, its shape and dtype need {nbytes}"
            raise OutputError(self.path, f"tensor {printable(name, 80)}: {problem}")
        self._left.remove(name)

    def _begin(self) -> None:
        if self._offsets:
            return
        if self._output is None:
            raise OutputError(self.path, "is not open: the writer is to be used in a `with` block")
        header: dict[str, object] = {"__metadata__": self.metadata} if self.metadata else {}
        position = 0
        # Widest elements first, as the reference implementation does: every tensor is then aligned to its element.
        for name in sorted(self._declared, key=lambda name: (-_STORED[self._declared[name][0]][1], name)):
            dtype, shape, nbytes = self._declared[name]
            header[name] = {"dtype": _STORED[dtype][0], "shape": list(shape), "data_offsets": [position, position + nbytes]}
            self._offsets[name] = position
            position += nbytes
        try:
            text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise OutputError(self.path, "a name cannot be written as UTF-8") from None
        text += b" " * (-len(text) % 8)
        for name in self._offsets:
            self._offsets[name] += 8 + len(text)
        self._output.reserve(8 + len(text) + position)
        self._output.write_at(0, struct.pack("<Q", len(text)) + text)

    def __enter__(self) -> SafetensorsWriter:
        self._output = self._context.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            try:
                self._begin()
                if self._left:
                    problem = f"{len(self._left)} declared tensors were not written: {some(sorted(self._left))}"
                    raise OutputError(self.path, problem)
            except BaseException:
                self._context.__exit__(*sys.exc_info())
                raise
        self._context.__exit__(kind, error, trace)


def _convert(piece: np.ndarray, dtype: str) -> np.ndarray:
    if piece.dtype != np.float32 or dtype not in ("bf16", "f16", "f64"):
        return piece
    return to_bf16(piece) if dtype == "bf16" else piece.astype({"f16": "<f2", "f64": "<f8"}[dtype])


class ShardedWriter:
    """Writes a model into a folder: model.safetensors, or shards of at most `shard_bytes` and their index. A context manager.

    The folder should be one that `atomic_folder` yields; shards are written one after another, in the order of declaration.
    """

    def __init__(self, folder: str | os.PathLike[str], *, shard_bytes: int = 5_000_000_000):
        self.folder, self.shard_bytes = Path(folder), shard_bytes
        self._shards: list[dict[str, tuple[tuple[int, ...], str]]] = [{}]
        self._room = shard_bytes
        self._total = 0
        self._place: dict[str, int] = {}
        self._writers: dict[int, SafetensorsWriter] = {}
        self._left: list[int] = []

    def declare(self, name: str, shape: Sequence[int], dtype: str) -> None:
        """Declares a tensor; see SafetensorsWriter.declare. Raises OutputError."""
        if name in self._place:
            raise OutputError(self.folder, f"tensor {printable(name, 80)} is declared twice")
        if dtype not in _STORED:
            raise OutputError(self.folder, f"tensor {printable(name, 80)}: safetensors has no dtype {printable(dtype, 40)}")
        nbytes = math.prod(shape) * _STORED[dtype][1]
        if nbytes > self._room and self._shards[-1]:
            self._shards.append({})
            self._room = self.shard_bytes
        self._room -= nbytes
        self._total += nbytes
        self._place[name] = len(self._shards) - 1
        self._shards[-1][name] = tuple(shape), dtype

    def file_name(self, shard: int) -> str:
        """The name of a shard's file; known once all tensors are declared."""
        if len(self._shards) == 1:
            return "model.safetensors"
        return f"model-{shard + 1:05}-of-{len(self._shards):05}.safetensors"

    def write(self, name: str, data: np.ndarray | Iterable[np.ndarray]) -> None:
        """Writes the whole of a declared tensor; see SafetensorsWriter.write. Raises OutputError."""
        shard = self._place[name]
        if not self._left:
            self._left = [len(names) for names in self._shards]
        if shard not in self._writers:
            self._open(shard)
        self._writers[shard].write(name, data)
        self._left[shard] -= 1
        if not self._left[shard]:
            self._writers.pop(shard).__exit__(None, None, None)

    def _open(self, shard: int) -> None:
        writer = SafetensorsWriter(self.folder / self.file_name(shard))
        for tensor, (shape, dtype) in self._shards[shard].items():
            writer.declare(tensor, shape, dtype)
        self._writers[shard] = writer.__enter__()

    def __enter__(self) -> ShardedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None and not self._place:
            self._open(0)
        try:
            while self._writers:
                self._writers.popitem()[1].__exit__(kind, error, trace)
        except BaseException:
            for writer in self._writers.values():
                writer.__exit__(*sys.exc_info())
            raise
        if kind is not None:
            return
        if any(self._left) or (self._place and not self._left):
            raise OutputError(self.folder, "not all declared tensors were written")
        if len(self._shards) > 1:
            index = {
                "metadata": {"total_size": self._total},
                "weight_map": {name: self.file_name(shard) for name, shard in sorted(self._place.items())},
            }
            with atomic_file(self.folder / INDEX_NAME) as file:
                file.write(json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n")
