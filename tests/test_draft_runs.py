"""The chances of drafts, by how far those before them were right."""

from itertools import pairwise

import pytest

from engine.scheduling.estimates.draft_runs import DraftRuns

FOUND = 7


def copies(runs: DraftRuns, length: int, others: int, times: int, *, granted: int = 3) -> None:
    """The text copies ``length`` tokens that are found, in steps of so many drafts, and then has so many that are not."""
    for _ in range(times):
        runs.land(0, 0, 0, more=True)  # the last of others: behind it there is a copy
        left = length
        while left > 0:
            right = min(granted, left)
            runs.land(granted, FOUND, right, more=left > granted)
            left -= granted + 1
        for _ in range(others - 1):
            runs.land(0, 0, 0, more=False)


def test_a_draft_is_as_likely_as_those_of_its_depth_were():
    """Copies end behind ten or eleven tokens: those up to there are likely, and those behind are not."""
    runs = DraftRuns(0.6)
    copies(runs, 10, 4, 30)
    runs.land(0, 0, 0, more=True)

    beginning = runs.chances(16, 0)
    assert beginning[7] > 0.9 and beginning[12] < 0.2
    assert all(later <= earlier for earlier, later in pairwise(beginning))
    assert runs.chances(3, 5) == pytest.approx(beginning[5:8], abs=0.02)


def test_copies_that_grow_longer_are_expected_to():
    """And those that are shorter again as well."""
    runs, chances = DraftRuns(0.6), []
    for length in (3, 30, 3):
        copies(runs, length, 4, 30)
        runs.land(0, 0, 0, more=True)
        chances.append(runs.chances(FOUND, 0)[6])

    assert chances[1] > 0.9 and max(chances[0], chances[2]) < 0.3


def test_what_was_there_when_a_step_was_planned_may_be_gone_when_it_runs():
    """The token between ends the copy each time: that counts, though no draft was wrong."""
    runs = DraftRuns(0.6)
    for _ in range(10):
        runs.land(0, 0, 0, more=True)
        runs.land(0, FOUND, 0, more=False)
        runs.land(3, 0, 0, more=False)
    runs.land(0, 0, 0, more=True)

    assert runs.chances(1, 1)[0] < 0.05


def test_one_copy_behind_another_is_no_long_copy():
    """Steps without drafts go on having some before them, of which the first is never right."""
    runs = DraftRuns(0.6)
    for _ in range(50):
        for _ in range(5):
            runs.land(0, FOUND, 0, more=True)
        runs.land(1, FOUND, 0, more=True)

    assert runs.chances(1, 0)[0] < 0.05 and runs.chances(1, 1)[0] < 0.05


def test_drafts_of_a_model_are_as_likely_as_those_of_their_place():
    """The first is right and the third is not, whatever came before."""
    runs = DraftRuns(0.6)
    for _ in range(30):
        runs.land_of_model(4, 2)

    first, second, third, _ = runs.chances(4, 0)
    assert second > 0.9 and first >= second and third < 0.6
