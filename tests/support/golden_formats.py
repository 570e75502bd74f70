"""Golden bytes of the block formats: how they were made, and where they lie.

    python tests/support/golden_formats.py NAME...      writes the files of new formats; existing files are never rewritten

A file holds what `encode(golden_weights(), method="nearest")` gave when the format was new: the blocks, then their tiles.
digests.json holds the SHA-256 of the float32 values that they decode to. These files must decode for ever.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parents[1] / "data" / "golden"
ROWS, COLUMNS = 19, 70


def golden_weights() -> np.ndarray:
    """float32[19, 70] from integer arithmetic alone, in [-0.5, 0.5), with rows that are zero, constant, tiny, and one outlier."""
    numbers = (np.arange(ROWS * COLUMNS, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(12345)) % np.uint64(1 << 32)
    weights = ((numbers >> np.uint64(8)).astype(np.float32) / np.float32(1 << 24) - np.float32(0.5)).reshape(ROWS, COLUMNS)
    weights[1] = 0
    weights[2] = 0.25
    weights[3] *= np.float32(2.0**-20)
    weights[4, 33] = 500
    return weights


def digest(values: np.ndarray) -> str:
    """SHA-256 of float32 values, little-endian; -0 counts as 0."""
    return hashlib.sha256((values + np.float32(0)).astype("<f4").tobytes()).hexdigest()


def main(names: list[str]) -> None:
    from halfbyte.quant import get_format

    path = FOLDER / "digests.json"
    digests = json.loads(path.read_text()) if path.exists() else {}
    for name in names:
        file = FOLDER / f"{name}.bin"
        if file.exists():
            sys.exit(f"error: {file} exists; golden bytes are not rewritten")
        block_format = get_format(name)
        blocks = block_format.encode(golden_weights(), method="nearest")
        file.write_bytes(blocks.tobytes() + block_format.tile(blocks).tobytes())
        digests[name] = digest(block_format.decode(blocks, COLUMNS))
    path.write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
