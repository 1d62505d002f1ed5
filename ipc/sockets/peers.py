"""The connections of one socket, as the daemon sees them: the peers, and the messages on their way
to them.

The socket itself is in a process that may die (``socket_process``). Then all of its connections
are lost, and a new process replaces it at once; clients reconnect by themselves. A connection's
``identity`` is random: no client chooses it, and it is not used again.
"""

import json
import logging
import math
import secrets
import select
import socket
from collections import deque
from concurrent.futures import Future

from ipc.sockets.link import Kind, LinkLost, Who
from ipc.sockets.peer_events import SEVERAL, Event, HasRoom, Lost, Peer, Refused, Said, Sent
from ipc.sockets.router import LINGER, SocketConfiguration
from ipc.sockets.spawner import Spawned, Spawner
from ipc.sockets.turns import TurnsOfConnections

logger = logging.getLogger(__name__)

MAX_ON_THE_WAY, MAX_BYTES_ON_THE_WAY = 500, 8 * 2**20
"""Messages on their way into one connection, and bytes, from which on it is given no more."""
MAX_UNSENT = 64 * 2**20
"""Bytes that the process has not taken yet, from which on it is given no more."""
MAX_UNHEARD = 4 * 2**20
"""Bytes that were read for connections to take turns, from which on the process is not read."""
SHORT_LIFE = 1.0
"""Seconds: after two processes in a row that died younger, the next starts later."""
LONGEST_DELAY = 1.0
"""Seconds from one process's death to the next one's birth, at most."""
ANSWER_LIMIT = 20.0
"""Seconds in which a process that was called must answer, or be killed."""


class Peers:
    """Used by one thread. Each process gets ``listening`` and ``configuration``."""

    def __init__(
        self, name: str, spawner: Spawner, listening: socket.socket, configuration: SocketConfiguration
    ) -> None:
        self.num_deaths = 0
        """Processes that died without being stopped."""
        self.called_at: float | None = None
        """When the process was last called, until it answers."""
        self._name = name
        self._spawner = spawner
        self._listening = listening
        self._configuration = configuration
        self._is_open = False
        self._spawned: Spawned | None = None
        self._born_at = -math.inf
        self._due_at = 0.0
        """When to start the next process, if there is none."""
        self._delay = 0.0
        self._by_serial: dict[int, Peer] = {}
        self._by_identity: dict[bytes, Peer] = {}
        self._unheard = TurnsOfConnections()
        self._lost: deque[Peer] = deque()
        self._held_up: set[Peer] = set()
        """Those whose connections have room, but for which the process has too much to take."""
        self._reloads: deque[Future[None]] = deque()
        """Reloads of keys that the process has not confirmed yet."""

    def flush_and_poll(self, poll: "select.poll") -> None:
        """Send what can be sent without waiting, and register what to poll for."""
        if self._spawned is not None:
            link = self._spawned.link
            link.flush()
            poll.register(link, select.POLLIN | (select.POLLOUT if link.unsent else 0))

    @property
    def due_at(self) -> float:
        """When to call ``attend`` without an event."""
        if self._unheard or self._lost or (self._held_up and self._takes):
            return 0.0
        return self._due_at if self._spawned is None else math.inf

    def attend(self, now: float) -> None:
        """Ensure that there is a process, and read its records."""
        if self._spawned is None and now >= self._due_at:
            self._spawn(now)
        if self._spawned is None or self._unheard.num_bytes > MAX_UNHEARD:
            return
        try:
            for record in self._spawned.link.receive():
                self._unheard.put(record)
        except LinkLost:
            self._lose(self._spawned, now)
            return
        if self.called_at is not None and now > self.called_at + ANSWER_LIMIT and not self._unheard:
            logger.error(
                "the process of the %s socket does not answer for %g s: it is killed", self._name, ANSWER_LIMIT
            )
            self.called_at = None
            self._spawned.kill()

    def next(self) -> Event | None:
        """The next event, of the connection whose turn it is; None if there is none."""
        while self._lost or self._unheard:
            if self._lost:
                return Lost(self._lost.popleft())
            event = self._event(*self._unheard.next())
            if event is not None:
                return event
        if self._held_up and self._takes:
            return HasRoom(self._held_up.pop())
        return None

    @property
    def _takes(self) -> bool:
        """Whether there is a process, and it has taken most of what it was given."""
        return self._spawned is not None and self._spawned.link.unsent <= MAX_UNSENT

    def open(self) -> None:
        """Have clients read."""
        self._is_open = True
        self._put(Kind.OPEN)

    def send(self, identity: bytes, frame: bytes) -> Sent:
        """Send one message, now or not at all."""
        peer = self._by_identity.get(identity)
        if peer is None or self._spawned is None:
            return Sent.GONE
        if peer.num_on_the_way >= MAX_ON_THE_WAY or peer.num_bytes_on_the_way >= MAX_BYTES_ON_THE_WAY:
            peer.was_full = True
            return Sent.FULL
        if not self._takes:
            self._held_up.add(peer)
            return Sent.FULL
        peer.num_on_the_way += 1
        peer.num_bytes_on_the_way += len(frame)
        self._spawned.link.put(Kind.MESSAGE, peer.serial, frame)
        return Sent.AWAY

    def close(self, identity: bytes) -> None:
        """Close a connection, after it had time to read its last messages."""
        if (peer := self._by_identity.get(identity)) is not None:
            self._put(Kind.CLOSE, peer.serial)

    def authorise(self, keys: list[str], done: "Future[None]") -> None:
        """Let these keys connect from now on; ``done`` gets its result when they may."""
        self._configuration["keys"] = keys
        self._put(Kind.KEYS, body=json.dumps(keys).encode())
        self._reloads.append(done)

    def call(self, now: float) -> None:
        """See whether the process answers, unless that is being waited for."""
        if self.called_at is None and self._spawned is not None:
            self.called_at = now
            self._put(Kind.BEAT)

    def stop(self) -> None:
        """Let the last messages leave, and end the process."""
        if self._spawned is None:
            return
        self._put(Kind.STOP)
        poll, link = select.poll(), self._spawned.link
        try:
            while True:
                link.flush()
                poll.register(link, select.POLLIN | (select.POLLOUT if link.unsent else 0))
                if not poll.poll(2 * LINGER):
                    break
                link.receive()
        except LinkLost:
            pass
        self._spawned.close()
        self._spawned = None

    def _put(self, kind: Kind, serial: int = 0, body: bytes = b"") -> None:
        if self._spawned is not None:
            self._spawned.link.put(kind, serial, body)

    def _event(self, kind: int, serial: int, body: bytes) -> Event | None:
        if kind == Kind.OPENED:
            return self._meet(serial, json.loads(body))
        if kind == Kind.KEYS and self._reloads:
            self._reloads.popleft().set_result(None)
        elif kind == Kind.BEAT:
            self.called_at = None
        peer = self._by_serial.get(serial)
        if peer is None:
            return None
        match kind:
            case Kind.MESSAGE:
                return Said(peer, [body])
            case Kind.PARTS:
                return Said(peer, SEVERAL)
            case Kind.GONE:
                return Lost(self._forget(peer))
            case Kind.TAKEN:
                num_messages, num_bytes = map(int, body.split())
                peer.num_on_the_way -= num_messages
                peer.num_bytes_on_the_way -= num_bytes
                if peer.was_full:
                    peer.was_full = False
                    return HasRoom(peer)
        return None

    def _meet(self, serial: int, who: Who) -> Event | None:
        identity = new_identity()
        peer = self._by_serial[serial] = self._by_identity[identity] = Peer(identity, serial, who["key"], who["uid"])
        return Refused(peer, *who["refusal"]) if who["refusal"] is not None else None

    def _forget(self, peer: Peer) -> Peer:
        self._held_up.discard(peer)
        self._by_serial.pop(peer.serial, None)
        self._by_identity.pop(peer.identity, None)
        return peer

    def _spawn(self, now: float) -> None:
        try:
            self._spawned = self._spawner.spawn(self._listening)
        except OSError as error:
            self._delay = self._due_in()
            self._due_at = now + self._delay
            logger.error("no process for the %s socket can be made: %s; it is tried again", self._name, error)
            return
        self._born_at = now
        self._put(Kind.CONFIGURE, body=json.dumps(self._configuration).encode())
        if self._is_open:
            self._put(Kind.OPEN)
        self._spawned.link.flush()

    def _lose(self, dead: Spawned, now: float) -> None:
        """Drop all its connections, and start the next process: at once, if this one lived
        long."""
        self.num_deaths += 1
        self._delay = 0.0 if now - self._born_at > SHORT_LIFE else self._due_in()
        self._due_at = now + self._delay
        self._spawned, self.called_at = None, None
        self._lost.extend(self._by_serial.values())
        self._unheard.clear()
        self._held_up.clear()
        self._by_serial.clear()
        self._by_identity.clear()
        if now >= self._due_at:
            self._spawn(now)
        logger.error(
            "the process of the %s socket %s: its %d connections are lost, and clients that resume come again",
            self._name, dead.how_it_ended(), len(self._lost),
        )  # fmt: skip
        dead.close()
        while self._reloads:
            self._reloads.popleft().set_result(None)  # the next process starts with the new keys

    def _due_in(self) -> float:
        return min(LONGEST_DELAY, 2 * self._delay + 0.05)


def new_identity() -> bytes:
    """A random name for a new connection."""
    return secrets.token_bytes(6)
