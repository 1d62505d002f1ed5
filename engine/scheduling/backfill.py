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
        self._passed = _Passed()
        """Those that nothing is reserved for."""
        self._reserved_for: list[Sequence] = []
        self.num_deferred = 0
        """Those that the step has no part for."""
        self._lack_adapters = _Passed()
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
        return self._passed.let_pass(sequence)

    def may_have_adapter(self, sequence: Sequence) -> bool:
        """Whether it may pin a slot before all of those whose adapters have none."""
        return not sequence.adapter_id or self._lack_adapters.let_pass(sequence)

    def pass_for_adapter(self, sequence: Sequence) -> None:
        """There is no slot for the sequence's adapter now."""
        self._lack_adapters.add(sequence)

    def pass_for_pages(self, sequence: Sequence) -> None:
        """The sequence lacks pages."""
        self.lacks_pages = True
        self._passed.add(sequence)

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
        for sequence in self._reserved_for:
            self._passed.add(sequence)
        self._reserved_for, self.pages = [], 0
        return given_up

    def started(self, sequence: Sequence) -> None:
        """A sequence has started before them."""
        self._passed.count()
        if sequence.adapter_id:
            self._lack_adapters.count()


class _Passed:
    """Some of them. To ask them takes the same time however many they are."""

    def __init__(self) -> None:
        self._sequences: set[Sequence] = set()
        self._priorities: set[int] = set()
        self._most = 0
        """The largest ``num_passed`` of them."""

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._sequences

    def add(self, sequence: Sequence) -> None:
        """One more is passed by."""
        self._sequences.add(sequence)
        self._priorities.add(sequence.params.priority)
        self._most = max(self._most, sequence.num_passed)

    def let_pass(self, sequence: Sequence) -> bool:
        """Whether a sequence may start before all of these."""
        return self._priorities <= {sequence.params.priority} and self._most < MOST_PASSED

    def count(self) -> None:
        """A sequence has started before them."""
        for passed in self._sequences:
            passed.num_passed += 1
        self._most += bool(self._sequences)
