"""Writing GGUF version 3 files, tensor by tensor. Source: the GGUF specification of the ggml project (docs/gguf.md)."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence

from ..errors import OutputError, printable
from ..tensor_types import BY_NAME
from .table_writer import TableWriter
from .values import ALIGNMENT, ValueType

NAME_LIMIT = 63
"""Longest tensor name in bytes that readers of the ggml project accept."""


class GGUFWriter(TableWriter):
    """Writes a GGUF file; see TableWriter for how. Offsets are multiples of `alignment` bytes."""

    def __init__(self, path: str | os.PathLike[str], *, inputs: Iterable[str | os.PathLike[str]] = (), alignment: int = 32):
        super().__init__(path, inputs=inputs)
        if alignment < 8 or alignment & (alignment - 1):
            raise OutputError(path, f"alignment {alignment} is not a power of two of at least 8")
        self.alignment = alignment
        if alignment != 32:
            super()._put(ALIGNMENT, ValueType.U32, struct.pack("<I", alignment))

    def _put(self, key: str, type: ValueType, encoded: bytes | memoryview) -> None:
        if key == ALIGNMENT:
            raise OutputError(self.path, f"{ALIGNMENT} is set by the writer's own argument")
        super()._put(key, type, encoded)

    def declare(self, name: str, shape: Sequence[int], type: str) -> None:
        """Declares a tensor: shape in NumPy order (rows, columns), type by GGUF's lower-case name.

        Its data are the rows one after another: uint8[rows, blocks, block_bytes] of a block format, or an array of plain numbers.
        Raises OutputError for a name, shape or type that GGUF cannot hold.
        """
        self._check_name(name, "tensor", NAME_LIMIT)
        if type.lower() not in BY_NAME:
            raise OutputError(self.path, f"tensor {printable(name, 80)}: GGUF has no type {printable(type, 40)}")
        kind = BY_NAME[type.lower()]
        columns = shape[-1] if shape else 1
        if columns % kind.block:
            problem = f"rows of {columns} weights are not whole blocks of {kind.name} ({kind.block} weights)"
            raise OutputError(self.path, f"tensor {printable(name, 80)}: {problem}")
        nbytes = kind.row_bytes(int(columns))
        for length in shape[:-1]:
            nbytes *= int(length)
        self._declare(name, shape, kind.number, nbytes)

    def _unpadded_head(self) -> bytes:
        start = struct.pack("<4sIQQ", b"GGUF", 3, len(self._tensors), len(self._entries))
        return start + self._encode_entries() + self._encode_table()

    def _head_bytes(self) -> int:
        return -(-len(self._unpadded_head()) // self.alignment) * self.alignment

    def _head(self, data_offset: int) -> bytes:
        return self._unpadded_head().ljust(data_offset, b"\0")
