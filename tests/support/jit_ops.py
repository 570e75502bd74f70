"""Every SIMD operation on chosen numbers, and a matrix kernel's integers, for the processor that NUMBA_CPU_NAME asks for.

    python jit_ops.py OUT.npz [MODEL]       also the logits of a model, if one is given

A process of its own, because a process compiles for one processor. The tests compare what it writes with NumPy.
"""

import os
import sys

import numpy as np

LANES = 16
TILES = 40
TABLE = (255, 0, 3, 128, 127, 200, 17, 9, 64, 31, 250, 1, 99, 86, 5, 180)
WIDE = (*TABLE, *(255 - entry // 2 for entry in TABLE))
EDGES_16, VALUES_16 = tuple(-20.0 + 2.5 * i for i in range(15)), tuple(float(i * i - 9) for i in range(16))
EDGES_32, VALUES_32 = tuple(-80.0 + 5.5 * i for i in range(31)), tuple(float(i * i % 19) for i in range(32))
EDGES, VALUES = (-40.0, -7.5, 0.0, 1.0, 33.0), (-9.0, 4.0, 0.5, -2.0, 100.0, 7.0)


MATRICES = ("q8_0", "q4_1", "nl4", "nl4_16", "nl5")


def inputs():
    """What the operations are given. The same in every process."""
    rng = np.random.default_rng(0)
    floats = np.concatenate([
        np.linspace(-90, 90, 4001), rng.standard_normal(4000) * 30,
        [0.0, -0.0, 1e-40, -1e-40, 88.0, -87.0, -87.001, 1e30, -1e30, 0.5, 1.5, 2.5],
    ]).astype(np.float32)  # fmt: skip
    codes = rng.integers(0, 256, (TILES, 64), np.uint8)
    signed = rng.integers(-127, 128, (TILES, 64)).astype(np.int8)
    codes[0], signed[0], codes[1], signed[1] = 255, 127, 255, -127  # the largest sums
    codes[2:4, ::2], signed[2:4, ::2] = 255, 127
    random = rng.integers(0, 2**32, 40000, np.uint64).astype(np.uint32)
    ties = (np.arange(0x38000000, 0x38000000 + 4096 * 64, 4096, np.uint64)).astype(np.uint32)  # halfway between two f16, and near
    edges = [0x477FEFFF, 0x477FF000, 0x477FE000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x33000000, 0x33000001, 0x387FC000, 1]
    edges = np.array(edges, np.uint32)
    return {
        "floats": padded(floats), "halves": np.arange(65536, dtype=np.uint16), "codes": codes, "signed": signed,
        "narrow": padded(np.concatenate([random, ties, ties + 1, edges]).view(np.float32)),
        "numbers": rng.integers(-1000, 1000, (TILES, LANES)).astype(np.int32),
        "start": rng.integers(-(10**6), 10**6, (TILES, LANES)).astype(np.int32),
    }  # fmt: skip


def padded(x):
    return np.pad(x, (0, -len(x) % LANES))


def results(given):
    """name -> array, computed by one compiled function over all operations: compiling is what takes the time."""
    from numba import njit

    from halfbyte.quant.jit import target
    from halfbyte.quant.jit.memory import load_f32, load_i64, store_f16, store_f32, store_i32
    from halfbyte.quant.jit.simd import (
        F16,
        F32,
        I8,
        I16,
        I32,
        absolute,
        dot4,
        dot4_full,
        exp,
        fma,
        iota,
        lanes_max,
        lanes_sum,
        less,
        load,
        load_tile,
        lookup,
        maximum,
        minimum,
        round_even,
        spread,
        staircase,
        store,
        store_tile,
        tile,
        to_f16,
        to_f32,
        to_i32,
        to_u32,
        where,
        zeros,
    )  # fmt: skip

    floats, narrow = given["floats"], given["narrow"]
    sources = {
        "floats": floats, "narrow": narrow, "halves": given["halves"], "codes": given["codes"], "seven_bits": given["codes"] & 127,
        "signed": given["signed"], "numbers": given["numbers"], "start": given["start"],
    }  # fmt: skip
    out = {name: np.zeros_like(floats) for name in ("exp", "round_even", "absolute", "maximum", "minimum", "fma")}
    out |= {name: np.zeros(narrow.size, np.float16) for name in ("to_f16", "store_f16")}
    out |= {name: np.zeros(65536, np.float32) for name in ("from_f16", "from_bf16")}
    out |= {"from_i32": np.zeros(TILES * LANES, np.float32), "where": np.zeros(TILES * LANES, np.int32)}
    out |= {name: np.zeros(TILES * 64, np.int32) for name in ("signed", "unsigned")}
    out |= {"lanes_sum": np.zeros(TILES, np.float32), "lanes_max": np.zeros(TILES, np.float32), "lanes_sum_i32": np.zeros(TILES, np.int32)}
    out |= {name: np.zeros((TILES, 3, LANES), np.int32) for name in ("dot4", "dot4_full")}
    out |= {"lookup": np.zeros((TILES, 64), np.uint8), "staircase": np.zeros_like(floats)}
    out |= {"lookup_wide": np.zeros((TILES, 64), np.uint8), "staircase_16": np.zeros_like(floats), "staircase_32": np.zeros_like(floats)}
    look, look_wide, step = lookup(TABLE), lookup(WIDE), staircase(EDGES, VALUES)
    step_16, step_32 = staircase(EDGES_16, VALUES_16), staircase(EDGES_32, VALUES_32)
    addresses = np.array([a.ctypes.data for a in (*sources.values(), *out.values())], np.int64)
    w_type, x_type, acc_type = tile(I32, 2, 1), tile(I32, 1, 3), tile(I32, 2, 3)
    many, few, singles = floats.size // LANES, narrow.size // LANES, narrow.size

    @njit("void(int64)", error_model="numpy")
    def run(at):
        floats, narrow, halves, codes = load_i64(at), load_i64(at + 8), load_i64(at + 16), load_i64(at + 24)
        seven, signed, numbers, start = load_i64(at + 32), load_i64(at + 40), load_i64(at + 48), load_i64(at + 56)
        at += 64
        for i in range(0, 64 * many, 64):
            x = load(F32, floats + i)
            store(load_i64(at) + i, exp(x))
            store(load_i64(at + 8) + i, round_even(x))
            store(load_i64(at + 16) + i, absolute(x))
            store(load_i64(at + 24) + i, maximum(x, absolute(x) - 3))
            store(load_i64(at + 32) + i, minimum(x, absolute(x) - 3))
            store(load_i64(at + 40) + i, fma(x, x, x))
            store(load_i64(at + 160) + i, step(x))
            store(load_i64(at + 176) + i, step_16(x))
            store(load_i64(at + 184) + i, step_32(x))
        for i in range(few):
            store(load_i64(at + 48) + 32 * i, to_f16(load(F32, narrow + 64 * i)))
        for i in range(singles):
            store_f16(load_i64(at + 56) + 2 * i, load_f32(narrow + 4 * i))
        for i in range(4096):
            store(load_i64(at + 64) + 64 * i, to_f32(load(F16, halves + 32 * i)))
            store(load_i64(at + 72) + 64 * i, to_f32(load(I16, halves + 32 * i)))
        for i in range(TILES):
            n = load(I32, numbers + 64 * i)
            store(load_i64(at + 152) + 64 * i, look(load(I32, codes + 64 * i) & 0x0F0F0F0F))
            store(load_i64(at + 168) + 64 * i, look_wide(load(I32, codes + 64 * i) & 0x1F1F1F1F))
            store(load_i64(at + 80) + 64 * i, to_f32(load(I32, start + 64 * i)))
            store(load_i64(at + 88) + 64 * i, where(less(n, n & 255), n * 2, n >> 28))
            x = load(F32, floats + 64 * i)
            store_f32(load_i64(at + 112) + 4 * i, lanes_sum(x))
            store_f32(load_i64(at + 120) + 4 * i, lanes_max(x))
            store_i32(load_i64(at + 128) + 4 * i, lanes_sum(n + iota(i)))
        for i in range(TILES * 4):
            store(load_i64(at + 96) + 64 * i, to_i32(load(I8, signed + 16 * i)))
            store(load_i64(at + 104) + 64 * i, to_u32(load(I8, codes + 16 * i)))
        for i in range(0, TILES, 2):
            x = spread(x_type, signed + 64 * i, 4)
            acc = zeros(acc_type) + load(I32, seven + 64 * i)  # any accumulator: what is added must wrap, never saturate
            store_tile(load_i64(at + 136) + 192 * i, dot4(acc, load_tile(w_type, seven + 64 * i, 64), x), 192, 64)
            acc = zeros(acc_type) + load(I32, codes + 64 * i)
            store_tile(load_i64(at + 144) + 192 * i, dot4_full(acc, load_tile(w_type, codes + 64 * i, 64), x), 192, 64)

    run(addresses.ctypes.data)
    return out | {"path": np.array(target.current().dot), "has_fma": np.array(target.current().has_fma)}


def matmul_sums(names=MATRICES):
    """float32 results of the matrix kernel that are exact integers (see test_kernels_matmul.py)."""
    from halfbyte.quant.block import Scales, get_format
    from support import kernelbox as box

    out = {}
    for name in names:
        rng, form = np.random.default_rng(1), get_format(name)
        if form.header_bytes:
            scales = rng.integers(-8, 9, (48, 96 // form.scale_columns))
            codes = rng.integers(0, len(form.levels), (48, 96)).astype(np.uint8)
            codes[0], codes[1] = 0, len(form.levels) - 1
            blocks = form.pack(Scales(scales, None, (np.ones(48, np.float32), scales.astype(np.int8))), codes)
        else:
            blocks = rng.integers(0, 256, (48, 3, form.block_bytes), np.uint8)
            size = form.scales.block_bytes
            blocks[0, ..., size:], blocks[1, ..., size:] = 0x7F, 0x80
            ones = np.array([1, -3][: form.scales.numbers], np.float16).view(np.uint8)
            blocks[..., :size] = 128 if size == 1 else ones
        codes = rng.integers(-127, 128, (7, 3, 32)).astype(np.int8)
        codes[0], codes[1] = 127, -127
        got = box.floats(12, 48)
        box.run(
            "matmul", (name, "int8"), 1, step=box.Step(7), weights=box.copied(form.tile(blocks)), columns=96, rows=48,
            x=box.make_panels("int8", codes=codes, scales=np.ones((7, 3), np.float32)), x_worker=0, out=got, out_stride=192, bias=0, add=0,
        )  # fmt: skip
        out[f"matmul_{name}"] = got[:7].copy()
        out[f"exact_{name}"] = codes.reshape(7, -1).astype(np.int64) @ form.decode(blocks).T.astype(np.int64)
    return out


def model_logits(path):
    """Logits of a prompt and of tokens one by one, with two workers."""
    from halfbyte.engine.model import Model, Work
    from halfbyte.engine.run.cache import Sequence
    from halfbyte.formats.opening import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        model = Model(checkpoint, threads=2)
        ids = np.random.default_rng(2).integers(0, model.vocabulary, 300)
        whole = model.step([Work(Sequence(), ids, "all")]).copy()
        sequence = Sequence()
        model.step([Work(sequence, ids[:290], "none")])
        tail = np.concatenate([model.step([Work(sequence, [i])]).copy() for i in ids[290:]])
        model.close()
    return {"logits": whole, "decoded": tail}


if __name__ == "__main__":
    found = {} if os.environ.get("WITHOUT_OPS") else results(inputs()) | matmul_sums()
    if len(sys.argv) > 2:
        found |= model_logits(sys.argv[2])
    np.savez(sys.argv[1], **found)
