"""GGUF files by hand, byte for byte, for tests of readers."""

import struct

U32, STRING, ARRAY = 4, 8, 9


def text(value: str | bytes, wide: bool = True) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q" if wide else "<I", len(raw)) + raw


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str | bytes, dimensions: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)


def build(
    entries: list[bytes] = (),
    tensors: list[bytes] = (),
    data: bytes = b"",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A GGUF file by hand."""
    tensor_count, entry_count = counts or (len(tensors), len(entries))
    head = b"GGUF" + struct.pack("<IQQ", version, tensor_count, entry_count) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) * bool(tensors) + data
