"""The timeouts of sequences."""

import math

from engine.scheduling.sequence import Sequence


class Deadlines:
    """Sequences with a ``timeout_s`` or a ``queue_timeout_s``, in seconds of the caller's
    clock."""

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}
        self._begins: dict[str, tuple[float, Sequence]] = {}
        self._next = math.inf

    @property
    def next(self) -> float:
        """When the next one may be overdue; infinity if there is none."""
        return self._next

    def add(self, sequence: Sequence, received_at: float, timeout: float | None, queue_timeout: float | None) -> None:
        """Adds a sequence that ends after ``timeout``, or ``queue_timeout`` if it has not
        begun."""
        if timeout is not None:
            self._ends[sequence.request_id] = received_at + timeout
        if queue_timeout is not None:
            self._begins[sequence.request_id] = received_at + queue_timeout, sequence
        self._next = min(self._next, received_at + min(timeout or math.inf, queue_timeout or math.inf))

    def discard(self, sequence_id: str) -> None:
        """Removes a sequence, known or not."""
        self._ends.pop(sequence_id, None)
        self._begins.pop(sequence_id, None)

    def overdue(self, now: float) -> list[str]:
        """Removes and returns the sequences that are to end now. Mostly costs one comparison."""
        if now < self._next:
            return []
        late = {sequence_id for sequence_id, at in self._ends.items() if at <= now}
        for sequence_id, (at, sequence) in list(self._begins.items()):
            if at <= now:
                del self._begins[sequence_id]
                if not sequence.has_begun:
                    late.add(sequence_id)
        for sequence_id in late:
            self.discard(sequence_id)
        times = [*self._ends.values(), *(at for at, _ in self._begins.values())]
        self._next = min(times, default=math.inf)
        return sorted(late)
