"""What the GGUF and .hbf writers share: metadata, tensors declared first and written in any order, all in one atomic file."""

from __future__ import annotations

import os
import struct
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from ..atomic import OutputFile, atomic_file
from ..errors import OutputError, printable, some
from ..file_keys import LAYOUT
from .values import (
    ALIGNMENT,
    MAX_KEYS,
    NAME_BYTES,
    TypedValues,
    ValueType,
    encode_entry,
    encode_string,
    encode_value,
    infer_type,
)

_Self = TypeVar("_Self", bound="TableWriter")
Pieces = np.ndarray | Iterable[np.ndarray]


class Declared:
    """A tensor that will be written: its row in the table, and where its bytes go (from the start of the tensor data)."""

    __slots__ = ("name", "nbytes", "number", "offset", "shape", "type", "written")

    def __init__(self, name: str, shape: tuple[int, ...], type: int, nbytes: int, offset: int, number: int):
        self.name, self.shape, self.type, self.nbytes, self.offset, self.number = name, shape, type, nbytes, offset, number
        self.written = False


class TableWriter(ABC):
    """Writes metadata, a tensor table and tensor data, streaming. A context manager: the file appears when the block ends well.

        with GGUFWriter("out.gguf", inputs=[source]) as writer:
            writer.add("general.architecture", "llama")
            writer.declare(...)              # every tensor, before the first byte of data
            writer.write("blk.0...", data)   # in any order, from any thread, one call per tensor

    A block that ends without every declared tensor written raises OutputError, and there is no file.
    """

    alignment: int

    def __init__(self, path: str | os.PathLike[str], *, inputs: Iterable[str | os.PathLike[str]] = ()):
        """inputs: files or folders being read, which the output must not be. Raises OutputError when the block is entered."""
        self.path = path
        self._context = atomic_file(path, inputs=inputs)
        self._output: OutputFile | None = None
        self._entries: dict[str, tuple[ValueType, bytes | memoryview]] = {}
        self._tensors: dict[str, Declared] = {}
        self._data_bytes = 0
        self._data_offset: int | None = None
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file, as far as it is known by now."""
        return (self._head_bytes() if self._data_offset is None else self._data_offset) + self._data_bytes

    def add(self, key: str, value: Any, type: ValueType | None = None, item: ValueType | None = None) -> None:
        """Adds a metadata entry; one of the same key is replaced, in its place.

        type and item: the value's type and that of an array's items. Without them bool, str, float (f32), int (u32, or i32, u64,
        i64 as needed), lists of these, NumPy numbers and arrays (their dtype) and bytes (u8 array) are understood.
        """
        if type is None and item is None:
            try:
                type, item = infer_type(value)
            except TypeError as error:
                raise OutputError(self.path, f"metadata key {printable(key, 80)}: {error}") from None
        elif type is None:
            type = ValueType.ARRAY
        assert type is not None
        try:
            encoded = encode_value(type, value, item)
        except (TypeError, ValueError, OverflowError) as error:  # a lone surrogate is a ValueError
            raise OutputError(self.path, f"metadata key {printable(key, 80)}: {printable(error)}") from None
        self._put(key, type, encoded)

    def copy(self, source: TypedValues, keys: Iterable[str] | None = None) -> None:
        """Adds entries of an open file as they are, types and all, without decoding them. Without `keys`, all of them.

        Those that describe the file they come from and not the model are left out: general.alignment, how a .hbf is laid out.
        """
        for key in source if keys is None else keys:
            if key != ALIGNMENT and key not in LAYOUT:
                self._put(key, source.type(key), source.raw(key))

    def _put(self, key: str, type: ValueType, encoded: bytes | memoryview) -> None:
        self._check_name(key, "metadata key")
        if len(self._entries) >= MAX_KEYS - 64:
            raise OutputError(self.path, f"more than {MAX_KEYS - 64} metadata entries")
        self._before_data("metadata")
        self._entries[key] = (type, encoded)

    def _before_data(self, what: str) -> None:
        if self._data_offset is not None:
            raise OutputError(self.path, f"{what} cannot be added after the first tensor was written")

    def _check_name(self, name: str, what: str, limit: int = NAME_BYTES) -> None:
        try:
            nbytes = len(name.encode())
        except UnicodeEncodeError:
            raise OutputError(self.path, f"{what} {printable(name, 80)} cannot be written as UTF-8") from None
        if not 0 < nbytes <= limit:
            shown = printable(name, 80) or "(empty)"
            raise OutputError(self.path, f"{what} {shown} has {nbytes} bytes; 1 to {limit} are possible")

    def _declare(self, name: str, shape: Sequence[int], type: int, nbytes: int) -> Declared:
        self._before_data("tensors")
        if name in self._tensors:
            raise OutputError(self.path, f"tensor {printable(name, 80)} is declared twice")
        if len(shape) > 4 or any(length < 1 for length in shape):
            problem = f"shape {list(shape)}: at most 4 dimensions, of 1 or more, are possible"
            raise OutputError(self.path, f"tensor {printable(name, 80)}: {problem}")
        tensor = Declared(name, tuple(map(int, shape)), type, nbytes, self._data_bytes, len(self._tensors))
        self._tensors[name] = tensor
        self._data_bytes += -(-nbytes // self.alignment) * self.alignment
        return tensor

    def write(self, name: str, data: Pieces) -> None:
        """Writes the whole of a declared tensor: one array, or an iterable of arrays whose bytes follow each other.

        May be called from several threads for different tensors. Raises OutputError.
        """
        self._write(self._tensors[name], data)

    def _write(self, tensor: Declared, data: Pieces) -> int:
        """Writes a tensor and gives the CRC-32 of its bytes."""
        self._begin()
        assert self._output is not None and self._data_offset is not None
        if tensor.written:
            raise OutputError(self.path, f"tensor {printable(tensor.name, 80)} is written twice")
        start = position = self._data_offset + tensor.offset
        checksum = 0
        for piece in [data] if isinstance(data, np.ndarray) else data:
            view = np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data
            if position + len(view) - start > tensor.nbytes:
                position += len(view)
                break
            position += self._output.write_at(position, view)
            checksum = self._checksum(view, checksum)
        if position - start != tensor.nbytes:
            problem = f"{position - start} bytes were given, its shape and type need {tensor.nbytes}"
            raise OutputError(self.path, f"tensor {printable(tensor.name, 80)}: {problem}")
        padding = -tensor.nbytes % self.alignment
        if padding:
            self._output.write_at(position, bytes(padding))
        tensor.written = True
        return checksum

    def _checksum(self, view: memoryview, checksum: int) -> int:
        return checksum

    def _begin(self) -> None:
        """Fixes where the tensor data begin, and takes the disk space for the whole file."""
        with self._lock:
            if self._data_offset is None:
                if self._output is None:
                    raise OutputError(self.path, "is not open: the writer is to be used in a `with` block")
                data_offset = self._head_bytes()
                self._output.reserve(data_offset + self._data_bytes)
                self._data_offset = data_offset

    @abstractmethod
    def _head_bytes(self) -> int:
        """Bytes before the tensor data."""

    @abstractmethod
    def _head(self, data_offset: int) -> bytes:
        """Everything before the tensor data, of exactly `data_offset` bytes."""

    def _encode_entries(self) -> bytes:
        return b"".join(encode_entry(key, type, encoded) for key, (type, encoded) in self._entries.items())

    def _encode_table(self) -> bytes:
        rows = []
        for tensor in self._tensors.values():
            rank = len(tensor.shape)
            rows.append(encode_string(tensor.name))
            rows.append(struct.pack(f"<I{rank}QIQ", rank, *tensor.shape[::-1], tensor.type, tensor.offset))
        return b"".join(rows)

    def __enter__(self: _Self) -> _Self:
        self._output = self._context.__enter__()
        return self

    def _finish(self) -> None:
        self._begin()
        assert self._output is not None and self._data_offset is not None
        missing = [tensor.name for tensor in self._tensors.values() if not tensor.written]
        if missing:
            raise OutputError(self.path, f"{len(missing)} declared tensors were not written: {some(missing)}")
        self._output.write_at(0, self._head(self._data_offset))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            try:
                self._finish()
            except BaseException:
                self._context.__exit__(*sys.exc_info())
                raise
        self._context.__exit__(kind, error, trace)
