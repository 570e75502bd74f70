"""Weights as kernels read them: tiles at an address.

A .hbf holds tiles, which are used where they are mapped. Other checkpoints are made into tiles at load: the same bits in another
order where a block format of ours holds them, else converted to the format that loses least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from ...formats.checkpoint import Checkpoint
from ...formats.tensor import Tensor
from ...formats.tile_tensor import ArrayTiles, tiles_nbytes
from ...quant.block import format_names, get_format
from ...quant.errors import HalfbyteError
from ...quant.processors import logical_processors

# Source types without a kernel -> the format they run in. Types of 6 bits and more with scales of 16 columns go to 8 bits.
CONVERTED = {
    "f64": "f32", "f8_e4m3": "bf16", "f8_e5m2": "bf16",
    "q2_k": "q8_0", "q3_k": "q8_0", "q4_k": "q4_1", "q5_k": "q5_1", "q6_k": "q8_0", "q8_k": "q8_0",
}  # fmt: skip


class WeightError(HalfbyteError):
    """A tensor cannot be run."""


class Matrix(ArrayTiles):
    """Weights of a matrix product, or of one for each expert: tiles at `address`, sizes as in the checkpoint, unpadded."""

    @property
    def integers(self) -> bool:
        """True if the format is multiplied as integers."""
        return get_format(self.format).integers


class Weights:
    """All weights of a checkpoint, by GGUF's names. `matrix` and `vector` say what a model needs; `load` then gets it all ready."""

    def __init__(self, checkpoint: Checkpoint, threads: int):
        self._tensors = checkpoint.tensors
        self._threads = threads
        self._matrices: dict[str, Matrix] = {}
        self._vectors: dict[str, np.ndarray] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices as they are run."""
        return sum(m.nbytes for m in self._matrices.values())

    def matrices(self) -> list[Matrix]:
        return list(self._matrices.values())

    def load(self, names: Iterable[str], report: Callable[[int, int], None] | None = None) -> None:
        """Makes the named matrices ready, on several threads where that takes work. `report(done, total)` in bytes."""
        wanted = [self._tensors[n] for n in names if n not in self._matrices]
        direct = [t for t in wanted if t.tiles() is not None]
        rest = [t for t in wanted if t.tiles() is None]
        for tensor in direct:
            self._matrices[tensor.name] = _mapped(tensor)
        total, done = sum(t.nbytes for t in rest), 0
        if not rest:
            return
        from concurrent.futures import ThreadPoolExecutor  # not needed by a .hbf

        rest.sort(key=lambda tensor: -tensor.size)  # the largest must not be the last, with nobody beside it
        with ThreadPoolExecutor(min(self._threads, logical_processors())) as pool:
            for tensor, matrix in zip(rest, pool.map(_made, rest), strict=True):
                self._matrices[tensor.name] = matrix
                done += tensor.nbytes
                if report:
                    report(done, total)

    def matrix(self, name: str) -> Matrix:
        """The matrix of that name; it must exist."""
        if name not in self._matrices:
            self.load([name])
        return self._matrices[name]

    def vector(self, name: str, pad: int = 32) -> np.ndarray:
        """float32, padded with zeros to a multiple of `pad`."""
        if name not in self._vectors:
            values = self._tensors[name].float32().reshape(-1)
            raw = np.zeros(-(-values.size // pad) * pad + 16, np.float32)
            start = -raw.ctypes.data % 64 // 4
            out = raw[start : start + -(-values.size // pad) * pad]
            out[: values.size] = values
            self._vectors[name] = out
        return self._vectors[name]


def make_matrix(tensor: Tensor, name: str | None = None) -> Matrix:
    """A tensor as kernels read it: where it is mapped, or made in memory, in the named format if there is one.

    Raises WeightError for types that cannot be run.
    """
    return _made(tensor, name) if tensor.tiles() is None else _mapped(tensor)


def _mapped(tensor: Tensor) -> Matrix:
    tiles = tensor.tiles()
    assert tiles is not None
    return Matrix(tensor.name, tensor.shape, tensor.format, tiles, tensor.recorded)


def run_format(source: str, name: str = "") -> str:
    """The block format in which a tensor of a source type is run. Raises WeightError if there is none."""
    if source in format_names():
        return source
    if source not in CONVERTED:
        raise WeightError(f"tensor {name!r} is stored as {source!r}, which cannot be run; convert the model with qconvert first")
    return CONVERTED[source]


def _made(tensor: Tensor, name: str | None = None) -> Matrix:
    """Tiles made in memory, in chunks of rows so that no float copy of the whole is needed."""
    from ...quant import encoders
    from .k_quants import exact_blocks

    name = name or run_format(tensor.format, tensor.name)
    form = get_format(name)
    nbytes, at = tiles_nbytes(form, tensor.shape), 0
    raw = np.empty(nbytes + 64, np.uint8)
    tiles = raw[-raw.ctypes.data % 64 :][:nbytes]
    for chunk in tensor.runs(1 << 21):
        blocks = tensor.blocks(chunk) if tensor.format == name else exact_blocks(tensor, chunk)
        if blocks is not None:
            part = encoders.tile(form, blocks, threads=1)
        elif encoders.has_kernel(form):
            part = encoders.encode(form, tensor.float32(chunk), method="nearest", name=tensor.name, threads=1).data
        else:
            part = form.tile(form.encode(tensor.float32(chunk), method="nearest"))
        tiles[at : at + part.size] = part
        at += part.size
        tensor.release(chunk)  # the source stays in the page cache, and is no longer counted as this process's memory
    tensor.release()
    return Matrix(tensor.name, tensor.shape, name, tiles)
