"""The native file, .hbf: its reader and its writer under one name. docs/file-format.md is the specification."""

from .reader import NativeFile, NativeTensor
from .writer import NativeWriter

__all__ = ["NativeFile", "NativeTensor", "NativeWriter"]
