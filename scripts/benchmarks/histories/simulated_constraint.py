"""A constraint for the scheduler's model checker, which answers when the history says, and
what has to hold of rows that have one."""

from collections.abc import Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from engine.scheduling.plan import NextIterationPlan
from scripts.benchmarks.histories.life import WRONG, Life

RIGHT = 0.85
"""How often a token is the one that it expects."""


class LateConstraint:
    """Allows every token, in its own time; what it is told has to be its sequence's output, each token once.

    With each answer it forces and guesses some tokens, right or wrong, and knows masks behind some of them. It is complete
    behind ``length`` tokens, and has no mask from there on.
    """

    mask = np.zeros(1, np.int32)
    error: str | None = None
    guess_acceptance = 0.5
    internal = False

    def __init__(self, length: int | None) -> None:
        self._length = length
        self.told: list[int] = []
        self.expected: list[int] = []
        self.num_forced = 0
        self.expected_masks: list[NDArray[np.int32]] = []
        self._guess: list[int] = []
        self.closed = False

    @property
    def complete(self) -> bool:
        """Whether the output is as long as it is to be."""
        return len(self.told) == self._length

    def advance(self, *token_ids: int, guess: Sequence[int] = ()) -> None:
        """The next tokens have landed."""
        self.told += token_ids
        self._guess = list(guess)

    def answer(self, random: Random, output: list[int], most_drafts: int) -> None:
        """It has answered to all that it was told; ``output`` is what its sequence is to give in all."""
        left = output[len(self.told) :][: random.randint(0, 2 * most_drafts + 1)]
        self.expected = [token if random.random() < RIGHT else WRONG for token in left]
        self.num_forced = random.randint(0, len(left))
        if self._guess and random.random() < RIGHT:
            self.expected = self._guess[: random.randint(0, len(self._guess))]
            self.num_forced = 0
            left = left[: len(self.expected)]
        until_complete = len(left) if self._length is None else self._length - len(self.told) - 1
        most = min(len(left), most_drafts, max(0, until_complete))
        self.expected_masks = [self.mask] * random.randint(min(most, 1), most)

    def hear(self, received: set[object]) -> bool:
        """The history says itself when an answer has come."""
        raise NotImplementedError

    def fileno(self) -> int:
        """Nobody waits for it."""
        raise NotImplementedError

    def suspend(self) -> None:
        """The sequence has been preempted."""
        assert not self.closed, "an ended sequence was preempted"

    def close(self) -> None:
        """The sequence has ended."""
        self.closed = True


def check_masks(plan: NextIterationPlan, row: int) -> None:
    """Its masks are those behind all of its tokens, and behind drafts."""
    sequence, drafts = plan.sequences[row], list(plan.expected.get(row, ()))
    constraint, others = sequence.constraint, sequence.num_in_flight - plan.samples[row]
    assert isinstance(constraint, LateConstraint) and not (sequence.awaits_mask or others)
    assert constraint.told == sequence.output_token_ids, "a row samples with the mask of another place"
    assert drafts == constraint.expected[: len(drafts)], "a row samples with the masks of other drafts"
    assert len(drafts) == plan.samples[row] - 1 and len(drafts) <= len(constraint.expected_masks), (
        "a row samples without a mask"
    )


def check_constrained(plan: NextIterationPlan) -> None:
    """Rows that have no mask keep their logits, and the others with a constraint have one."""
    for row in plan.constrained:
        check_masks(plan, row)
    late = {row: plan.sequences[row] for row in plan.late}
    assert all(sequence.awaits_mask or sequence.num_in_flight > plan.counts[row] for row, sequence in late.items()), (
        "a mask is there"
    )


def check_told(life: Life) -> None:
    """The constraint of a sequence that has ended, if it had one, was told what it gave."""
    constraint = life.sequence.constraint
    if constraint is None:
        return
    assert isinstance(constraint, LateConstraint) and constraint.closed
    told = life.received[: len(constraint.told)]
    if life.reason not in ("stop", "length"):  # whose last output ends it whatever its constraint says
        told = life.received
    assert constraint.told == told, "a constraint was not told what its sequence gave"
