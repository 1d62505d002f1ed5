"""The connections of a socket as the daemon sees them, with the test or a process at the other end of the link."""

import math
import select
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from fake_driver import PATIENCE
from raw_client import RawClient

from ipc.sockets import peers
from ipc.sockets.binding import listening
from ipc.sockets.link import Kind, Link
from ipc.sockets.peer_events import SEVERAL, Event, HasRoom, Lost, Peer, Said, Sent
from ipc.sockets.peers import MAX_BYTES_ON_THE_WAY, Peers
from ipc.sockets.router import SocketConfiguration
from ipc.sockets.socket_process import MAX_BYTES_INSIDE
from ipc.sockets.spawner import Spawned, Spawner
from ipc.wire.codec import encode
from ipc.wire.messages import Ping, TokenizerInfoReply


class LinkedSpawner(Spawner):
    """Its process is the test, at the other end of the link."""

    def __init__(self) -> None:
        super().__init__()
        ours, theirs = socket.socketpair()
        self.there = Link(theirs)
        self._spawned = Spawned(Link(ours), socket.socket())

    def spawn(self, listening: socket.socket) -> Spawned:
        del listening
        return self._spawned


def build_configuration(address: str) -> SocketConfiguration:
    """For a socket without keys and limits."""
    return {"address": address, "max_message_bytes": -1, "silence_limit": None, "secret": None, "keys": []}


@contextmanager
def linked() -> Iterator[tuple[Peers, Link]]:
    """Peers, and the end of their link at which a process would be."""
    spawner = LinkedSpawner()
    with socket.socket() as end:
        table = Peers("work", spawner, end, build_configuration(""))
        table.attend(now=0.0)
        yield table, spawner.there
        spawner.there.close()
        table.stop()


def say(there: Link, serial: int, *frames: bytes) -> None:
    """A new connection's messages."""
    there.put(Kind.OPENED, serial, b'{"key": null, "uid": null, "refusal": null}')
    for frame in frames:
        there.put(Kind.MESSAGE, serial, frame)
    there.flush()


def test_how_many_frames_a_message_has_costs_the_daemon_nothing() -> None:
    """It learns that there are several, and no number that a client has chosen."""
    with linked() as (table, there):
        say(there, 1, b"hello")
        there.put(Kind.PARTS, 1)
        there.flush()
        table.attend(now=0.0)

        assert [event.frames for event in (table.next(), table.next()) if isinstance(event, Said)] == [
            [b"hello"],
            SEVERAL,
        ]


def heard(table: Peers) -> list[tuple[int, bytes]]:
    """All that is to be heard, by whom."""
    said = []
    while (event := table.next()) is not None:
        assert isinstance(event, Said)
        said.append((event.peer.serial, event.frames[0]))
    return said


def test_a_peer_has_room_again_once_the_process_has_taken_what_others_were_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It learns of it at once, though nothing of its own is on the way, and of nothing while the process takes nothing."""
    monkeypatch.setattr(peers, "MAX_UNSENT", 1000)
    with linked() as (table, there):
        poll = select.poll()
        for serial in (1, 2):
            say(there, serial, b"hello")
        table.attend(now=0.0)
        busy, other = (event.peer for event in (table.next(), table.next()) if isinstance(event, Said))

        assert table.send(busy.identity, b"x" * 10_000_000) is Sent.AWAY
        assert table.send(other.identity, b"x") is Sent.FULL
        table.flush_and_poll(poll)
        assert table.next() is None
        assert table.due_at == math.inf
        for _ in range(1000):
            there.receive()
            table.flush_and_poll(poll)
        assert table.due_at == 0.0
        assert table.next() == HasRoom(other)
        assert table.next() is None
        assert table.send(other.identity, b"x") is Sent.AWAY


def test_connections_are_heard_in_turns() -> None:
    """However much one has said before another's first word; each one's own messages keep their order."""
    with linked() as (table, there):
        say(there, 1, *(b"%d" % number for number in range(1000)))
        table.attend(now=0.0)
        assert isinstance(first := table.next(), Said) and first.frames == [b"0"]

        say(there, 2, b"hello", b"again")
        table.attend(now=0.0)
        rest = heard(table)
        assert {frame for _, frame in rest[:5]} >= {b"hello", b"again"}
        assert [frame for serial, frame in rest if serial == 1] == [b"%d" % number for number in range(1, 1000)]
        assert table.due_at == math.inf


def test_a_process_is_not_read_while_much_is_to_be_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be it bytes or empty messages; what was held of connections that are lost is not heard."""
    monkeypatch.setattr(peers, "MAX_UNHEARD", 10_000)
    for frames in ([b"x" * 20_000], [b""] * 100):
        with linked() as (table, there):
            say(there, 1, *frames)
            table.attend(now=0.0)
            say(there, 2, b"late")
            table.attend(now=0.0)
            assert heard(table) == [(1, frame) for frame in frames]
            table.attend(now=0.0)
            say(there, 1, b"unheard")
            assert heard(table) == [(2, b"late")]

            table.attend(now=0.0)
            there.close()
            table.attend(now=0.0)
            assert {event.peer.serial for event in (table.next(), table.next()) if isinstance(event, Lost)} == {1, 2}
            assert table.next() is None


def test_a_connection_has_room_for_messages_and_for_bytes() -> None:
    """It is full with enough of either on the way, and has room again when some are reported to be in the connection."""
    with linked() as (table, there):
        say(there, 1, b"hello")
        table.attend(now=0.0)
        said = table.next()
        assert isinstance(said, Said)
        for frame in (b"", b"x" * (MAX_BYTES_ON_THE_WAY // 500)):
            sent = 0
            while table.send(said.peer.identity, frame) is Sent.AWAY:
                sent += 1
            assert sent == 500

            there.put(Kind.TAKEN, 1, b"%d %d" % (sent, sent * len(frame)))
            there.flush()
            table.attend(now=0.0)
            assert table.next() == HasRoom(said.peer)
        assert table.send(said.peer.identity, b"x" * 10 * MAX_BYTES_ON_THE_WAY) is Sent.AWAY
        assert table.send(said.peer.identity, b"x") is Sent.FULL


def events(table: Peers, until: Callable[[], bool]) -> list[Event]:
    """What a process says until something is so; it is a fault if it does not come to be."""
    events: list[Event] = []
    deadline = time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < deadline, "it does not happen"
        table.attend(time.monotonic())
        while (event := table.next()) is not None:
            events.append(event)
        table.flush_and_poll(poll := select.poll())
        poll.poll(10)
    return events


def filled(table: Peers, peer: Peer, frame: bytes, most: int) -> int:
    """How often this frame can be sent until there is no room, also once the process has done all that it was told."""
    num_sent, had_room = 0, True
    while had_room:
        while table.send(peer.identity, frame) is Sent.AWAY:
            num_sent += 1
            assert num_sent <= most
        table.call(time.monotonic())
        had_room = HasRoom(peer) in events(table, until=lambda: table.called_at is None)
    return num_sent


def test_a_client_that_does_not_read_holds_some_bytes_and_no_more(address: str) -> None:
    """However long the messages are; once it reads it gets every one, and has room again."""
    spawner = Spawner()
    reply = TokenizerInfoReply("a", {"text": "x" * 2**20})
    frame = encode(reply)
    most = (MAX_BYTES_INSIDE + MAX_BYTES_ON_THE_WAY) // len(frame) + 4  # those, and what the client's libzmq reads
    with listening(address) as end, RawClient(address, receive_high_water=1) as client, ThreadPoolExecutor() as reader:
        table = Peers("work", spawner, end, build_configuration(address))
        table.open()
        client.say(Ping())
        heard: list[Event] = []
        while not heard:
            heard = events(table, until=iter([False, True]).__next__)
        peer = heard[0].peer

        num_sent = filled(table, peer, frame, most)
        read = reader.submit(lambda: [client.hear() for _ in range(num_sent)])

        # the process tells of what it was sent a while after the client has it
        assert HasRoom(peer) in events(table, until=lambda: read.done() and not peer.num_on_the_way)
        assert read.result() == [reply] * num_sent
        table.stop()
    spawner.stop()
