"""One connection of a client to a daemon, from hello until it is lost."""

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack

import zmq
from zmq.utils.monitor import recv_monitor_message

from ipc.errors import ConnectFailed, ConnectionLost, DaemonStarting
from ipc.wire.codec import MessageError, decode_server_message, encode
from ipc.wire.greeting import mechanism
from ipc.wire.keys import ClientKey
from ipc.wire.messages import (
    PING_INTERVAL,
    PROTOCOL_VERSION,
    SILENCE_LIMIT,
    AdaptersReply,
    Done,
    Error,
    Hello,
    MetricsReply,
    Ok,
    Ping,
    Pong,
    RequestsReply,
    ServerMessage,
    Starting,
    StatusReply,
    Token,
    TokenizerInfoReply,
    Welcome,
)

LINGER = 1000
"""Milliseconds that the last aborts have to leave when the socket closes."""

RECEIVE_HIGH_WATER = 1000
"""Messages queued for a thread that does not read; more wait at the daemon."""
GREETING_PATIENCE = 0.2
"""Seconds that a daemon has to say whether it asks for keys."""
LONGEST_KNOCK = 1000
"""Milliseconds between attempts to reach a daemon; the first follow each other sooner."""

NUM_DESCRIPTORS = 12
"""File descriptors that a client takes, about: 11 with its first connection."""

_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_HELLO = encode(Hello(PROTOCOL_VERSION))
_PING = encode(Ping())
_PONG = encode(Pong())

Answer = Token | Done | Error | TokenizerInfoReply | AdaptersReply | StatusReply | MetricsReply | RequestsReply | Ok
"""An answer to a request."""


def check_process(maker: int) -> None:
    """Raises ConnectionLost in any process but this one, which made a client: a forked child has
    none of its threads, and libzmq's sockets are the parent's."""
    if os.getpid() != maker:
        raise ConnectionLost("this client was made before the process forked: make another one in the child")


def started_context(address: str) -> "zmq.Context[zmq.Socket[bytes]]":
    """A context for the connections of a client, with its threads. Raises ConnectFailed where too few
    file descriptors are free.

    The first socket starts the threads, and libzmq aborts the process if one of them gets none.
    """
    try:
        with ExitStack() as held:
            for _ in range(NUM_DESCRIPTORS):
                held.callback(os.close, os.eventfd(0))
        context = zmq.Context()
        context.socket(zmq.PAIR).close(0)
    except (OSError, zmq.ZMQError) as error:
        raise ConnectFailed(f"cannot connect to {address}: {error.strerror}") from error
    return context


class Session:
    """A DEALER that sends Hello when connected, pings, and notices a lost daemon.

    It is not used again once ``lost`` is set; it tries to connect until ``welcome`` is set.
    One thread makes, uses and closes it. Times are in seconds, and the caller's. Raises
    ConnectFailed where there can be no socket.
    """

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, poller: zmq.Poller, key: ClientKey | None
    ) -> None:
        self.welcome: Welcome | None = None
        self.reached = False
        """Whether something speaks ZeroMQ at the address."""
        self.starting: str | None = None
        """How far the daemon's start is, as it last said."""
        self.lost: str | None = None
        """Why it is over."""
        self.code: str | None = None
        """The code of the error with which the daemon ended it."""
        self.next_ping = math.inf
        """When to call ``keep_alive`` again."""
        self._address = address
        self._key = key
        self._suspicion: str | None = None
        """A possible fault of the server at the address."""
        self._poller = poller
        self._last_received_at = math.inf
        try:
            with ExitStack() as on_failure:
                self._dealer = context.socket(zmq.DEALER)
                on_failure.callback(self._dealer.close, 0)
                self._set_options()
                self._monitor = self._dealer.get_monitor_socket(_EVENTS)
                on_failure.callback(self._monitor.close, 0)
                on_failure.callback(self._dealer.disable_monitor)
                self._dealer.connect(address)
                on_failure.pop_all()
        except zmq.ZMQError as error:  # such as too many open files
            raise ConnectFailed(f"cannot connect to {address}: {error.strerror}") from error
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)

    def send(self, frame: bytes) -> None:
        """Send one message. After a disconnection no answer comes until the loss is noticed."""
        self._dealer.send(frame, zmq.NOBLOCK)

    def receive(self, now: float) -> Iterator[tuple[Answer, int]]:
        """Yield the arrived answers, each with its size in bytes; handle pings and the like."""
        gone = self._watch()
        while self.lost is None:
            try:
                frame = self._dealer.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._last_received_at = now
            message = self._decoded(frame)
            if isinstance(message, Error) and message.code == "invalid_request":
                gone = self._watch() or gone
                if gone:  # perhaps the next daemon's, which got something before Hello
                    continue
            if isinstance(message, Answer):
                yield message, len(frame)
            elif isinstance(message, Ping):
                self.send(_PONG)
        # Only now: the daemon's last messages are read before the loss is reported.
        if gone and self.welcome is not None and self.lost is None:
            self.lost = f"the daemon at {self._address} went away"

    def keep_alive(self, now: float) -> None:
        """Ping if it is time, and check that earlier pings were answered. Call ``receive`` first.

        A call that comes far too late means that this process was frozen or starved; then the
        daemon's silence does not count.
        """
        if now - self.next_ping > PING_INTERVAL:
            self._last_received_at = now
        if self.welcome is not None and now - self._last_received_at > SILENCE_LIMIT:
            self.lost = f"the daemon at {self._address} has not answered for {SILENCE_LIMIT:g} s"
        elif now >= self.next_ping:
            self.send(_PING)
            self.next_ping = now + PING_INTERVAL

    def failure(self) -> ConnectFailed:
        """Why there is no welcome yet."""
        if self._suspicion is not None:
            return ConnectFailed(self._suspicion)
        if self.starting is not None:
            return DaemonStarting(f"the daemon at {self._address} is starting: {self.starting}")
        return ConnectFailed.silent(self._address) if self.reached else ConnectFailed.nobody(self._address)

    def close(self) -> None:
        """Send what is queued, if the daemon is there, and close."""
        self._poller.unregister(self._dealer)
        self._poller.unregister(self._monitor)
        self._dealer.disable_monitor()
        self._monitor.close(0)
        self._dealer.close(0 if self.lost else LINGER)

    def _set_options(self) -> None:
        # Not zmq.IMMEDIATE: with it, libzmq drops unread messages when the connection ends.
        self._dealer.setsockopt(zmq.SNDHWM, 0)  # what one asks for is in one's own memory anyway
        self._dealer.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
        self._dealer.setsockopt(zmq.IPV6, 1 if "[" in self._address else 0)
        self._dealer.setsockopt(zmq.RECONNECT_IVL_MAX, LONGEST_KNOCK)
        if self._key is not None:
            self._dealer.setsockopt(zmq.CURVE_PUBLICKEY, self._key.public.encode())
            self._dealer.setsockopt(zmq.CURVE_SECRETKEY, self._key.secret.encode())
            self._dealer.setsockopt(zmq.CURVE_SERVERKEY, self._key.server.encode())

    def _watch(self) -> bool:
        """Whether the daemon went away; sends Hello each time that one is reached."""
        gone = False
        while self._monitor.poll(0):
            news = recv_monitor_message(self._monitor)
            match news["event"]:
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self.reached = True
                    self.send(_HELLO)
                case zmq.EVENT_DISCONNECTED:
                    self.reached = False
                    gone = True
                case failure:
                    self._handshake_failed(failure, news["value"])
        return gone

    def _handshake_failed(self, failure: int, value: int) -> None:
        """Handle a failed CURVE handshake. It may be a daemon that is just ending: wait then."""
        if failure == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.lost = f"the daemon at {self._address} does not know this key: it was revoked, or is new and `odriver reload` has to be run"
        elif value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH and self._key is None:
            self.lost = self._asks_for_key()
        elif value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            self.lost = f"the daemon at {self._address} takes no keys: connect without one"
        elif self._key is None and mechanism(self._address, GREETING_PATIENCE) == "CURVE":
            self.lost = self._asks_for_key()
        elif self._key is not None:
            self._suspicion = f"what answers at {self._address} is not the daemon that this key was made for"

    def _asks_for_key(self) -> str:
        return f"the daemon at {self._address} asks for a key: give yours with --key FILE"

    def _decoded(self, frame: bytes) -> ServerMessage | None:
        try:
            message = decode_server_message(frame)
        except MessageError as error:
            self.lost = f"what answers at {self._address} is no daemon of this version: {error}"
            return None
        if isinstance(message, Welcome):
            self.welcome = message
            self.next_ping = self._last_received_at + PING_INTERVAL
        elif isinstance(message, Starting):
            self.starting = message.text
        elif isinstance(message, Error) and message.request_id is None:
            self.lost, self.code = (
                f"the daemon at {self._address} ended the connection: {message.message}",
                message.code,
            )
            return None
        return message
