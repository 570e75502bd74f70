"""Statistics of whatever kind of file: our own, or llama.cpp's importance matrices."""

from __future__ import annotations

import os

from ..file_kinds import HEAD_BYTES, kind_of_bytes
from ..mapped import MappedFile
from .imatrix import read_imatrix
from .statistics import CalibrationFile, Statistics


def open_statistics(path: str | os.PathLike[str]) -> Statistics:
    """Opens a calibration file, or an imatrix file of llama.cpp's (GGUF, or the older .dat), told apart by their first bytes.

    Raises FileFormatError and its subclasses.
    """
    with MappedFile(path) as file:
        head = file.bytes[:HEAD_BYTES].tobytes()
    if kind_of_bytes(head) == "safetensors":
        return CalibrationFile(path)
    return read_imatrix(path)
