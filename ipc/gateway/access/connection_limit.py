"""The limit of connections, and which of them end first.

At the limit a new connection ends the one that has waited longest for its peer: between two
requests, or for the rest of one. Connections with an answer in progress stay; if all have one, the
new connection is refused.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

from ipc.process.http_socket import MAX_CONNECTIONS

RESERVED_FILES = 64
"""Open files kept for other purposes: the daemons, the log, connections about to be refused."""


class LimitedConnection(Protocol):
    """A connection that can be ended for another one."""

    @property
    def host(self) -> str:
        """The address that it comes from."""

    @property
    def peer(self) -> str:
        """The peer at that address."""

    def give_way(self) -> None:
        """End at once."""


class ConnectionLimit:
    """At most ``most`` connections, half of them of one peer, unless it is ``trusted``."""

    def __init__(self, most: int = MAX_CONNECTIONS, trusted: Callable[[str], bool] | None = None) -> None:
        self._most = most
        self._most_of_one = max(1, most // 2)
        self._trusted = trusted or (lambda _: False)
        self._peers: Counter[str] = Counter()
        self._waiting: dict[LimitedConnection, None] = {}
        """Idle connections, which may be closed for others, the longest waiting first."""
        self._working: set[LimitedConnection] = set()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._working)

    def admit(self, connection: LimitedConnection) -> bool:
        """Whether there is room for one more, which is then idle; another may be closed for it."""
        peer = connection.peer
        if not self._trusted(connection.host) and self._peers[peer] >= self._most_of_one:
            return self._give_way(other for other in self._waiting if other.peer == peer) and self._add(connection)
        if len(self) >= self._most:
            return self._give_way(iter(self._waiting)) and self._add(connection)
        return self._add(connection)

    def wait(self, connection: LimitedConnection) -> None:
        """It waits for its peer."""
        if connection in self._working:
            self._working.remove(connection)
            self._waiting[connection] = None

    def work(self, connection: LimitedConnection) -> None:
        """Its peer waits for us."""
        if connection in self._waiting:
            del self._waiting[connection]
            self._working.add(connection)

    def remove(self, connection: LimitedConnection) -> None:
        """It has ended, or was never admitted."""
        if connection not in self._waiting and connection not in self._working:
            return
        self._waiting.pop(connection, None)
        self._working.discard(connection)
        self._peers[connection.peer] -= 1
        if not self._peers[connection.peer]:
            del self._peers[connection.peer]

    def _add(self, connection: LimitedConnection) -> bool:
        self._waiting[connection] = None
        self._peers[connection.peer] += 1
        return True

    def _give_way(self, waiting: Iterator[LimitedConnection]) -> bool:
        """Whether one of these, which are in order, has."""
        oldest = next(waiting, None)
        if oldest is None:
            return False
        self.remove(oldest)
        oldest.give_way()
        return True
