"""What kind of file bytes begin: the one place that knows. Bytes decide; a name only where they say nothing, so that the reader of
that kind can say what is wrong with them.
"""

from __future__ import annotations

from pathlib import PurePath

HEAD_BYTES = 9
"""Bytes of a file's beginning that tell its kind."""

_ENDINGS = {".gguf": "gguf", ".hbf": "hbf", ".safetensors": "safetensors"}


def kind_of_bytes(head: bytes) -> str:
    """ "gguf", "hbf", "safetensors", or "" for neither. head: the first HEAD_BYTES of a file, or fewer if it has no more."""
    if head[:4] in (b"GGUF", b"FUGG"):  # the second is a big-endian file's
        return "gguf"
    if head[:3] == b"HBF":
        return "hbf"
    # A length of 64 bits, of which the upper bytes are always zero, then a JSON object.
    return "safetensors" if head[8:9] == b"{" and 0 in head[:8] else ""


def kind_of(head: bytes, path: PurePath) -> str:
    """The same, or what the file's ending promises where the bytes are of no kind."""
    return kind_of_bytes(head) or _ENDINGS.get(path.suffix, "")
