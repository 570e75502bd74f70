"""Statistics of whatever kind of file: our own, or llama.cpp's importance matrices."""

from __future__ import annotations

import os

from ..mapped import MappedFile
from .imatrix import read_imatrix
from .statistics import CalibrationFile, Statistics


def open_statistics(path: str | os.PathLike[str]) -> Statistics:
    """Opens a calibration file, or an imatrix file of llama.cpp's (GGUF, or the older .dat), told apart by their first bytes.

    Raises FileFormatError and its subclasses.
    """
    with MappedFile(path) as file:
        head = file.bytes[:9].tobytes()
    if len(head) == 9 and head[8:] == b"{":
        return CalibrationFile(path)
    return read_imatrix(path)
