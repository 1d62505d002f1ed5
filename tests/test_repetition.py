"""Loops are seen at the token that completes them."""

from hypothesis import given
from hypothesis import strategies as st

from driver.text.stops import RepetitionDetector
from engine.sampling_params import RepetitionDetection


def brute_force(tokens: list[int], smallest: int, largest: int, count: int) -> bool:
    """Whether these end in a pattern of such a size, so many times."""
    return any(
        len(tokens) >= size * count and tokens[-size * count :] == tokens[-size:] * count
        for size in range(smallest, largest + 1)
    )


@given(
    tokens=st.lists(st.integers(0, 2), max_size=40),
    smallest=st.integers(1, 3),
    more=st.integers(0, 4),
    count=st.integers(2, 4),
)
def test_every_loop_is_seen_and_nothing_else(tokens: list[int], smallest: int, more: int, count: int) -> None:
    """After each token, as looking at the end of all tokens finds it."""
    largest = smallest + more
    detector = RepetitionDetector(
        RepetitionDetection(min_pattern_size=smallest, max_pattern_size=largest, min_count=count)
    )

    seen = [detector.add(token_id) for token_id in tokens]

    assert seen == [brute_force(tokens[: end + 1], smallest, largest, count) for end in range(len(tokens))]
