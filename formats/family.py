"""What a family of checkpoints is: how its Hugging Face config and tensor names map to GGUF's, which tensors it has.

A family is one module in `formats/families`, named after GGUF's architecture, that holds an instance called FAMILY. It is found by
that name, or through the entry point group `halfbyte.families` (families/__init__.py); nothing else lists the families.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

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
