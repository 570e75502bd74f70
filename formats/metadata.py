"""Key-value metadata of a checkpoint, read by key with a type, and the errors that name what is missing or wrong.

The keys are GGUF's names, whatever the source. A Metadata remembers where it came from and how that source spells a key, so
that someone with a config.json is told that `num_hidden_layers` is missing, not `llama.block_count`.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..quant.errors import HalfbyteError

_absent = object()


class CheckpointError(HalfbyteError):
    """A checkpoint cannot be read: what, in which file, and what to do. Base of the errors of `formats.checkpoint`."""


class MissingKeyError(CheckpointError):
    """A key that is needed is not in the metadata. The text spells it as the source does."""


class MetadataTypeError(CheckpointError):
    """A key holds a value of another type, or outside the range that makes sense."""


class Metadata(Mapping[str, Any]):
    """An immutable mapping of keys to values: bool, int, float, str, lists and NumPy arrays of these.

    source    what the values were read from, as error texts name it: "config.json", "model.gguf"
    spelling  how that source spells a key, for keys whose name there is another
    """

    def __init__(self, values: Mapping[str, Any], source: str, spelling: Mapping[str, str] | None = None) -> None:
        self._values = values
        self.source = source
        self._spelling = spelling or {}

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __repr__(self) -> str:
        return f"<Metadata of {self.source}: {len(self)} keys>"

    def spelled(self, key: str) -> str:
        """The key as the source spells it."""
        return self._spelling.get(key, key)

    def updated(self, values: Mapping[str, Any]) -> Metadata:
        """The same metadata with `values` added or replaced."""
        # A chain, not a merged dict: values of a mapped file stay undecoded until someone asks for them.
        return Metadata(ChainMap(dict(values), self._values), self.source, self._spelling)  # type: ignore[arg-type]

    def has(self, key: str) -> bool:
        """True if the key is there and not null (a null in config.json is a key left out)."""
        return self._values.get(key) is not None

    def require(self, key: str, kind: type | None = None) -> Any:
        """The value of a key, as `kind` (bool, int, float, str, list, dict) if one is given.

        Raises MissingKeyError if the key is absent or null, MetadataTypeError if the value is of another type.
        """
        value = self._values.get(key)
        if value is None:
            raise MissingKeyError(f"{self.source} lacks {self.spelled(key)!r}, which is needed")
        return value if kind is None else self._as(key, value, kind)

    def get(self, key: str, default: Any = None, kind: type | None = None) -> Any:
        """Like `require`, with a default for a key that is absent or null."""
        value = self._values.get(key)
        if value is None:
            return default
        return value if kind is None else self._as(key, value, kind)

    def count(self, key: str, low: int = 1, high: int = 1 << 31, default: Any = _absent) -> int:
        """An integer between `low` and `high` (both included): the number of layers, heads, columns.

        Raises MissingKeyError (unless there is a default) and MetadataTypeError.
        """
        if default is not _absent and not self.has(key):
            return default
        value = self.require(key, int)
        if not low <= value <= high:
            raise MetadataTypeError(f"{self.source}: {self.spelled(key)!r} is {_short(value)}; it must be from {low} to {high}")
        return value

    def number(self, key: str, low: float = 0.0, high: float = 3e38, default: Any = _absent) -> float:
        """A finite number above `low` and at most `high`: an epsilon, a base, a factor.

        Raises MissingKeyError (unless there is a default) and MetadataTypeError.
        """
        if default is not _absent and not self.has(key):
            return default
        value = self.require(key, float)
        if not low < value <= high:  # false for NaN as well
            most = "" if high == 3e38 else f" and at most {high:g}"
            raise MetadataTypeError(f"{self.source}: {self.spelled(key)!r} is {value:g}; it must be a finite number above {low:g}{most}")
        return value

    def _as(self, key: str, value: Any, kind: type) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        if kind is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError:
                pass
        if kind is list and isinstance(value, (tuple, np.ndarray)):
            return list(value)
        if isinstance(value, kind) and not (kind in (int, float) and isinstance(value, bool)):
            return value
        names = {int: "an integer", float: "a number", str: "a text", bool: "true or false", list: "a list", dict: "an object"}
        raise MetadataTypeError(f"{self.source}: {self.spelled(key)!r} is {_short(value)}, not {names.get(kind, kind.__name__)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
