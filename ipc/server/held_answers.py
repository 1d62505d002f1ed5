"""The answers of the control socket: one that a connection has no room for waits, or ends it."""

import logging
from collections import deque
from collections.abc import Callable

from ipc.server.shared_answers import Send
from ipc.sockets.peer_events import Sent
from ipc.wire.messages import ServerMessage

logger = logging.getLogger(__name__)

MAX_HELD = 64
"""Answers held for a client. One that asks for more and does not read is cut off."""


class HeldAnswers:
    """Sends answers in order, with ``send``, and no client waits for one in vain: ``close`` ends
    the connection of one that asks and does not read."""

    def __init__(self, send: Send, close: Callable[[bytes], None]) -> None:
        self._send = send
        self._close = close
        self._held: dict[bytes, deque[ServerMessage]] = {}
        """By client, what waits for room; never empty."""
        self._cut_off: set[bytes] = set()
        """Those whose connections are about to end."""

    def has_cut_off(self, identity: bytes) -> bool:
        """Whether nobody would hear an answer to this client any more."""
        return identity in self._cut_off

    def send(self, identity: bytes, message: ServerMessage) -> None:
        """Send an answer now, or when there is room."""
        held = self._held.get(identity)
        if held is not None:
            held.append(message)
            if len(held) > MAX_HELD:
                self._end(identity)
        elif identity not in self._cut_off and self._send(identity, message) is Sent.FULL:
            self._held[identity] = deque([message])

    def has_room(self, identity: bytes) -> None:
        """A connection that was full is not any more."""
        held = self._held.get(identity, deque())
        while held and self._send(identity, held[0]) is not Sent.FULL:
            held.popleft()
        if not held:
            self._held.pop(identity, None)

    def lost(self, identity: bytes) -> None:
        """A connection is over."""
        self._held.pop(identity, None)
        self._cut_off.discard(identity)

    def _end(self, identity: bytes) -> None:
        logger.warning("client %s of the control socket asks and does not read: it is cut off", identity.hex())
        del self._held[identity]
        self._cut_off.add(identity)
        self._close(identity)
