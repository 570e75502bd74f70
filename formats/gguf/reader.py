"""Reading GGUF files: header, metadata and tensor table are checked once, at opening; tensor data are views of the mapping.

GGUF versions 1 to 3, little-endian. Source: the GGUF specification of the ggml project (docs/gguf.md).
Nothing in the file is trusted: every count, length, offset and size is held against the bytes that are there.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ..dequantize import to_float32
from ..errors import HeaderError, NotThisKindError, TensorError, UnknownTypeError, UnsupportedVersionError, printable
from ..mapped import MappedFile
from ..tensor_types import REMOVED, TYPES, TensorType
from .values import ALIGNMENT, Cursor, TableEntry, TypedValues, ValueType, check_layout, read_table

MAGIC = b"GGUF"
MAX_TENSORS = 1 << 17


class GGUFTensor:
    """One tensor of an open GGUF file.

    Attributes
    ----------
    name    as in the file
    shape   NumPy order: (rows, columns), outermost first
    type    lower-case name of its GGUF type: "f32", "q4_0", "q4_k", …
    kind    TensorType: weights and bytes per block
    offset  of its first byte from the start of the file
    nbytes  bytes of its data
    """

    __slots__ = ("_file", "kind", "name", "nbytes", "offset", "shape", "type")

    def __init__(self, file: GGUFFile, name: str, shape: tuple[int, ...], kind: TensorType, offset: int, nbytes: int):
        self._file, self.name, self.shape, self.kind, self.offset, self.nbytes = file, name, shape, kind, offset, nbytes
        self.type = kind.name

    @property
    def rows(self) -> int:
        """Rows of the tensor seen as a matrix: the product of all dimensions but the last."""
        rows = 1
        for length in self.shape[:-1]:
            rows *= length
        return rows

    @property
    def columns(self) -> int:
        return self.shape[-1] if self.shape else 1

    def raw(self, rows: slice | None = None) -> np.ndarray:
        """uint8[rows, bytes per row], a read-only view of the file."""
        view = self._file.bytes[self.offset : self.offset + self.nbytes].reshape(self.rows, -1)
        return view if rows is None else view[rows]

    def blocks(self, rows: slice | None = None) -> np.ndarray:
        """uint8[rows, blocks, bytes per block], a read-only view of the file."""
        raw = self.raw(rows)
        return raw.reshape(raw.shape[0], -1, self.kind.nbytes)

    def float32(self, rows: slice | None = None) -> np.ndarray:
        """The values as a new float32 array of `shape`, or float32[n, columns] for a slice of the rows.

        Raises UnknownTypeError for a type that nobody can dequantize.
        """
        raw = self.raw(rows)
        values = to_float32(raw.reshape(raw.shape[0], -1), self.type, self._file.path, self.name)
        return values.reshape(self.shape) if rows is None else values

    def __repr__(self) -> str:
        return f"<GGUFTensor {printable(self.name, 80)} {self.type} {self.shape}>"


class GGUFFile(MappedFile):
    """An open GGUF file. A context manager.

    Attributes
    ----------
    version      1, 2 or 3
    metadata     TypedValues: keys to Python values, decoded when asked for
    tensors      dict of names to GGUFTensor, in the order of the file
    alignment    bytes that offsets of tensors are multiples of
    data_offset  where the tensor data begin
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Opens and checks a file; tensor data are not touched.

        Raises InputError, NotThisKindError, UnsupportedVersionError, HeaderError, DuplicateError, UnknownTypeError, TensorError,
        TruncatedError: all FileFormatError.
        """
        super().__init__(path)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        magic = self.bytes[:4].tobytes()
        if magic != MAGIC[: len(magic)]:
            if magic[::-1] == MAGIC:
                raise UnsupportedVersionError(self.path, "a big-endian GGUF file; only little-endian ones are read", offset=0)
            raise NotThisKindError(self.path, f"not a GGUF file: it begins with {printable(repr(magic), 40)}", offset=0)
        cursor = Cursor(self.path, self.bytes, min(4, self.size))
        self.version = _version(self.path, cursor.u32("header"))
        cursor.wide = self.version >= 2
        tensor_count, value_count = cursor.count("header"), cursor.count("header")
        self.metadata = TypedValues(cursor, value_count)
        table = read_table(cursor, tensor_count, MAX_TENSORS)
        self.alignment = self._read_alignment()
        self.data_offset = -(-cursor.position // self.alignment) * self.alignment
        self.tensors: dict[str, GGUFTensor] = {}
        for entry in table:
            self.tensors[entry.name] = self._tensor(entry)
        check_layout(self.path, [(t.name, t.offset, t.nbytes) for t in self.tensors.values()], self.size)

    def _read_alignment(self) -> int:
        key = ALIGNMENT
        if key not in self.metadata:
            return 32
        at = self.metadata.position(key)
        if self.metadata.type(key) is not ValueType.U32:
            kind = self.metadata.type(key).name.lower()
            raise HeaderError(self.path, f"must be a u32, is {kind}", where=key, offset=at)
        alignment: int = self.metadata[key]
        if alignment < 8 or alignment & (alignment - 1) or alignment > 1 << 24:
            problem = f"{alignment} is not a power of two between 8 and 2^24"
            raise HeaderError(self.path, problem, where=key, offset=at)
        return alignment

    def _tensor(self, entry: TableEntry) -> GGUFTensor:
        path, name, at = self.path, entry.name, entry.at
        if entry.type not in TYPES:
            known = f" ({REMOVED[entry.type]}, which GGUF has given up)" if entry.type in REMOVED else ""
            raise UnknownTypeError(path, f"unknown tensor type {entry.type}{known}", where=name, offset=at)
        kind = TYPES[entry.type]
        shape = entry.dimensions[::-1]
        columns = shape[-1] if shape else 1
        if columns % kind.block:
            problem = f"rows of {columns} weights are not whole blocks of {kind.name} ({kind.block} weights)"
            raise TensorError(path, problem, where=name, offset=at)
        if entry.offset % self.alignment:
            problem = f"its offset {entry.offset} is not a multiple of the alignment {self.alignment}"
            raise TensorError(path, problem, where=name, offset=at)
        nbytes = kind.row_bytes(columns)
        for length in shape[:-1]:
            nbytes *= length
        return GGUFTensor(self, name, shape, kind, self.data_offset + entry.offset, nbytes)


def _version(path: Any, version: int) -> int:
    if version in (1, 2, 3):
        return version
    if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3):
        raise UnsupportedVersionError(path, "a big-endian GGUF file; only little-endian ones are read", offset=4)
    raise UnsupportedVersionError(path, f"GGUF version {version}; versions 1 to 3 are read", offset=4)
