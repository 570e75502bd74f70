"""Native files for tests: matrices in every format, and a file that holds them."""


import numpy as np

from halfbyte.formats.hbf import structure
from halfbyte.formats.hbf.writer import NativeWriter
from halfbyte.quant.block import format_names, get_format

TOKENS = ["<s>", "a", "", "é", "x" * 400] * 400
JSON = '{"version": "1.0", "text": "ünïcödé"}'


def matrices(seed: int = 0) -> dict[str, tuple[np.ndarray, str]]:
    """Matrices whose rows are no multiple of 16 and whose columns are none of 32, in every format of this package."""
    rng = np.random.default_rng(seed)
    found = {f"m.{name}": (rng.standard_normal((37, 70), dtype=np.float32), name) for name in format_names() if name != "f32"}
    found["single"] = rng.standard_normal((16, 32), dtype=np.float32), "f32"
    found["experts"] = rng.standard_normal((3, 20, 33), dtype=np.float32), "q8_0"
    found["row.experts"] = rng.standard_normal((2, 20, 33), dtype=np.float32), "nl4_16"
    return found


def encode(array: np.ndarray, name: str) -> np.ndarray:
    """Tiles of a matrix, or of several one after another."""
    format = get_format(name)
    return np.concatenate([format.tile(format.encode(m, method=None)) for m in array.reshape(-1, *array.shape[-2:])])


def decoded(array: np.ndarray, name: str) -> np.ndarray:
    format = get_format(name)
    each = [format.decode(format.encode(m, method=None), m.shape[-1]) for m in array.reshape(-1, *array.shape[-2:])]
    return np.stack(each).reshape(array.shape)


def write(path, arrays=None) -> None:
    arrays = matrices() if arrays is None else arrays
    with NativeWriter(path) as writer:
        writer.add("general.architecture", "llama")
        writer.add("llama.block_count", 30)
        writer.add("llama.rope.freq_base", 1e5)
        writer.add("tokenizer.ggml.tokens", TOKENS)
        writer.add("tokenizer.ggml.scores", np.linspace(0, 1, 50, dtype=np.float32))
        writer.add(structure.TOKENIZER, JSON)
        writer.declare("norm", (7,), "f32", source="bf16")
        for name, (array, kind) in arrays.items():
            writer.declare(name, array.shape, kind, source="bf16")
        for number, (name, (array, kind)) in enumerate(reversed(arrays.items())):
            writer.write(name, encode(array, kind), cosine=1 - number / 100, nmse=number / 50, method="search")
        writer.write("norm", np.arange(7, dtype=np.float32))
        writer.add("halfbyte.note", "known only at the end")
