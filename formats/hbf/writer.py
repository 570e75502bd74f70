"""Writing .hbf files, tensor by tensor. The head is written last, into room that was kept for it, when all measures are known."""

from __future__ import annotations

import math
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ...quant.block import get_format
from .. import file_keys
from ..errors import OutputError, printable
from ..gguf.table_writer import Declared, Pieces, TableWriter
from ..gguf.values import ValueType, encode_entry, encode_value
from ..tile_tensor import tiles_nbytes
from . import structure

_SLACK = 1 << 14  # bytes of the head kept free for metadata and method names that come while tensors are written
_PACK_FROM = 1024  # string arrays of so many items are stored packed, so that readers step over them


class NativeWriter(TableWriter):
    """Writes a .hbf file; see TableWriter for how.

        with NativeWriter("model.hbf", inputs=[source]) as writer:
            writer.add("general.architecture", "llama")
            writer.declare("blk.0.attn_q.weight", (576, 576), "q4_0", source="bf16")
            writer.declare("blk.0.attn_norm.weight", (576,), "f32", source="bf16")
            writer.write("blk.0.attn_q.weight", get_format("q4_0").tile(blocks), cosine=0.997, nmse=0.006, method="search")
            writer.write("blk.0.attn_norm.weight", norm_float32)

    Metadata may be added until the block ends, as long as what comes after the first tensor stays below 16 KiB.
    """

    alignment = structure.PAGE

    def __init__(self, path: str | os.PathLike[str], *, inputs: Iterable[str | os.PathLike[str]] = ()):
        super().__init__(path, inputs=inputs)
        self._formats: list[str] = []
        self._sources: dict[str, str] = {}
        self._records: dict[str, dict[str, Any]] = {}

    def declare(self, name: str, shape: Sequence[int], format: str, *, source: str = "") -> None:
        """Declares a tensor: shape in NumPy order, `format` the name of a registered block format, source the type it had before.

        Tensors of one dimension (or none) are plain float32, format "f32". Of two or more dimensions, the last two are a matrix
        stored as tiles; further ones count matrices, each with tiles of its own. Raises OutputError, FormatError.
        """
        self._check_name(name, "tensor")
        if len(shape) < 2:
            if format != "f32":
                raise OutputError(self.path, f"tensor {printable(name, 80)}: one dimension is stored as f32, not as {format}")
            nbytes = 4 * math.prod(shape)
        else:
            nbytes = tiles_nbytes(get_format(format), shape)
        if format not in self._formats:
            self._formats.append(format)
        self._declare(name, shape, self._formats.index(format), nbytes)
        self._sources[name] = source

    def write(
        self,
        name: str,
        data: Pieces,
        *,
        cosine: float | None = None,
        nmse: float | None = None,
        method: str = "",
    ) -> None:
        """Writes the whole of a declared tensor: its tiles (or float32 for one dimension), as one array or an iterable of arrays.

        cosine: similarity to the source's weights; nmse: squared error over the source's squared sum; method: how scales were
        chosen. All three are kept in the file beside a checksum. May be called from several threads for different tensors.
        """
        if isinstance(data, np.ndarray) and len(self._tensors[name].shape) < 2:
            data = np.ascontiguousarray(data, "<f4")
        checksum = self._write(self._tensors[name], data)
        self._records[name] = {"cosine": cosine, "nmse": nmse, "method": method, "checksum": checksum}

    def record(self, name: str, *, cosine: float | None = None, nmse: float | None = None, method: str = "") -> None:
        """Adds to a tensor that was written in pieces what was measured on the way; see `write`."""
        self._records[name].update(cosine=cosine, nmse=nmse, method=method)

    def _checksum(self, view: memoryview, checksum: int) -> int:
        return zlib.crc32(view, checksum)

    def _before_data(self, what: str) -> None:
        if what != "metadata":
            super()._before_data(what)

    def _put(self, key: str, type: ValueType, encoded: bytes | memoryview) -> None:
        if key in file_keys.LAYOUT or key.startswith(file_keys.PACKED):
            raise OutputError(self.path, f"metadata key {printable(key, 80)} is one that the writer makes itself")
        if type is ValueType.ARRAY:
            item, count = struct.unpack_from("<IQ", encoded)
            if item == ValueType.STRING and count >= _PACK_FROM:
                head = struct.pack("<IQ", ValueType.U8, len(encoded))
                key, encoded = file_keys.PACKED + key, b"".join((head, encoded))
        super()._put(key, type, encoded)

    def _own_entries(self) -> bytes:
        """The entries that say how the tensors are stored and what was measured, in the order of the table."""
        tensors: list[Declared] = list(self._tensors.values())
        records = [self._records.get(tensor.name, {}) for tensor in tensors]
        methods = [record.get("method") or "" for record in records]
        sources = [self._sources[tensor.name] for tensor in tensors]
        method_names, source_names = list(dict.fromkeys(methods)), list(dict.fromkeys(sources))
        arrays: list[tuple[str, Any, ValueType]] = [
            (file_keys.FORMATS, self._formats, ValueType.STRING),
            (file_keys.METHODS, method_names, ValueType.STRING),
            (file_keys.SOURCES, source_names, ValueType.STRING),
            (file_keys.BYTES, [tensor.nbytes for tensor in tensors], ValueType.U64),
            (file_keys.CHECKSUM, [record.get("checksum", 0) for record in records], ValueType.U32),
            (file_keys.COSINE, [_measure(record.get("cosine")) for record in records], ValueType.F32),
            (file_keys.NMSE, [_measure(record.get("nmse")) for record in records], ValueType.F32),
            (file_keys.METHOD, [method_names.index(method) for method in methods], ValueType.U32),
            (file_keys.SOURCE, [source_names.index(source) for source in sources], ValueType.U32),
        ]
        encoded = [encode_entry(key, ValueType.ARRAY, encode_value(ValueType.ARRAY, value, item)) for key, value, item in arrays]
        self._own_count = len(encoded)
        return b"".join(encoded)

    def _unpadded_head(self, data_offset: int) -> bytearray:
        entries = self._encode_entries() + self._own_entries()
        table = self._encode_table()
        nbytes = structure.HEADER.size + len(entries) + len(table)
        counts = len(self._tensors), len(self._entries) + self._own_count
        header = structure.HEADER.pack(structure.MAGIC, structure.VERSION, *counts, nbytes, data_offset, data_offset + self._data_bytes, 0)
        return bytearray().join((header, entries, table))

    def _head_bytes(self) -> int:
        return -(-(len(self._unpadded_head(0)) + _SLACK) // structure.PAGE) * structure.PAGE

    def _head(self, data_offset: int) -> bytes:
        head = self._unpadded_head(data_offset)
        if len(head) > data_offset:
            problem = f"{len(head) - data_offset} bytes of metadata too many were added after the first tensor was written"
            raise OutputError(self.path, problem)
        head += bytes(data_offset - len(head))
        struct.pack_into("<I", head, structure.CHECKSUM_AT, structure.head_checksum(head))
        return bytes(head)


def _measure(value: float | None) -> float:
    return float("nan") if value is None else float(value)
