"""Conversion of a checkpoint to a .hbf file: tensor by tensor, in row chunks, so that memory does not grow with the model."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ... import __version__
from ...quant.block import get_format
from ...quant.processors import logical_processors
from ..checkpoint import Checkpoint, model_name
from ..file_keys import describes_file
from ..hbf.checkpoint import TOKENIZER_CONFIG
from ..hbf.structure import TOKENIZER
from ..hbf.writer import NativeWriter
from ..tensor import Tensor, block_format
from ..tokenizer.from_gguf import checked, compact, dumps, from_gguf
from ..tokenizer.pretokenizers import TokenizerError
from .recipe import F16_MAX, Choice, Recipe, RecipeError, method_of, needs_range
from .stream import Job, Measure, streams

_BLOCK = 1 << 22


@dataclass
class TensorResult:
    """What became of one tensor.

    format, source   its format now and before
    nbytes           its bytes in the output
    reason           why it has another format than was asked for, or ""
    padded           columns in the output if rows had to be filled up, else 0
    """

    name: str
    shape: tuple[int, ...]
    format: str
    source: str
    nbytes: int
    reason: str = ""
    method: str = ""
    kept: bool = False
    cosine: float = 1.0
    nmse: float = 0.0
    replaced: int = 0
    padded: int = 0

    @property
    def size(self) -> int:
        """Number of weights."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass
class ConversionResult:
    """What a conversion did.

    path           the output
    kind           "hbf", "gguf" or "safetensors"
    asked          the format asked for
    bytes_before   of the source's weight files
    bytes_after    of the output's files
    left_out       tensors that are not in the output, with the reason
    """

    path: Path
    kind: str
    asked: str
    bytes_before: int
    bytes_after: int = 0
    tensors: list[TensorResult] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def bits_per_weight(self) -> float:
        """Bits of all tensors, padding and scales included, over the number of weights."""
        weights = sum(tensor.size for tensor in self.tensors)
        return 8 * sum(tensor.nbytes for tensor in self.tensors) / weights if weights else 0.0

    @property
    def worst(self) -> TensorResult | None:
        """The tensor with the lowest cosine."""
        return min(self.tensors, key=lambda tensor: tensor.cosine, default=None)

    def exceptions(self) -> list[TensorResult]:
        """Tensors whose format is not the one asked for."""
        return [tensor for tensor in self.tensors if tensor.format != self.asked]


def convert(
    checkpoint: Checkpoint,
    output: str | os.PathLike[str],
    recipe: Recipe,
    *,
    threads: int | None = None,
    allow_nonfinite: bool = False,
    advance: Callable[[int], None] = lambda nbytes: None,
    provenance: Mapping[str, Any] | None = None,
) -> ConversionResult:
    """Writes a checkpoint as a .hbf file, whole or not at all.

    threads          for reading and encoding; None: all processors of this process
    allow_nonfinite  replace NaN (by 0) and infinity (by the row's largest magnitude) instead of refusing them
    advance          called with bytes of the source that are done
    provenance       further metadata about how the file came to be

    Raises NonFiniteError, OutputError, RecipeError and what reading the source raises: all HalfbyteError.
    """
    recipe.check_without_inputs()
    kept, left_out = usable(checkpoint)
    jobs = [plan(tensor, recipe) for tensor in kept]
    result = ConversionResult(Path(output), "hbf", recipe.asked, files_nbytes(checkpoint), left_out=left_out)
    result.notes += requantization_note(jobs) + recipe.unused(kept)
    encoded = streams([job for job, _ in jobs], threads or logical_processors(), allow_nonfinite=allow_nonfinite, advance=advance)
    with NativeWriter(output, inputs=inputs(checkpoint)) as writer, closing(encoded), digesting(checkpoint.files) as digests:
        first = next(encoded)  # begins to encode, while the metadata are made
        _declare(writer, checkpoint, recipe, [job for job, _ in jobs], provenance)
        for stream, (job, choice) in zip(chain([first], encoded), jobs, strict=True):
            writer.write(job.tensor.name, stream.pieces)
            done = tensor_result(job, choice, stream.measure, stream.nbytes)
            writer.record(done.name, cosine=done.cosine, nmse=done.nmse, method=done.method)
            result.tensors.append(done)
        for key, value in source_keys(checkpoint, digests.result()).items():
            writer.add(key, value)
    result.bytes_after = os.stat(output).st_size
    result.notes += replacement_note(result)
    return result


def _declare(
    writer: NativeWriter, checkpoint: Checkpoint, recipe: Recipe, jobs: Iterable[Job], provenance: Mapping[str, Any] | None
) -> None:
    """Metadata and table of the output."""
    for key, value in {**native_metadata(checkpoint, recipe), **(provenance or {})}.items():
        writer.add(key, value)
    for job in jobs:
        # What is quantized already and kept as it is may know what it was made from.
        source = job.tensor.recorded.get("source") if job.kept else None
        writer.declare(job.tensor.name, job.tensor.shape, job.format, source=source or job.tensor.format)


def file_nbytes(checkpoint: Checkpoint, recipe: Recipe, provenance: Mapping[str, Any] | None = None) -> int:
    """Bytes of the file that `convert` writes. Raises what it raises before it writes."""
    writer = NativeWriter("not written")
    _declare(writer, checkpoint, recipe, [plan(tensor, recipe)[0] for tensor in usable(checkpoint)[0]], provenance)
    return writer.nbytes


def plan(tensor: Tensor, recipe: Recipe) -> tuple[Job, Choice]:
    """The job that a recipe makes of a tensor. Looks at the weights where f16 might not hold them."""
    choice = recipe.choose(tensor)
    if needs_range(choice, tensor) and beyond_f16(tensor):
        choice = Choice("bf16", f"holds weights beyond f16's range of {F16_MAX:g}", kept=tensor.format == "bf16")
    method = None if choice.kept or tensor.vector else method_of(get_format(choice.format), recipe)
    return Job(tensor, choice.format, choice.kept, method), choice


def beyond_f16(tensor: Tensor) -> bool:
    """True if a finite weight is too large for f16."""
    form = block_format(tensor.format)
    step = max(1, (1 << 20) // max(1, tensor.columns))
    for start in range(0, tensor.rows, step):
        rows = slice(start, min(start + step, tensor.rows))
        blocks = tensor.blocks(rows)
        bounds = form.bounds(blocks) if blocks is not None and form is not None else None
        if bounds is not None and bool((bounds <= F16_MAX).all()):
            continue
        weights = np.abs(tensor.float32(rows))
        if bool((weights[np.isfinite(weights)] > F16_MAX).any()):
            return True
        tensor.release(rows)
    return False


def usable(checkpoint: Checkpoint) -> tuple[list[Tensor], dict[str, str]]:
    """The tensors that can be quantized, and those that cannot (of a lone .safetensors) with the reason.

    Raises RecipeError if none is left.
    """
    kept, left_out = [], {}
    for tensor in checkpoint.tensors.values():
        if (tensor.format[0] in "iu" and tensor.format[1:].isdigit()) or tensor.format == "bool":
            left_out[tensor.name] = f"holds integers ({tensor.format}), not weights"
        elif tensor.size == 0:
            left_out[tensor.name] = "is empty"
        elif len(tensor.shape) > 4:
            left_out[tensor.name] = f"has {len(tensor.shape)} dimensions; at most 4 can be stored"
        else:
            kept.append(tensor)
    if not kept:
        raise RecipeError(f"{checkpoint.path.name}: there is no tensor of weights in it")
    return kept, left_out


def tensor_result(job: Job, choice: Choice, measure: Measure, nbytes: int) -> TensorResult:
    """The record of a job that is done. What was measured when kept blocks were made stays with them."""
    tensor, form = job.tensor, block_format(job.format)
    missing = 0 if tensor.vector or form is None or job.layout != "tiles" else -tensor.columns % form.block_columns
    before = tensor.recorded if job.kept and tensor.recorded.get("cosine") is not None else {}
    return TensorResult(
        tensor.name,
        tensor.shape,
        job.format,
        tensor.format,
        nbytes,
        choice.reason,
        before.get("method") or ("kept" if job.kept else job.method or ""),
        job.kept,
        before.get("cosine", measure.cosine),
        before.get("nmse", measure.nmse) or 0.0,
        measure.replaced,
        tensor.columns + missing if missing else 0,
    )


def inputs(checkpoint: Checkpoint) -> list[Path]:
    """Everything that an output must not be."""
    found = [*checkpoint.files, checkpoint.path]
    if checkpoint.kind == "safetensors" and checkpoint.family is not None:
        folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
        found += [path for path in folder.iterdir() if path.suffix in (".json", ".jinja", ".safetensors", ".model")]
    return found


def files_nbytes(checkpoint: Checkpoint) -> int:
    return sum(file.stat().st_size for file in checkpoint.files)


def requantization_note(jobs: Iterable[tuple[Job, Choice]]) -> list[str]:
    """A note if tensors that were quantized before are quantized again."""
    again = sorted({job.tensor.format for job, _ in jobs if not job.kept and is_quantized(job.tensor.format) and is_quantized(job.format)})
    if not again:
        return []
    return [f"the source is quantized already ({', '.join(again)}): quantizing it again adds to its error; convert the original if you can"]


def is_quantized(name: str) -> bool:
    """True for a type of fewer than 16 bits per weight that is not a plain 8-bit float."""
    return name.startswith(("q", "iq", "tq", "mxfp", "nvfp")) or ((form := block_format(name)) is not None and form.integers)


def replacement_note(result: ConversionResult) -> list[str]:
    return [f"{tensor.name}: {tensor.replaced} weights that were not finite were replaced" for tensor in result.tensors if tensor.replaced]


def native_metadata(checkpoint: Checkpoint, recipe: Recipe) -> dict[str, Any]:
    """The metadata of a .hbf file: the checkpoint's, its tokenizer, and how the file came to be."""
    skipped = ("general.alignment", "general.file_type", "general.quantization_version", "split.")
    keys: dict[str, Any] = {}
    for key in checkpoint.metadata:
        if not key.startswith(skipped) and not describes_file(key):
            keys[key] = checkpoint.metadata[key]
    tokenizer = checkpoint.tokenizer
    if tokenizer.json is not None:
        keys[TOKENIZER] = compact(checked(tokenizer.json)).decode("utf-8", "replace")
    elif tokenizer:
        # A tokenizer.json is ready in half the time that GGUF's keys take, and that time is part of every start.
        with suppress(TokenizerError):
            keys[TOKENIZER] = dumps(from_gguf(checkpoint.metadata)).decode("utf-8", "replace")
    if tokenizer.config:
        config = {key: value for key, value in tokenizer.config.items() if key != "chat_template"}
        keys[TOKENIZER_CONFIG] = json.dumps(config, separators=(",", ":"))
    keys["halfbyte.version"] = __version__
    keys["halfbyte.recipe"] = json.dumps(recipe.to_dict())
    keys["halfbyte.source.kind"] = checkpoint.kind
    keys["halfbyte.source.name"] = model_name(checkpoint.path)
    # The digests are known last; these keep their place.
    return keys | source_keys(checkpoint, ["0" * 64] * len(checkpoint.files))


def source_keys(checkpoint: Checkpoint, digests: Sequence[str]) -> dict[str, Any]:
    """Names, sizes and SHA-256 of the source's weight files."""
    return {
        "halfbyte.source.files": [file.name for file in checkpoint.files],
        "halfbyte.source.bytes": np.array([file.stat().st_size for file in checkpoint.files], np.uint64),
        "halfbyte.source.sha256": list(digests),
    }


@contextmanager
def digesting(files: Sequence[Path]) -> Iterator[Future[list[str]]]:
    """Digests of files, counted in a thread of its own, which ends when the block does."""
    stop = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="digest") as pool:
        try:
            yield pool.submit(file_digests, files, stop)
        finally:
            stop.set()


def file_digests(files: Iterable[Path], stop: threading.Event | None = None) -> list[str]:
    """SHA-256 of files, in hexadecimal. Reads with a small buffer, so that no mapping grows. Gives up early once `stop` is set."""
    digests = []
    buffer = bytearray(_BLOCK)
    for file in files:
        digest = hashlib.sha256()
        with open(file, "rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
                if stop is not None and stop.is_set():
                    return []
        digests.append(digest.hexdigest())
    return digests
