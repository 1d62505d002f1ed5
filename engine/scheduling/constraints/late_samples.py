"""Rows whose forward pass runs before their constraint has said what they may sample."""

from collections.abc import Iterable
from collections.abc import Sequence as ListOf

from engine.scheduling.plan import NextIterationPlan
from engine.scheduling.sequence import Sequence

MOST_KEPT = 4
"""Steps whose logits may be kept: beside the last one, those in which a mask is late. Kept logits
are at most so many times those of a step, which is what the sampler has reserved while it rests."""


class LateSamples:
    """Which sequences are to sample from which plan's logits, as soon as they have a mask.

    A sequence is here from the plan that computes its logits (``begin``) to the one that samples
    (``plan``), unless it loses its slot meanwhile (``drop``): then nobody reads them.
    """

    def __init__(self) -> None:
        self._plans: dict[Sequence, tuple[NextIterationPlan, int]] = {}
        """And the row that it has there."""
        self._answered: dict[Sequence, None] = {}
        self._counts: dict[NextIterationPlan, int] = {}
        """Of each plan whose logits are kept, its sequences that are here."""
        self._done: list[NextIterationPlan] = []

    @property
    def num_sequences(self) -> int:
        """Sequences that are here."""
        return len(self._plans)

    @property
    def has_room(self) -> bool:
        """Whether one more plan's logits may be kept."""
        return len(self._counts) < MOST_KEPT

    def begin(self, plan: NextIterationPlan) -> None:
        """The rows of a plan that sample late are known."""
        for row in plan.late:
            self._plans[plan.sequences[row]] = plan, row
        if plan.late:
            self._counts[plan] = len(plan.late)

    def answered(self, sequence: Sequence) -> None:
        """A sequence that is here has its mask."""
        assert sequence in self._plans, "its logits are not kept"
        self._answered[sequence] = None

    def with_guesses(self, sequences: Iterable[Sequence]) -> list[NextIterationPlan]:
        """The plans in which a draft model writes drafts for those of these sequences that are here,
        and that have not been read yet."""
        plans = dict.fromkeys(self._plans[sequence][0] for sequence in sequences if sequence in self._plans)
        return [plan for plan in plans if plan.has_guesses and not plan.guesses]

    def guess(self, sequence: Sequence) -> ListOf[int]:
        """The drafts that a draft model has written for its row, if it is here."""
        plan, row = self._plans.get(sequence, (None, -1))
        return () if plan is None else plan.guesses.get(row, ())

    def plan(self) -> list[NextIterationPlan]:
        """Plans that sample for all sequences that have a mask: one for each that made logits."""
        plans: dict[NextIterationPlan, NextIterationPlan] = {}
        for sequence in self._answered:
            of, row = self._take(sequence)
            if of not in plans:
                plans[of] = NextIterationPlan(samples_of=of)
            plans[of].add_late(sequence, row)
        self._answered.clear()
        return list(plans.values())

    def drop(self, sequence: Sequence) -> None:
        """The sequence loses its slot: if it is here it does not sample, and nothing of it is in
        flight for that."""
        if sequence.awaits_sample:
            plan, row = self._take(sequence)
            self._answered.pop(sequence, None)
            sequence.num_in_flight -= plan.counts[row]

    def take_done(self) -> list[NextIterationPlan]:
        """The plans whose logits nobody reads any more, behind the plans that were made so far."""
        done, self._done = self._done, []
        return done

    def check_integrity(self, running: list[Sequence]) -> None:
        """Assert that those that await a sample, and have a slot, are here."""
        assert {s for s in running if s.awaits_sample} == set(self._plans), "a sequence awaits no sample, or in vain"
        assert sum(self._counts.values()) == len(self._plans), "logits are kept that nobody reads"
        assert self._answered.keys() <= self._plans.keys(), "a sequence samples twice"

    def _take(self, sequence: Sequence) -> tuple[NextIterationPlan, int]:
        plan, row = self._plans.pop(sequence)
        sequence.awaits_sample = False
        self._counts[plan] -= 1
        if not self._counts[plan]:
            del self._counts[plan]
            self._done.append(plan)
        return plan, row
