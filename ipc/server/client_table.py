"""The clients that have sent Hello, their open requests, and the answers to their messages.

All rules of the work socket's server side are here and in ``stream.py``; there is no socket,
thread or clock in this file.
"""

import logging
import math
from collections.abc import Callable
from functools import partial

import msgspec

from driver.errors import DriverError, Overloaded
from driver.request import ReturnSample
from ipc.server.connected_client import MAX_BACKLOG_BYTES, ConnectedClient
from ipc.server.driver_protocol import Driver
from ipc.server.isolation import Work, isolating
from ipc.server.ledger import Ledger
from ipc.server.outbox import Outbox, Reply
from ipc.server.requests import Question, submit
from ipc.server.stream import SampleStream
from ipc.sockets.peers import Sent
from ipc.sockets.tenants import EVERYBODY, Tenant
from ipc.wire.codec import decode_client_message, read
from ipc.wire.messages import (
    PING_INTERVAL,
    PROTOCOL_VERSION,
    SILENCE_LIMIT,
    Abort,
    AdaptersReply,
    ClientMessage,
    Credit,
    Detokenize,
    Error,
    Generate,
    Hello,
    ListAdapters,
    Ping,
    Pong,
    ServerMessage,
    Tokenize,
    TokenizerInfo,
    TokenizerInfoReply,
    Welcome,
)

logger = logging.getLogger(__name__)

Send = Callable[[bytes, ServerMessage], Sent]
"""Sends to one client without waiting."""

MAX_UNSENT = 1000
"""Answers held for a client that asks and does not read. One that asks for more is cut off."""


class Clients:
    """Answers clients, each by itself: an error with one client reaches only that client. Times
    are in seconds.

    ``current`` returns a tenant with its present limits, None if its key has been revoked.
    """

    def __init__(
        self,
        driver: Driver,
        welcome: Welcome,
        outbox: Outbox,
        send: Send,
        current: Callable[[Tenant], Tenant | None] = lambda tenant: tenant,
    ) -> None:
        self._driver = driver
        self._welcome = welcome
        self._outbox = outbox
        self._post = send
        self._current = current
        self._ledger = Ledger()
        self._clients: dict[bytes, ConnectedClient] = {}
        self._full: set[bytes] = set()
        self._judged_at = 0.0
        self._stage = isolating("sockets", self._break_off)

    def __len__(self) -> int:
        return len(self._clients)

    def hear(self, identity: bytes, frames: list[bytes], now: float, tenant: Tenant = EVERYBODY) -> None:
        """Takes one message of one client, whatever it may hold, and answers it."""
        self._stage.work(Work(identity, tenant.name, partial(self._hear, identity, frames, now, tenant), frames=frames))

    def deliver(self, reply: Reply, sample: ReturnSample, now: float) -> None:
        """Send a sample, as far as the client reads; drop it if the client has gone."""
        if sample.is_last:
            self._ledger.close(reply, sample.usage)
        client = self._clients.get(reply.identity)
        if client is None:
            return
        stream = client.streams.get(reply.request_id)
        if stream is None or stream.reply is not reply:
            return
        deliver = partial(self._deliver, client, stream, sample, now)
        self._stage.work(Work(reply.identity, client.tenant.name, deliver, reply.request_id))

    def _hear(self, identity: bytes, frames: list[bytes], now: float, tenant: Tenant) -> None:
        client = self._clients.get(identity)
        if client is not None:
            if client.tenant.name != tenant.name:  # a new peer with a lost connection's identity
                self._drop(identity, "the connection ended")
            client.tenant, client.last_received_at = tenant, now
        message = read(frames, decode_client_message)
        if isinstance(message, Error):
            self._send(identity, message)
        else:
            self._answer(identity, message, now, tenant, len(frames[0]))
        if identity in self._full:
            self._flush(identity, now)

    def has_room(self, identity: bytes, now: float) -> None:
        """Send messages that waited for room in a client's connection."""
        client = self._clients.get(identity)
        if client is not None and identity in self._full:
            self._stage.work(Work(identity, client.tenant.name, partial(self._flush, identity, now)))

    def lost(self, identity: bytes) -> None:
        """Aborts the open requests of a client without a connection."""
        client = self._clients.get(identity)
        if client is not None:
            self._stage.work(Work(identity, client.tenant.name, partial(self._drop, identity, "the connection ended")))

    def _deliver(self, client: ConnectedClient, stream: SampleStream, sample: ReturnSample, now: float) -> None:
        """Send a sample, or have it wait: to flush joins all that waits, and in a connection known
        to be full that is for nothing."""
        identity = stream.reply.identity
        stream.put(sample, now)
        if identity not in self._full:
            self._flush_stream(identity, client, stream, now)
        self._cut_off_longest(identity, client)

    def _break_off(self, identity: bytes, request_id: str | None, error: DriverError) -> None:
        """End a request after an exception, or the connection if there is no request id."""
        client = self._clients.get(identity)
        self._refuse(identity, request_id, error.code, str(error))
        if request_id is None:
            self._drop(identity, str(error))
        elif client is not None and request_id in client.streams:
            self._abort(client, request_id)

    @property
    def patience(self) -> float:
        """Seconds from one ``look`` to the next."""
        if not self._clients:
            return math.inf
        return PING_INTERVAL

    def look(self, now: float) -> None:
        """Check for silent clients, for those that do not read, and for room in connections.

        A call that comes far too late means that this process was frozen or starved; then no
        earlier silence counts.
        """
        absent = now - self._judged_at > 2 * PING_INTERVAL
        self._judged_at = now
        self._ledger.forget(now)
        for identity, client in list(self._clients.items()):
            self._stage.work(
                Work(identity, client.tenant.name, partial(self._look_after, identity, client, now, absent=absent))
            )

    def _look_after(self, identity: bytes, client: ConnectedClient, now: float, *, absent: bool) -> None:
        if identity in self._full:
            self._flush(identity, now)
        if identity not in self._clients:
            return
        if absent:
            client.last_received_at = now
        self._cut_off_revoked(identity, client)
        self._cut_off_stuck(identity, client, now, absent=absent)
        if now - client.last_received_at > SILENCE_LIMIT:
            self._drop(identity, f"silent for {SILENCE_LIMIT:g} s")
        elif now - max(client.last_received_at, client.pinged_at) >= PING_INTERVAL:
            client.pinged_at = now
            self._send_heartbeat(identity, Ping())

    def _answer(self, identity: bytes, message: ClientMessage, now: float, tenant: Tenant, num_bytes: int) -> None:
        if isinstance(message, Hello):
            self._greet(identity, message, now, tenant)
            return
        client = self._clients.get(identity)
        if client is None:
            request_id = None if isinstance(message, Ping | Pong) else message.request_id
            self._refuse(identity, request_id, "invalid_request", "say hello first: this connection is new or was lost")
            return
        match message:
            case Generate() | Tokenize() | Detokenize():
                self._take(identity, client, message, now, num_bytes)
            case TokenizerInfo(request_id=request_id):
                self._send(identity, TokenizerInfoReply(request_id, self._driver.tokenizer_info))
            case ListAdapters(request_id=request_id):
                self._send(identity, listed_adapters(self._driver, request_id, tenant))
            case Abort(request_id=request_id) if request_id in client.streams:
                self._driver.abort(client.streams[request_id].reply.driver_id)
            case Credit(request_id=request_id, count=count):
                client.progressed_at = now
                if request_id in client.streams:
                    client.streams[request_id].grant(count, now)
                    self._flush_stream(identity, client, client.streams[request_id], now)
            case Ping():
                self._send_heartbeat(identity, Pong())

    def _greet(self, identity: bytes, hello: Hello, now: float, tenant: Tenant) -> None:
        self._drop(identity, "said hello again")
        answer = greeting(self._welcome, identity, hello)
        if isinstance(answer, Welcome):
            self._clients[identity] = ConnectedClient(tenant, now, now)
        self._send(identity, answer)

    def _take(self, identity: bytes, client: ConnectedClient, message: Question, now: float, num_bytes: int) -> None:
        """Owes the client an end of this, unless the driver refuses it."""
        request_id = message.request_id
        if request_id in client.streams:
            in_use = f"request id {request_id!r} is in use until its last message"
            self._refuse(identity, request_id, "duplicate_request", in_use)
            return
        over = self._ledger.refusal(client.tenant, now)
        if over is not None:
            self._send(identity, Error(request_id, "quota_exceeded", *over))
            return
        reply = Reply(self._outbox, identity, request_id, stream=not isinstance(message, Generate) or message.stream)
        client.streams[request_id] = SampleStream(reply, client.backlog)
        try:
            num_prompt_tokens = submit(self._driver, message, reply, client.tenant, num_bytes)
        except BaseException as error:
            del client.streams[request_id]
            if not isinstance(error, DriverError):
                raise
            retry_after = error.retry_after_s if isinstance(error, Overloaded) else None
            self._send(identity, Error(request_id, error.code, str(error), retry_after))
        else:
            self._ledger.open(client.tenant, reply, num_prompt_tokens, now)

    def _flush(self, identity: bytes, now: float) -> None:
        """Send messages that waited for room in a client's connection."""
        client = self._clients[identity]
        self._full.discard(identity)
        while client.unsent and identity not in self._full:
            self._send(identity, client.unsent.popleft())
        for stream in list(client.streams.values()):
            if identity not in self._full and stream.is_stuck:
                self._flush_stream(identity, client, stream, now)

    def _flush_stream(self, identity: bytes, client: ConnectedClient, stream: SampleStream, now: float) -> None:
        self._conclude(identity, client, stream, stream.flush(partial(self._post, identity), now), now)

    def _conclude(self, identity: bytes, client: ConnectedClient, stream: SampleStream, sent: Sent, now: float) -> None:
        """Record the result of sending a stream's messages."""
        if stream.ended:
            client.progressed_at = now
            del client.streams[stream.reply.request_id]
        if sent is Sent.FULL:
            self._full.add(identity)
        elif sent is Sent.GONE:
            self._drop(identity, "the connection ended")

    def _cut_off_revoked(self, identity: bytes, client: ConnectedClient) -> None:
        if self._current(client.tenant) is None:
            self._refuse(identity, None, "forbidden", "this key is not authorised any more")
            self._drop(identity, "its key was revoked")

    def _cut_off_stuck(self, identity: bytes, client: ConnectedClient, now: float, *, absent: bool) -> None:
        """End the streams of a client that has something to read of each, and has read nothing for
        SILENCE_LIMIT.

        A client that reads one stream, or waits for more of one, may leave the others for later.
        """
        if absent:
            client.progressed_at = now
        if client.seconds_unread(now) > SILENCE_LIMIT:
            unread = f"cut off: nothing was read for {SILENCE_LIMIT:g} s; read, and send credit"
            for request_id in list(client.streams):
                self._cut_off(identity, client, request_id, unread)

    def _cut_off_longest(self, identity: bytes, client: ConnectedClient) -> None:
        """End the longest waiting streams of a client for which too many bytes wait."""
        while (request_id := client.longest_beyond_limit) is not None:
            longest = (
                f"cut off: more than {MAX_BACKLOG_BYTES >> 20} MiB wait to be read, most of them of this; read faster"
            )
            self._cut_off(identity, client, request_id, longest)

    def _cut_off(self, identity: bytes, client: ConnectedClient, request_id: str, why: str) -> None:
        self._abort(client, request_id)
        self._refuse(identity, request_id, "slow_reader", why)

    def _abort(self, client: ConnectedClient, request_id: str) -> None:
        stream = client.streams.pop(request_id)
        stream.drop()
        self._driver.abort(stream.reply.driver_id)

    def _refuse(self, identity: bytes, request_id: str | None, code: str, why: str) -> None:
        self._send(identity, Error(request_id, code, why))

    def _send(self, identity: bytes, message: ServerMessage) -> None:
        """Sends an answer, now or when there is room; only known clients have a backlog."""
        sent, client = self._post(identity, message), self._clients.get(identity)
        if sent is Sent.GONE:
            self._drop(identity, "the connection ended")
        elif sent is Sent.FULL and client is not None:
            self._full.add(identity)
            client.unsent.append(message)
            if len(client.unsent) > MAX_UNSENT:
                self._drop(identity, "it asks and does not read")

    def _send_heartbeat(self, identity: bytes, message: Ping | Pong) -> None:
        """To a connection that is full there is no need of one."""
        if self._post(identity, message) is Sent.GONE:
            self._drop(identity, "the connection ended")

    def _drop(self, identity: bytes, why: str) -> None:
        client = self._clients.pop(identity, None)
        self._full.discard(identity)
        if client is None:
            return
        if client.streams:
            logger.info(
                "client %s is gone (%s): %d requests are aborted",
                identity.hex(),
                why,
                len(client.streams),
                extra={"client": identity.hex()},
            )
        for stream in client.streams.values():
            self._driver.abort(stream.reply.driver_id)


def greeting(welcome: Welcome, identity: bytes, hello: Hello) -> Welcome | Error:
    """The answer to ``hello``: a client of another protocol version is refused."""
    if hello.version == PROTOCOL_VERSION:
        return msgspec.structs.replace(welcome, client_id=identity.hex())
    return unsupported(hello)


def listed_adapters(driver: Driver, request_id: str, tenant: Tenant) -> AdaptersReply:
    """The adapters that a tenant may use."""
    rows = driver.adapters.rows(tenant.adapters)
    return AdaptersReply(request_id, [msgspec.structs.asdict(row) for row in rows])


def unsupported(hello: Hello) -> Error:
    """The answer to a client of another protocol version."""
    words = f"this daemon speaks version {PROTOCOL_VERSION} of the protocol, not {hello.version}"
    return Error(None, "unsupported_version", words)
