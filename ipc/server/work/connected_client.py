"""A client that has sent Hello: its open requests, and what waits for room in its connection."""

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from ipc.server.work.stream import Backlog, SampleStream
from ipc.sockets.tenants import Tenant
from ipc.wire.messages import ServerMessage

MAX_BACKLOG_BYTES = 64 << 20
"""Bytes in memory that may wait for one client; beyond it the longest stream is cut off."""


@dataclass(eq=False)
class ConnectedClient:
    """One of them. Times are in seconds, and the caller's."""

    identity: bytes
    tenant: Tenant
    last_received_at: float
    pinged_at: float
    streams: dict[str, SampleStream] = field(default_factory=dict)
    """Open requests, by the client's request id."""
    backlog: Backlog = field(default_factory=Backlog)
    """The samples of its streams that wait."""
    progressed_at: float = -math.inf
    """When it last gave credit, whatever for, or a stream of it ended."""
    is_full: bool = False
    """Whether its connection had no room for the last message."""
    unsent: deque[ServerMessage] = field(default_factory=deque)
    """Answers that wait for room."""
    turns: OrderedDict[str, SampleStream] = field(default_factory=OrderedDict)
    """The streams that wait for room, by request id; the next one first."""

    @property
    def waits(self) -> bool:
        """Whether something waits for room."""
        return bool(self.unsent or self.turns)

    def remove(self, request_id: str) -> SampleStream:
        """A stream has ended, or is to."""
        self.turns.pop(request_id, None)
        return self.streams.pop(request_id)

    def seconds_unread(self, now: float) -> float:
        """For how long it has read nothing, though each of its streams has something to read."""
        return now - max([self.progressed_at, *(stream.stuck_since for stream in self.streams.values())])

    @property
    def longest_beyond_limit(self) -> str | None:
        """The request for which most waits, where too much waits for the client; else None."""
        if self.backlog.num_bytes <= MAX_BACKLOG_BYTES or not self.streams:
            return None
        return max(self.streams, key=lambda name: self.streams[name].num_bytes)
