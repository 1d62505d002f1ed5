"""Stop strings end the text before them and never show a part of themselves."""

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.text.stops import StopStrings

STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


def brute_force(stops: list[str], text: str) -> tuple[str, str | None]:
    """The text before the first stop string to be complete, and that string, found a character at a time."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], text[min(starts) : end]
    return text, None


@given(stops=STOPS, pieces=st.lists(st.text("abcd", max_size=5), max_size=12))
def test_the_cut_is_where_a_search_of_the_whole_text_finds_it(stops: list[str], pieces: list[str]) -> None:
    """However the text comes in pieces, what is shown is the text before the first stop string to be complete."""
    matcher = StopStrings(stops)
    shown = ""

    for piece in pieces:
        shown += matcher.add(piece)
        if matcher.matched:
            break
    shown += matcher.flush()

    assert (shown, matcher.matched) == brute_force(stops, "".join(pieces))


@given(stops=STOPS, pieces=st.lists(st.text("abcd", max_size=5), max_size=12), least=st.integers(0, 12))
def test_what_is_complete_too_early_is_passed_over(stops: list[str], pieces: list[str], least: int) -> None:
    """A stop string may begin in a piece that does not end the text; it counts where it is complete."""
    matcher, text = StopStrings(stops), "".join(pieces)
    passed = len("".join(pieces[:least]))
    ends = [end for end in range(passed + 1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    shown = ""

    for number, piece in enumerate(pieces):
        shown += matcher.add(piece, may_end=number >= least)
        if matcher.matched:
            break
    shown += matcher.flush()

    longest = max((stop for stop in stops if ends and text[: ends[0]].endswith(stop)), key=len, default="")
    assert matcher.matched == (longest or None)
    assert shown == (text[: ends[0] - len(longest)] if ends else text)


@given(stops=STOPS, pieces=st.lists(st.text("abcd", max_size=5), max_size=12))
def test_no_more_is_held_than_could_begin_a_stop_string(stops: list[str], pieces: list[str]) -> None:
    """What is held back is always the longest end of the text that a stop string begins with."""
    matcher = StopStrings(stops)
    text = shown = ""

    for piece in pieces:
        text += piece
        shown += matcher.add(piece)
        if matcher.matched:
            return
        begins = [n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])]

        assert len(text) - len(shown) == max(begins, default=0)


@pytest.mark.parametrize("stop", ["END", "\n\n"])
def test_a_part_of_a_stop_string_is_shown_once_it_is_none(stop: str) -> None:
    """The beginning of a stop string is held, and shown when the text goes on otherwise."""
    matcher = StopStrings([stop])

    assert matcher.add("x" + stop[:-1]) == "x"
    assert matcher.add("y") == stop[:-1] + "y"
    assert not matcher.matched


@given(stops=STOPS.filter(bool), pieces=st.lists(st.text("abcd", max_size=5), max_size=12))
def test_it_is_where_the_strings_would_be_found_one_by_one(stops: list[str], pieces: list[str]) -> None:
    """Piece by piece the same is shown as by an automaton for each string, which costs so many times more."""
    together, one_by_one = StopStrings(stops), OneByOne(stops)

    for number, piece in enumerate(pieces):
        may_end = number % 3 > 0

        assert together.add(piece, may_end=may_end) == one_by_one.add(piece, may_end=may_end)
        assert together.matched == one_by_one.matched
        if together.matched:
            return


class OneByOne:
    """What StopStrings does, with a count for each stop string of how much of it the text ends with."""

    def __init__(self, stops: list[str]) -> None:
        self._stops, self._text, self._shown = stops, "", 0
        self.matched: str | None = None

    def add(self, piece: str, *, may_end: bool) -> str:
        start = self._shown
        for character in piece:
            self._text += character
            complete = [stop for stop in self._stops if self._text.endswith(stop)]
            if complete and may_end:
                self.matched = max(complete, key=len)
                return self._text[start : len(self._text) - len(self.matched)]
        begun = [n for stop in self._stops for n in range(len(stop)) if self._text.endswith(stop[:n])]
        self._shown = len(self._text) - max(begun)
        return self._text[start : self._shown]


def num_calls(stops: list[str], text: str) -> int:
    """How many functions a text calls."""
    matcher, calls = StopStrings(stops), 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        matcher.add(text)
    finally:
        sys.setprofile(None)
    return calls


def test_many_stop_strings_cost_what_one_does() -> None:
    """A token of 128 spaces is looked at once, and not once for each string that may begin so."""
    stops = [" " * 200 + chr(0x4E00 + number) for number in range(16)]

    assert num_calls(stops, " " * 128) == num_calls(stops[:1], " " * 128)
