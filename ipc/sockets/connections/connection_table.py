"""The connections of a socket's process, their tenants, and the refusals. No socket, thread or
clock in this file.

libzmq identifies a connection by its routing id, which a peer may choose and a later peer reuse.
So a connection has a serial of ours instead. It is assigned at the handshake, and libzmq attaches
it to every message of the connection.
"""

import heapq
import itertools
from collections import Counter, defaultdict, deque

from zmq import MessageTracker

SHARE_OF_PEER, SHARE_OF_OWNER = 2, 4
"""Shares of the connections: at any stage one user or machine has at most half, and one key, user
or machine at most a quarter of those that are served; the rest of that half get an error."""
KEPT = 64
"""Outdated counts of peers that are kept beside twice as many as there are peers."""


class PeerConnection:
    """A connection that has sent something; ``refusal`` is a code and message if not served."""

    def __init__(
        self, serial: int, descriptor: int, routing_id: bytes, owner: str, refusal: tuple[str, str] | None
    ) -> None:
        self.serial = serial
        self.descriptor = descriptor
        self.routing_id = routing_id
        self.owner = owner
        self.refusal = refusal
        self.num_taken = self.num_bytes_taken = 0
        """Messages sent into it and not yet reported to the daemon, and their bytes."""
        self.num_bytes_sent = 0
        """Bytes sent into it since libzmq was last known to have written all."""
        self.filled_by: MessageTracker | None = None
        """The message with which those were too many: done when libzmq has written it."""
        self.held: deque[bytes] = deque()
        """Messages that have not."""
        self.num_bytes_held = 0
        self.waits_since = 0.0
        """When something of what is held was sent last, or the first of it was held."""


class Accepted:
    """An accepted file descriptor; it has a connection, once its peer has sent something."""

    def __init__(self, descriptor: int, peer: str, last_serial: int, now: float) -> None:
        self.descriptor = descriptor
        self.peer = peer
        """Its user or its machine, by the kernel's word."""
        self.last_serial = last_serial
        """The last that was given before: those of this descriptor come later."""
        self.last_received_at = now
        self.is_sending = False
        """Whether there were bytes to read at a look at the memory, and no message has come since."""
        self.ends_at: float | None = None
        """When to close it."""
        self.connection: PeerConnection | None = None


class Connections:
    """The connections, up to a limit. Times are in seconds, and the caller's.

    Report events in the order in which they happened: before a handshake, and before a
    connection's first message, all acceptances and disconnections that libzmq has reported by
    then.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._serials = itertools.count(1)
        self._last_serial = 0
        self._accepted: dict[int, Accepted] = {}
        self._by_serial: dict[int, tuple[PeerConnection, Accepted]] = {}
        self._silent: defaultdict[str, dict[int, Accepted]] = defaultdict(dict)
        """Those that have sent nothing yet, by peer, the oldest first."""
        self._num_of_peer: Counter[str] = Counter()
        self._most: list[tuple[int, str]] = []
        """A heap: minus the connections of each peer that has a silent one, and outdated numbers."""
        self._num_of_owner: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._accepted)

    def accept(self, descriptor: int, peer: str, now: float) -> Accepted | None:
        """Add a peer. Over the limit, returns the one to close at once: the oldest that has sent
        nothing.

        So a peer that does send something gets in; if there is no silent one, the new one is
        closed.
        """
        accepted = self._accepted[descriptor] = Accepted(descriptor, peer, self._last_serial, now)
        self._silent[peer][descriptor] = accepted
        self._num_of_peer[peer] += 1
        self._count(peer)
        suspect = peer
        if self._num_of_peer[peer] <= self._limit // SHARE_OF_PEER:
            if len(self._accepted) <= self._limit:
                return None
            suspect = self._most_suspect()
        silent = self._silent[suspect]
        return silent.pop(next(iter(silent)))

    def disconnect(self, descriptor: int) -> PeerConnection | None:
        """Remove it; returns its connection, if it had sent something."""
        accepted = self._accepted.pop(descriptor, None)
        if accepted is None:
            return None
        _take_one(self._num_of_peer, accepted.peer)
        self._silent[accepted.peer].pop(descriptor, None)
        if accepted.peer not in self._num_of_peer:
            del self._silent[accepted.peer]
        else:
            self._count(accepted.peer)
        if accepted.connection is None:
            return None
        del self._by_serial[accepted.connection.serial]
        _take_one(self._num_of_owner, accepted.connection.owner)
        return accepted.connection

    def new_serial(self) -> int:
        """For a connection whose handshake is under way."""
        self._last_serial = next(self._serials)
        return self._last_serial

    def get(self, serial: int) -> tuple[PeerConnection, Accepted] | None:
        """An open connection that has sent something."""
        return self._by_serial.get(serial)

    def add(
        self, serial: int, descriptor: int, routing_id: bytes, key: str, *, has_name: bool
    ) -> tuple[PeerConnection, Accepted] | None:
        """Its first message has come; None if it has ended since.

        It is its key's, or its user's or machine's if that is empty.
        """
        accepted = self._accepted.get(descriptor)
        if accepted is None or accepted.connection is not None or serial <= accepted.last_serial:
            return None
        owner = f"key {key}" if key else accepted.peer
        connection = PeerConnection(serial, descriptor, routing_id, owner, self._refusal(owner, has_name=has_name))
        accepted.connection = connection
        self._silent[accepted.peer].pop(descriptor, None)
        self._num_of_owner[owner] += 1
        self._by_serial[serial] = connection, accepted
        return connection, accepted

    def all(self) -> list[Accepted]:
        """All of them, whether they have sent something or not."""
        return list(self._accepted.values())

    def _count(self, peer: str) -> None:
        """The number of a peer's connections has changed."""
        if self._silent[peer]:
            heapq.heappush(self._most, (-self._num_of_peer[peer], peer))
        if len(self._most) > 2 * len(self._silent) + KEPT:
            self._most = [(-self._num_of_peer[peer], peer) for peer, silent in self._silent.items() if silent]
            heapq.heapify(self._most)

    def _most_suspect(self) -> str:
        """Of the peers that have a silent connection, one with the most connections."""
        while True:
            count, peer = self._most[0]
            if self._num_of_peer[peer] == -count and self._silent.get(peer):
                return peer
            heapq.heappop(self._most)

    def _refusal(self, owner: str, *, has_name: bool) -> tuple[str, str] | None:
        most = self._limit // SHARE_OF_OWNER
        if has_name:
            return "invalid_request", "a connection may not choose its name: leave ZMQ_ROUTING_ID as it is"
        if self._num_of_owner[owner] >= most:
            return "overloaded", f"you have {most} connections to this socket, which is all that one may: close some"
        return None


def _take_one(counter: Counter[str], key: str) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
