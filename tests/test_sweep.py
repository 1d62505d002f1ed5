"""Which connections a socket's process ends by itself."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from ipc.sockets.connections.connection_table import Accepted, PeerConnection
from ipc.sockets.connections.sweep import (
    CONNECTION_BYTES,
    FULL_LIMIT,
    LOOK_INTERVAL,
    MAX_KNOWN,
    MAX_MEMORY,
    PRESSED_LIMIT,
    SWEEP_INTERVAL,
    Sweep,
    takes_more_than,
)
from ipc.sockets.router import HELLO_LIMIT

SILENCE_LIMIT = 60.0
SOME = 10 * CONNECTION_BYTES
"""More than the few connections of a test are known to take."""


@dataclass
class Swept:
    """A sweep over connections, each of them one end of a pair of sockets, and whose other ends are the clients."""

    memory: int = 0
    is_dropping: bool = False
    drains: bool = True
    clients: list[socket.socket] = field(default_factory=list)
    ends: list[socket.socket] = field(default_factory=list)
    connections: list[Accepted] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sweep = Sweep(SILENCE_LIMIT, 0.0, lambda num_bytes: self.memory > num_bytes)

    def connect(self, count: int, *, greeted: bool = True) -> None:
        """So many more connections, which have sent a message or not."""
        for _ in range(count):
            client, end = socket.socketpair()
            accepted = Accepted(end.fileno(), "uid 0", 0, now=0.0)
            if greeted:
                accepted.connection = PeerConnection(1, end.fileno(), b"", "", None)
            self.clients.append(client)
            self.ends.append(end)
            self.connections.append(accepted)

    def overdue(self, now: float) -> list[int]:
        """The places of the connections to end now."""
        self.sweep.was_drained |= self.drains
        ended = self.sweep.overdue(now, self.connections, is_dropping=self.is_dropping)
        return [self.connections.index(accepted) for accepted in ended]


@pytest.fixture
def swept() -> Iterator[Swept]:
    """No connections yet."""
    swept = Swept()
    yield swept
    for end in (*swept.clients, *swept.ends):
        end.close()


def looks(count: int) -> list[float]:
    """The times of the first looks at the memory, before the first sweep."""
    return [LOOK_INTERVAL * (number + 1) for number in range(count)]


def test_what_sends_and_brings_no_message_ends_where_memory_is_too_much(swept: Swept) -> None:
    """At the second look: not one that sends nothing, or from which a message came in between, and nobody while there is
    memory."""
    swept.connect(3)
    silent, sender, talker = swept.clients
    del silent
    for client in (sender, talker):
        client.send(b"x")
    first, second, third, fourth = looks(4)

    assert swept.overdue(first) == []
    swept.memory = MAX_MEMORY + SOME
    assert swept.overdue(second) == []
    swept.connections[2].is_sending = False  # a message has come
    assert swept.overdue(third) == [1]
    swept.memory = MAX_MEMORY
    assert swept.overdue(fourth) == []


def test_a_message_that_is_being_dropped_may_take_memory(swept: Swept) -> None:
    """Other connections wait meanwhile, and are not to blame; as much again is too much then, too."""
    swept.connect(1)
    swept.clients[0].send(b"x")
    swept.memory, swept.is_dropping = 2 * MAX_MEMORY, True

    assert [swept.overdue(now) for now in looks(3)] == [[], [], []]
    swept.memory += SOME
    assert [swept.overdue(now) for now in looks(2)] == [[], [0]]


def test_silence_is_short_where_memory_is_too_much(swept: Swept) -> None:
    """Of those that nothing limits otherwise, too; pings come more often."""
    swept.connect(1)
    times = [SWEEP_INTERVAL * (number + 1) for number in range(int(PRESSED_LIMIT / SWEEP_INTERVAL) + 1)]

    assert [swept.overdue(now) for now in times] == [[]] * len(times)
    swept.memory = MAX_MEMORY + SOME
    assert swept.overdue(times[-1] + SWEEP_INTERVAL) == [0]


def test_the_silent_end_but_not_for_what_this_process_did(swept: Swept) -> None:
    """After the limit, or the shorter one before their first message; from anew where reading was paused, or the process
    stood still."""
    swept.connect(1)
    swept.connect(1, greeted=False)
    now, ended = 0.0, {}
    while now < SILENCE_LIMIT + 2 * SWEEP_INTERVAL:
        now += SWEEP_INTERVAL
        ended |= {place: ended.get(place, now) for place in swept.overdue(now)}
    assert ended == {0: SILENCE_LIMIT + SWEEP_INTERVAL, 1: HELLO_LIMIT + SWEEP_INTERVAL}

    swept.sweep.was_paused = True
    assert swept.overdue(now + SWEEP_INTERVAL) == []
    assert swept.overdue(now + 1000) == []
    swept.connections[0].ends_at = now + 1000
    assert swept.overdue(now + 1000 + SWEEP_INTERVAL) == [0]


def test_who_is_full_and_takes_nothing_ends(swept: Swept) -> None:
    """After FULL_LIMIT, or soon where memory is too much; not one that takes something now and then, of whose bytes as
    many wait in the kernel at each look."""
    swept.connect(3)
    full, slow, other = (accepted.connection for accepted in swept.connections)
    assert full is not None and slow is not None and other is not None
    for connection in (full, slow):
        connection.held.append(b"x")
    for end in swept.ends:
        end.send(b"x" * 1000)
    ended: dict[int, float] = {}
    for now in range(int(SWEEP_INTERVAL), 140, int(SWEEP_INTERVAL)):
        if now % 100 == 0:
            slow.waits_since = now
        ended |= {place: ended.get(place, now) for place in swept.overdue(now)}
        for accepted in swept.connections:
            accepted.last_received_at = now
    assert ended == {0: FULL_LIMIT + SWEEP_INTERVAL}

    swept.memory = 2 * MAX_MEMORY
    assert swept.overdue(now + SWEEP_INTERVAL) == [0, 1]


def test_who_is_full_while_this_process_stands_still_does_not_end(swept: Swept) -> None:
    """And perhaps the machine does: it has the time anew."""
    swept.connect(1)
    [accepted] = swept.connections
    assert accepted.connection is not None
    accepted.connection.held.append(b"x")
    swept.overdue(SWEEP_INTERVAL)

    assert swept.overdue(1000.0) == []
    assert swept.overdue(1000.0 + SWEEP_INTERVAL) == []


def test_what_connections_are_known_to_take_is_not_too_much(swept: Swept) -> None:
    """What was sent and is held, up to a bound; what has been read counts no more."""
    swept.connect(1)
    swept.clients[0].send(b"x")
    swept.ends[0].send(b"x")
    [accepted] = swept.connections
    connection = accepted.connection
    assert connection is not None
    connection.num_bytes_sent, connection.num_bytes_held = 10**6, 10**6
    swept.memory = MAX_MEMORY + 2 * 10**6
    assert [swept.overdue(now) for now in looks(2)] == [[], []]
    swept.memory += CONNECTION_BYTES + 1
    assert [swept.overdue(now) for now in looks(2)] == [[], [0]]

    connection.num_bytes_sent = 2 * MAX_KNOWN
    swept.memory = MAX_MEMORY + MAX_KNOWN
    assert swept.overdue(looks(1)[0]) == []
    swept.clients[0].recv(1)
    assert swept.overdue(looks(1)[0]) == [0]


def test_who_waits_for_us_is_not_to_blame(swept: Swept) -> None:
    """Messages that were not received yet take memory, and bytes behind them wait in the kernel."""
    swept.connect(1)
    swept.clients[0].send(b"x")
    swept.memory = 2 * MAX_MEMORY
    swept.drains = swept.sweep.was_drained = False
    assert [swept.overdue(now) for now in looks(3)] == [[]] * 3
    swept.drains = True
    assert [swept.overdue(now) for now in looks(2)] == [[], [0]]


def test_a_process_knows_what_memory_it_takes() -> None:
    """More than nothing, and less than a TiB."""
    assert takes_more_than(0)
    assert not takes_more_than(2**40)
