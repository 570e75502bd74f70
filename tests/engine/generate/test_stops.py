"""Stop strings against their definition on the whole text."""

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from halfbyte.engine.generate.stops import StopStrings


def naive(text, stops):
    """The definition: the first place where a stop string is complete, the longest of those complete there."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def stream(pieces, stops):
    watcher, shown = StopStrings(stops), []
    for piece in pieces:
        shown.append(watcher.push(piece))
        if watcher.matched is not None:
            assert watcher.push("more") == "" and watcher.finish() == ""
            return "".join(shown), watcher.matched
    shown.append(watcher.finish())
    return "".join(shown), None


letters = st.text("ab\n", max_size=30)
stop_lists = st.lists(st.text("ab\n", min_size=1, max_size=6), max_size=4)


@settings(max_examples=400, deadline=None)
@given(letters, stop_lists, st.lists(st.integers(0, 30), max_size=10))
@example("aabaab", ["aabaabb", "ab"], [1, 2, 3, 4, 5])
@example("abcd", ["abcd", "bc"], [])
def test_any_pieces_give_what_the_whole_text_gives(text, stops, cuts):
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(bounds)]
    assert stream(pieces, stops) == naive(text, stops) == stream(list(text), stops) == stream([text], stops)


@settings(max_examples=200, deadline=None)
@given(letters, stop_lists)
def test_no_more_is_held_back_than_must_be(text, stops):
    """After each character, what is held is the longest end of the text that begins a stop string: anything less would leak."""
    watcher, so_far = StopStrings(stops), ""
    for character in text:
        watcher.push(character)
        so_far += character
        if watcher.matched is not None:
            break
        beginnings = [n for stop in stops for n in range(1, len(stop)) if so_far.endswith(stop[:n])]
        assert len(watcher.held) == max(beginnings, default=0)
        assert so_far.endswith(watcher.held)


def test_shared_prefix_and_end_of_text():
    watcher = StopStrings(["</s>", "</stop>"])
    assert [watcher.push(p) for p in ["Hi <", "/s", "to", "p"]] == ["Hi ", "", "", ""]
    assert watcher.finish() == "</stop"  # the text ended: nothing is lost
    watcher = StopStrings(["</s>", "</stop>"])
    assert [watcher.push(p) for p in ["Hi <", "/st", "x</s", ">!"]] == ["Hi ", "", "</stx", ""]
    assert watcher.matched == "</s>"


def test_without_stops_text_passes_untouched():
    watcher = StopStrings([])
    assert watcher.push("anything") == "anything" and watcher.held == "" and watcher.finish() == ""


def test_an_empty_stop_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


def test_a_long_stop_costs_one_step_per_character():
    """A hostile stop string of a hundred thousand characters and a text that always nearly matches."""
    watcher = StopStrings(["a" * 100_000 + "b"])
    shown = "".join(watcher.push("a" * 1000) for _ in range(200))
    assert len(shown) == 100_000 and set(shown) == {"a"}
    assert watcher.push("b") == "" and watcher.matched is not None
