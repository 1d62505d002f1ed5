"""Sequences whose last token has landed, while the mask for the next one is computed elsewhere."""

import select
import time

from engine.scheduling.sequence import Sequence, SequenceStatus

PATIENCE = 0.005
"""Seconds that a step waits for the masks after tokens that have just landed.

A mask takes a tenth of it at most, as a rule, and a step is in flight meanwhile; a row whose mask
takes longer misses a step, so that a slow grammar does not slow its neighbours.
"""
IDLE_PATIENCE = 0.05
"""Seconds to wait where there is nothing else to do, so that messages are still received."""


class AwaitedMasks:
    """Collects the answers of constraints. One thread uses it."""

    def __init__(self) -> None:
        self._fresh: list[Sequence] = []
        self._late: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._fresh) + len(self._late)

    def add(self, sequence: Sequence) -> None:
        """Expect an answer for the token that has just landed."""
        self._fresh.append(sequence)

    def hear(self) -> list[Sequence]:
        """Sequences with an answer; waits up to PATIENCE for those added since the last call."""
        if not self:
            return []
        answered, self._late = _divide(self._late)
        deadline = time.monotonic() + PATIENCE
        while self._fresh:
            in_time, self._fresh = _divide(self._fresh)
            answered += in_time
            left = deadline - time.monotonic()
            if left <= 0:
                break
            _poll(self._fresh, left)
        self._late += self._fresh
        self._fresh = []
        return answered

    def wait(self) -> None:
        """Wait up to IDLE_PATIENCE for any answer."""
        _poll(self._late, IDLE_PATIENCE)


def _divide(awaited: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """Those whose answers have come, and the others; sequences that have ended are neither."""
    answered: list[Sequence] = []
    unanswered: list[Sequence] = []
    for sequence in awaited:
        assert sequence.constraint is not None
        if sequence.status is not SequenceStatus.FINISHED:
            (answered if sequence.constraint.hear() else unanswered).append(sequence)
    return answered, unanswered


def _poll(awaited: list[Sequence], seconds: float) -> None:
    """Wait until one of them has an answer, at most so many seconds."""
    poll = select.poll()
    for sequence in awaited:
        assert sequence.constraint is not None
        poll.register(sequence.constraint.fileno(), select.POLLIN)
    if awaited:
        poll.poll(1000 * seconds)
