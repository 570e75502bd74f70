"""Metadata keys of ours that describe one file and not the model in it: a file made from another has its own.

Those about tensors are made by the .hbf writer and specified in docs/file-format.md.
"""

from __future__ import annotations

PACKED = "halfbyte.packed."
FORMATS = "halfbyte.formats"
METHODS = "halfbyte.methods"
SOURCES = "halfbyte.sources"
BYTES = "halfbyte.tensor.bytes"
CHECKSUM = "halfbyte.tensor.checksum"
COSINE = "halfbyte.tensor.cosine"
NMSE = "halfbyte.tensor.nmse"
METHOD = "halfbyte.tensor.method"
SOURCE = "halfbyte.tensor.source"

LAYOUT = frozenset({FORMATS, METHODS, SOURCES, BYTES, CHECKSUM, COSINE, NMSE, METHOD, SOURCE})
"""Keys that the writer of a .hbf makes itself."""


def describes_file(key: str) -> bool:
    """True for keys that say how one file is laid out, what it was made from, and by which version and recipe."""
    made = ("halfbyte.source.", PACKED, "halfbyte.calibration")
    return key in LAYOUT or key.startswith(made) or key in ("halfbyte.version", "halfbyte.recipe")
