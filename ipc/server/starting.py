"""The answers of a daemon that starts: who comes early waits, and is told how far it is."""

import math
from collections.abc import Callable

from driver.request import ReturnSample
from ipc.server.outbox import Reply
from ipc.server.shared_answers import Send, unsupported
from ipc.sockets.tenants import Tenant
from ipc.wire.codec import decode_hello, read
from ipc.wire.messages import PROTOCOL_VERSION, Error, ServerMessage, Starting

LOOK_INTERVAL = 1.0
"""Seconds from one look at the progress to the next."""


class StartingRules:
    """Keeps each connection's ``hello`` until the daemon serves; ``progress`` is for people."""

    def __init__(self, send: Send, progress: Callable[[], str]) -> None:
        self.early: dict[bytes, tuple[list[bytes], Tenant]] = {}
        """By connection: the frames of its ``hello``, and who it is."""
        self._send = send
        self._progress = progress
        self._told = ""
        """What all who wait have been told, at least."""

    @property
    def patience(self) -> float:
        """Seconds from one ``look`` to the next."""
        return LOOK_INTERVAL if self.early else math.inf

    def hear(self, identity: bytes, frames: list[bytes], now: float, tenant: Tenant) -> None:
        """Answers one message: anything but ``hello`` has to wait."""
        del now
        message = read(frames, decode_hello)
        if isinstance(message, Error):
            answer: ServerMessage = message
        elif message.version != PROTOCOL_VERSION:
            answer = unsupported(message)
        else:
            progress = self._progress()
            if not self.early:
                self._told = progress  # otherwise those who wait are told of it by ``look``
            self.early[identity] = frames, tenant
            answer = Starting(progress)
        self._send(identity, answer)

    def look(self, now: float) -> None:
        """Tells all who wait how far the start is, where that has changed."""
        del now
        progress = self._progress()
        if progress != self._told:
            self._told = progress
            for identity in list(self.early):
                self._send(identity, Starting(progress))

    def lost(self, identity: bytes) -> None:
        """A connection is over."""
        self.early.pop(identity, None)

    def has_room(self, identity: bytes) -> None:
        """Nothing waits for it."""

    def deliver(self, reply: Reply, sample: ReturnSample, now: float) -> None:
        """There is no driver yet."""
