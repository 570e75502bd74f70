"""Statistics of the inputs of a model's matrices: the file that calibration writes, and what readers of others' files give.

A file is a .safetensors that anyone can read (docs/calibration.md). For every matrix, by GGUF's name:

    NAME.in_sum2   f32[1, columns]   Σ x² of each column of its input: llama.cpp's name and meaning
    NAME.counts    f32[1]            the vectors that were summed
    NAME.gram      i16[n (n + 1) / 2]  the Gram matrix, if it was asked for: the upper triangle row by row, as correlations
                                     Σ xᵢxⱼ / √(Σ xᵢ² Σ xⱼ²) times 32767
    token_embd.weight.token_counts   i64[vocabulary]: how often each token was seen

Where a tensor holds several matrices (experts), their number stands for the 1, and before n (n + 1) / 2: each has its own.

Matrices that read the same input share one Gram matrix; the header's metadata `shared` says which has whose. Rounded correlations lose
nothing that matters: an error of at most 2⁻¹⁶ in each entry moves eigenvalues by about 2⁻¹⁶ √n of the mean diagonal, a tenth or
less of the damping that error feedback needs anyway. They take a quarter of float32 in full: 101 MB for SmolLM2-135M where that is 403 MB.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from ..errors import FileFormatError, HeaderError, InputError, TensorError, UnsupportedVersionError, printable
from ..safetensors.reader import SafetensorsFile, SafetensorsTensor, parse_json
from ..safetensors.writer import SafetensorsWriter

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

KIND, VERSION = "halfbyte.calibration", "1"
SUMS, COUNTS, GRAM, TOKEN_COUNTS = ".in_sum2", ".counts", ".gram", ".token_counts"
_STEPS = 32767


class StatisticsError(FileFormatError):
    """Statistics that do not fit the model, or do not have what is asked of them."""


@dataclass(frozen=True)
class ColumnSums:
    """Of one matrix, or of each of several that one tensor holds (experts).

    sums    float64[matrices, columns], Σ x²
    counts  float64[matrices], vectors that were summed; 0: this one was never used
    """

    sums: np.ndarray
    counts: np.ndarray

    @property
    def columns(self) -> int:
        return int(self.sums.shape[1])

    @property
    def mean_squares(self) -> np.ndarray:
        """float64[matrices, columns], mean of x². 1 throughout for a matrix that was never used: all its columns count alike."""
        used = self.counts > 0
        means = self.sums / np.where(used, self.counts, 1)[:, None]
        means[~used] = 1
        return means


@dataclass
class Statistics:
    """Sums by GGUF's tensor names, whatever file they come from. A context manager; Gram matrices need it open.

    path      the file
    kind      "calibration", "imatrix" or "imatrix.dat"
    sums      ColumnSums by the names of matrices
    metadata  what the file says about itself: "tokens", "chunk", "model", "text", … as text
    """

    path: Path
    kind: str
    sums: dict[str, ColumnSums]
    metadata: dict[str, str] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.sums

    def weights(self, name: str, columns: int, matrices: int = 1) -> np.ndarray | None:
        """float32[matrices, columns]: how much an error in each column matters, on average 1; None if nothing is known of the tensor.

        Columns that were never active get a millionth, because a weight of 0 would let them become anything.
        Raises StatisticsError if the tensor is of another shape.
        """
        found = self.sums.get(name)
        if found is None:
            return None
        means = found.mean_squares
        if len(means) == 1 and self.kind == "imatrix.dat":  # several matrices, of which this file does not tell the number
            means = means.reshape(matrices, -1) if means.size == matrices * columns else means
        if means.shape != (matrices, columns):
            shape, wanted = ("x".join(map(str, s)) for s in (means.shape, (matrices, columns)))
            raise StatisticsError(self.path, f"is {shape}, the model's is {wanted}: these are statistics of another model", where=name)
        scale = means.mean(axis=1, keepdims=True)
        weights = np.divide(means, scale, out=np.ones_like(means), where=scale > 0)
        return np.maximum(weights, 1e-6).astype(np.float32)

    def gram(self, name: str, matrix: int = 0) -> np.ndarray | None:
        """float32[columns, columns], Σ x xᵀ of the input of a matrix, or of that number of several; None if the file does not have it."""
        return None

    def gram_owner(self, name: str) -> str:
        """The first of the matrices that read the same input as this one, and so have the same Gram matrix."""
        return name

    def token_counts(self) -> np.ndarray | None:
        """int64[vocabulary], how often each token was seen; None if the file does not say."""
        return None

    def close(self) -> None:
        """Closes the file; sums stay."""

    def __enter__(self) -> Statistics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class CalibrationFile(Statistics):
    """Statistics in a file of our own. Sums are read at once, Gram matrices when they are asked for."""

    def __init__(self, path: str | os.PathLike[str]):
        """Raises FileFormatError and its subclasses."""
        self._file = SafetensorsFile(path)
        try:
            metadata = dict(self._file.metadata)
            if metadata.get("kind") != KIND:
                raise InputError(path, "is a .safetensors file, but not one that qcalibrate has written")
            if metadata.get("version") != VERSION:
                problem = f"calibration files of version {printable(metadata.get('version'), 20)} are not read, only {VERSION}"
                raise UnsupportedVersionError(path, problem)
            self._shared = _shared(path, metadata.pop("shared", "{}"))
            super().__init__(Path(path), "calibration", self._sums(), metadata)
        except BaseException:
            self._file.close()
            raise

    def _sums(self) -> dict[str, ColumnSums]:
        found = {}
        for name, tensor in self._file.tensors.items():
            if name.endswith(SUMS):
                matrix = name.removesuffix(SUMS)
                counts = self._file.tensors.get(matrix + COUNTS)
                if counts is None:
                    raise HeaderError(self._file.path, f"has {SUMS} but no {COUNTS}", where=matrix)
                if tensor.dtype != "f32" or counts.dtype != "f32":
                    raise TensorError(self._file.path, "sums and counts must be f32", where=matrix)
                found[matrix] = column_sums(self._file.path, matrix, tensor.array(), counts.array())
        return found

    def gram_owner(self, name: str) -> str:
        return self._shared.get(name, name)

    def gram(self, name: str, matrix: int = 0) -> np.ndarray | None:
        """See Statistics.gram. Raises TensorError."""
        owner = self.gram_owner(name)
        packed, sums = self._file.tensors.get(owner + GRAM), self.sums.get(owner)
        if packed is None or sums is None:
            return None
        n, matrices = sums.columns, len(sums.sums)
        shape = (n * (n + 1) // 2,) if matrices == 1 else (matrices, n * (n + 1) // 2)
        if packed.dtype != "i16" or packed.shape != shape:
            of = f"{matrices} matrices of " if matrices > 1 else ""
            problem = f"is {packed.dtype}{list(packed.shape)}; {of}{n} columns need i16{list(shape)}"
            raise TensorError(self.path, problem, where=owner + GRAM)
        if name != owner and (name not in self.sums or self.sums[name].columns != n):
            raise HeaderError(self.path, f"shares the Gram matrix of {printable(owner, 80)}, which has {n} columns", where=name)
        return unpack_gram(packed.array().reshape(matrices, -1)[matrix], sums.sums[matrix])

    def token_counts(self) -> np.ndarray | None:
        """int64[vocabulary], how often each token was seen; None if the file does not say. Raises TensorError."""
        tensor: SafetensorsTensor | None = next((t for n, t in self._file.tensors.items() if n.endswith(TOKEN_COUNTS)), None)
        if tensor is None:
            return None
        if tensor.dtype != "i64" or len(tensor.shape) != 1:
            raise TensorError(self.path, "must be i64[vocabulary]", where=tensor.name)
        return tensor.array().copy()

    def close(self) -> None:
        self._file.close()


def _shared(path: str | os.PathLike[str], text: str) -> dict[str, str]:
    shared = parse_json(path, text.encode("utf-8", "replace"), where="shared")
    if not all(isinstance(owner, str) for owner in shared.values()):
        raise HeaderError(path, "must be an object of names", where="shared")
    return shared


def column_sums(path: str | os.PathLike[str], name: str, sums: np.ndarray, counts: np.ndarray) -> ColumnSums:
    """Sums of a file, [matrices, columns] or flat, and counts, [matrices] or one for all, checked. Raises TensorError."""
    counts = np.asarray(counts, np.float64).reshape(-1)
    if not counts.size or not sums.size or sums.size % counts.size:
        raise TensorError(path, f"{sums.size} sums do not belong to {counts.size} counts", where=name)
    matrices = sums.shape[0] if sums.ndim > 1 else counts.size
    table = np.asarray(sums, np.float64).reshape(matrices, -1)
    if counts.size not in (1, matrices):
        raise TensorError(path, f"{counts.size} counts for {matrices} matrices", where=name)
    for what, values in (("sums", table), ("counts", counts)):
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise TensorError(path, f"{what} must be finite and not negative", where=name)
    return ColumnSums(table, np.broadcast_to(counts, (matrices,)).copy() if counts.size == 1 else counts)


def fingerprint(checkpoint: Checkpoint) -> str:
    """SHA-256 of names, shapes and first rows of a checkpoint's tensors: tells models apart without reading them whole.

    The rows are taken as float32, so files of different kinds that hold the same weights have the same fingerprint.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(checkpoint.tensors.items()):
        row = tensor.float32() if tensor.vector else tensor.float32(slice(0, 1))
        digest.update(f"{name} {list(tensor.shape)}\n".encode("utf-8", "replace"))
        digest.update(np.ascontiguousarray(row, "<f4").tobytes())
    return digest.hexdigest()


class StatisticsWriter:
    """Writes a calibration file, one input after another. A context manager: the file appears when the block ends well.

    inputs    (names of the matrices that read it, matrices under each of these names, columns, whether Gram matrices will be written) of
              every input
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        inputs: Iterable[tuple[Sequence[str], int, int, bool]],
        metadata: Mapping[str, str],
        *,
        vocabulary: int | None = None,
        sources: Iterable[str | os.PathLike[str]] = (),
    ):
        """sources: files that are being read, which the output must not be. Raises OutputError when the block is entered."""
        inputs = list(inputs)
        shared = {name: names[0] for names, _, _, gram in inputs if gram for name in names[1:]}
        header = {**metadata, "kind": KIND, "version": VERSION, "shared": json.dumps(shared)}
        self._writer = SafetensorsWriter(path, inputs=sources, metadata=header)
        for names, matrices, columns, gram in inputs:
            for name in names:
                self._writer.declare(name + SUMS, (matrices, columns), "f32")
                self._writer.declare(name + COUNTS, (matrices,), "f32")
            if gram:
                packed = columns * (columns + 1) // 2
                self._writer.declare(names[0] + GRAM, (packed,) if matrices == 1 else (matrices, packed), "i16")
        if vocabulary is not None:
            self._writer.declare("token_embd.weight" + TOKEN_COUNTS, (vocabulary,), "i64")

    def write(self, names: Sequence[str], sums: Sequence[np.ndarray], counts: Sequence[int], grams: Sequence[np.ndarray] | None) -> None:
        """The input of each matrix: float64[columns] Σ x², the number of vectors, float32[columns, columns] Σ x xᵀ. Raises OutputError."""
        for name in names:
            self._writer.write(name + SUMS, np.stack(sums).astype("<f4"))
            self._writer.write(name + COUNTS, np.array(counts, "<f4"))
        if grams is not None:
            packed = [pack_gram(gram, each) for gram, each in zip(grams, sums, strict=True)]
            self._writer.write(names[0] + GRAM, packed[0] if len(packed) == 1 else np.stack(packed))

    def write_token_counts(self, counts: np.ndarray) -> None:
        """int64[vocabulary]. Raises OutputError."""
        self._writer.write("token_embd.weight" + TOKEN_COUNTS, np.asarray(counts, "<i8"))

    def __enter__(self) -> StatisticsWriter:
        self._writer.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._writer.__exit__(kind, error, trace)


def pack_gram(gram: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """float32[n, n] Σ x xᵀ and float64[n] Σ x² -> i16[n (n + 1) / 2]: correlations times 32767, the upper triangle row by row."""
    n = len(gram)
    roots = np.sqrt(np.asarray(sums, np.float64))
    inverse = np.divide(1.0, roots, out=np.zeros(n), where=roots > 0).astype(np.float32)
    packed = np.empty(n * (n + 1) // 2, "<i2")
    at = 0
    for i in range(n):
        row = gram[i, i:] * inverse[i:] * (inverse[i] * np.float32(_STEPS))
        packed[at : at + n - i] = np.clip(np.rint(row), -_STEPS, _STEPS)
        at += n - i
    return packed


def unpack_gram(packed: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """The inverse: float32[n, n], symmetric, with float64[n] `sums` on the diagonal."""
    roots = np.sqrt(np.asarray(sums, np.float64)).astype(np.float32)
    n, at = len(roots), 0
    gram = np.empty((n, n), np.float32)
    for i in range(n):
        gram[i, i:] = gram[i:, i] = packed[at : at + n - i] * (roots[i] / np.float32(_STEPS)) * roots[i:]
        at += n - i
    np.fill_diagonal(gram, sums)
    return gram
