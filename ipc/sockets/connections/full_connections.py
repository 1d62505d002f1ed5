"""The connections that had no room for a message, and when each is tried again. No socket, thread
or clock in this file."""

import itertools
import math
from collections.abc import Callable

from ipc.sockets.connections.connection_table import PeerConnection

RETRY_INTERVAL = 0.02
"""Seconds from one retry to the next."""
MAX_RETRIED = 64
"""Connections that one retry tries, at 4 us each: many full ones delay nobody else."""


class FullConnections:
    """Connections that hold messages, those next that were tried the longest ago. Times are in
    seconds."""

    def __init__(self) -> None:
        self._in_turn: dict[PeerConnection, None] = {}
        self._retried_at = -math.inf

    @property
    def due_at(self) -> float:
        """When to call ``retry``; infinity where no connection is full."""
        return self._retried_at + RETRY_INTERVAL if self._in_turn else math.inf

    def hold(self, connection: PeerConnection, frame: bytes, now: float) -> None:
        """Keep a message for when there is room."""
        if not connection.held:
            connection.waits_since = now
        connection.held.append(frame)
        connection.num_bytes_held += len(frame)
        self._in_turn[connection] = None

    def discard(self, connection: PeerConnection) -> None:
        """It has ended."""
        self._in_turn.pop(connection, None)

    def retry(self, now: float, deliver: Callable[[PeerConnection, bytes], bool]) -> None:
        """Deliver what is held, in order, to the next connections; nothing before ``due_at``."""
        if now < self.due_at:
            return
        self._retried_at = now
        for connection in list(itertools.islice(self._in_turn, MAX_RETRIED)):
            del self._in_turn[connection]
            while connection.held and deliver(connection, connection.held[0]):
                connection.num_bytes_held -= len(connection.held.popleft())
                connection.waits_since = now
            if connection.held:
                self._in_turn[connection] = None
