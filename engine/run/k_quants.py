"""GGUF's K-quants as blocks of ours: the same integers, with each product of two scales as one f16.

A sub-block of 32 weights of Q4_K or Q5_K is code * (d * scale) - (dmin * minimum), which q4_1 and q5_1 hold but for the rounding
of the two products to f16 (2**-11 of them). What has scales of 16 columns, or more bits, is converted through float32.
"""

from __future__ import annotations

import numpy as np

from ...formats.dequantize import six_bit_pairs
from ...formats.tensor import Tensor


def exact_blocks(tensor: Tensor, rows: slice) -> np.ndarray | None:
    """uint8[rows, blocks, block_bytes] of the format that runs the tensor, or None if there is no such short way."""
    raw = getattr(tensor, "raw_rows", None)
    if raw is None or tensor.format not in ("q4_k", "q5_k"):
        return None
    return _k_blocks(raw(rows), five=tensor.format == "q5_k")


def _k_blocks(raw: np.ndarray, five: bool) -> np.ndarray:
    """uint8[rows, bytes] of Q4_K (144 per 256 weights) or Q5_K (176) -> q4_1 (20 per 32) or q5_1 (24)."""
    size = 176 if five else 144
    rows = raw.shape[0]
    supers = raw.reshape(rows, -1, size)
    d = np.ascontiguousarray(supers[..., :4]).view(np.float16).astype(np.float32)
    scales, minima = six_bit_pairs(supers[..., 4:16])
    header = np.stack([d[..., :1] * scales, -(d[..., 1:] * minima)], axis=-1).astype("<f2")  # [rows, supers, 8, 2]
    nibbles = supers[..., -128:].reshape(rows, -1, 4, 32)
    codes = np.stack([nibbles & 15, nibbles >> 4], axis=3).reshape(rows, -1, 8, 32)
    parts = [header.view(np.uint8).reshape(rows, -1, 8, 4)]
    if five:
        high = supers[..., 16:48][..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1
        parts.append(np.packbits(high, axis=-1, bitorder="little"))
    parts.append(codes[..., :16] | codes[..., 16:] << 4)
    blocks = np.concatenate(parts, axis=-1)
    return blocks.reshape(rows, -1, blocks.shape[-1])
