"""The safetensors of a Hugging Face checkpoint as one set of named tensors, 8-bit floats with their scales included."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, TensorError, some
from ..metadata import CheckpointError, Metadata
from ..safetensors.reader import INDEX_NAME as SHARD_INDEX
from ..safetensors.reader import SafetensorsFolder
from ..tensor import RowIndex, RowsTensor

_PACKED = {
    "GPTQ or AWQ": re.compile(r"\.(qweight|qzeros|g_idx)$"),
    "bitsandbytes": re.compile(r"\.(absmax|quant_map|nested_absmax|quant_state\..+|SCB)$"),
    "compressed-tensors": re.compile(r"\.weight_(packed|shape)$"),
}
_METHODS = {
    "bitsandbytes": "bitsandbytes",
    "gptq": "GPTQ",
    "awq": "AWQ",
    "compressed-tensors": "compressed-tensors",
    "hqq": "HQQ",
    "quanto": "Quanto",
    "aqlm": "AQLM",
    "torchao": "torchao",
    "mxfp4": "MXFP4",
    "modelopt": "ModelOpt",
}
_FLOAT8 = ("f8_e4m3", "f8_e5m2")
_INPUT_SCALES = re.compile(r".*\.(input_scale|activation_scale|input_scale_ub)$")


class AlreadyQuantizedError(CheckpointError):
    """The weights are packed integers of another tool."""


def refuse_quantized(config: Metadata) -> None:
    """Raises AlreadyQuantizedError, which names the tool, for a config.json whose weights are packed integers. fp8 is read."""
    for key in ("quantization_config", "compression_config"):
        settings = config.get(key, None, dict)
        if settings is None:
            continue
        method = str(settings.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in settings else "a method without a name"))
        if method.lower() not in ("fp8", "fbgemm_fp8"):
            name = _METHODS.get(method.lower(), repr(method)[:60])
            raise AlreadyQuantizedError(
                f"{config.source}: the weights are already quantized with {name} ({key!r}); convert the original checkpoint instead"
            )


def refuse_packed(path: Path, names: Iterable[str]) -> None:
    """Raises AlreadyQuantizedError if the names of tensors are those of another tool's packed weights."""
    for tool, pattern in _PACKED.items():
        name = next((name for name in names if pattern.search(name)), None)
        if name is not None:
            raise AlreadyQuantizedError(
                f"{path.name}: already quantized with {tool} (it holds {some([name])}); convert the original checkpoint instead"
            )


class Weights:
    """Tensors by the names that the files have.

    files   the files, in the order of their names
    names   of all weights; scales that belong to 8-bit floats, and scales of activations, are not among them
    """

    def __init__(self, source: SafetensorsFolder, block: tuple[int, int]) -> None:
        self.path, self.files = source.path, [file.path for file in source.files]
        self._entries = source.tensors
        self._block = block
        self._scales: dict[str, str] = {}
        for name, entry in self._entries.items():
            if entry.dtype in _FLOAT8:
                scale = next((name + ending for ending in ("_scale_inv", "_scale") if name + ending in self._entries), None)
                if scale is not None:
                    self._scales[name] = scale
        scales = set(self._scales.values())
        self.names = [name for name in self._entries if name not in scales and not _INPUT_SCALES.match(name)]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def float8_without_scale(self) -> list[str]:
        """8-bit floats that no scale belongs to."""
        return [name for name in self.names if self._entries[name].dtype in _FLOAT8 and name not in self._scales]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def tensor(self, name: str) -> RowsTensor:
        """The tensor of a name."""
        entry = self._entries[name]
        scale = self._scale_of(name) if name in self._scales else None
        return RowsTensor(name, entry.shape, entry.dtype, entry.file, entry.raw(), scale=scale)

    def _scale_of(self, name: str) -> Any:
        """A function that gives the factors of some rows: one for the tensor, one per row, or one per block of rows and columns."""
        rows, columns = self._matrix_shape(name)
        values = self.tensor(self._scales[name]).float32()
        blocks = tuple(-(-size // step) for size, step in zip((rows, columns), self._block, strict=True))
        if values.size == 1:
            factor = values.reshape(1, 1)
            return lambda index: factor
        if values.ndim <= 2 and values.size == rows and values.shape[0] == rows:
            column = values.reshape(rows, 1)
            return lambda index: column[index]
        if values.shape == blocks:
            step, wide = self._block

            def factors(index: RowIndex) -> np.ndarray:
                numbers = np.arange(rows)[index] // step
                return np.repeat(values, wide, axis=1)[:, :columns][numbers]

            return factors
        raise TensorError(
            self.path,
            f"has shape {list(values.shape)}; one factor, one per row ({rows}) or one per block ({list(blocks)}) is needed",
            where=self._scales[name],
        )

    def _matrix_shape(self, name: str) -> tuple[int, int]:
        shape = self.shape(name)
        return (int(np.prod(shape[:-1], dtype=np.int64)), shape[-1]) if shape else (1, 1)


def open_weights(folder: Path, file: Path | None, stack: ExitStack, config: Metadata | None = None) -> tuple[Weights, list[str]]:
    """The weights of a folder, or of one file in it, and notes. The files stay open as long as `stack`.

    Raises FileFormatError (MissingTensorsError with all names, if an index promises what is not there).
    """
    settings = Metadata({} if config is None else config.get("quantization_config", {}, dict), "config.json: quantization_config")
    block = settings.get("weight_block_size", [128, 128], list)
    if len(block) != 2 or not all(isinstance(size, int) and 0 < size < 1 << 24 for size in block):
        raise CheckpointError(f"{settings.source}: 'weight_block_size' must be two positive integers")
    if file is None:
        _refuse_pickles(folder)
    source = stack.enter_context(SafetensorsFolder(folder if file is None else file))
    weights = Weights(source, (block[0], block[1]))
    bare = weights.float8_without_scale()
    if bare and settings.has("quant_method"):
        raise TensorError(folder, f"8-bit floats without the scales that config.json promises: {some(bare)}")
    return weights, source.notes


def _refuse_pickles(folder: Path) -> None:
    """Raises InputError for a folder whose weights are PyTorch pickles only."""
    files = list(folder.iterdir())
    if any(path.suffix == ".safetensors" or path.name == SHARD_INDEX for path in files):
        return
    pickles = sorted(path.name for path in files if path.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        raise InputError(
            folder, f"holds weights only as PyTorch pickles ({some(pickles, 2)}), which can run code; convert them to safetensors first"
        )
