"""Texts that are kept for drafts of later requests: whose they are, and how many."""

from driver.text.earlier_texts import MOST_SALTS, EarlierTexts


def test_texts_are_kept_apart_by_salt() -> None:
    """And none of those without a salt or an output, or where none are to be kept."""
    texts, none = EarlierTexts(40), EarlierTexts(0)
    texts.add(b"a", [1], [2, 3])
    texts.add(b"b", [4], [5])
    texts.add(b"a", [6], [7])
    texts.add(b"a", [9], [])
    texts.add(None, [8], [8])
    none.add(b"a", [1], [2])

    assert list(texts.of(b"a")) == [1, 2, 3, -1, 6, 7, -1] and list(texts.of(b"b")) == [4, 5, -1]
    assert not texts.of(b"c") and not texts.of(None) and not none.of(b"a")


def test_the_last_tokens_are_kept_and_no_text_takes_more_than_a_part() -> None:
    """So that several have room."""
    texts = EarlierTexts(16)
    for first in range(0, 100, 10):
        texts.add(b"", list(range(first, first + 8)), [first + 8, first + 9])

    assert list(texts.of(b"")) == [67, 68, 69, -1, 77, 78, 79, -1, 87, 88, 89, -1, 97, 98, 99, -1]


def test_salts_that_ended_nothing_for_long_are_forgotten() -> None:
    """Whatever others do, what is kept is bounded."""
    texts = EarlierTexts(8)
    for number in range(MOST_SALTS + 5):
        texts.add(b"%d" % number, [1], [2])
        texts.add(b"0", [1], [2])

    assert texts.of(b"0") and not texts.of(b"1") and texts.of(b"%d" % (MOST_SALTS + 4))
    assert len(texts._texts) == MOST_SALTS
