"""Sequences whose last token has landed, while the mask for the next one is computed elsewhere."""

import select
import time

from engine.scheduling.sequence import Sequence, SequenceStatus

SHARE = 0.5
"""How long a step waits for the masks after tokens that have just landed, as a share of the time
that the steps in flight take yet: there is time to plan and dispatch it then, before the device is
idle. A row whose mask takes longer misses it, so that a slow grammar does not slow its neighbours.
"""
PATIENCE = 0.005
"""Seconds to wait for them where nobody knows that time. A mask takes a tenth of it at most, as a
rule."""
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

    def hear(self, in_flight: float | None = None) -> list[Sequence]:
        """Sequences with an answer; waits for those added since the last call.

        ``in_flight`` are the seconds that the steps in flight take yet, if that is known.
        """
        if not self:
            return []
        answered, self._late = _divide(self._late)
        deadline = time.monotonic() + (PATIENCE if in_flight is None else SHARE * in_flight)
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
    received: set[object] = set()
    for sequence in awaited:
        assert sequence.constraint is not None
        if sequence.status is not SequenceStatus.FINISHED:
            (answered if sequence.constraint.hear(received) else unanswered).append(sequence)
    return answered, unanswered


def _poll(awaited: list[Sequence], seconds: float) -> None:
    """Wait until one of them has an answer, at most so many seconds."""
    poll = select.poll()
    for sequence in awaited:
        assert sequence.constraint is not None
        poll.register(sequence.constraint.fileno(), select.POLLIN)
    if awaited:
        poll.poll(1000 * seconds)
