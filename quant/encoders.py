"""Fast ways to encode and to reorder: compiled kernels over threads, equal to the NumPy reference bit for bit.

Formats that the kernels do not know (their own grid or parts, or no integers at all) take the reference's way.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from .arrays import COLUMNS, check_blocks, row_chunks
from .bf16 import from_bf16
from .block import ENCODINGS, ROWS, BlockFormat
from .errors import FormatError
from .measures import TensorErrors, TensorMeter
from .processors import logical_processors
from .scaled import ScaledIntegers
from .scales import AbsoluteMax, Affine, SignedMax, Table, check_finite, check_importance

_ORDERS = ("tiles", "blocks")
ENCODE_SCRATCH, TILE_SCRATCH = 10240, 1536
"""Bytes of scratch memory of one worker: see encode_kernel.py (up to 8 vectors of words after WORDS) and retile_kernel.py.

Kernels of some scales need more: ScaleStorage.scratch_bytes.
"""


class Encoded(NamedTuple):
    """tiles: uint8[tiles_nbytes], or blocks: uint8[blocks_shape]; and how far they are from the weights."""

    data: np.ndarray
    errors: TensorErrors


def encode(
    block_format: BlockFormat,
    weights: np.ndarray,
    order: str = "tiles",
    *,
    importance: np.ndarray | None = None,
    method: str | None = None,
    name: str = "tensor",
    threads: int | None = None,
    meter: TensorMeter | None = None,
) -> Encoded:
    """Quantizes a matrix and measures the error of doing so, in one pass over the weights.

    weights: [rows, columns] of float32, float16, ml_dtypes.bfloat16, or uint16 holding bf16 bits; read where they lie.
    order: "tiles" or "blocks"; importance and method as in BlockFormat.encode; threads: None = the processors of this process.
    meter: what the errors are added to, for a tensor that is encoded in runs of rows; `errors` are then of all runs so far.
    Raises NonFiniteError naming `name` and the place, FormatError for arguments that do not suit.
    """
    if order not in _ORDERS:
        raise FormatError(f"unknown byte order {order!r}; known are {', '.join(_ORDERS)}")
    kind = _source_type(weights, name)
    if kind is None:
        weights, kind = np.asarray(weights, np.float32), "f32"
    elif kind == "bf16":
        weights = weights.view(np.uint16)
    rows, columns = weights.shape
    if not has_kernel(block_format) or rows < ROWS or columns == 0:
        return _reference(block_format, weights, kind, order, importance, method, name, meter or TensorMeter())
    assert isinstance(block_format, ScaledIntegers)
    storage = block_format.scales
    method = method or block_format.method
    if method not in ENCODINGS:
        raise FormatError(f"{block_format.name}: unknown method {method!r}; known are {', '.join(ENCODINGS)}")
    weigh = np.ones(columns, np.float32) if importance is None else check_importance(importance, columns, block_format.name)
    blocks = -(-columns // COLUMNS)
    weigh = np.pad(weigh, (0, blocks * COLUMNS - columns), mode="edge")
    groups, rest = divmod(rows, ROWS)
    source = weights[: groups * ROWS]
    if columns % COLUMNS:
        source = np.pad(source, ((0, 0), (0, blocks * COLUMNS - columns)))
    elif source.strides[1] != source.itemsize or source.strides[0] < 0 or not source.dtype.isnative:
        source = np.ascontiguousarray(source, source.dtype.newbyteorder("="))

    as_tiles = order == "tiles"
    group_bytes = block_format.tiles_nbytes(ROWS, columns) if as_tiles else math.prod(block_format.blocks_shape(ROWS, columns))
    out = np.empty((-(-rows // ROWS) if as_tiles else groups) * group_bytes, np.uint8)
    sums = np.empty((groups, 8), np.float32)
    candidates = block_format.grid.candidates
    run_kernel(
        (storage.encoder or "", block_format.name, kind, method, order),
        ENCODE_SCRATCH + storage.scratch_bytes(blocks),
        groups,
        threads,
        source=source.ctypes.data,
        row_bytes=source.strides[0],
        columns=columns,
        blocks=blocks,
        groups=groups,
        out=out.ctypes.data,
        out_bytes=group_bytes,
        importance=weigh.ctypes.data,
        candidates=candidates.ctypes.data,
        candidate_count=len(candidates),
        sums=sums.ctypes.data,
    )
    meter = meter or TensorMeter()
    totals = sums.astype(np.float64)
    body = out[: groups * group_bytes]
    if np.isfinite(totals).all() and totals[:, 0].sum() > 1e-24 * rows * columns:
        meter.add_sums(groups * ROWS, columns, totals)
    else:  # NaN, infinity, or squares that float32 cannot hold
        for chunk in row_chunks(groups * ROWS, columns):
            check_finite(_as_f32(weights[chunk], kind), name, chunk.start)
        decoded = block_format.untile(body, groups * ROWS, columns) if as_tiles else body
        decoded = decoded.reshape(block_format.blocks_shape(groups * ROWS, columns))
        for chunk in row_chunks(groups * ROWS, columns):
            meter.add(_as_f32(weights[chunk], kind), block_format.decode(decoded[chunk], columns))
    if rest:
        last = _as_f32(weights[groups * ROWS :], kind)
        check_finite(last, name, groups * ROWS)
        tail = block_format.encode(last, importance, method)
        meter.add(last, block_format.decode(tail, columns))
        if as_tiles:
            out[groups * group_bytes :] = block_format.tile(tail)
        else:
            out = np.concatenate([body, tail.reshape(-1)])
    return Encoded(out if as_tiles else out.reshape(block_format.blocks_shape(rows, columns)), meter.result())


def tile(block_format: BlockFormat, blocks: np.ndarray, threads: int | None = None) -> np.ndarray:
    """BlockFormat.tile, compiled and over threads: uint8[blocks_shape] -> uint8[tiles_nbytes]."""
    if not has_kernel(block_format) or block_format.header_bytes:
        return block_format.tile(blocks)
    check_blocks(blocks, block_format.block_bytes, block_format.name)
    rows, count, _ = blocks.shape
    groups, rest = divmod(rows, ROWS)
    if groups == 0 or count == 0:
        return block_format.tile(blocks)
    blocks = np.ascontiguousarray(blocks)
    group_bytes = count * block_format.tile_bytes
    out = np.empty((-(-rows // ROWS)) * group_bytes, np.uint8)
    run_kernel(
        ("retile_kernel", block_format.name),
        TILE_SCRATCH,
        groups,
        threads,
        source=blocks.ctypes.data,
        blocks=count,
        groups=groups,
        out=out.ctypes.data,
        out_bytes=group_bytes,
    )
    if rest:
        out[groups * group_bytes :] = block_format.tile(blocks[groups * ROWS :])
    return out


def has_kernel(block_format: BlockFormat) -> bool:
    """Whether the kernels know this format: integers of a known grid, scales and parts that have a compiled side, nothing overridden."""
    return (
        isinstance(block_format, ScaledIntegers)
        and type(block_format.grid) in (SignedMax, AbsoluteMax, Table, Affine)
        and block_format.scales.encoder is not None
        and all(part.compiled for part in block_format.parts)
        and all(getattr(type(block_format), way) is getattr(ScaledIntegers, way) for way in ("encode", "decode", "tile", "untile"))
    )


# ---- the reference's way ---------------------------------------------------------------------------------------------


def _reference(
    block_format: BlockFormat,
    weights: np.ndarray,
    kind: str,
    order: str,
    importance: np.ndarray | None,
    method: str | None,
    name: str,
    meter: TensorMeter,
) -> Encoded:
    rows, columns = weights.shape
    blocks = np.empty(block_format.blocks_shape(rows, columns), np.uint8)
    for chunk in row_chunks(rows, columns):
        values = _as_f32(weights[chunk], kind)
        check_finite(values, name, chunk.start)
        blocks[chunk] = block_format.encode(values, importance, method)
        meter.add(values, block_format.decode(blocks[chunk], columns))
    return Encoded(block_format.tile(blocks) if order == "tiles" else blocks, meter.result())


def _source_type(weights: np.ndarray, name: str) -> str | None:
    """f32, f16 or bf16; None for other floats. Raises FormatError for what is not a matrix of floats."""
    kind = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "uint16": "bf16"}.get(weights.dtype.name)
    if weights.ndim != 2 or (kind is None and weights.dtype.kind != "f"):
        raise FormatError(f"{name}: weights must be a float matrix [rows, columns], not {weights.dtype}{list(weights.shape)}")
    return kind


def as_float32(weights: np.ndarray, name: str) -> np.ndarray:
    """A matrix as `encode` takes it -> float32[rows, columns], the array itself if it is float32. Raises FormatError as `encode`."""
    kind = _source_type(weights, name) or ""
    return _as_f32(weights.view(np.uint16) if kind == "bf16" else weights, kind)


def _as_f32(weights: np.ndarray, kind: str) -> np.ndarray:
    if kind == "bf16":
        return from_bf16(weights)
    return weights.astype(np.float32, copy=False)


# ---- calling kernels -------------------------------------------------------------------------------------------------

_CALL = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32)
"""Numba's convention (see jit/memory.py, call_kernel). The interpreter's lock is released while it runs."""


def run_kernel(kernel: tuple[str, ...], scratch_bytes: int, items: int, threads: int | None, **values: float) -> None:
    """Calls the kernel of that module and parameters on each of the workers, at most one per item."""
    from .jit.arguments import pack
    from .jit.store import find

    workers = max(1, min(items, threads or logical_processors()))
    found = find(f"{__package__}.{kernel[0]}", *kernel[1:])
    scratch = np.empty(workers * scratch_bytes + 64, np.uint8)
    start = scratch.ctypes.data + -scratch.ctypes.data % 64
    block = np.frombuffer(pack(found.fields, values | {"scratch": start, "scratch_bytes": scratch_bytes}), np.uint8)
    call: Callable[..., int] = _CALL(found.address)

    def work(worker: int) -> None:
        slots = (ctypes.c_int64 * 16)()
        address = ctypes.addressof(slots)
        call(address, address + 64, block.ctypes.data, worker, workers)

    if workers == 1:
        work(0)
        return
    with ThreadPoolExecutor(workers - 1) as pool:
        others = [pool.submit(work, worker) for worker in range(1, workers)]
        work(0)
        for other in others:
            other.result()
