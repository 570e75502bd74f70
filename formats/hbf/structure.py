"""Numbers of the .hbf layout that its reader and writer share. docs/file-format.md is the specification."""

from __future__ import annotations

import struct
import zlib

MAGIC = b"HBF\x1a"
"""The last byte stops a text tool from listing the file, and is damaged by transfers that treat the file as text."""
VERSION = 1
PAGE = 4096
"""Tensor data, and each tensor in them, begin at a multiple of this."""
HEADER = struct.Struct("<4sIQQQQQI12x")
"""magic, version, tensor count, metadata count, bytes of the head, offset of the data, bytes of the file, CRC-32 of the head."""
CHECKSUM_AT = 48
"""Where in the header the CRC-32 stands; it counts as four zeros when it is computed."""

TOKENIZER = "tokenizer.huggingface.json"


def head_checksum(head: bytes | bytearray | memoryview) -> int:
    """CRC-32 of everything before the tensor data, its own field taken as zeros."""
    view = memoryview(head)
    checksum = zlib.crc32(view[:CHECKSUM_AT])
    checksum = zlib.crc32(bytes(4), checksum)
    return zlib.crc32(view[CHECKSUM_AT + 4 :], checksum)
