"""Backfilling: sequences start before those whose turn it is and that cannot start in this step.

Without bounds a stream of short prompts starves a long one, as it takes every page and slot that
comes free. So a sequence that starts earlier leaves what the first of those passed by needs, and
what all preempted ones need, or it is counted; a sequence that was passed by ``MOST_PASSED`` of
these is not passed by again.
"""

from engine.scheduling.sequence import Sequence

MOST_PASSED = 16
"""Sequences that may take what another needs whose turn it is, in all its life: enough that
short prompts use what is free meanwhile, and so few that it starts soon."""


class Backfill:
    """The sequences passed by in one plan, as they lack pages or a part of the step."""

    def __init__(self) -> None:
        self._passed: dict[Sequence, None] = {}
        """Those that nothing is reserved for."""
        self._reserved_for: list[Sequence] = []
        self.num_deferred = 0
        """Those that the step has no part for."""
        self._lack_adapters: list[Sequence] = []
        """Those whose adapters have no slot now: only who has an adapter as well keeps them waiting."""
        self.lacks_pages = False
        """Whether one of them lacks pages."""
        self.pages = 0
        """Pages reserved for those that the step has no part for."""

    @property
    def slots(self) -> int:
        """Slots reserved with these pages."""
        return len(self._reserved_for)

    def may_start(self, sequence: Sequence) -> bool:
        """Whether it may pass all of these: their priority is its own, none was passed too often."""
        priority = sequence.params.priority
        return all(passed.params.priority == priority and passed.num_passed < MOST_PASSED for passed in self._passed)

    def may_have_adapter(self, sequence: Sequence) -> bool:
        """Whether it may pin a slot before all of those whose adapters have none."""
        if not sequence.adapter_id:
            return True
        priority = sequence.params.priority
        return all(
            passed.params.priority == priority and passed.num_passed < MOST_PASSED for passed in self._lack_adapters
        )

    def pass_for_adapter(self, sequence: Sequence) -> None:
        """There is no slot for the sequence's adapter now."""
        self._lack_adapters.append(sequence)

    def pass_for_pages(self, sequence: Sequence) -> None:
        """The sequence lacks pages."""
        self.lacks_pages = True
        self._passed[sequence] = None

    def pass_for_step(self, sequence: Sequence, pages: int) -> None:
        """The step has no part for the sequence, which will need so many pages."""
        self.num_deferred += 1
        if sequence not in self._passed and (sequence.has_begun or not self._reserved_for):
            self._reserved_for.append(sequence)
            self.pages += pages

    def give_up_reservation(self) -> bool:
        """No sequence can start beside what is reserved: reserve nothing from now on, and count
        those that start.

        False if nothing was reserved.
        """
        given_up = bool(self._reserved_for)
        self._passed |= dict.fromkeys(self._reserved_for)
        self._reserved_for, self.pages = [], 0
        return given_up

    def started(self, sequence: Sequence) -> None:
        """A sequence has started before them."""
        for passed in (*self._passed, *(self._lack_adapters if sequence.adapter_id else ())):
            passed.num_passed += 1
