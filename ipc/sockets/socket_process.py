"""The process of one socket. It owns the ROUTER, and passes frames between clients and the daemon.

A client can make libzmq abort its process: it connects under a routing id of the form that libzmq
itself assigns, which later collides. So libzmq faces clients in this process, where only
connections can be lost: no weights, no requests, and no rules but for connecting and its rate. It
does not decode frames, and reads nothing while the daemon does not. This file and its imports load
in a few milliseconds.
"""

import json
import math
import select
import socket
import time

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from ipc.sockets.connections.connection_table import Accepted, Connections, PeerConnection
from ipc.sockets.connections.descriptors import USER, is_chosen, peer_of, raise_open_files_limit, shut
from ipc.sockets.connections.full_connections import FullConnections
from ipc.sockets.connections.sweep import Sweep
from ipc.sockets.link import Kind, Link, LinkLost, Who
from ipc.sockets.router import LINGER, SocketConfiguration, new_router

UNREAD_LIMIT = 2**18
"""Bytes that the daemon has not read, above which no client is read."""
MESSAGES_PER_TURN = 64
"""Messages taken from clients before the daemon's get their turn again."""
PARTS_PER_TURN = 255
"""Frames behind a message's first that are dropped before the daemon and other clients get their turn."""
TAKEN_AT_ONCE, BYTES_TAKEN_AT_ONCE = 50, 2**20
"""Sent messages that are reported to the daemon together, and their bytes."""
MAX_BYTES_INSIDE = 8 * 2**20
"""Bytes in a connection from which on it is full, until libzmq has written all of them: it counts
messages alone, and says when it has written one."""
MAX_CONNECTIONS = 8192
SPARE_FILES = 64
"""File descriptors that are not for connections."""
FAREWELL = 1.0
"""Seconds that a connection has to read why it is closed."""

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


def run(link: Link, listening: socket.socket) -> None:
    """Run the process until the daemon stops it or is gone."""
    SocketProcess(link, listening).run()


class SocketProcess:
    """Serves one listening socket at the word of the daemon at the other end of the link."""

    def __init__(self, link: Link, listening: socket.socket) -> None:
        self._link = link
        self._listening = listening
        self._connections = Connections(min(MAX_CONNECTIONS, raise_open_files_limit() - SPARE_FILES))
        self._full = FullConnections()
        self._keys: frozenset[str] | None = None
        self._is_open = False
        self._stopping = False
        self._is_dropping = False
        """Whether a message of several frames is not received to its end yet."""
        self._context = zmq.Context()

    def run(self) -> None:
        """Be configured, serve, and let the last messages leave."""
        try:
            self._configure(self._first_record())
            while not self._stopping:
                self._turn()
        except LinkLost:
            return
        self._monitor.close(0)
        self._router.disable_monitor()
        self._router.close(LINGER)
        self._zap.close(0)
        self._context.term()

    def _first_record(self) -> SocketConfiguration:
        while not (records := self._link.receive()):
            select.select([self._link], [], [])
        (_, _, body), *self._early = records
        configuration: SocketConfiguration = json.loads(body)
        return configuration

    def _configure(self, configuration: SocketConfiguration) -> None:
        self._sweep = Sweep(configuration["silence_limit"] or math.inf, time.monotonic())
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP_ADDRESS)
        self._router = new_router(self._context, configuration)
        if configuration["secret"] is not None:
            self._keys = frozenset(configuration["keys"])
        self._router.setsockopt(zmq.USE_FD, self._listening.detach())
        self._monitor = self._router.get_monitor_socket(_EVENTS)
        self._router.bind(configuration["address"])
        self._poller = zmq.Poller()
        for source in (self._link, self._monitor, self._zap, self._router):
            self._poller.register(source, zmq.POLLIN)

    def _turn(self) -> None:
        ready = self._wait()
        if self._early or self._link.fileno() in ready:
            for kind, serial, body in self._early or self._link.receive():
                self._handle_record(kind, serial, body)
            self._early = []
        now = time.monotonic()
        if self._monitor in ready:
            self._watch(now)
        if self._zap in ready:
            self._answer_zap(now)
        self._full.retry(now, self._deliver)
        if self._router in ready:
            for _ in range(MESSAGES_PER_TURN):
                if not self._receive(now):
                    break
        if now >= self._sweep.due_at:
            self._watch(now)
            for overdue in self._sweep.overdue(now, self._connections.all(), is_dropping=self._is_dropping):
                shut(overdue.descriptor, overdue.peer)
        self._link.flush()

    def _wait(self) -> set[object]:
        """Wait for something to do; which sockets there is something to read from."""
        self._poller.modify(self._link, zmq.POLLIN | (zmq.POLLOUT if self._link.unsent else 0))
        self._poller.modify(self._router, zmq.POLLIN if self._reads() else 0)
        timeout = None
        if self._early:
            timeout = 0
        elif self._connections:
            due_at = min(self._full.due_at, self._sweep.due_at)
            timeout = max(0, math.ceil(1000 * (due_at - time.monotonic())))
        return {at for at, events in self._poller.poll(timeout) if events & ~zmq.POLLOUT}

    def _reads(self) -> bool:
        reads = self._is_open and self._link.unsent <= UNREAD_LIMIT
        self._sweep.was_paused |= not reads
        return reads

    def _handle_record(self, kind: int, serial: int, body: bytes) -> None:
        now = time.monotonic()
        match kind:
            case Kind.MESSAGE:
                self._send(serial, body, now)
            case Kind.CLOSE:
                if (found := self._connections.get(serial)) is not None:
                    found[1].ends_at = now + FAREWELL
            case Kind.KEYS:
                self._keys = frozenset(json.loads(body))
                self._link.put(Kind.KEYS)
            case Kind.BEAT:
                self._link.put(Kind.BEAT)
            case Kind.OPEN:
                self._is_open = True
            case Kind.STOP:
                self._stopping = True

    # To a client.

    def _send(self, serial: int, frame: bytes, now: float) -> None:
        found = self._connections.get(serial)
        if found is None:
            return  # the daemon has a report of its end, or will have
        connection, _ = found
        if connection.held or not self._deliver(connection, frame):
            self._full.hold(connection, frame, now)

    def _deliver(self, connection: PeerConnection, frame: bytes) -> bool:
        """Whether there was room for it. A lost connection has room: its end is reported soon."""
        if connection.filled_by is not None:
            if not connection.filled_by.done:
                return False
            connection.num_bytes_sent, connection.filled_by = 0, None
        fills = connection.num_bytes_sent + len(frame) >= MAX_BYTES_INSIDE
        message = zmq.Frame(frame, track=True, copy=False) if fills else frame
        try:
            connection.filled_by = self._router.send_multipart(
                [connection.routing_id, message], zmq.NOBLOCK, copy=not fills, track=fills
            )
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
        connection.num_bytes_sent += len(frame)
        connection.num_taken += 1
        connection.num_bytes_taken += len(frame)
        if connection.num_taken >= TAKEN_AT_ONCE or connection.num_bytes_taken >= BYTES_TAKEN_AT_ONCE:
            self._report_taken(connection)
        return True

    def _report_taken(self, connection: PeerConnection) -> None:
        taken = f"{connection.num_taken} {connection.num_bytes_taken}"
        self._link.put(Kind.TAKEN, connection.serial, taken.encode())
        connection.num_taken = connection.num_bytes_taken = 0

    # From a client.

    def _receive(self, now: float) -> bool:
        """Pass on one message; False if there is none, or its rest has to wait for the next turn."""
        if not self._drop_rest():
            return False
        try:
            routing_id = self._router.recv(zmq.NOBLOCK)
        except zmq.Again:
            self._sweep.was_drained = True
            return False
        frame = self._router.recv(copy=False)
        self._is_dropping = frame.more
        serial_text, _, key = str(frame.get("User-Id")).partition(" ")
        serial = int(serial_text)
        found = self._connections.get(serial) or self._new(serial, key, routing_id, frame, now)
        if found is not None:
            self._pass_on(*found, frame, now)
        if self._drop_rest():
            return True
        if found is not None:
            shut(found[1].descriptor, found[1].peer)
        return False

    def _pass_on(self, connection: PeerConnection, accepted: Accepted, frame: zmq.Frame, now: float) -> None:
        accepted.last_received_at = now
        accepted.is_sending = False
        if connection.refusal is None and frame.more:
            self._link.put(Kind.PARTS, connection.serial)
        elif connection.refusal is None:
            self._link.put(Kind.MESSAGE, connection.serial, frame.bytes)

    def _drop_rest(self) -> bool:
        """Drop further frames of a message; False if it has more than a turn is for.

        It has to be received to its end before any other.
        """
        for _ in range(PARTS_PER_TURN):
            if not self._is_dropping:
                break
            self._is_dropping = self._router.recv(copy=False).more
        return not self._is_dropping

    def _new(
        self, serial: int, key: str, routing_id: bytes, frame: zmq.Frame, now: float
    ) -> tuple[PeerConnection, Accepted] | None:
        self._watch(now)
        has_name = is_chosen(routing_id)
        found = self._connections.add(serial, int(frame.get(zmq.SRCFD)), routing_id, key, has_name=has_name)
        if found is not None:
            connection, accepted = found
            uid = int(accepted.peer.removeprefix(USER)) if accepted.peer.startswith(USER) else None
            who: Who = {"key": key or None, "uid": uid, "refusal": connection.refusal}
            self._link.put(Kind.OPENED, serial, json.dumps(who).encode())
        return found

    # New connections, and connections to be closed.

    def _watch(self, now: float) -> None:
        """Take note of all that have come and gone."""
        while self._monitor.poll(0):
            news = recv_monitor_message(self._monitor)
            descriptor = int(news["value"])
            self._disconnected(descriptor)
            if news["event"] == zmq.EVENT_ACCEPTED:
                peer = peer_of(descriptor)
                excess = None if peer is None else self._connections.accept(descriptor, peer, now)
                if excess is not None:
                    shut(excess.descriptor, excess.peer)

    def _disconnected(self, descriptor: int) -> None:
        connection = self._connections.disconnect(descriptor)
        if connection is not None:
            self._full.discard(connection)
            self._link.put(Kind.GONE, connection.serial)

    def _answer_zap(self, now: float) -> None:
        """Admit peers under a serial of ours, which libzmq attaches to their messages."""
        while True:
            try:
                question = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._watch(now)
            key = "" if self._keys is None else z85.encode(question[6]).decode()
            allowed = self._keys is None or key in self._keys
            status = (b"200", b"OK") if allowed else (b"400", b"this key is not authorised")
            name = f"{self._connections.new_serial()} {key}".encode()
            self._zap.send_multipart([b"1.0", question[1], *status, name, b""])
