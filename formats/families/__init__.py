"""Families by name: a module of this folder each, or another package's, through the entry point group `halfbyte.families`."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from ..errors import printable
from ..family import Family, UnsupportedArchitectureError


def family(architecture: str, source: str) -> Family:
    """The family of a GGUF architecture. `source` names the file for the error.

    Raises UnsupportedArchitectureError.
    """
    found = _load(architecture)
    if found is None:
        raise _unsupported(source, f"architecture {printable(architecture, 60)!r}")
    return found


def family_of_model_type(model_type: str, source: str) -> Family:
    """The family of config.json's model_type. Raises UnsupportedArchitectureError."""
    # The module of that name first: it saves importing all the others.
    for name in (model_type, *family_names()):
        found = _load(name)
        if found is not None and model_type in found.model_types:
            return found
    raise _unsupported(source, f"model_type {printable(model_type, 60)!r}")


def _unsupported(source: str, what: str) -> UnsupportedArchitectureError:
    found = [one for one in map(_load, family_names()) if one is not None]
    known = sorted({kind for one in found for kind in (one.name, *one.model_types)})
    return UnsupportedArchitectureError(f"{source}: {what} is not supported; supported are {', '.join(known)}")


def family_names() -> tuple[str, ...]:
    """Architectures that a family is known for: the modules of `formats/families`, then other packages' entry points."""
    from importlib.metadata import entry_points

    ours = built_in_names()
    return (*ours, *(point.name for point in entry_points(group="halfbyte.families") if point.name not in ours))


@cache
def built_in_names() -> tuple[str, ...]:
    """Architectures that a module of this folder knows."""
    return tuple(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


@cache
def _load(name: str) -> Family | None:
    if name in built_in_names():
        return importlib.import_module(f".{name}", __name__).FAMILY
    # Reading the entry points of all installed packages takes milliseconds: only for names that are not ours.
    from importlib.metadata import entry_points

    for point in entry_points(group="halfbyte.families"):
        if point.name == name:
            return point.load()
    return None
