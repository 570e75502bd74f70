"""Kernels called one by one, and NumPy models of what they read and write. Nothing here imports numba."""

import ctypes

import numpy as np

from halfbyte.engine.kernels import structs as layout
from halfbyte.quant.jit import store
from halfbyte.quant.jit.arguments import pack, parse

KERNEL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32)
_SLOTS = (ctypes.c_int64 * 16)()

CLAIMED = ("matmul", "gated", "expert_matmul", "expert_gated", "expert_sum")
"""Kernels that take a span of units instead of the number of workers."""


def aligned(nbytes, fill=0xFF):
    """uint8[nbytes] at a multiple of 64; all ones is NaN in f16 and f32, so what is read but never written shows."""
    raw = np.full(nbytes + 64, fill, np.uint8)
    return raw[-raw.ctypes.data % 64 :][:nbytes]


def floats(rows, columns, fill=np.nan):
    """float32[rows, columns], aligned."""
    out = aligned(4 * rows * columns).view(np.float32).reshape(rows, columns)
    out[:] = fill
    return out


def copied(array):
    """The same array at an aligned address."""
    out = aligned(array.nbytes).view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def run(name, parameters, workers=1, **arguments):
    """Runs a kernel of engine/kernels, worker after worker. Arrays and steps stand for their addresses, and live until it is done."""
    kernel = store.find(f"halfbyte.engine.kernels.{name}", *map(str, parameters))
    values = {k: v.ctypes.data if isinstance(v, np.ndarray) else getattr(v, "address", v) for k, v in arguments.items()}
    block = np.frombuffer(pack(kernel.fields, values), np.uint8)
    slot = ctypes.addressof(_SLOTS)
    for worker in range(workers):
        third = workers
        if name in CLAIMED:
            third = layout.span(layout.WHOLE * worker // workers, layout.WHOLE * (worker + 1) // workers)
        assert KERNEL(kernel.address)(slot, slot + 64, block.ctypes.data, worker, third) == 0


class Step:
    """The step struct. sequences: (start, count, page numbers, splits) each."""

    def __init__(self, tokens, ids=None, sequences=()):
        self.ids = np.asarray(np.zeros(tokens) if ids is None else ids, np.int32)
        self.pages = [np.asarray(pages, np.int64) for _, _, pages, _ in sequences]
        names = layout.SEQUENCE.split()
        self.table = np.zeros((max(len(sequences), 1), len(names)), np.int64)
        positions, first = [], 0
        for i, (start, count, _, splits) in enumerate(sequences):
            row = {"first": first, "count": count, "start": start, "pages": self.pages[i].ctypes.data, "splits": splits}
            self.table[i] = [row[n] for n in names]
            positions += range(start, start + count)
            first += count
        self.positions = np.asarray(positions or np.zeros(tokens), np.int64)
        row = {
            "tokens": tokens, "ids": self.ids.ctypes.data, "positions": self.positions.ctypes.data,
            "sequences": len(sequences), "table": self.table.ctypes.data,
        }  # fmt: skip
        self.struct = np.array([row[n] for n, _ in parse(layout.STEP)], np.int64)

    @property
    def address(self):
        return self.struct.ctypes.data


# ---- panels ------------------------------------------------------------------------------------------------------------


def widths(tokens):
    """Widths of the panels of a step: sixes, then 1, 2, 4 or 6."""
    rest = tokens % 6
    return [6] * (tokens // 6) + ([{1: 1, 2: 2, 3: 4, 4: 4, 5: 6}[rest]] if rest else [])


def quantized(x):
    """(codes int8[n, blocks, 32], scales float32[n, blocks]): 32 columns at a time, largest magnitude to 127."""
    n, columns = x.shape
    blocks = -(-columns // 32)
    x = np.pad(np.asarray(x, np.float32), ((0, 0), (0, 32 * blocks - columns))).reshape(n, blocks, 32)
    largest = np.abs(x).max(-1)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    return np.rint(x * inverse[..., None]).astype(np.int8), largest * np.float32(1 / 127)


def make_panels(kind, x=None, codes=None, scales=None):
    """The bytes of panels that hold float32[n, columns], or given codes and scales. Lanes without a token are NaN (or 0xFF)."""
    if kind == "int8":
        if codes is None:
            codes, scales = quantized(x)
        n, blocks, _ = codes.shape
    else:
        n, columns = x.shape
        blocks = -(-columns // 32)
        x = np.pad(np.asarray(x, np.float32), ((0, 0), (0, 32 * blocks - columns))).reshape(n, blocks, 32)
    out, first = [], 0
    for width in widths(n):
        here = slice(first, min(first + width, n))
        count = here.stop - here.start
        if kind == "f32":
            record = np.full((blocks, width, 32), np.nan, np.float32)
            record[:, :count] = x[here].swapaxes(0, 1)
            out.append(record.view(np.uint8).reshape(-1))
        else:
            record = np.full((blocks, 44 * width), 0xFF, np.uint8)
            sums = codes[here].astype(np.int32)
            columns_of = [(32, codes[here]), (4, scales[here][..., None]), (4, sums.sum(-1)[..., None].astype(np.int32)),
                          (4, sums[..., :16].sum(-1)[..., None].astype(np.int32))]  # fmt: skip
            at = 0
            for size, values in columns_of:
                part = np.ascontiguousarray(values.swapaxes(0, 1)).view(np.uint8).reshape(blocks, count * size)
                record[:, at : at + count * size] = part
                at += width * size
            out.append(record.reshape(-1))
        first += width
    return copied(np.concatenate(out))


def panel_tokens(kind, panels, n, columns):
    """Back from panels: float32[n, blocks * 32] of kind f32, or (codes, scales, sums, first sums) of kind int8."""
    blocks = -(-columns // 32)
    parts, at, first = [], 0, 0
    for width in widths(n):
        size = blocks * width * layout.RECORD[kind]
        record = panels[at : at + size].reshape(blocks, -1)
        count = min(width, n - first)
        if kind == "f32":
            parts.append([record.view(np.float32).reshape(blocks, width, 32)[:, :count].swapaxes(0, 1)])
        else:
            cut = np.cumsum([0, 32 * width, 4 * width, 4 * width, 4 * width])
            kinds = (np.int8, np.float32, np.int32, np.int32)
            fields = [np.ascontiguousarray(record[:, a:b]).view(t) for a, b, t in zip(cut, cut[1:], kinds, strict=False)]
            parts.append([f.reshape(blocks, width, -1)[:, :count].swapaxes(0, 1) for f in fields])
        at, first = at + size, first + width
    joined = [np.concatenate(p) for p in zip(*parts, strict=True)]
    if kind == "f32":
        return joined[0].reshape(n, -1)
    return joined[0], *(j[..., 0] for j in joined[1:])


# ---- pages of the KV cache ---------------------------------------------------------------------------------------------


class Pages:
    """One layer of the KV cache in NumPy's view. Everything is NaN until written (integers: all ones)."""

    def __init__(self, pages, kv_heads, key_size, value_size, layout_name):
        self.kv_heads, self.key_size, self.value_size, self.layout = kv_heads, key_size, value_size, layout_name
        self.padded = -(-value_size // 16) * 16
        self.dtype = {"f16": np.float16, "f32": np.float32, "q8": np.int8}[layout_name]
        size, scale = np.dtype(self.dtype).itemsize, 4 if layout_name == "q8" else 0
        self._cut = np.cumsum([0, key_size * size, scale, self.padded * size, scale]) * layout.PAGE
        self.head_bytes = int(self._cut[-1])
        self.page_bytes = kv_heads * self.head_bytes
        self.memory = aligned(pages * self.page_bytes)

    def _part(self, page, head, i, dtype):
        at = page * self.page_bytes + head * self.head_bytes
        return self.memory[at + self._cut[i] : at + self._cut[i + 1]].view(dtype)

    def keys(self, page, head):
        """[key size, PAGE]: numbers, or codes"""
        return self._part(page, head, 0, self.dtype).reshape(self.key_size, layout.PAGE)

    def key_scales(self, page, head):
        """float32[PAGE] of q8"""
        return self._part(page, head, 1, np.float32)

    def values(self, page, head):
        """[PAGE, padded value size]: numbers, or codes"""
        return self._part(page, head, 2, self.dtype).reshape(layout.PAGE, self.padded)

    def value_scales(self, page, head):
        """float32[PAGE] of q8"""
        return self._part(page, head, 3, np.float32)

    def slot(self, page, head, slot):
        """Views of all that belongs to one position and head."""
        scales = [s[slot : slot + 1] for s in (self.key_scales(page, head), self.value_scales(page, head))]
        return [self.keys(page, head)[:, slot], self.values(page, head)[slot], *(scales if self.layout == "q8" else [])]

    def put(self, page_numbers, position, k, v):
        """k, v: [kv heads, key size], [kv heads, value size] of one position."""
        page, slot = page_numbers[position // layout.PAGE], position % layout.PAGE
        for h in range(self.kv_heads):
            if self.layout == "q8":
                self.keys(page, h)[:, slot], self.key_scales(page, h)[slot] = rounded(k[h])
                codes, self.value_scales(page, h)[slot] = rounded(v[h])
                self.values(page, h)[slot] = np.pad(codes, (0, self.padded - self.value_size))
            else:
                self.keys(page, h)[:, slot] = k[h]
                self.values(page, h)[slot, : self.value_size] = v[h]

    def get(self, page_numbers, positions):
        """(k, v) float64[positions, kv heads, key or value size]"""
        k, v = (np.zeros((positions, self.kv_heads, size)) for size in (self.key_size, self.value_size))
        for p in range(positions):
            page, slot = page_numbers[p // layout.PAGE], p % layout.PAGE
            for h in range(self.kv_heads):
                k[p, h], v[p, h] = self.keys(page, h)[:, slot], self.values(page, h)[slot, : self.value_size]
                if self.layout == "q8":
                    k[p, h] *= self.key_scales(page, h)[slot]
                    v[p, h] *= self.value_scales(page, h)[slot]
        return k, v


def rounded(x):
    """(int8 codes, float32 scale) of a key or a value in a q8 cache; the scale is NaN where x is not finite."""
    x = np.asarray(x, np.float32)
    if not np.isfinite(x).all():
        return np.zeros(x.shape, np.int8), np.float32(np.nan)
    largest = np.abs(x).max()
    inverse = np.float32(127) / largest if largest > 0 else np.float32(0)
    return np.rint(x * inverse).astype(np.int8), largest * np.float32(1 / 127)
