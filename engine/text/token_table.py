"""Tables of tokens in the cache folder: what is asked of a vocabulary, without building it.

The tokenizers library takes 80 ms (SmolLM2) to 300 ms (Qwen2.5) to read a tokenizer.json. The first start with a tokenizer leaves a
table of its tokens and merges; later starts map the table, and `tokenizer_reduced` encodes short texts with the few tokens that it
finds there. The table lies in `tokenizers/` of the cache folder, with the tokenizer.json that it was made from, and is used for
exactly these bytes. A file that is damaged, foreign or missing only costs time.

Tokens are found by length and hash: a token of bytes b has the hash sum((b[i] + 1) * _FACTOR ** (len - 1 - i)) modulo 2^64, which
for all parts of a text that are one byte longer takes one multiplication and one addition.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...quant.cache_folder import cache_folder, is_ours, keep_file

# magic, crc32 of facts and arrays, bytes of the facts, bytes of the arrays, bytes of the tokenizer.json; then these three.
_HEADER = struct.Struct("<8sIIQQ")
_MAGIC = b"HBTOKEN2"  # a new number for every change of what is in the file
_ALIGN = 8
_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1

LEAST_BYTES = 1 << 18
"""Bytes of a tokenizer.json that is worth a table. The library reads a smaller one in 10 ms."""
MOST_FILES = 32
"""Files that the folder keeps; the oldest go."""


class Added(NamedTuple):
    """An added token: how it is spelled, whether it is a mark and no text, whether it takes white space around it along."""

    content: str
    special: bool
    lstrip: bool
    rstrip: bool


class Unfit(Exception):
    """A tokenizer of a kind that the table cannot hold. It works as ever, only without one."""


class TokenTable:
    """The tokens of a tokenizer, and the merges that make them.

    Attributes
    ----------
    size      number of tokens, added ones included
    added     dict of ids to Added
    decoder   the `decoder` part of the tokenizer.json, a dict or None
    first     ids that the post-processor puts before a text
    skeleton  the tokenizer.json without vocabulary and merges
    options   of the BPE model: unk_token, fuse_unk, byte_fallback, ignore_merges
    always    ids that encoding may need whatever the text is
    outside   ids of tokens that only were added: not part of the model's vocabulary
    drops     True if characters that are no tokens leave no trace
    """

    def __init__(self, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        self.size: int = facts["size"]
        self.added = {id: Added(*token) for id, *token in facts["added"]}
        self.decoder: dict[str, Any] | None = facts["decoder"]
        self.first: list[int] = facts["first"]
        self.skeleton: str = facts["skeleton"]
        self.options: dict[str, Any] = facts["options"]
        self.always: list[int] = facts["always"]
        self.outside = frozenset(facts["outside"])
        bytes_stand_in = self.options["byte_fallback"] and len(self.always) >= 256
        self.drops = self.options["unk_token"] is None and not bytes_stand_in
        # Token i is text[starts[i]:starts[i + 1]]. Tokens of length n are order[lengths[n]:lengths[n + 1]], sorted by `hashes` there.
        self._starts, self._text = arrays["starts"], arrays["text"]
        self._order, self._hashes, self._lengths = arrays["order"], arrays["hashes"], arrays["lengths"]
        # Merges by rank: pairs of ids. Those that make token i are made_by[makers[i]:makers[i + 1]].
        self._merges, self._made_by, self._makers = arrays["merges"], arrays["made_by"], arrays["makers"]

    @property
    def longest(self) -> int:
        """Bytes of the longest token."""
        return len(self._lengths) - 2

    def token(self, id: int) -> str | None:
        """How a token is spelled, or None."""
        if not 0 <= id < len(self._starts) - 1:
            return None
        return self._text[self._starts[id] : self._starts[id + 1]].tobytes().decode() or None

    def id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it, or None."""
        data, hash = token.encode(), 0
        if not 0 < len(data) <= self.longest:
            return None
        for byte in data:
            hash = (hash * _FACTOR + byte + 1) & _MASK
        first, stop = self._lengths[len(data) : len(data) + 2]
        at = first + np.searchsorted(self._hashes[first:stop], np.uint64(hash))
        if at == stop:
            return None
        id = int(self._order[at])
        return id if self._text[self._starts[id] : self._starts[id + 1]].tobytes() == data else None

    def parts_of(self, words: Iterable[str]) -> set[int]:
        """Ids of all tokens that are a part of one of the words (and maybe, once in 2^64 times, of one that is not)."""
        encoded = [word.encode() for word in words]
        data = b"\xff".join(encoded)  # a byte that no text holds, and so no token
        longest = max(map(len, encoded), default=0)
        found: set[int] = set()
        for length, hashes in _hashes_of_parts(np.frombuffer(data, np.uint8), min(longest, self.longest)):
            first, stop = self._lengths[length : length + 2]
            if first < stop:
                known = self._hashes[first:stop]
                at = np.minimum(np.searchsorted(known, hashes), stop - first - 1)
                found.update(self._order[first:stop][at[known[at] == hashes]].tolist())
        return found

    def merges_of(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """The merges that make these tokens out of these tokens, by rank."""
        chosen, there = np.asarray(ids, np.int64), set(ids)
        ranges = zip(self._makers[chosen].tolist(), self._makers[chosen + 1].tolist(), strict=True)
        ranks = sorted(self._made_by[[i for first, stop in ranges for i in range(first, stop)]].tolist())
        return [(left, right) for left, right in self._merges[ranks].tolist() if left in there and right in there]


def _hashes_of_parts(data: np.ndarray, longest: int) -> Iterator[tuple[int, np.ndarray]]:
    """(length, hashes of all parts of that length) of bytes, for lengths 1 to longest."""
    values = data.astype(np.uint64) + np.uint64(1)
    hashes = np.zeros(len(values) + 1, np.uint64)
    for length in range(1, longest + 1):
        hashes = hashes[:-1] * np.uint64(_FACTOR) + values[length - 1 :]
        yield length, hashes


# ---- the file --------------------------------------------------------------------------------------------------------


def open_table(json: bytes) -> TokenTable | None:
    """The table of a tokenizer.json, if the cache folder has a sound one."""
    path = _path(json)
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            if not is_ours(os.fstat(file.fileno())):
                return None
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return _read(np.frombuffer(mapped, np.uint8), json)
    except (OSError, ValueError):
        return None


def keep_table(json: bytes, library: Any) -> None:
    """Leaves a table in the cache folder, made from a tokenizer.json and the library's object for it, if they are fit for one."""
    path = _path(json)
    if path is None:
        return
    try:
        facts, arrays = make_table(library)
    except Unfit:
        return
    _make_room(path.parent)
    keep_file(path, _written(facts, arrays, json))


def _path(json: bytes) -> Path | None:
    if len(json) < LEAST_BYTES:
        return None
    from tokenizers import __version__

    folder = cache_folder()
    return folder and folder / "tokenizers" / f"{zlib.crc32(json):08x}-{len(json)}-{__version__}.bin"


def _make_room(folder: Path) -> None:
    try:
        files = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
        for path in files[: 1 - MOST_FILES]:
            path.unlink()
    except OSError:  # no folder yet, or another process makes room as well
        pass


def _written(facts: dict[str, Any], arrays: dict[str, np.ndarray], json: bytes) -> bytes:
    from json import dumps

    facts = {**facts, "arrays": [[name, array.dtype.str, array.shape] for name, array in arrays.items()]}
    text = dumps(facts).encode()
    text += b" " * (-(_HEADER.size + len(text)) % _ALIGN)
    body = b"".join(array.tobytes() + bytes(-array.nbytes % _ALIGN) for array in arrays.values())
    checksum = zlib.crc32(body, zlib.crc32(text))
    return _HEADER.pack(_MAGIC, checksum, len(text), len(body), len(json)) + text + body + json


def _read(data: np.ndarray, json: bytes) -> TokenTable | None:
    """The table of a file's bytes; None if it belongs to another tokenizer.json. Raises ValueError if it is damaged."""
    from json import loads

    if len(data) < _HEADER.size:
        raise ValueError("too short")
    magic, checksum, text_size, body_size, json_size = _HEADER.unpack_from(data.data)
    body, end = _HEADER.size + text_size, _HEADER.size + text_size + body_size
    if magic != _MAGIC or len(data) != end + json_size or zlib.crc32(data[_HEADER.size : end].data) != checksum:
        raise ValueError("damaged")
    if not np.array_equal(data[end:], np.frombuffer(json, np.uint8)):
        return None
    facts, arrays, at = loads(data[_HEADER.size : body].tobytes()), {}, body
    for name, dtype, shape in facts.pop("arrays"):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        arrays[name] = data[at : at + size].view(dtype).reshape(shape)
        at += size + -size % _ALIGN
    return TokenTable(facts, arrays)


# ---- making it -------------------------------------------------------------------------------------------------------


def make_table(library: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Facts and arrays of a TokenTable from the library's object, as it says itself what it has read. Raises Unfit."""
    from json import dumps, loads

    vocabulary: dict[str, int] = library.get_vocab(with_added_tokens=False)
    added = {id: Added(t.content, t.special, t.lstrip, t.rstrip) for id, t in sorted(library.get_added_tokens_decoder().items())}
    outside = {token.content: id for id, token in added.items() if token.content not in vocabulary}
    known = vocabulary | outside
    tokens = {id: token for token, id in known.items()}
    count = 1 + max(tokens, default=-1)
    if len(tokens) != len(known) or "" in known or count > 2 * len(tokens) + 1000:
        raise Unfit  # ids or tokens that cannot be told apart, or a table full of gaps
    if any(known[token.content] != id for id, token in added.items()):
        raise Unfit
    source = loads(library.to_str(pretty=False))  # tries every id below the highest, so not before ids are known to be dense
    model = source["model"]
    if model["type"] != "BPE" or any(model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")):
        raise Unfit
    pairs = [(vocabulary[left], vocabulary[right]) for left, right in model["merges"]]
    made = [vocabulary[left + right] for left, right in model["merges"]]
    always = [model["unk_token"]] if model["unk_token"] is not None else []
    if model["byte_fallback"]:
        always += [f"<0x{byte:02X}>" for byte in range(256)]
    stand_ins = {vocabulary[token] for token in always if token in vocabulary}
    if any(left in stand_ins or right in stand_ins for left, right in pairs):
        raise Unfit  # a merge of tokens that stand for text other than their own
    bare = {**model, "vocab": {token.content: id for id, token in added.items()}, "merges": []}
    facts = {
        "size": library.get_vocab_size(with_added_tokens=True),
        "added": [[id, *token] for id, token in added.items()],
        "decoder": source["decoder"],
        "first": library.encode("", add_special_tokens=True).ids,
        "skeleton": dumps({**source, "model": bare, "truncation": None, "padding": None}),
        "options": {key: model[key] for key in ("unk_token", "fuse_unk", "byte_fallback", "ignore_merges")},
        "always": sorted(stand_ins),
        "outside": sorted(outside.values()),
    }
    texts = [tokens.get(id, "").encode() for id in range(count)]
    return facts, _find_arrays(texts) | _merge_arrays(pairs, made, count)


def _find_arrays(texts: list[bytes]) -> dict[str, np.ndarray]:
    """Arrays that find tokens. texts: bytes of the token of each id; b"" where there is none."""
    sizes = np.array([len(text) for text in texts], np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    text = np.frombuffer(b"".join(texts), np.uint8)
    hashes = np.zeros(len(texts), np.uint64)
    for length in np.unique(sizes[sizes > 0]).tolist():
        ids = np.flatnonzero(sizes == length)
        for at in range(length):
            hashes[ids] = hashes[ids] * np.uint64(_FACTOR) + text[starts[ids] + at].astype(np.uint64) + np.uint64(1)
    order = np.lexsort((hashes, sizes))
    order = order[np.count_nonzero(sizes == 0) :]
    if np.any((np.diff(hashes[order]) == 0) & (np.diff(sizes[order]) == 0)):
        raise Unfit  # two tokens of one hash
    lengths = np.searchsorted(sizes[order], np.arange(int(sizes.max(initial=0)) + 2))
    return {
        "starts": starts.astype(np.uint32),
        "text": text,
        "order": order.astype(np.uint32),
        "hashes": hashes[order],
        "lengths": lengths.astype(np.int64),
    }


def _merge_arrays(pairs: list[tuple[int, int]], made: list[int], count: int) -> dict[str, np.ndarray]:
    """Arrays of merges. pairs: by rank; made: the token that each makes."""
    results = np.array(made, np.int64)
    made_by = np.argsort(results, kind="stable")
    return {
        "merges": np.array(pairs, np.uint32).reshape(-1, 2),
        "made_by": made_by.astype(np.uint32),
        "makers": np.searchsorted(results[made_by], np.arange(count + 1)).astype(np.uint32),
    }
