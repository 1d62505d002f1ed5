"""Sending to clients: what a connection has no room for waits, and its streams take turns.

A connection that was full is tried again when it has room, and not before: to try is to join all
that waits of a stream. Then as much is sent at once as takes a millisecond or two, of one client
after the other, so that nobody else waits for long.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial

from ipc.server.shared_answers import Send
from ipc.server.work.connected_client import ConnectedClient
from ipc.server.work.stream import SampleStream
from ipc.sockets.peer_events import Sent
from ipc.wire.messages import Ping, Pong, ServerMessage

MAX_UNSENT = 1000
"""Answers held for a client that asks and does not read. One that asks for more is cut off."""
SENT_AT_ONCE = 64
"""Messages that one call of ``look`` sends of what has waited for room, and as many as a stream has
credit beyond."""


class Delivery:
    """``send`` is the connections' own. ``drop`` is called with a client that is gone or cut off,
    and why."""

    def __init__(self, send: Send, drop: Callable[[bytes, str], None]) -> None:
        self._send = send
        self._drop = drop
        self._with_room: OrderedDict[ConnectedClient, None] = OrderedDict()
        """Clients for which something waits, though their connections have room; next turn first."""
        self._num_left = 0
        """Of SENT_AT_ONCE."""

    @property
    def is_behind(self) -> bool:
        """Whether something waits that has room."""
        return bool(self._with_room)

    def answer(self, client: ConnectedClient, message: ServerMessage) -> None:
        """Send an answer, after those that wait."""
        if client.is_full or client.waits:
            self._hold(client, message)
            return
        sent = self._send(client.identity, message)
        if sent is Sent.GONE:
            self._drop(client.identity, "the connection ended")
        elif sent is Sent.FULL:
            client.is_full = True
            self._hold(client, message)

    def beat(self, client: ConnectedClient, message: Ping | Pong) -> None:
        """Send a sign of life; to a connection that is full there is no need of one."""
        if self._send(client.identity, message) is Sent.GONE:
            self._drop(client.identity, "the connection ended")

    def offer(self, client: ConnectedClient, stream: SampleStream, now: float) -> None:
        """Send what waits of a stream, as far as its credit goes, or give it a turn."""
        if not stream.is_sendable:
            return
        if client.is_full or client.waits:
            client.turns.setdefault(stream.reply.request_id, stream)
        else:
            self._send_stream(client, stream, now)

    def has_room(self, client: ConnectedClient) -> None:
        """The connection was full and is not any more."""
        client.is_full = False
        if client.waits:
            self._with_room[client] = None

    def turns(self) -> Iterator[ConnectedClient]:
        """The clients to ``flush`` now, one after the other, until SENT_AT_ONCE are away."""
        self._num_left = SENT_AT_ONCE
        while self._num_left > 0 and self._with_room:
            client, _ = self._with_room.popitem(last=False)
            yield client

    def flush(self, client: ConnectedClient, now: float) -> None:
        """Send what waits for a client: all, or until its connection is full or it is the next
        one's turn."""
        while client.waits and not client.is_full:
            if self._num_left <= 0:
                self._with_room[client] = None
                return
            if client.unsent:
                self._num_left -= 1
                self._send_first(client)
            else:
                _, stream = client.turns.popitem(last=False)
                num_sent = stream.num_sent
                self._send_stream(client, stream, now)
                self._num_left -= max(1, stream.num_sent - num_sent)

    def forget(self, client: ConnectedClient) -> None:
        """The client is dropped: nothing that waits will be sent."""
        self._with_room.pop(client, None)
        client.unsent.clear()
        client.turns.clear()

    def _hold(self, client: ConnectedClient, message: ServerMessage) -> None:
        client.unsent.append(message)
        if len(client.unsent) > MAX_UNSENT:
            self._drop(client.identity, "it asks and does not read")

    def _send_first(self, client: ConnectedClient) -> None:
        sent = self._send(client.identity, client.unsent[0])
        if sent is Sent.AWAY:
            client.unsent.popleft()
        elif sent is Sent.FULL:
            client.is_full = True
        else:
            self._drop(client.identity, "the connection ended")

    def _send_stream(self, client: ConnectedClient, stream: SampleStream, now: float) -> None:
        """Send what waits of a stream; where the connection is full, it keeps its turn if it had
        none."""
        num_sent, request_id = stream.num_sent, stream.reply.request_id
        sent = stream.flush(partial(self._send, client.identity), now)
        if stream.ended:
            client.progressed_at = now
            client.remove(request_id)
        if sent is Sent.FULL:
            client.is_full = True
            client.turns[request_id] = stream
            client.turns.move_to_end(request_id, last=stream.num_sent > num_sent)
        elif sent is Sent.GONE:
            self._drop(client.identity, "the connection ended")
