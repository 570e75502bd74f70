"""The typed key-value encoding of GGUF, which .hbf files share: reading it lazily from a mapping, and writing it.

    entry  = key (string), value type (u32), value
    string = length (u64), that many bytes of UTF-8
    array  = item type (u32), count (u64), the items one after another
    bool   = one byte; all numbers little-endian

Parsing notes where each value lies and decodes none; a vocabulary of 150,000 strings is stepped over in a few milliseconds and
becomes Python strings when someone asks for it. Every length and count is held against the bytes that are left before anything
is allocated. GGUF version 1 has u32 where later versions have u64.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any

import numpy as np

from ..errors import DuplicateError, HeaderError, TensorError, TruncatedError, UnknownTypeError, printable
from .string_array import find_strings

NAME_BYTES = 1024
"""Longest key or tensor name that is read. Real ones have less than 100 bytes."""
ALIGNMENT = "general.alignment"
MAX_KEYS = 1 << 16
"""Most metadata entries that are read: bounds the time that a hostile file can take."""


class ValueType(IntEnum):
    """GGUF's value types by their number in files."""

    U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


NUMBERS: dict[ValueType, np.dtype[Any]] = {
    ValueType.U8: np.dtype("<u1"), ValueType.U16: np.dtype("<u2"), ValueType.U32: np.dtype("<u4"),
    ValueType.I8: np.dtype("<i1"), ValueType.I16: np.dtype("<i2"), ValueType.I32: np.dtype("<i4"), ValueType.I64: np.dtype("<i8"),
    ValueType.U64: np.dtype("<u8"), ValueType.F32: np.dtype("<f4"), ValueType.F64: np.dtype("<f8"),
    ValueType.BOOL: np.dtype("<u1"),
}  # fmt: skip
"""Value types of fixed size and how their bytes are read. A bool is a byte that is 0 or not."""

_OF_DTYPE = {(d.kind, d.itemsize): t for t, d in NUMBERS.items() if t is not ValueType.BOOL} | {("b", 1): ValueType.BOOL}


class Cursor:
    """A position in the bytes of a file that cannot leave them. Raises TruncatedError where the bytes end."""

    def __init__(self, path: Any, data: np.ndarray, position: int = 0, wide: bool = True):
        """data: uint8[n]. wide: lengths and counts are u64 (GGUF 2 and later, .hbf) or u32 (GGUF 1)."""
        self.path, self.data, self.position, self.end = path, data, position, len(data)
        self.view = data.data
        self.wide = wide

    def take(self, nbytes: int, where: str = "") -> int:
        """Steps over `nbytes` and gives the position before them."""
        start = self.position
        if nbytes > self.end - start:
            raise TruncatedError(self.path, start + nbytes, self.end, where=where, offset=start)
        self.position = start + nbytes
        return start

    def u32(self, where: str = "") -> int:
        return int(struct.unpack_from("<I", self.view, self.take(4, where))[0])

    def u64(self, where: str = "") -> int:
        return int(struct.unpack_from("<Q", self.view, self.take(8, where))[0])

    def count(self, where: str = "") -> int:
        """A length or a count, of the width that the file's version has."""
        return self.u64(where) if self.wide else self.u32(where)

    def name(self, what: str) -> str:
        """A key or a tensor's name: 1 to NAME_BYTES bytes of UTF-8."""
        start = self.position
        nbytes = self.count(what)
        if nbytes == 0:
            raise HeaderError(self.path, f"the name of {what} is empty", offset=start)
        if nbytes > NAME_BYTES:
            if nbytes > self.end - self.position:
                raise TruncatedError(self.path, self.position + nbytes, self.end, where=what, offset=start)
            problem = f"the name of {what} is {nbytes} bytes long; at most {NAME_BYTES} are read"
            raise HeaderError(self.path, problem, offset=start)
        at = self.take(nbytes, what)
        try:
            return str(self.view[at : at + nbytes], "utf-8")
        except UnicodeDecodeError:
            raise HeaderError(self.path, f"the name of {what} is not UTF-8", offset=start) from None


@dataclass(slots=True)
class Entry:
    """Where one value lies. `start` is the first byte after the type (for arrays: after item type and count)."""

    type: ValueType
    item: ValueType | None
    count: int
    start: int
    stop: int
    strings: np.ndarray | None = None  # int64[count + 1]: where each string of an array begins, once it is known


class TypedValues(Mapping[str, Any]):
    """Metadata of a GGUF or .hbf file: a mapping of keys to Python values, decoded when asked for and then kept.

    Numbers are int, float or bool; strings str; arrays of numbers NumPy arrays (bool arrays: bool); arrays of strings list[str].
    Asking for a string that is not UTF-8 raises HeaderError. The mapping stays usable after its file is closed.
    """

    def __init__(self, cursor: Cursor, count: int):
        """Parses `count` entries from the cursor on, and leaves it behind the last one.

        Raises HeaderError, TruncatedError, DuplicateError, UnknownTypeError.
        """
        self._cursor = cursor
        self._entries: dict[str, Entry] = {}
        self._decoded: dict[str, Any] = {}
        left = cursor.end - cursor.position
        smallest = (8 if cursor.wide else 4) + 1 + 4 + 1  # a key of one byte and its length, a type, a value of one byte
        if count > left // smallest:
            raise TruncatedError(cursor.path, cursor.position + smallest * count, cursor.end, where=f"{count} metadata entries")
        if count > MAX_KEYS:
            raise HeaderError(cursor.path, f"announces {count} metadata entries; at most {MAX_KEYS} are read")
        for number in range(count):
            start = cursor.position
            key = cursor.name(f"metadata entry {number}")
            if key in self._entries:
                raise DuplicateError(cursor.path, "the key appears twice", where=key, offset=start)
            self._entries[key] = read_entry(cursor, key)

    def __getitem__(self, key: str) -> Any:
        if key not in self._decoded:
            self._decoded[key] = self._decode(key, self._entries[key])
        return self._decoded[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def type(self, key: str) -> ValueType:
        """The type that a key's value has in the file."""
        return self._entries[key].type

    def item_type(self, key: str) -> ValueType | None:
        """The type of an array's items; None if the value is not an array."""
        return self._entries[key].item

    def length(self, key: str) -> int:
        """How many items an array has, how many bytes a string has; 1 for a number. Decodes nothing."""
        return self._entries[key].count

    def position(self, key: str) -> int:
        """Where the value lies: bytes from the start of the file (for arrays: behind item type and count)."""
        return self._entries[key].start

    def raw(self, key: str) -> memoryview | bytes:
        """The value as GGUF 2 and 3 encode it, without its type: what a writer needs to copy it unseen."""
        entry = self._entries[key]
        if not self._cursor.wide:
            return encode_value(entry.type, self[key], entry.item)
        lead = {ValueType.ARRAY: 12, ValueType.STRING: 8}.get(entry.type, 0)
        return self._cursor.view[entry.start - lead : entry.stop]

    def unpack(self, prefix: str) -> None:
        """Puts values that were packed under `prefix` + key, as u8 arrays that hold an array's encoding, back under `key`.

        Only the item type and the count are looked at now. Raises HeaderError, DuplicateError, UnknownTypeError, TruncatedError.
        """
        for packed in [key for key in self._entries if key.startswith(prefix) and len(key) > len(prefix)]:
            entry, key = self._entries.pop(packed), packed[len(prefix) :]
            path = self._cursor.path
            if entry.item is not ValueType.U8:
                raise HeaderError(path, "a packed value must be an array of u8", where=packed, offset=entry.start)
            if key in self._entries:
                raise DuplicateError(path, f"the key appears twice, the second time packed as {packed}", where=key)
            inside = Cursor(path, self._cursor.data[: entry.stop], entry.start)
            self._entries[key] = found = read_array(inside, packed, lazy=True)
            if found.stop != entry.stop:
                problem = f"{entry.stop - found.stop} bytes follow the packed array"
                raise HeaderError(path, problem, where=packed, offset=found.stop)

    def _find(self, key: str, entry: Entry) -> np.ndarray:
        if entry.strings is None:
            cursor = self._cursor
            data = cursor.data[: entry.stop]
            entry.strings = find_strings(cursor.path, data, entry.start, entry.count, cursor.wide, key)
            if entry.strings[-1] != entry.stop:
                raise HeaderError(cursor.path, "bytes follow the last string", where=key, offset=int(entry.strings[-1]))
        return entry.strings

    def _decode(self, key: str, entry: Entry) -> Any:
        view, start = self._cursor.view, entry.start
        kind = entry.item if entry.type is ValueType.ARRAY else entry.type
        assert kind is not None
        if kind is ValueType.STRING:
            if entry.type is ValueType.STRING:
                return self._text(key, bytes(view[start : entry.stop]), start)
            return self._texts(key, self._find(key, entry))
        dtype = NUMBERS[kind]
        array = np.frombuffer(view, dtype, entry.count, start).astype(dtype.newbyteorder("="))
        if kind is ValueType.BOOL:
            array = array != 0
        return array if entry.type is ValueType.ARRAY else array[0].item()

    def _text(self, key: str, raw: bytes, offset: int) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            problem = f"the text is not UTF-8 ({error.reason} at its byte {error.start}): {printable(raw, 60)}"
            raise HeaderError(self._cursor.path, problem, where=key, offset=offset) from None

    def _texts(self, key: str, strings: np.ndarray) -> list[str]:
        lead = 8 if self._cursor.wide else 4
        first = int(strings[0])
        blob = bytes(self._cursor.view[first : int(strings[-1])])
        starts = (strings[:-1] - (first - lead)).tolist()
        stops = (strings[1:] - first).tolist()
        try:
            return [blob[a:b].decode() for a, b in zip(starts, stops, strict=True)]
        except UnicodeDecodeError:
            for number, (a, b) in enumerate(zip(starts, stops, strict=True)):
                self._text(f"{key}[{number}]", blob[a:b], first + a)
            raise


def read_entry(cursor: Cursor, key: str) -> Entry:
    """The value type and the value at the cursor, located but not decoded."""
    kind = _value_type(cursor, key)
    if kind is ValueType.ARRAY:
        return read_array(cursor, key)
    if kind is ValueType.STRING:
        count = cursor.count(key)
        start = cursor.take(count, key)
        return Entry(kind, None, count, start, cursor.position)
    start = cursor.take(NUMBERS[kind].itemsize, key)
    return Entry(kind, None, 1, start, cursor.position)


def read_array(cursor: Cursor, key: str, lazy: bool = False) -> Entry:
    """An array at the cursor. With `lazy`, strings are not walked over but taken to fill all bytes that the cursor has."""
    item = _value_type(cursor, key)
    at = cursor.position
    if item is ValueType.ARRAY:
        raise UnknownTypeError(cursor.path, "an array of arrays, which is not read", where=key, offset=at)
    count = cursor.count(key)
    start = cursor.position
    if item is not ValueType.STRING:
        cursor.take(count * NUMBERS[item].itemsize, key)
        return Entry(ValueType.ARRAY, item, count, start, cursor.position)
    if lazy:
        if count > (cursor.end - start) // 8:
            raise TruncatedError(cursor.path, start + 8 * count, cursor.end, where=key, offset=start)
        return Entry(ValueType.ARRAY, item, count, start, cursor.end)
    strings = find_strings(cursor.path, cursor.data, start, count, cursor.wide, key)
    cursor.position = int(strings[-1])
    return Entry(ValueType.ARRAY, item, count, start, cursor.position, strings)


def _value_type(cursor: Cursor, key: str) -> ValueType:
    at = cursor.position
    number = cursor.u32(key)
    try:
        return ValueType(number)
    except ValueError:
        raise UnknownTypeError(cursor.path, f"unknown value type {number}", where=key, offset=at) from None


@dataclass(slots=True)
class TableEntry:
    """One row of the tensor table: name, dimensions (innermost first, as in the file), type number, offset in the data."""

    name: str
    dimensions: tuple[int, ...]
    type: int
    offset: int
    at: int


def read_table(cursor: Cursor, count: int, limit: int) -> list[TableEntry]:
    """The tensor table: `count` entries of name (string), number of dimensions (u32), dimensions (u64), type (u32), offset (u64).

    Dimensions are 1 or more and their product is below 2^63. Raises TensorError, DuplicateError, TruncatedError, HeaderError.
    """
    path = cursor.path
    smallest = (8 if cursor.wide else 4) + 1 + 4 + 4 + 8
    if count > (cursor.end - cursor.position) // smallest:
        raise TruncatedError(path, cursor.position + smallest * count, cursor.end, where=f"{count} tensors")
    if count > limit:
        raise HeaderError(path, f"announces {count} tensors; at most {limit} are read")
    table: list[TableEntry] = []
    seen: set[str] = set()
    for number in range(count):
        at = cursor.position
        name = cursor.name(f"tensor {number}")
        if name in seen:
            raise DuplicateError(path, "the tensor appears twice", where=name, offset=at)
        seen.add(name)
        rank = cursor.u32(name)
        if rank > 4:
            raise TensorError(path, f"has {rank} dimensions; at most 4 are possible", where=name, offset=at)
        dimensions = tuple(cursor.count(name) for _ in range(rank))
        total = 1
        for length in dimensions:
            total *= length
            if length == 0:
                raise TensorError(path, f"has a dimension of 0: {list(dimensions)}", where=name, offset=at)
            if total >= 1 << 63:
                raise TensorError(path, f"its dimensions {list(dimensions)} multiply to 2^63 or more", where=name, offset=at)
        table.append(TableEntry(name, dimensions, cursor.u32(name), cursor.u64(name), at))
    return table


def check_layout(path: Any, tensors: list[tuple[str, int, int]], size: int) -> None:
    """Holds (name, absolute offset, bytes) of all tensors against the file: inside it, and none over another.

    Raises TruncatedError with the bytes that the whole file needs, or TensorError.
    """
    needs = max((start + nbytes for _, start, nbytes in tensors), default=0)
    if needs > size:
        name, start, _ = next(t for t in tensors if t[1] + t[2] > size)
        raise TruncatedError(path, needs, size, where=name, offset=start)
    order = sorted(tensors, key=lambda t: (t[1], t[2]))
    for (name, start, nbytes), (other, begin, _) in pairwise(order):
        if start + nbytes > begin:
            raise TensorError(path, f"overlaps tensor {printable(name, 80)}", where=other, offset=begin)


def infer_type(value: Any) -> tuple[ValueType, ValueType | None]:
    """The type that a Python value is stored with when none is asked for: bool, u32 (or i32, u64, i64 as needed), f32, string;
    arrays by their dtype, lists by their items. Raises TypeError."""
    if isinstance(value, (bool, np.bool_)):
        return ValueType.BOOL, None
    if isinstance(value, str):
        return ValueType.STRING, None
    if isinstance(value, np.generic):
        return _OF_DTYPE[value.dtype.kind, value.dtype.itemsize], None
    if isinstance(value, int):
        return _integer_type(value, value), None
    if isinstance(value, float):
        return ValueType.F32, None
    if isinstance(value, np.ndarray):
        if (value.dtype.kind, value.dtype.itemsize) not in _OF_DTYPE:
            raise TypeError(f"arrays of {value.dtype} have no value type")
        return ValueType.ARRAY, _OF_DTYPE[value.dtype.kind, value.dtype.itemsize]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return ValueType.ARRAY, ValueType.U8
    if isinstance(value, (list, tuple)):
        if not value or all(isinstance(item, str) for item in value):
            return ValueType.ARRAY, ValueType.STRING
        if all(isinstance(item, bool) for item in value):
            return ValueType.ARRAY, ValueType.BOOL
        if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            return ValueType.ARRAY, _integer_type(min(value), max(value), signed=True)
        if all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in value):
            return ValueType.ARRAY, ValueType.F32
    raise TypeError(f"a value of type {type(value).__name__} has no value type")


def _integer_type(low: int, high: int, signed: bool = False) -> ValueType:
    if low >= -(1 << 31) and high < 1 << 31 and (signed or low < 0):
        return ValueType.I32
    if low >= 0 and high < 1 << 32:
        return ValueType.U32
    return ValueType.U64 if low >= 0 and high >= 1 << 63 else ValueType.I64


def encode_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def encode_value(kind: ValueType, value: Any, item: ValueType | None = None) -> bytes:
    """A value as it stands in a file, without its type. Raises TypeError, ValueError, OverflowError if it does not fit."""
    if kind is ValueType.STRING:
        if not isinstance(value, str):
            raise TypeError(f"{value!r} is not text")
        return encode_string(value)
    if kind is ValueType.ARRAY:
        if item is None:
            item = infer_type(value)[1]
        assert item is not None
        head = struct.pack("<IQ", item, len(value))
        if item is ValueType.STRING:
            return head + b"".join(map(encode_string, value))
        if isinstance(value, (bytes, bytearray, memoryview)):
            value = np.frombuffer(value, np.uint8)
        return head + _numbers(value, item).tobytes()
    return _numbers([value], kind).tobytes()


def _numbers(values: Any, kind: ValueType) -> np.ndarray:
    if kind is ValueType.BOOL:
        return np.asarray(values, dtype=bool).astype("<u1").reshape(-1)
    dtype, given = NUMBERS[kind], np.asarray(values)
    if given.size == 0:
        return np.empty(0, dtype)
    if given.dtype.kind not in "iuf" or (dtype.kind in "iu" and given.dtype.kind == "f"):
        raise TypeError(f"{printable(values, 60)} cannot be stored as {kind.name.lower()}")
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        low, high = int(given.min()), int(given.max())
        if low < limits.min or high > limits.max:
            raise OverflowError(f"{low if low < limits.min else high} does not fit {kind.name.lower()}")
    return given.astype(dtype).reshape(-1)


def encode_entry(key: str, kind: ValueType, encoded: bytes | memoryview) -> bytes:
    """A whole metadata entry from an encoded value."""
    return b"".join((encode_string(key), struct.pack("<I", kind), encoded))
