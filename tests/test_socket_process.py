"""The processes of the sockets: they may die, and what clients choose in them means nothing."""

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from fake_driver import PATIENCE, FakeDriver, serving
from fakes import FakeEngine, FakeTokenizer
from raw_client import RawClient

from driver.odriver import oDriver
from ipc.client import Client
from ipc.control_client import ControlClient
from ipc.sockets import socket_process
from ipc.sockets.connections.connection_table import PeerConnection
from ipc.sockets.connections.full_connections import MAX_RETRIED, RETRY_INTERVAL, FullConnections
from ipc.sockets.link import Kind, Link, LinkLost
from ipc.sockets.socket_process import MAX_BYTES_INSIDE, PARTS_PER_TURN, SocketProcess
from ipc.sockets.tenants import of_user
from ipc.wire.addresses import control_address
from ipc.wire.codec import encode
from ipc.wire.messages import PROTOCOL_VERSION, Error, Generate, Hello, Ping, Pong


def processes() -> tuple[list[int], list[int]]:
    """The programs that fork for daemons of this process, of which another test may have left one, and the processes that
    they have forked."""
    forks: list[psutil.Process] = []
    sockets: list[psutil.Process] = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it was just ending
            if child.name() == "odriver-sockets":
                sockets += child.children()
                forks.append(child)
    return [fork.pid for fork in forks], [process.pid for process in sockets]


def until(happens: Callable[[], bool]) -> None:
    """Wait for something; it is a fault if it does not happen."""
    deadline = time.monotonic() + PATIENCE
    while not happens():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.01)


@pytest.mark.parametrize("victim", ["sockets", "fork server"])
def test_a_stream_goes_on_when_the_sockets_processes_are_killed(address: str, victim: str) -> None:
    """With resume, to the same text; driver and server live on, and the deaths are counted."""
    driver = oDriver(FakeEngine(max_model_len=4096), FakeTokenizer())
    driver.start()
    prompt = "a parrot says "
    with serving(address, driver) as server, Client(address, resume=True, timeout=PATIENCE) as client:
        stream = client.generate(prompt, max_tokens=4000)
        text = next(stream).text

        fork_servers, sockets = processes()
        for process in sockets if victim == "sockets" else fork_servers:
            os.kill(process, signal.SIGKILL)
        text += "".join(piece.text for piece in stream)

        until(lambda: server.num_restarts >= 2)
        with ControlClient(address, timeout=PATIENCE) as control:
            assert control.status()["running"] == 0
        driver.stop("done")
    assert text == (prompt * 300)[:4000]


def test_what_a_client_had_open_is_aborted_when_its_sockets_process_dies(address: str, driver: FakeDriver) -> None:
    """The client knows nothing of it, and begins anew; its name is another."""
    with RawClient(address) as client:
        first = client.greet()
        client.say(Generate("a", prompt=[1]))
        request = driver.take()

        _, sockets = processes()
        for process in sockets:
            os.kill(process, signal.SIGKILL)

        assert driver.aborted.get(timeout=PATIENCE) == request.request_id
        with RawClient(address) as again:
            assert again.greet().client_id != first.client_id


def test_a_process_that_hangs_is_followed_by_another(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once somebody has asked for it in vain for long enough."""
    with serving(address, FakeDriver()) as server:
        with RawClient(address) as client, RawClient(control_address(address)) as control:
            client.greet()
            control.greet()
        _, sockets = processes()
        for process in sockets:
            os.kill(process, signal.SIGSTOP)

        with monkeypatch.context() as patch:
            patch.setattr("ipc.sockets.peers.ANSWER_LIMIT", 0.05)
            until(lambda: bool(server.stages()) and server.num_restarts >= 2)

        # On a busy machine one more may have been too slow, and be just ending.
        with Client(address, resume=True, timeout=PATIENCE) as client:
            assert client.complete("x").text == "x"


def test_a_message_of_very_many_frames_ends_its_connection(address: str, driver: FakeDriver) -> None:
    """With what that had open; others are answered, and the sender may come again."""
    with RawClient(address) as client, RawClient(address) as other:
        client.greet()
        other.greet()
        client.say(Generate("a", prompt=[1]))
        request = driver.take()

        client.send(*[b""] * (1 + PARTS_PER_TURN))
        assert client.hear() == Error(None, "invalid_request", "a message is one frame, not several")
        client.send(*[b""] * (2 + PARTS_PER_TURN))

        assert driver.aborted.get(timeout=PATIENCE) == request.request_id
        assert other.ask(Ping()) == Pong()
        client.greet()


def test_the_kernel_ends_sockets_processes_before_others_where_memory_is_short(
    address: str, driver: FakeDriver
) -> None:
    """And not the one with the weights."""
    del driver
    with RawClient(address) as client, RawClient(control_address(address)) as control:
        client.greet()
        control.greet()
    _, sockets = processes()

    assert {Path(f"/proc/{process}/oom_score_adj").read_text().strip() for process in sockets} == {"1000"}


def named(address: str, name: bytes) -> tuple["zmq.Context[zmq.Socket[bytes]]", "zmq.Socket[bytes]"]:
    """A client that calls itself so, and has said hello."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.ROUTING_ID, name)
    dealer.connect(address)
    dealer.send(encode(Hello(PROTOCOL_VERSION)))
    return context, dealer


@pytest.mark.parametrize("name", [b"demo", b"\xff\xfe", b"\0", b"\0\0\0\0\0\0", b"x" * 255])
@pytest.mark.parametrize("place", ["work", "control"])
def test_a_client_may_not_choose_its_name(address: str, driver: FakeDriver, name: bytes, place: str) -> None:
    """Whatever bytes it has: it is told, and closed; everybody else goes on."""
    del driver
    at = address if place == "work" else control_address(address)
    with RawClient(address) as client:
        client.greet()
        context, dealer = named(at, name)

        assert dealer.poll(1000 * PATIENCE)
        assert b"may not choose its name" in dealer.recv()

        assert client.ask(Ping()) == Pong()
        context.destroy(linger=0)


def test_a_name_like_libzmqs_own_is_no_elses(address: str, driver: FakeDriver) -> None:
    """Clients that connect under one that looks like it have names of ours, each its own, and so have all the others."""
    del driver
    others = [named(address, b"\0" + bytes([number]) * 4) for number in range(20)]
    with RawClient(address) as client:
        names = {client.greet().client_id}
    for context, dealer in others:
        assert dealer.poll(1000 * PATIENCE)
        dealer.recv()
        context.destroy(linger=0)
    with RawClient(address) as client:
        names.add(client.greet().client_id)

    assert len(names) == 2


FIRST_ROUTING_IDS = """
import os
import zmq
from ipc.sockets import fork_server
for _ in range(3):
    if os.fork() == 0:
        fork_server.reseed()
        context = zmq.Context()
        router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        router.bind("inproc://ids")
        dealer.connect("inproc://ids")
        dealer.send(b"")
        print(router.recv().hex(), flush=True)
        os._exit(0)
    os.wait()
"""


def test_each_process_counts_routing_ids_from_somewhere_else() -> None:
    """What a client may have learnt of one is of no use against the next, though one program forks them all."""
    command = [sys.executable, "-c", FIRST_ROUTING_IDS]
    ids = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout.split()

    assert len(set(ids)) == 3


def test_users_without_keys_are_tenants() -> None:
    """But the daemon's own, and those of whom the kernel says nothing; its own and root control it."""
    own, root, other, nobody = of_user(os.geteuid()), of_user(0), of_user(54321), of_user(None)

    assert (own.name, other.name, nobody.name) == ("", "uid 54321", "")
    assert (own.may_control, root.may_control, other.may_control, nobody.may_control) == (True, True, False, False)


# Full connections.


class Pipes:
    """Connections that take as many messages as they have room for; notes which were tried."""

    def __init__(self, num_full: int) -> None:
        self.full = FullConnections()
        self.connections = [PeerConnection(serial, -1, b"", "", None) for serial in range(num_full)]
        self.room = dict.fromkeys(self.connections, 0)
        self.taken: list[tuple[int, bytes]] = []
        self.tried: list[int] = []
        for connection in self.connections:
            for frame in (b"1", b"2", b"3"):
                self.full.hold(connection, frame, 0.0)

    def retry(self, now: float) -> list[int]:
        """The connections that are tried now, by serial."""
        self.tried = []
        self.full.retry(now, self._deliver)
        return self.tried

    def _deliver(self, connection: PeerConnection, frame: bytes) -> bool:
        self.tried.append(connection.serial)
        if self.room[connection] == 0:
            return False
        self.room[connection] -= 1
        self.taken.append((connection.serial, frame))
        return True


def test_full_connections_are_tried_once_an_interval() -> None:
    """However often there is something else to do; and not at all once there are none."""
    pipes = Pipes(num_full=2)

    assert pipes.retry(now=1.0) == [0, 1]
    assert pipes.full.due_at == 1.0 + RETRY_INTERVAL
    assert pipes.retry(now=1.0 + RETRY_INTERVAL / 2) == []
    pipes.full.hold(pipes.connections[0], b"4", 0.0)
    assert pipes.retry(now=1.0 + RETRY_INTERVAL / 2) == []
    assert pipes.retry(now=pipes.full.due_at) == [0, 1]
    for connection in pipes.connections:
        pipes.full.discard(connection)
    assert pipes.full.due_at == math.inf
    assert pipes.retry(now=2.0) == []


def test_each_of_many_full_connections_has_its_turn() -> None:
    """A bounded number at a time, and none twice before all the others."""
    pipes = Pipes(num_full=2 * MAX_RETRIED + 10)
    order = list(range(2 * MAX_RETRIED + 10)) * 2

    tried = [serial for now in range(4) for serial in pipes.retry(float(now))]

    assert tried == order[: 4 * MAX_RETRIED]


def test_a_full_connection_with_room_takes_all_that_waits_in_order() -> None:
    """As far as there is room; what is left waits on, and one that has taken all is tried no more."""
    pipes = Pipes(num_full=3)
    first, second, third = pipes.connections
    pipes.room |= {first: 2, second: 3}

    pipes.retry(now=1.0)
    assert pipes.taken == [(0, b"1"), (0, b"2"), (1, b"1"), (1, b"2"), (1, b"3")]
    pipes.room |= {first: 5, second: 5}
    pipes.retry(now=2.0)
    assert pipes.taken[5:] == [(0, b"3")]
    assert pipes.retry(now=3.0) == [third.serial]


class Router:
    """One that takes all that it is given, and of which no thread has begun to write."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.done = False

    def send_multipart(self, parts: list[Any], *_: int, track: bool = False, **__: bool) -> "Router | None":
        self.num_bytes += len(parts[-1])
        return self if track else None


def test_a_connection_is_full_until_all_of_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before any of it is, when the kernel has nothing of it."""
    monkeypatch.setattr(socket_process, "raise_open_files_limit", lambda: 1024)
    end, other = socket.socketpair()
    with end, other:
        process = SocketProcess(Link(end), other)
        process._router = router = Router()  # type: ignore[assignment]
        connection = PeerConnection(1, end.fileno(), b"", "", None)
        for _ in range(2):
            router.num_bytes, router.done = 0, True
            assert process._deliver(connection, b"x" * 2**20)
            router.done = False
            while process._deliver(connection, b"x" * 2**20):
                assert router.num_bytes <= MAX_BYTES_INSIDE
            assert router.num_bytes == MAX_BYTES_INSIDE
        process._context.term()


# The link.


def test_records_arrive_as_they_were_put() -> None:
    """Of any size, in order, however they are cut on the way."""
    here, there = (Link(end) for end in socket.socketpair())
    bodies = [b"", b"x", b"y" * 3_000_000, b"z"]
    for serial, body in enumerate(bodies):
        here.put(Kind.MESSAGE, serial, body)
    received = []
    while len(received) < len(bodies):
        here.flush()
        received += there.receive()

    assert received == [(Kind.MESSAGE, serial, body) for serial, body in enumerate(bodies)]
    assert here.unsent == 0
    here.close()
    there.close()


def test_a_link_without_another_end_is_lost() -> None:
    """Once all that it said has been received; what is put then is dropped."""
    here, there = (Link(end) for end in socket.socketpair())
    there.put(Kind.STOP)
    there.flush()
    there.close()

    assert here.receive() == [(Kind.STOP, 0, b"")]
    here.put(Kind.BEAT)
    here.flush()
    assert here.unsent == 0
    with pytest.raises(LinkLost):
        here.receive()
    here.close()
