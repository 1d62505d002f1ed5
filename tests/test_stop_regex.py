"""Stop patterns: linear, in pieces, never a part of a match shown."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driver.stop_regex import MAX_STATES, StopRegex, StopRegexSearch
from driver.stop_strings import StopStrings

PIECES = st.lists(st.text("ab1 \n", max_size=4), max_size=8)
ATOMS = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\d", r"\s", r"\W", "1", "(?:ab|1)", "[a-b1]"])
PATTERNS = st.lists(
    st.builds(lambda atom, times: atom + times, ATOMS, st.sampled_from(["", "", "+", "*", "?", "{2}", "{1,3}", "+?"])),
    min_size=1,
    max_size=4,
).map("".join)


def brute_force(pattern: str, text: str) -> tuple[int, int] | None:
    """End and start of the first match to be complete, by trying every end and every start."""
    for end in range(1, len(text) + 1):
        for start in range(end):
            if re.compile(pattern).fullmatch(text, start, end):
                return end, start
    return None


@settings(max_examples=500, deadline=None)
@given(pattern=PATTERNS, pieces=PIECES)
def test_the_first_match_to_be_complete_is_found_however_the_text_comes(pattern: str, pieces: list[str]) -> None:
    """As Python's own engine finds it, end by end; nothing of it was shown before."""
    if re.fullmatch(pattern, ""):
        with pytest.raises(ValueError, match="matches the empty text"):
            StopRegex(pattern)
        return
    stops, shown = StopStrings([], [StopRegex(pattern)]), ""
    for piece in pieces:
        shown += stops.add(piece)
        if stops.matched:
            break
    if not stops.matched:
        shown += stops.flush()

    text = "".join(pieces)
    expected = brute_force(pattern, text)
    assert stops.matched == (expected is not None)
    assert shown == (text if expected is None else text[: expected[1]])


def test_a_pattern_that_ruins_backtracking_costs_a_look_at_each_state_a_character() -> None:
    """(a+)+$-like patterns are followed in a bounded number of states, however long the text."""
    looks = 0

    class CountingRegex(StopRegex):
        def _test(self, operation: object, argument: object):
            test = super()._test(operation, argument)

            def counting(char: str) -> bool:
                nonlocal looks
                looks += 1
                return test(char)

            return counting

    regex = CountingRegex("(?:a+)+(?:a|a?)+b")

    assert StopRegexSearch(regex).add("a" * 2000) is None
    assert looks <= 2000 * len(regex.steps)


@pytest.mark.parametrize(
    ("pattern", "text", "end"),
    [("(?i)stop", "please StOp", 11), ("(?s)a.b", "a\nb", 3), ("[^\\W\\d]{3}", "a1bcd", 5), ("a|bc|d{2}", "bdd", 3)],
)
def test_flags_classes_and_branches(pattern: str, text: str, end: int) -> None:
    """The flags i and s, negated categories in a class, and branches work as in re."""
    match = StopRegexSearch(StopRegex(pattern)).add(text)

    assert match is not None and match[0] == end


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [
        ("a$", "has at"),
        (r"\bword", "has at"),
        ("(?=a)b", "has assert"),
        (r"(a)\1", "has groupref"),
        ("(?>a)", "has atomic_group"),
        ("a++", "has possessive_repeat"),
        ("(?m)a", "flags other than i and s"),
        ("[", "is no regular expression"),
        ("a{600}", f"more than {MAX_STATES} states"),
        ("(" * 120 + "a{9}" + "){9}" * 120, f"more than {MAX_STATES} states"),
        ("", "matches the empty text"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(pattern: str, complaint: str) -> None:
    """Anchors, lookaround, backreferences, unknown flags and patterns that are too large: a ValueError that says so."""
    with pytest.raises(ValueError, match=re.escape(complaint)):
        StopRegex(pattern)
