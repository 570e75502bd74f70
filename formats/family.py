"""What a family of checkpoints is: how its Hugging Face config and tensor names map to GGUF's, which tensors it has.

A family is one module in `formats/families`, named after GGUF's architecture, that holds an instance called FAMILY. It is found by
that name, or through the entry point group `halfbyte.families` (families/__init__.py); nothing else lists the families.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .expression import Expression, Source
from .layers import ModelSpec
from .metadata import CheckpointError, Metadata
from .tensor import Tensor


class UnsupportedArchitectureError(CheckpointError):
    """No family knows this architecture. The text lists those that are known."""


class UnsupportedFeatureError(CheckpointError):
    """The architecture is known, but the checkpoint uses something that is not; it is named."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor that a family expects.

    name         GGUF's name
    huggingface  how it is made of the tensors of a Hugging Face checkpoint, which are named without the "model." prefix; None if such
                 files do not hold it. A text stands for the tensor of that name
    shape        numpy order, canonical
    optional     True if a checkpoint may be without it
    group        optional tensors of one group, such as a bias of every layer, are all there or none of them is; "" for no group
    gguf         how it is made of the tensors of a GGUF file; a text stands for the tensor of that name, "" for the one of this name
    """

    name: str
    huggingface: Expression | str | None
    shape: tuple[int, ...]
    optional: bool = False
    group: str = ""
    gguf: Expression | str = ""

    def made_of(self, kind: Literal["gguf", "huggingface"]) -> Expression | None:
        """The expression for files of a kind."""
        found = self.huggingface if kind == "huggingface" else self.gguf or self.name
        return Source(found) if isinstance(found, str) else found


@dataclass(frozen=True)
class Family(ABC):
    """How the checkpoints of one architecture map to the canonical form.

    name                GGUF's architecture
    model_types         values of config.json's model_type that belong to it
    huggingface_class   the entry of config.json's "architectures" when a folder is written
    ignored             regular expressions of tensors that a file may hold and a model does not need
    """

    name: str
    model_types: tuple[str, ...]
    huggingface_class: str
    ignored: tuple[str, ...] = ()

    @abstractmethod
    def from_huggingface(self, config: Metadata) -> tuple[dict[str, Any], dict[str, np.ndarray], list[str]]:
        """config.json -> GGUF's metadata, tensors that follow from the config alone, and notes. Refuses what is not understood."""

    @abstractmethod
    def to_huggingface(self, metadata: Metadata, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """GGUF's metadata -> config.json."""

    @abstractmethod
    def defaults(self, metadata: Metadata) -> tuple[dict[str, Any], list[str]]:
        """Values that GGUF files may leave out, and notes. Refuses what is not understood, in files of any kind."""

    @abstractmethod
    def model(self, metadata: Metadata) -> ModelSpec:
        """What the model is made of, from complete metadata. Raises MissingKeyError and MetadataTypeError by the key's name."""

    @abstractmethod
    def tensors(self, metadata: Metadata) -> list[TensorSpec]:
        """Every tensor of the model, in the order in which it uses them."""

    def huggingface_tensors(self, metadata: Metadata, config: Metadata) -> list[TensorSpec]:
        """The same for Hugging Face files, where config.json may say which of the optional tensors there are."""
        return self.tensors(metadata)

    @abstractmethod
    def spelling(self) -> dict[str, str]:
        """GGUF's key -> the key of config.json that it comes from."""
