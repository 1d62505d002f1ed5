"""Which clients are looked after next: each once in PING_INTERVAL, and few at a time."""

import math
from collections.abc import Collection

from ipc.wire.messages import PING_INTERVAL

LOOKED_AFTER_AT_ONCE = 64
"""Clients, at 5 us each, so that nobody waits for that."""
LATE = 3
"""Intervals without a call, of which there may be nearly two, that are no silence of the clients."""


class Rounds:
    """Rounds over all clients; times are in seconds, and the caller's."""

    def __init__(self) -> None:
        self.present_since = -math.inf
        """When this process was last found to have been frozen or starved: no earlier silence of
        anybody counts."""
        self._left: list[bytes] = []
        """Of this round, the next one last."""
        self._at = 0.0

    @staticmethod
    def interval(num_clients: int) -> float:
        """Seconds from one ``take`` to the next; infinity where there are no clients."""
        if not num_clients:
            return math.inf
        return PING_INTERVAL * min(1.0, LOOKED_AFTER_AT_ONCE / num_clients)

    def take(self, clients: Collection[bytes], now: float) -> list[bytes]:
        """Those whose turn it is, nobody before the time; some may have gone.

        After a call that comes late there are more of them, as many as are due; nobody is, where
        it comes so late that no earlier silence counts.
        """
        if now < self._at + self.interval(len(clients)):
            return []
        seconds, self._at = now - self._at, now
        due = min(1.0, seconds / PING_INTERVAL)
        if seconds > LATE * PING_INTERVAL:
            self.present_since, due = now, 0.0
        count = max(min(len(clients), LOOKED_AFTER_AT_ONCE), math.ceil(len(clients) * due))
        taken = self._take(count)
        if len(taken) < count:
            self._left = list(clients)
            taken += self._take(count - len(taken))
        return taken

    def _take(self, count: int) -> list[bytes]:
        taken = self._left[-count:]
        del self._left[-count:]
        return taken
