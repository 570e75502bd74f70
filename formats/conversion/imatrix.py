"""Reading importance matrices of llama.cpp: files of its llama-imatrix, in GGUF and in the older format without a magic number.

GGUF: general.type is "imatrix"; for each matrix NAME the tensors NAME.in_sum2, f32[matrices, columns], Σ x², and NAME.counts,
f32[matrices], the vectors summed (NAME.in_sum, Σ x, is not used here).

The older one: int32 number of entries; then each as int32 length and bytes of the name, int32 calls, int32 number of values, and
these as float32: the mean of x² times the calls. For a tensor of several matrices their columns follow each other. Behind the entries
may come int32 chunks, int32 length and the name of the text. All little-endian.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DuplicateError, HeaderError, InputError, TensorError, TruncatedError, printable
from ..file_kinds import HEAD_BYTES, kind_of_bytes
from ..gguf.reader import GGUFFile
from ..gguf.values import ValueType
from ..mapped import MappedFile
from .statistics import COUNTS, SUMS, Statistics, column_sums

_MOST_NAME = 1024
_MOST_ENTRIES = 1 << 17


def read_imatrix(path: str | os.PathLike[str]) -> Statistics:
    """Reads an imatrix file of either format. Raises FileFormatError and its subclasses; the file is closed on return."""
    with MappedFile(path) as file:
        gguf = kind_of_bytes(file.bytes[:HEAD_BYTES].tobytes()) == "gguf"
    return _read_gguf(path) if gguf else _read_dat(path)


def _read_gguf(path: str | os.PathLike[str]) -> Statistics:
    with GGUFFile(path) as file:
        metadata = file.metadata
        kind = metadata.get("general.type")
        if kind != "imatrix":
            what = f"its general.type is {printable(repr(kind), 40)}" if kind is not None else "it has no general.type"
            raise InputError(path, f"is a GGUF file, but not an imatrix: {what}")
        found = {}
        for name, tensor in file.tensors.items():
            if not name.endswith(SUMS):
                continue
            matrix = name.removesuffix(SUMS)
            counts = file.tensors.get(matrix + COUNTS)
            if counts is None:
                raise HeaderError(path, f"has {SUMS} but no {COUNTS}", where=matrix)
            if tensor.type != "f32" or counts.type != "f32":
                raise TensorError(path, "sums and counts must be f32", where=matrix)
            found[matrix] = column_sums(path, matrix, _table(tensor.float32()), counts.float32())
        if not found:
            raise HeaderError(path, f"an imatrix without any {SUMS}")
        about = {}
        for key, ours in (("imatrix.chunk_count", "chunks"), ("imatrix.chunk_size", "chunk")):
            if key in metadata:
                about[ours] = str(metadata[key])
        if "imatrix.datasets" in metadata and metadata.item_type("imatrix.datasets") is ValueType.STRING:
            about["text"] = ", ".join(metadata["imatrix.datasets"])
        return Statistics(Path(path), "imatrix", found, about)


def _table(sums: np.ndarray) -> np.ndarray:
    return sums.reshape(-1, sums.shape[-1]) if sums.ndim else sums.reshape(1, 1)


class _Reader:
    """Steps through the older format; every length is held against what is left."""

    def __init__(self, path: Any, data: np.ndarray):
        self.path, self.data, self.at = path, data, 0

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, nbytes: int, where: str) -> np.ndarray:
        if nbytes > self.left:
            raise TruncatedError(self.path, self.at + nbytes, len(self.data), where=where, offset=self.at)
        self.at += nbytes
        return self.data[self.at - nbytes : self.at]

    def number(self, where: str, least: int, most: int) -> int:
        value = int.from_bytes(self.take(4, where).tobytes(), "little", signed=True)
        if not least <= value <= most:
            problem = f"{value} is not between {least} and {most}: neither an imatrix of llama.cpp nor a calibration file"
            raise HeaderError(self.path, problem, where=where, offset=self.at - 4)
        return value

    def text(self, nbytes: int, where: str) -> str:
        raw = self.take(nbytes, where).tobytes()
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise HeaderError(self.path, "is not UTF-8", where=where, offset=self.at - nbytes) from None


def _read_dat(path: str | os.PathLike[str]) -> Statistics:
    with MappedFile(path) as file:
        reader = _Reader(path, file.bytes)
        entries = reader.number("number of entries", 1, _MOST_ENTRIES)
        found = {}
        for i in range(entries):
            where = f"entry {i}"
            name = reader.text(reader.number(f"length of the name of {where}", 1, _MOST_NAME), f"name of {where}")
            if name in found:
                raise DuplicateError(path, "the tensor appears twice", where=name, offset=reader.at)
            calls = reader.number(f"calls of {printable(name, 80)}", 0, (1 << 31) - 1)
            values = reader.number(f"number of values of {printable(name, 80)}", 1, (1 << 31) - 1)
            found[name] = column_sums(path, name, reader.take(4 * values, name).view("<f4"), np.array([max(calls, 1)]))
        about = {}
        if reader.left:  # files before 2024 end here
            about["chunks"] = str(reader.number("number of chunks", 0, (1 << 31) - 1))
            if reader.left:
                about["text"] = reader.text(reader.number("length of the name of the text", 0, 1 << 16), "name of the text")
        return Statistics(Path(path), "imatrix.dat", found, about)
