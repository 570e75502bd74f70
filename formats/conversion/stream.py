"""Tensors that stream through encoders: chunks of rows are read, encoded and measured in worker threads, and come out in order.

Memory is a few chunks per thread, whatever the size of a tensor.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from ...quant import encoders
from ...quant.block import ROWS, BlockFormat, get_format
from ...quant.errors import NonFiniteError
from ...quant.measures import TensorMeter
from ...quant.scales import check_finite, replace_nonfinite
from ..tensor import Tensor

CHUNK = 1 << 20
"""Weights of a chunk: 4 MB as float32."""


@dataclass(frozen=True)
class Job:
    """What is to become of one tensor.

    format      the block format of the output
    kept        the source's blocks are kept bit for bit, or, if `format` is another one, written with its codes (see `can_widen`)
    method      how scales are chosen
    through     a block format that weights are quantized to and back before they are written as `format`
    layout      "tiles" (kernel order), "rows" (one row after another, as GGUF and safetensors have them)
    """

    tensor: Tensor
    format: str
    kept: bool = False
    method: str | None = None
    layout: str = "tiles"
    through: str | None = None


@dataclass
class Measure:
    """Sums over the weights of a tensor, before and after: what cosine and nmse are made of."""

    dot: float = 0.0
    before: float = 0.0
    after: float = 0.0
    error: float = 0.0
    replaced: int = 0

    def add(self, other: Measure) -> None:
        self.dot += other.dot
        self.before += other.before
        self.after += other.after
        self.error += other.error
        self.replaced += other.replaced

    def take(self, meter: TensorMeter) -> None:
        """Adds what a meter has summed."""
        self.dot += meter.dot
        self.before += meter.reference_energy
        self.after += meter.energy
        self.error += meter.error_energy

    @property
    def cosine(self) -> float:
        """Cosine similarity of the weights before and after; 1 for two zero tensors, and where nothing was measured."""
        if self.error == 0.0:
            return 1.0
        norm = math.sqrt(self.before) * math.sqrt(self.after)
        return max(-1.0, min(1.0, self.dot / norm)) if norm > 0 else 0.0

    @property
    def nmse(self) -> float:
        """Sum of squared errors over the sum of squares before."""
        if self.error == 0.0:
            return 0.0
        return self.error / self.before if self.before > 0 else math.inf


@dataclass
class Stream:
    """One tensor on its way: iterate over `pieces` (arrays whose bytes follow each other), then read `measure` and `nbytes`."""

    job: Job
    pieces: Iterator[np.ndarray]
    measure: Measure = field(default_factory=Measure)
    nbytes: int = 0


def streams(
    jobs: Sequence[Job], threads: int, *, allow_nonfinite: bool = False, advance: Callable[[int], None] = lambda nbytes: None
) -> Generator[Stream, None, None]:
    """Yields a Stream per job, in order. Its pieces must be used up before the next one is asked for.

    Encoding begins when the first stream is asked for, and goes on while the caller is busy with other things. Close the iterator
    (contextlib.closing) if it is not used up.

    advance: called with bytes of the source that are done. Raises NonFiniteError by tensor, row and column, unless allowed.
    """
    queue: deque[Future[tuple[np.ndarray, Measure, int]]] = deque()
    work = ((job, rows) for job in jobs for rows in chunks(job))
    most = 2 * threads + 8
    with ThreadPoolExecutor(threads, thread_name_prefix="encode") as pool:

        def fill() -> None:
            while len(queue) < most:
                item = next(work, None)
                if item is None:
                    return
                queue.append(pool.submit(_encode, *item, allow_nonfinite))

        def pieces(stream: Stream) -> Iterator[np.ndarray]:
            for _ in chunks(stream.job):
                fill()
                data, measure, nbytes = queue.popleft().result()
                stream.measure.add(measure)
                stream.nbytes += data.nbytes
                advance(nbytes)
                yield data
            stream.job.tensor.release()

        try:
            fill()
            for job in jobs:
                stream = Stream(job, iter(()))
                stream.pieces = pieces(stream)
                yield stream
        finally:
            for future in queue:
                future.cancel()


def chunks(job: Job) -> list[slice]:
    """Slices of about CHUNK weights of one matrix each: whole groups of 16 rows for tiles."""
    tensor = job.tensor
    if tensor.vector:
        return [slice(0, 1)]
    unit = ROWS if job.layout == "tiles" else 1
    return tensor.runs(CHUNK, unit)


def _encode(job: Job, rows: slice, allow_nonfinite: bool) -> tuple[np.ndarray, Measure, int]:
    """One chunk: its bytes in the output, what was measured, and the bytes it has in the source."""
    tensor = job.tensor
    if tensor.vector:
        return _vector(job, allow_nonfinite)
    share = tensor.nbytes * (rows.stop - rows.start) // tensor.rows
    form = get_format(job.format)
    tiles = job.layout == "tiles"
    measure, ready = Measure(), False
    blocks = _kept_blocks(tensor, rows, form, measure) if job.kept else None
    if blocks is None:
        ready = tiles
        blocks = _quantize(job, form, rows, "tiles" if ready else "blocks", allow_nonfinite, measure)
    if ready:
        data = blocks
    elif tiles:
        data = encoders.tile(form, blocks, threads=1)
    else:
        data = np.ascontiguousarray(blocks).reshape(blocks.shape[0], -1)
        if not form.integers:  # plain rows end where the columns end
            data = data[:, : tensor.columns * form.block_bytes // form.block_columns]
    tensor.release(rows)
    return data, measure, share


def _quantize(job: Job, form: BlockFormat, rows: slice, order: str, allow_nonfinite: bool, measure: Measure) -> np.ndarray:
    """Rows of a tensor in a format, as encoders.encode gives them in that order; `measure` takes the errors."""
    tensor, meter = job.tensor, TensorMeter()
    weights = tensor.plain(rows)
    if weights is None:
        weights = tensor.float32(rows)
    try:
        data = _through(job, form, weights, order, meter)
    except NonFiniteError:
        # The encoder sees a run of rows; the error must name the row of the tensor.
        weights = tensor.float32(rows)
        if not allow_nonfinite:
            check_finite(weights, tensor.name, rows.start)
        weights, measure.replaced = replace_nonfinite(weights)
        meter = TensorMeter()
        data = _through(job, form, weights, order, meter)
    measure.take(meter)
    return data


def _through(job: Job, form: BlockFormat, weights: np.ndarray, order: str, meter: TensorMeter) -> np.ndarray:
    if job.through is None:
        return encoders.encode(form, weights, order, method=job.method, name=job.tensor.name, threads=1, meter=meter).data
    middle = get_format(job.through)
    blocks = encoders.encode(middle, weights, "blocks", method=job.method, name=job.tensor.name, threads=1, meter=meter).data
    return encoders.encode(form, middle.decode(blocks, job.tensor.columns), order, name=job.tensor.name, threads=1).data


def _kept_blocks(tensor: Tensor, rows: slice, form: BlockFormat, measure: Measure) -> np.ndarray | None:
    """The source's own blocks as blocks of `form`; None if there are none, as of floats that were computed, or if a weight in
    them is not finite, which the caller then has to look at."""
    blocks, source = tensor.blocks(rows), get_format(tensor.format)
    if blocks is None:
        return None
    bounds = source.bounds(blocks)
    if (bounds is None or not np.isfinite(bounds).all()) and not np.isfinite(source.decode(blocks, tensor.columns)).all():
        return None
    if source is form:
        return blocks
    widened, exact = widen(blocks, source, form)
    if not exact:
        meter = TensorMeter()
        meter.add(source.decode(blocks, tensor.columns), form.decode(widened, tensor.columns))
        measure.take(meter)
    return widened


def can_widen(source: BlockFormat, form: BlockFormat) -> bool:
    """True if `form` has all levels of `source` for as many columns, so that blocks of `source` can be written with its codes.

    The values are the same bit for bit if both store scales alike; others are rounded as `form` stores them, by 2^-11 of them at most
    unless they are beyond its range.
    """
    stores = (source.scales, form.scales)
    if any(each is None or each.numbers > 1 for each in stores) or not form.scales.any_scale or source.scale_columns != form.scale_columns:
        return False
    return bool(np.isin(source.levels, form.levels).all())


def widen(blocks: np.ndarray, source: BlockFormat, form: BlockFormat) -> tuple[np.ndarray, bool]:
    """Blocks of `source` as blocks of `form` with the same levels, and whether no scale was rounded. See `can_widen`."""
    scales, codes = source.unpack(blocks)
    rounded = form.scales.rounded(scales.scale, None)
    code_of = np.searchsorted(form.levels, source.levels).astype(np.uint8)
    return form.pack(rounded, code_of[codes]), np.array_equal(rounded.scale, scales.scale)


def _vector(job: Job, allow_nonfinite: bool) -> tuple[np.ndarray, Measure, int]:
    values = np.atleast_1d(job.tensor.float32())
    measure = Measure()
    if not np.isfinite(values).all():
        if not allow_nonfinite:
            check_finite(values, job.tensor.name)
        values, measure.replaced = replace_nonfinite(values)
    if job.format == "f32":
        return values, measure, job.tensor.nbytes
    form, meter = get_format(job.format), TensorMeter()
    row = encoders.encode(form, values[None], "blocks", threads=1, meter=meter).data
    measure.take(meter)
    return row.reshape(-1)[: len(values) * form.block_bytes // form.block_columns], measure, job.tensor.nbytes
