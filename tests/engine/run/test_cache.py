"""Pages of the KV cache: who has them, groups of layers, windows that leave pages behind, cutting back."""

import gc
from itertools import pairwise

import numpy as np
import pytest

from halfbyte.engine.kernels.structs import PAGE
from halfbyte.engine.plan.operands import LayerShape
from halfbyte.engine.run.cache import BEHIND, CacheFullError, PagedCache, Sequence, SequenceError

PLAIN = LayerShape("f16", 2, 24, 24)
WINDOW = 100
WINDOWED = LayerShape("f16", 2, 24, 24, WINDOW)


def grown(cache, length):
    """A sequence of that length, as after a step."""
    sequence = Sequence()
    grow(cache, sequence, length)
    return sequence


def grow(cache, sequence, length):
    cache.reserve(sequence, length)
    sequence.length = length
    cache.slide(sequence)


def test_pages_come_and_go():
    cache = PagedCache([PLAIN] * 2, 4)
    a, b = Sequence(), Sequence()
    cache.reserve(a, 1)
    cache.reserve(b, 2 * PAGE + 1)
    assert (a.used, b.used, cache.free_positions) == (1, 3, 0)
    assert len({*a.tables[0].pages[:1], *b.tables[0].pages[:3]}) == 4
    with pytest.raises(CacheFullError, match="32 positions are needed, 0 are free"):
        cache.reserve(a, PAGE + 1)
    assert a.used == 1
    cache.reserve(a, PAGE)
    b.length = 2 * PAGE + 1
    assert cache.truncate(b, PAGE) == PAGE
    assert (b.used, b.length, cache.free_positions) == (1, PAGE, 2 * PAGE)
    assert cache.truncate(b, 5 * PAGE) == PAGE, "it has no more"
    assert cache.truncate(b, 0) == cache.truncate(a, 0) == 0
    assert cache.free_positions == 4 * PAGE


def test_block_tables_grow():
    cache = PagedCache([PLAIN], 50)
    a = Sequence()
    cache.reserve(a, 5 * PAGE)
    (table,) = a.tables
    first = table.pages[:5].copy()
    cache.reserve(a, 50 * PAGE)
    np.testing.assert_array_equal(table.pages[:5], first)
    assert sorted(table.pages[:50]) == list(range(50))


def test_layers_do_not_overlap():
    wide = LayerShape("q8", 1, 40, 16)
    cache = PagedCache([PLAIN, wide, PLAIN, wide, WINDOWED], 4)
    assert [cache.group(layer) for layer in range(5)] == [0, 1, 0, 1, 2]
    assert PLAIN.page_bytes == 2 * (24 * PAGE + 32 * PAGE) * 2 and wide.page_bytes == (40 + 4 + 16 + 4) * PAGE
    places = sorted((cache.layer(layer), cache.shapes[layer].page_bytes * 4) for layer in range(5))
    assert all(at + size <= following for (at, size), (following, _) in pairwise(places))
    assert cache.layer(2) - cache.layer(0) == 4 * PLAIN.page_bytes and cache.layer(0) % 64 == cache.layer(1) % 64 == 0
    assert cache.bytes_per_position == (3 * PLAIN.page_bytes + 2 * wide.page_bytes) / PAGE
    shared = PagedCache([PLAIN, wide, PLAIN], 4, shared=True)
    assert shared.layer(0) == shared.layer(2) != shared.layer(1)


def test_more_memory_than_there_is():
    with pytest.raises(CacheFullError, match="ask for less context"):
        PagedCache([PLAIN] * 2, 1 << 50)


def test_a_window_frees_what_is_behind_it():
    cache = PagedCache([PLAIN, WINDOWED], 100)
    sequence = grown(cache, WINDOW + BEHIND + PAGE - 2)
    plain, windowed = sequence.tables
    assert (windowed.first, windowed.used, plain.used) == (0, 13, 13)
    grow(cache, sequence, WINDOW + BEHIND + PAGE - 1)  # the next token does not see position PAGE - 1, nor after cutting back BEHIND
    assert (windowed.first, windowed.used) == (1, 13)
    grow(cache, sequence, 3000)
    assert windowed.used == plain.used == 94 and plain.first == 0
    assert windowed.first == (3000 - WINDOW + 1 - BEHIND) // PAGE
    held = windowed.used - windowed.first
    assert held * PAGE < WINDOW + BEHIND + 2 * PAGE and len(cache.groups[1].free) == 100 - held and len(cache.groups[0].free) == 6
    assert cache.free_positions == 6 * PAGE
    others = [grown(cache, 2 * PAGE) for _ in range(3)]
    with pytest.raises(CacheFullError):
        cache.reserve(sequence, 3001 + PAGE)
    pages = [*windowed.pages[windowed.first : windowed.used], *(p for s in others for p in s.tables[1].pages[:2])]
    assert len(set(pages)) == len(pages), "no page has two owners"
    for s in (sequence, *others):
        assert cache.truncate(s, 0) == 0 and s.used == 0
    assert [sorted(g.free) for g in cache.groups] == [list(range(100))] * 2


@pytest.mark.parametrize("length", [WINDOW + BEHIND + 5, 1000, 1007, 1024])
def test_cutting_back_behind_a_window(length):
    cache = PagedCache([WINDOWED, PLAIN], 64)
    for back in (1, PAGE, BEHIND):
        sequence = grown(cache, length)
        assert cache.truncate(sequence, length - back) == sequence.length == length - back
        windowed = sequence.tables[0]
        assert windowed.first * PAGE <= max(length - back - WINDOW + 1, 0), "the next token sees nothing that is gone"
        cache.truncate(sequence, 0)
    sequence = grown(cache, length)
    gone = sequence.tables[0].first * PAGE + WINDOW - 1  # the shortest text whose next token sees only what is there
    assert (gone <= length - BEHIND) and (cache.truncate(sequence, gone) == gone if sequence.tables[0].first else True)
    if sequence.tables[0].first:
        assert cache.truncate(sequence, gone - 1) == sequence.length == sequence.used == 0
    else:
        assert cache.truncate(sequence, 3) == 3
    cache.truncate(sequence, 0)
    assert all(len(g.free) == 64 for g in cache.groups)


def test_dropped_sequences_give_their_pages_back_once():
    cache = PagedCache([PLAIN, WINDOWED], 64)
    a, b = grown(cache, 1000), grown(cache, 100)
    cache.truncate(a, 990)
    del a
    gc.collect()
    assert len(cache.groups[0].free) < 64, "not in the middle of something else"
    assert cache.free_positions == (64 - 4) * PAGE
    cache.truncate(b, 0)
    del b
    gc.collect()
    assert cache.free_positions == 64 * PAGE and sorted(cache.groups[1].free) == list(range(64))


def test_an_empty_sequence_may_change_its_cache():
    first, second = PagedCache([PLAIN], 4), PagedCache([PLAIN, WINDOWED], 4)
    a = grown(first, 40)
    with pytest.raises(SequenceError, match="another engine"):
        second.reserve(a, 10)
    with pytest.raises(SequenceError, match="another engine"):
        second.truncate(a, 0)
    first.truncate(a, 0)
    grow(second, a, 40)
    assert a.used == 4 and first.free_positions == 4 * PAGE
    del a
    gc.collect()
    assert first.free_positions == second.free_positions == 4 * PAGE
