"""Which connections a socket's process ends by itself."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from ipc.sockets.connection_table import Accepted, PeerConnection
from ipc.sockets.router import HELLO_LIMIT
from ipc.sockets.sweep import (
    LOOK_INTERVAL,
    MAX_MEMORY,
    PRESSED_SILENCE_LIMIT,
    READ_LIMIT,
    SWEEP_INTERVAL,
    Sweep,
    takes_more_than,
)

SILENCE_LIMIT = 60.0


@dataclass
class Swept:
    """A sweep over connections, each of them one end of a pair of sockets, and whose other ends are the clients."""

    memory: int = 0
    is_dropping: bool = False
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
    swept.memory = MAX_MEMORY + 1
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
    swept.memory += 1
    assert [swept.overdue(now) for now in looks(2)] == [[], [0]]


def test_silence_is_short_where_memory_is_too_much(swept: Swept) -> None:
    """Of those that nothing limits otherwise, too; pings come more often."""
    swept.connect(1)
    times = [SWEEP_INTERVAL * (number + 1) for number in range(int(PRESSED_SILENCE_LIMIT / SWEEP_INTERVAL) + 1)]

    assert [swept.overdue(now) for now in times] == [[]] * len(times)
    swept.memory = MAX_MEMORY + 1
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


def test_who_does_not_read_what_was_sent_ends(swept: Swept) -> None:
    """Whatever it says, after READ_LIMIT in which it has read nothing; not one that has read a little, or all."""
    swept.connect(3)
    for end in swept.ends:
        for _ in range(50):
            end.send(b"x" * 1000)
    ended: dict[int, float] = {}
    for now in range(int(SWEEP_INTERVAL), 70, int(SWEEP_INTERVAL)):
        ended |= {place: ended.get(place, now) for place in swept.overdue(now)}
        for accepted in swept.connections:
            accepted.last_received_at = now
        swept.clients[1].recv(1000)
        swept.ends[2].send(b"x")
        swept.clients[2].recv(100_000)

    assert ended == {0: READ_LIMIT + 2 * SWEEP_INTERVAL}


def test_who_cannot_have_read_does_not_end(swept: Swept) -> None:
    """As this process stood still, and perhaps the machine did."""
    swept.connect(1)
    swept.ends[0].send(b"x")
    swept.overdue(SWEEP_INTERVAL)

    assert swept.overdue(1000.0) == []
    assert swept.overdue(1000.0 + SWEEP_INTERVAL) == []


def test_a_process_knows_what_memory_it_takes() -> None:
    """More than nothing, and less than a TiB."""
    assert takes_more_than(0)
    assert not takes_more_than(2**40)
