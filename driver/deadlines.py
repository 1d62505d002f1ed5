"""Which sequences are to end by when."""

import math


class Deadlines:
    """Sequences with a ``timeout_s``. Times are in seconds, and the caller's. Asking costs one comparison most times."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        self._next = math.inf

    def add(self, sequence_id: str, at: float) -> None:
        """End this one by then."""
        self._at[sequence_id] = at
        self._next = min(self._next, at)

    def discard(self, sequence_id: str) -> None:
        """It has ended, or never had to."""
        self._at.pop(sequence_id, None)

    def overdue(self, now: float) -> list[str]:
        """Those whose time is up; they are known no more."""
        if now < self._next:
            return []
        late = [sequence_id for sequence_id, at in self._at.items() if at <= now]
        for sequence_id in late:
            del self._at[sequence_id]
        self._next = min(self._at.values(), default=math.inf)
        return late
