"""What a family of checkpoints is: how its Hugging Face config and tensor names map to GGUF's, which tensors it has.

A family is one module in `formats/families`, named after GGUF's architecture, that holds an instance called FAMILY. It is found by
that name, or through the entry point group `halfbyte.families`; nothing else lists the families.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .errors import printable
from .metadata import CheckpointError, Metadata
from .tensor import Tensor

if TYPE_CHECKING:
    from .huggingface.weights import Weights


class UnsupportedArchitectureError(CheckpointError):
    """No family knows this architecture. The text lists those that are known."""


class UnsupportedFeatureError(CheckpointError):
    """The architecture is known, but the checkpoint uses something that is not; it is named."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor that a family expects.

    name          GGUF's name
    sources       what it is made of in a Hugging Face checkpoint, without the "model." prefix: one tensor, several for families
                  that override `Family.tensor`, none if such files do not hold it
    shape         numpy order, canonical
    optional      True if a checkpoint may be without it
    group         optional tensors of one group, such as a bias of every layer, are all there or none of them is; "" for no group
    rotary_heads  > 0 for the rows of q and k: that many heads, whose rows GGUF holds as interleaved pairs if the family does
    offset        added to the weights of a Hugging Face file (1 for norms stored as w - 1)
    """

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    optional: bool = False
    group: str = ""
    rotary_heads: int = 0
    offset: float = 0.0


class Family(ABC):
    """How the checkpoints of one architecture map to the canonical form.

    name                GGUF's architecture
    model_types         values of config.json's model_type that belong to it
    huggingface_class   the entry of config.json's "architectures" when a folder is written
    interleaved         True if GGUF files hold the rotary rows of q and k as interleaved pairs
    ignored             regular expressions of tensors that a file may hold and a model does not need
    """

    name: ClassVar[str]
    model_types: ClassVar[tuple[str, ...]]
    huggingface_class: ClassVar[str]
    interleaved: ClassVar[bool] = False
    ignored: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def from_huggingface(self, config: Metadata) -> tuple[dict[str, Any], dict[str, np.ndarray], list[str]]:
        """config.json -> GGUF's metadata, tensors that follow from the config alone, and notes. Refuses what is not understood."""

    @abstractmethod
    def to_huggingface(self, metadata: Metadata, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """GGUF's metadata -> config.json."""

    @abstractmethod
    def complete(self, metadata: Metadata) -> tuple[dict[str, Any], list[str]]:
        """Values that GGUF files may leave out, and notes. Refuses what is not understood, in files of any kind."""

    @abstractmethod
    def tensors(self, metadata: Metadata) -> list[TensorSpec]:
        """Every tensor of the model, in the order in which it uses them."""

    def huggingface_tensors(self, metadata: Metadata, config: Metadata) -> list[TensorSpec]:
        """The same for Hugging Face files, where config.json may say which of the optional tensors there are."""
        return self.tensors(metadata)

    @abstractmethod
    def spelling(self) -> dict[str, str]:
        """GGUF's key -> the key of config.json that it comes from."""

    def tensor(self, spec: TensorSpec, weights: Weights, names: tuple[str, ...]) -> Tensor:
        """The canonical tensor of a spec from Hugging Face files, where it is called `names`.

        The place for families that stack, split or transpose; here a tensor is what it is, but for the offset.
        """
        return weights.tensor(names[0], spec.name, spec.offset)


def rotary_order(heads: int, rows: int) -> np.ndarray:
    """int64[rows]: row i of the half order is row order[i] of the interleaved order, head by head.

    In the half order the pair of a rotation is rows (j, j + size / 2) of a head, in the interleaved one rows (2 j, 2 j + 1).
    """
    size = rows // heads
    return np.arange(rows).reshape(heads, size // 2, 2).swapaxes(1, 2).reshape(rows)


def interleave_order(heads: int, rows: int) -> np.ndarray:
    """int64[rows]: row i of the interleaved order is row order[i] of the half order; the inverse of `rotary_order`."""
    size = rows // heads
    return np.arange(rows).reshape(heads, 2, size // 2).swapaxes(1, 2).reshape(rows)


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

    ours = _own_names()
    return (*ours, *(point.name for point in entry_points(group="halfbyte.families") if point.name not in ours))


@cache
def _own_names() -> tuple[str, ...]:
    from . import families

    return tuple(module.name for module in pkgutil.iter_modules(families.__path__) if not module.name.startswith("_"))


@cache
def _load(name: str) -> Family | None:
    if name in _own_names():
        return importlib.import_module(f".families.{name}", __package__).FAMILY
    # Reading the entry points of all installed packages takes milliseconds: only for names that are not ours.
    from importlib.metadata import entry_points

    for point in entry_points(group="halfbyte.families"):
        if point.name == name:
            return point.load()
    return None
