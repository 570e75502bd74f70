"""Reading .safetensors files, and folders of them, where they lie.

A file is a length (u64), that many bytes of JSON, and the tensor data. All of it is checked once, at opening: offsets are
contiguous, in bounds and in keeping with shape and dtype. Source: the safetensors format page
and the checks of its reference implementation.
The safetensors library is not used to read, because NumPy, which it hands arrays out in, has neither bf16 nor fp8; conversions ask
what it thinks of a header (judge.py).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ..dequantize import PLAIN, to_float32
from ..errors import (
    DuplicateError,
    FileFormatError,
    HeaderError,
    InputError,
    MissingTensorsError,
    NotThisKindError,
    TensorError,
    TruncatedError,
    UnknownTypeError,
    printable,
    some,
)
from ..mapped import MappedFile, why_not_opened

DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("f64", 8), "F32": ("f32", 4), "F16": ("f16", 2), "BF16": ("bf16", 2),
    "F8_E4M3": ("f8_e4m3", 1), "F8_E5M2": ("f8_e5m2", 1), "F8_E8M0": ("f8_e8m0", 1),
    "I8": ("i8", 1), "I16": ("i16", 2), "I32": ("i32", 4), "I64": ("i64", 8),
    "U8": ("u8", 1), "U16": ("u16", 2), "U32": ("u32", 4), "U64": ("u64", 8), "BOOL": ("bool", 1),
}  # fmt: skip
"""safetensors' dtypes: our lower-case name and bytes per element."""

_WIDTHS = dict(DTYPES.values())

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER = 100_000_000
"""Longest header that is read, the limit of the reference implementation too."""
MAX_VALUES = 1 << 22
"""Most items of objects and arrays in a header or an index: bounds what parsing takes in time and memory. A tensor has ten."""
_NAME_LIMIT = 1024


class SafetensorsTensor:
    """One tensor of an open .safetensors file.

    Attributes
    ----------
    name    as in the file
    shape   NumPy order; () for a scalar; a length may be 0
    dtype   lower case: "bf16", "f16", "f32", "f64", "f8_e4m3", "f8_e5m2", "f8_e8m0", "i8" … "u64", "bool"
    offset  of its first byte from the start of the file
    nbytes  bytes of its data
    """

    __slots__ = ("_file", "dtype", "name", "nbytes", "offset", "shape")

    def __init__(self, file: SafetensorsFile, name: str, shape: tuple[int, ...], dtype: str, offset: int, nbytes: int):
        self._file, self.name, self.shape, self.dtype, self.offset, self.nbytes = file, name, shape, dtype, offset, nbytes

    @property
    def file(self) -> SafetensorsFile:
        """The file (for a folder: the shard) that holds the tensor."""
        return self._file

    @property
    def rows(self) -> int:
        """Rows of the tensor seen as a matrix: the product of all dimensions but the last; 1 for a vector or a scalar."""
        return math.prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        return self.shape[-1] if self.shape else 1

    def raw(self, rows: slice | None = None) -> np.ndarray:
        """uint8[rows, bytes per row], a read-only view of the file."""
        width = _WIDTHS[self.dtype] * self.columns
        view = self._file.bytes[self.offset : self.offset + self.nbytes].reshape(self.rows, width)
        return view if rows is None else view[rows]

    def array(self) -> np.ndarray:
        """The values in their own dtype and shape, a read-only view of the file; bf16 as uint16, fp8 as uint8."""
        dtype = PLAIN.get(self.dtype, np.dtype("<u2" if self.dtype == "bf16" else np.uint8))
        return self._file.bytes[self.offset : self.offset + self.nbytes].view(dtype).reshape(self.shape)

    def float32(self, rows: slice | None = None) -> np.ndarray:
        """The values as a new float32 array of `shape`, or float32[n, columns] for a slice of the rows."""
        values = to_float32(self.raw(rows), self.dtype, self._file.path, self.name)
        return values.reshape(self.shape) if rows is None else values

    def __repr__(self) -> str:
        return f"<SafetensorsTensor {printable(self.name, 80)} {self.dtype} {self.shape}>"


class SafetensorsFile(MappedFile):
    """One open .safetensors file. A context manager.

    Attributes
    ----------
    metadata     dict[str, str]: the header's __metadata__
    tensors      dict of names to SafetensorsTensor, in the order of their data
    data_offset  where the tensor data begin
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Opens and checks a file; tensor data are not touched.

        Raises InputError, NotThisKindError, HeaderError, DuplicateError, UnknownTypeError, TensorError, TruncatedError: all
        FileFormatError.
        """
        super().__init__(path)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        if self.size < 8:
            raise TruncatedError(self.path, 8, self.size, where="header")
        nbytes = int.from_bytes(self.bytes[:8].tobytes(), "little")
        if nbytes > MAX_HEADER:
            if self.bytes[8:9].tobytes() != b"{":
                raise NotThisKindError(self.path, "not a safetensors file: it does not begin with a length and JSON", offset=0)
            raise HeaderError(self.path, f"the header claims {nbytes} bytes; at most {MAX_HEADER} are read", offset=0)
        if nbytes > self.size - 8:
            raise TruncatedError(self.path, 8 + nbytes, self.size, where="header", offset=0)
        self.data_offset = 8 + nbytes
        header = parse_json(self.path, self.bytes[8 : self.data_offset].tobytes(), where="header", offset=8)
        self.metadata = self._read_metadata(header.pop("__metadata__", {}))
        found = [self._tensor(name, entry) for name, entry in header.items()]
        found.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
        self._check_contiguous(found)
        self.tensors = {tensor.name: tensor for tensor in found}

    def _read_metadata(self, given: Any) -> dict[str, str]:
        if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
            raise HeaderError(self.path, "must be an object of strings", where="__metadata__", offset=8)
        return given

    def _tensor(self, name: str, entry: Any) -> SafetensorsTensor:
        path = self.path
        if not 0 < len(name) <= _NAME_LIMIT:
            problem = f"a tensor's name has {len(name)} characters; 1 to {_NAME_LIMIT} are read"
            raise HeaderError(path, problem, where=name, offset=8)
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise HeaderError(path, "its entry must have exactly dtype, shape and data_offsets", where=name, offset=8)
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise UnknownTypeError(path, f"unknown dtype {printable(dtype, 40)}", where=name, offset=8)
        if not _are_counts(shape) or len(shape) > 8:
            raise TensorError(path, f"impossible shape {printable(shape, 80)}", where=name, offset=8)
        if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise TensorError(path, f"impossible data_offsets {printable(offsets, 80)}", where=name, offset=8)
        # Counted without zeros as well, because NumPy cannot hold a shape such as [0, 2^63].
        if math.prod(length for length in shape if length) >= 1 << 60:
            raise TensorError(path, f"its shape {printable(shape, 80)} multiplies to 2^60 or more", where=name, offset=8)
        kind, width = DTYPES[dtype]
        begin, end = offsets
        needed = math.prod(shape) * width
        if end - begin != needed:
            problem = f"shape {printable(shape, 80)} in {dtype} takes {needed} bytes, data_offsets give {end - begin}"
            raise TensorError(path, problem, where=name, offset=self.data_offset + begin)
        return SafetensorsTensor(self, name, tuple(shape), kind, self.data_offset + begin, needed)

    def _check_contiguous(self, tensors: list[SafetensorsTensor]) -> None:
        end, before = self.data_offset, "the header"
        for tensor in tensors:
            if tensor.offset != end:
                problem = "overlaps" if tensor.offset < end else f"leaves a gap of {tensor.offset - end} bytes behind"
                raise TensorError(self.path, f"{problem} {printable(before, 80)}", where=tensor.name, offset=tensor.offset)
            end, before = tensor.offset + tensor.nbytes, tensor.name
        if end > self.size:
            first = next(tensor for tensor in tensors if tensor.offset + tensor.nbytes > self.size)
            raise TruncatedError(self.path, end, self.size, where=first.name, offset=first.offset)
        if end < self.size:
            raise HeaderError(self.path, f"{self.size - end} bytes follow the last tensor", offset=end)


class SafetensorsFolder:
    """All tensors of a folder of .safetensors files, or of one file, seen as one. A context manager.

    Attributes
    ----------
    path      Path that was opened
    files     list of open SafetensorsFile, the shards
    metadata  dict[str, str]: the __metadata__ of the first shard
    tensors   dict of names to SafetensorsTensor, shard after shard
    notes     list[str]: files that were left aside, and why
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Opens a folder or a file.

        In a folder model.safetensors.index.json is followed if it is there; else model.safetensors is read; else all
        *.safetensors but consolidated ones, which hold the same weights under other names; else the consolidated ones alone.
        Raises FileFormatError and its subclasses; MissingTensorsError names all missing shards or tensors.
        """
        self.path = Path(path)
        self.files: list[SafetensorsFile] = []
        self.tensors: dict[str, SafetensorsTensor] = {}
        self.notes: list[str] = []
        try:
            if self.path.is_dir():
                self._open_folder()
            else:
                self._add(self.path)
        except OSError as error:
            self.close()
            raise InputError(self.path, why_not_opened(error, self.path)) from None
        except BaseException:
            self.close()
            raise
        self.metadata = self.files[0].metadata

    def _open_folder(self) -> None:
        index = self.path / INDEX_NAME
        present = sorted(file.name for file in self.path.iterdir() if file.suffix == ".safetensors")
        if index.is_file():
            used = self._follow_index(index, present)
        elif "model.safetensors" in present:
            used = ["model.safetensors"]
            self._add(self.path / used[0])
        else:
            used = [name for name in present if not name.startswith("consolidated")] or present
            if not used:
                raise InputError(self.path, f"holds neither {INDEX_NAME} nor a .safetensors file")
            for name in used:
                self._add(self.path / name)
        aside = [name for name in present if name not in used]
        if aside:
            self.notes.append(f"not read, because {index.name if index.is_file() else used[0]} goes first: {some(aside)}")

    def _follow_index(self, index: Path, present: list[str]) -> list[str]:
        weight_map = read_index(index)
        shards = sorted(set(weight_map.values()))
        missing = [shard for shard in shards if not (self.path / shard).is_file()]
        if missing:
            raise MissingTensorsError(index, f"names {len(missing)} shards that are not in the folder", missing)
        for shard in shards:
            self._add(self.path / shard)
        absent = [
            f"{name} (in {shard})"
            for name, shard in weight_map.items()
            if name not in self.tensors or self.tensors[name].file.path.name != shard
        ]
        if absent:
            raise MissingTensorsError(index, f"names {len(absent)} tensors that their shards do not hold", absent)
        extra = [name for name in self.tensors if name not in weight_map]
        if extra:
            raise MissingTensorsError(index, f"does not name {len(extra)} tensors that its shards hold", extra)
        return shards

    def _add(self, path: Path) -> None:
        file = SafetensorsFile(path)
        self.files.append(file)
        for name, tensor in file.tensors.items():
            if name in self.tensors:
                other = self.tensors[name].file.path.name
                raise DuplicateError(path, f"the tensor is in {printable(other, 80)} too", where=name, offset=tensor.offset)
            self.tensors[name] = tensor

    def close(self) -> None:
        for file in self.files:
            file.close()

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def read_index(path: str | os.PathLike[str]) -> dict[str, str]:
    """The weight_map of a model.safetensors.index.json: tensor names to names of shards beside the index.

    Raises HeaderError also for a shard's name that would lead out of the folder.
    """
    with MappedFile(path) as file:
        if file.size > MAX_HEADER:
            raise HeaderError(path, f"has {file.size} bytes; at most {MAX_HEADER} are read")
        index = parse_json(path, file.bytes.tobytes())
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise HeaderError(path, "must be an object of tensor names and files, and not empty", where="weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not is_plain_name(shard):
            raise HeaderError(path, f"{printable(shard, 80)!r} is not the name of a file in this folder", where=name)
    return weight_map


def is_plain_name(name: str) -> bool:
    """True if a name from a file can only mean a file in the same folder: no separators, no drive, no control characters."""
    return 0 < len(name) <= 255 and name not in (".", "..") and name.isprintable() and not set(name) & set('/\\:*?"<>|')


def parse_json(path: Any, raw: bytes, where: str = "", offset: int | None = None) -> dict[str, Any]:
    """A JSON object from a file; nothing but an object, no key twice. Raises HeaderError, DuplicateError."""

    def pairs(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in items:
            if key in found:
                raise DuplicateError(path, "the key appears twice", where=key, offset=offset)
            found[key] = value
        return found

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > MAX_VALUES:
        raise HeaderError(path, f"has more than {MAX_VALUES} values", where=where, offset=offset)
    try:
        value = json.loads(raw.decode(), object_pairs_hook=pairs, parse_constant=refuse)
    except FileFormatError:
        raise
    except (ValueError, RecursionError, OverflowError) as error:
        raise HeaderError(path, f"is not valid JSON: {printable(error, 120)}", where=where, offset=offset) from None
    if not isinstance(value, dict):
        raise HeaderError(path, f"must be a JSON object, is {_json_kind(value)}", where=where, offset=offset)
    return value


def _json_kind(value: Any) -> str:
    if isinstance(value, list):
        return "an array"
    return "a string" if isinstance(value, str) else "null" if value is None else "a boolean or a number"


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)
