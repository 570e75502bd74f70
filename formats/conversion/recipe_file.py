"""Recipe files: what a conversion is to do, as JSON that can be read and edited.

    {
     "format": "nl4",
     "method": "feedback",
     "tensors": {"attn_[kv]\\\\.weight": "q6_r", "^token_embd": "q6_r"}
    }

"bits" may stand instead of "format". All keys may be left out. "tensors" are regular expressions, and the block format of the matrices in
whose names they are found; of several the last one counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..atomic import atomic_file
from ..errors import HeaderError, InputError, printable
from ..mapped import open_stream, why_not_opened
from ..safetensors.reader import parse_json
from .recipe import Recipe

_MOST = 1 << 24
_KEYS = {"bits": int, "format": str, "method": str, "tensors": dict}


def read_recipe(path: str | os.PathLike[str]) -> Recipe:
    """A recipe from a file. Raises InputError, HeaderError, DuplicateError, and RecipeError and FormatError for what makes no sense."""
    try:
        with open_stream(path) as file:
            raw = file.read(_MOST + 1)
    except OSError as error:
        raise InputError(path, why_not_opened(error, Path(path))) from None
    except ValueError:
        raise InputError(path, "cannot be opened: not a file name") from None
    if len(raw) > _MOST:
        raise InputError(path, f"has more than {_MOST} bytes: this is no recipe")
    found: dict[str, Any] = parse_json(path, raw)
    for key, value in found.items():
        kind = _KEYS.get(key)
        if kind is None:
            raise HeaderError(path, f"is no key of a recipe; known are {', '.join(_KEYS)}", where=printable(key, 80))
        if value is not None and type(value) is not kind:
            raise HeaderError(path, f"must be of type {kind.__name__}", where=key)
    tensors = found.get("tensors") or {}
    for pattern, form in tensors.items():
        if not isinstance(form, str):
            raise HeaderError(path, "must be the name of a block format", where=printable(pattern, 80))
    return Recipe(found.get("bits"), found.get("format"), found.get("method"), tuple(tensors.items()))


def write_recipe(path: str | os.PathLike[str], recipe: Recipe, *, inputs: Iterable[str | os.PathLike[str]] = ()) -> None:
    """Writes a recipe so that `read_recipe` gives it again. inputs: files that the output must not be. Raises OutputError."""
    values = {"bits": recipe.bits, "format": recipe.format, "method": recipe.method, "tensors": dict(recipe.tensors)}
    text = json.dumps({key: value for key, value in values.items() if value}, indent=1, ensure_ascii=False) + "\n"
    with atomic_file(path, inputs=inputs) as output:
        output.write_at(0, text.encode("utf-8", "surrogatepass"))
