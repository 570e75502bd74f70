"""Numbers: block formats, the choice of scales, error measures. Arrays in, blocks out; no files, no models.

Names are loaded when first used, so that a program that needs one of them does not pay for the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .block import ROWS, BlockFormat, format_names, get_format, register
    from .errors import FormatError, HalfbyteError, NonFiniteError
    from .scales import check_finite, replace_nonfinite

_HOME = {
    "ROWS": "block",
    "BlockFormat": "block",
    "FormatError": "errors",
    "HalfbyteError": "errors",
    "NonFiniteError": "errors",
    "check_finite": "scales",
    "format_names": "block",
    "get_format": "block",
    "register": "block",
    "replace_nonfinite": "scales",
}

__all__ = [
    "ROWS",
    "BlockFormat",
    "FormatError",
    "HalfbyteError",
    "NonFiniteError",
    "check_finite",
    "format_names",
    "get_format",
    "register",
    "replace_nonfinite",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
