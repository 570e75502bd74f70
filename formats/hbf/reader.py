"""Reading .hbf files: weights that lie in the file as the kernels read them. docs/file-format.md is the specification.

Opening checks the head (by its checksum, then entry by entry) and touches no tensor data; `verify` reads and checks those.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ...quant.block import BlockFormat, get_format
from ...quant.errors import FormatError
from .. import file_keys
from ..errors import (
    ChecksumError,
    HeaderError,
    NotThisKindError,
    TensorError,
    TruncatedError,
    UnknownTypeError,
    UnsupportedVersionError,
    printable,
    some,
)
from ..gguf.values import Cursor, TableEntry, TypedValues, ValueType, check_layout, read_table
from ..mapped import MappedFile
from ..tensor import RowSlice
from ..tile_tensor import TileTensor, tiles_nbytes
from . import structure

MAX_TENSORS = 1 << 17
_CHUNK = 1 << 23  # bytes that are checked between two reports of progress


class NativeTensor(TileTensor):
    """One tensor of an open .hbf file. Its bytes are a read-only view of the file.

    offset    of its first byte from the start of the file, a multiple of 4096
    recorded  checksum (CRC-32), source, method (str, "" if unknown), cosine, nmse (float, or None if not measured)
    """

    def __init__(
        self, file: NativeFile, name: str, shape: tuple[int, ...], format: str, offset: int, nbytes: int, recorded: dict[str, Any]
    ):
        super().__init__(name, shape, format, nbytes, recorded)
        self._file, self.offset = file, offset

    def raw(self) -> np.ndarray:
        return self._file.bytes[self.offset : self.offset + self.nbytes]

    def release(self, rows: RowSlice = None) -> None:
        if rows is None:
            self._file.release(self.offset, self.nbytes)

    def __repr__(self) -> str:
        return f"<NativeTensor {printable(self.name, 80)} {self.format} {self.shape}>"


class NativeFile(MappedFile):
    """An open .hbf file. A context manager.

    Attributes
    ----------
    version      of the layout
    metadata     TypedValues: keys to Python values, decoded when asked for; packed arrays appear under their own keys
    tensors      dict of names to NativeTensor, in the order of the file
    formats      names of the block formats in it
    data_offset  where the tensor data begin
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Opens and checks a file; tensor data are not touched.

        Raises InputError, NotThisKindError, UnsupportedVersionError, TruncatedError, ChecksumError, HeaderError, DuplicateError,
        UnknownTypeError, TensorError: all FileFormatError.
        """
        super().__init__(path)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        path, header = self.path, structure.HEADER
        magic = self.bytes[:4].tobytes()
        if magic != structure.MAGIC[: len(magic)]:
            raise NotThisKindError(path, f"not a .hbf file: it begins with {printable(repr(magic), 40)}", offset=0)
        if self.size < header.size:
            raise TruncatedError(path, header.size, self.size, where="header")
        fields = header.unpack_from(self.bytes.data)
        _, self.version, tensor_count, value_count, head_bytes, data_offset, file_bytes, checksum = fields
        if self.version != structure.VERSION:
            problem = f".hbf version {self.version}; this program reads version {structure.VERSION}"
            raise UnsupportedVersionError(path, problem, offset=4)
        if file_bytes > self.size:
            raise TruncatedError(path, file_bytes, self.size)
        if file_bytes < self.size:
            raise HeaderError(path, f"{self.size - file_bytes} bytes follow the end that its header gives", offset=file_bytes)
        if not header.size <= head_bytes <= data_offset <= file_bytes or data_offset % structure.PAGE:
            problem = f"impossible sizes: head {head_bytes}, data from {data_offset}, file {file_bytes}"
            raise HeaderError(path, problem, where="header", offset=24)
        if structure.head_checksum(self.bytes[:data_offset].data) != checksum:
            raise ChecksumError(path, "its checksum does not match: the file is damaged", where="header")
        self.data_offset = data_offset
        cursor = Cursor(path, self.bytes[:head_bytes], header.size)
        self.metadata = TypedValues(cursor, value_count)
        table = read_table(cursor, tensor_count, MAX_TENSORS)
        if cursor.position != head_bytes:
            raise HeaderError(path, f"the head ends here, not at byte {head_bytes}", where="header", offset=cursor.position)
        self._read_tensors(table)
        self.metadata.unpack(file_keys.PACKED)

    def _read_tensors(self, table: list[TableEntry]) -> None:
        self.formats = self._strings(file_keys.FORMATS)
        for name in self.formats:
            if not name.isprintable() or not 0 < len(name) <= 64:
                problem = f"'{printable(name, 40)}' cannot be the name of a block format"
                raise HeaderError(self.path, problem, where=file_keys.FORMATS)
        methods, sources = self._strings(file_keys.METHODS), self._strings(file_keys.SOURCES)
        count = len(table)
        sizes = self._numbers(file_keys.BYTES, ValueType.U64, count)
        checksums = self._numbers(file_keys.CHECKSUM, ValueType.U32, count)
        cosines = self._numbers(file_keys.COSINE, ValueType.F32, count)
        errors = self._numbers(file_keys.NMSE, ValueType.F32, count)
        method = self._indices(file_keys.METHOD, count, methods)
        source = self._indices(file_keys.SOURCE, count, sources)
        known = [_format(name) for name in self.formats]
        self.tensors: dict[str, NativeTensor] = {}
        for number, entry in enumerate(table):
            if entry.type >= len(self.formats):
                problem = f"format number {entry.type}, of which {file_keys.FORMATS} has {len(self.formats)}"
                raise UnknownTypeError(self.path, problem, where=entry.name, offset=entry.at)
            recorded = {
                "checksum": checksums[number],
                "source": source[number],
                "method": method[number],
                "cosine": None if math.isnan(cosines[number]) else cosines[number],
                "nmse": None if math.isnan(errors[number]) else errors[number],
            }
            shape, name = entry.dimensions[::-1], self.formats[entry.type]
            self._check(entry, shape, name, known[entry.type], sizes[number])
            offset = self.data_offset + entry.offset
            self.tensors[entry.name] = NativeTensor(self, entry.name, shape, name, offset, sizes[number], recorded)
        check_layout(self.path, [(t.name, t.offset, t.nbytes) for t in self.tensors.values()], self.size)

    def _check(self, entry: TableEntry, shape: tuple[int, ...], name: str, format: BlockFormat | None, nbytes: int) -> None:
        if entry.offset % structure.PAGE:
            problem = f"its offset {entry.offset} is not a multiple of {structure.PAGE}"
            raise TensorError(self.path, problem, where=entry.name, offset=entry.at)
        if len(shape) < 2:
            if name != "f32":
                problem = f"has one dimension and format {name}, not f32"
                raise TensorError(self.path, problem, where=entry.name, offset=entry.at)
            needed = 4 * math.prod(shape)
        elif format is not None:
            needed = tiles_nbytes(format, shape)
        else:
            needed = nbytes  # a format of a package that is not installed: its tensors can be listed and verified, not read
        if needed != nbytes:
            problem = f"shape {list(shape)} in {printable(name, 40)} takes {needed} bytes, {file_keys.BYTES} has {nbytes}"
            raise TensorError(self.path, problem, where=entry.name, offset=entry.at)

    def _strings(self, key: str) -> list[str]:
        self._require(key, ValueType.STRING)
        value: list[str] = self.metadata[key]
        return value

    def _numbers(self, key: str, item: ValueType, count: int) -> list[Any]:
        self._require(key, item)
        if self.metadata.length(key) != count:
            problem = f"has {self.metadata.length(key)} items for {count} tensors"
            raise HeaderError(self.path, problem, where=key, offset=self.metadata.position(key))
        value: list[Any] = self.metadata[key].tolist()
        return value

    def _indices(self, key: str, count: int, names: list[str]) -> list[str]:
        numbers = self._numbers(key, ValueType.U32, count)
        if numbers and max(numbers) >= len(names):
            at = self.metadata.position(key)
            raise HeaderError(self.path, f"index {max(numbers)} into {len(names)} names", where=key, offset=at)
        return [names[number] for number in numbers]

    def _require(self, key: str, item: ValueType) -> None:
        if key not in self.metadata:
            raise HeaderError(self.path, "the metadata entry is missing", where=key)
        if self.metadata.item_type(key) is not item:
            at = self.metadata.position(key)
            raise HeaderError(self.path, f"must be an array of {item.name.lower()}", where=key, offset=at)

    def verify(self, names: Iterable[str] | None = None, progress: Callable[[int, int], None] | None = None) -> None:
        """Reads tensors (all, or those named) and holds them against their checksums; the bytes between tensors must be zero.

        progress: called with bytes done and bytes in all. Raises ChecksumError, which names every broken tensor.
        """
        tensors = list(self.tensors.values()) if names is None else [self.tensors[name] for name in names]
        total, done, broken = sum(tensor.nbytes for tensor in tensors), 0, []
        for tensor in tensors:
            checksum, data = 0, tensor.raw()
            for start in range(0, tensor.nbytes, _CHUNK):
                part = data[start : start + _CHUNK]
                checksum = zlib.crc32(part.data, checksum)
                done += len(part)
                if progress is not None:
                    progress(done, total)
            if checksum != tensor.recorded["checksum"]:
                broken.append(tensor.name)
        if broken:
            first = self.tensors[broken[0]]
            also = f"; so are {some(broken[1:])}" if len(broken) > 1 else ""
            raise ChecksumError(
                self.path, f"its checksum does not match: the tensor is damaged{also}", where=first.name, offset=first.offset
            )
        if names is None:
            self._verify_gaps()

    def _verify_gaps(self) -> None:
        end, before = self.data_offset, "header"
        for tensor in [*sorted(self.tensors.values(), key=lambda t: t.offset), None]:
            gap = self.bytes[end : self.size if tensor is None else tensor.offset]
            if gap.any():
                at = end + int(np.flatnonzero(gap)[0])
                raise ChecksumError(self.path, "the padding behind it is not zero: the file is damaged", where=before, offset=at)
            if tensor is not None:
                end, before = tensor.offset + tensor.nbytes, tensor.name


def _format(name: str) -> BlockFormat | None:
    try:
        return get_format(name)
    except FormatError:
        return None
