"""The timeouts of sequences."""

import heapq
import math

from engine.scheduling.sequence import Sequence

KEPT = 64
"""Times of sequences that are gone which are kept beside as many as there are of others."""


class Deadlines:
    """Sequences with a ``timeout_s`` or a ``queue_timeout_s``, in seconds of the caller's
    clock. However many there are, each costs the logarithm of their number."""

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}
        self._begins: dict[str, tuple[float, Sequence]] = {}
        self._times: list[tuple[float, str]] = []
        """A heap of all of these, and of some that are gone."""

    @property
    def next(self) -> float:
        """When the next one may be overdue; infinity if there is none."""
        return self._times[0][0] if self._times else math.inf

    def add(self, sequence: Sequence, received_at: float, timeout: float | None, queue_timeout: float | None) -> None:
        """Adds a sequence that ends after ``timeout``, or ``queue_timeout`` if it has not
        begun."""
        name = sequence.request_id
        if timeout is not None:
            self._ends[name] = received_at + timeout
            heapq.heappush(self._times, (received_at + timeout, name))
        if queue_timeout is not None:
            self._begins[name] = received_at + queue_timeout, sequence
            heapq.heappush(self._times, (received_at + queue_timeout, name))

    def discard(self, sequence_id: str) -> None:
        """Removes a sequence, known or not."""
        self._ends.pop(sequence_id, None)
        self._begins.pop(sequence_id, None)
        if len(self._times) > 2 * (len(self._ends) + len(self._begins)) + KEPT:
            ends = [(at, name) for name, at in self._ends.items()]
            self._times = sorted([*ends, *((at, name) for name, (at, _) in self._begins.items())])  # which is a heap

    def overdue(self, now: float) -> list[str]:
        """Removes and returns the sequences that are to end now. Mostly costs one comparison."""
        late = set()
        while self.next <= now:
            _, name = heapq.heappop(self._times)
            if self._ends.get(name, math.inf) <= now:
                late.add(name)
            begins = self._begins.get(name)
            if begins is not None and begins[0] <= now:
                del self._begins[name]
                if not begins[1].has_begun:
                    late.add(name)
        for name in late:
            self.discard(name)
        return sorted(late)
