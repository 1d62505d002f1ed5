"""A constraint for the scheduler's model checker, which answers when the history says."""

from collections.abc import Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

RIGHT = 0.85
"""How often a token is the one that it expects."""
NO_TOKEN = -1


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
        self.expected = [token if random.random() < RIGHT else NO_TOKEN for token in left]
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
