"""A client that says exactly what a test wants it to say, and how."""

from types import TracebackType
from typing import Self

import zmq
from fake_driver import PATIENCE

from ipc.wire.codec import decode_server_message, encode
from ipc.wire.messages import PROTOCOL_VERSION, ClientMessage, Hello, Ping, Pong, ServerMessage, Welcome

LONGEST_POLL = 1000 * PATIENCE
"""Milliseconds after which an answer is taken for never coming."""


class RawClient:
    """A DEALER. ``receive_high_water`` makes it one that soon reads no more."""

    def __init__(self, address: str, receive_high_water: int = 0) -> None:
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.RCVHWM, receive_high_water)
        self._dealer.connect(address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.vanish()

    def greet(self) -> Welcome:
        """Say hello and be welcomed."""
        welcome = self.ask(Hello(PROTOCOL_VERSION))
        assert isinstance(welcome, Welcome)
        return welcome

    def say(self, message: ClientMessage) -> None:
        self.send(encode(message))

    def ask(self, message: ClientMessage) -> ServerMessage:
        self.say(message)
        return self.hear()

    def send(self, *frames: bytes) -> None:
        self._dealer.send_multipart(frames)

    def hear(self) -> ServerMessage:
        """The next message but pings, which are answered."""
        while True:
            assert self._dealer.poll(LONGEST_POLL), "no answer came"
            message = decode_server_message(self._dealer.recv())
            if not isinstance(message, Ping):
                return message
            self.say(Pong())

    def monitor(self, events: int) -> "zmq.Socket[bytes]":
        """Where libzmq tells of these events of the connection."""
        return self._dealer.get_monitor_socket(events)

    def vanish(self) -> None:
        """Be gone, with whatever was on its way."""
        self._context.destroy(linger=0)
