"""Who may start before those whose turn it is and who cannot start in this step.

In the words of batch schedulers this is backfilling. Without bounds a stream of short prompts starves a long one: it takes
every page and slot that comes free. So whoever starts earlier leaves what the first of those passed needs, and all who
have begun and were preempted, or it counts; and one that was passed so ``MOST_PASSED`` times is not passed any more.
"""

from engine.scheduling.sequence import Sequence

MOST_PASSED = 16
"""Sequences that may take what one needs whose turn it is, in all its life: enough that short prompts use what is free
meanwhile, and so few that it starts soon."""


class Backfill:
    """Those that were passed in one plan for want of pages or of a part of the step."""

    def __init__(self) -> None:
        self._passed: dict[Sequence, None] = {}
        """Whom nothing is left for."""
        self._reserved_for: list[Sequence] = []
        self.lacks_pages = False
        """Whether there are no pages for one of them."""
        self.pages = 0
        """To be left for those of them that the step has no part for."""

    @property
    def slots(self) -> int:
        """To be left with them."""
        return len(self._reserved_for)

    def may_start(self, sequence: Sequence) -> bool:
        """Whether it may start before all of these: it is their equal, and nobody was passed too often."""
        priority = sequence.params.priority
        return all(passed.params.priority == priority and passed.num_passed < MOST_PASSED for passed in self._passed)

    def pass_for_pages(self, sequence: Sequence) -> None:
        """There are no pages for it."""
        self.lacks_pages = True
        self._passed[sequence] = None

    def pass_for_step(self, sequence: Sequence, pages: int) -> None:
        """The step has no part for it, which needs so many pages as soon as one has."""
        if sequence not in self._passed and (sequence.has_begun or not self._reserved_for):
            self._reserved_for.append(sequence)
            self.pages += pages

    def give_up_reservation(self) -> bool:
        """Nobody can start beside what is left: from now on whoever starts counts. False if nothing is left for anybody."""
        given_up = bool(self._reserved_for)
        self._passed |= dict.fromkeys(self._reserved_for)
        self._reserved_for, self.pages = [], 0
        return given_up

    def started(self) -> None:
        """One has started before them."""
        for sequence in self._passed:
            sequence.num_passed += 1
