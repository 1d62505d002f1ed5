"""The clients that have sent Hello, their open requests, and the answers to their messages."""

import logging
from collections.abc import Callable
from functools import partial

from driver.errors import DriverError, Overloaded
from driver.request import ReturnSample
from ipc.server.driver_protocol import Driver
from ipc.server.isolation import Work, isolating
from ipc.server.outbox import Outbox, Reply
from ipc.server.shared_answers import Send, greeting, listed_adapters
from ipc.server.work.connected_client import MAX_BACKLOG_BYTES, ConnectedClient
from ipc.server.work.delivery import Delivery
from ipc.server.work.ledger import Ledger
from ipc.server.work.requests import Question, submit
from ipc.server.work.rounds import Rounds
from ipc.server.work.stream import SampleStream
from ipc.sockets.tenants import EVERYBODY, Tenant
from ipc.wire.codec import decode_client_message, read
from ipc.wire.messages import (
    PING_INTERVAL,
    SILENCE_LIMIT,
    Abort,
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
        self._delivery = Delivery(send, self._drop)
        self._rounds = Rounds()
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

    def has_room(self, identity: bytes) -> None:
        """A connection was full and is not any more: ``look`` sends what has waited."""
        if (client := self._clients.get(identity)) is not None:
            self._delivery.has_room(client)

    def lost(self, identity: bytes) -> None:
        """Aborts the open requests of a client without a connection."""
        client = self._clients.get(identity)
        if client is not None:
            self._stage.work(Work(identity, client.tenant.name, partial(self._drop, identity, "the connection ended")))

    def _deliver(self, client: ConnectedClient, stream: SampleStream, sample: ReturnSample, now: float) -> None:
        stream.put(sample, now)
        self._delivery.offer(client, stream, now)
        self._cut_off_longest(client)

    def _break_off(self, identity: bytes, request_id: str | None, error: DriverError) -> None:
        """End a request after an exception, or the connection if there is no request id."""
        if request_id is None:
            self._part(identity, error.code, str(error), str(error))
            return
        client = self._clients.get(identity)
        self._refuse(identity, request_id, error.code, str(error))
        if client is not None and request_id in client.streams:
            self._abort(client, request_id)

    @property
    def patience(self) -> float:
        """Seconds from one ``look`` to the next; 0 while there is more to send."""
        return 0.0 if self._delivery.is_behind else self._rounds.interval(len(self._clients))

    def look(self, now: float) -> None:
        """Send some of what waited for room; check for silent clients, and those that do not
        read."""
        for client in self._delivery.turns():
            flush = partial(self._delivery.flush, client, now)
            self._stage.work(Work(client.identity, client.tenant.name, flush))
        due = self._rounds.take(self._clients, now)
        if due:
            self._ledger.forget(now)
        for client in [self._clients[identity] for identity in due if identity in self._clients]:
            look_after = partial(self._look_after, client, now)
            self._stage.work(Work(client.identity, client.tenant.name, look_after))

    def _look_after(self, client: ConnectedClient, now: float) -> None:
        present_since = self._rounds.present_since
        client.last_received_at = max(client.last_received_at, present_since)
        client.progressed_at = max(client.progressed_at, present_since)
        if self._current(client.tenant) is None:
            self._part(client.identity, "forbidden", "this key is not authorised any more", "its key was revoked")
            return
        self._cut_off_stuck(client, now)
        if now - client.last_received_at > SILENCE_LIMIT:
            self._drop(client.identity, f"silent for {SILENCE_LIMIT:g} s")
        elif now - max(client.last_received_at, client.pinged_at) >= PING_INTERVAL:
            client.pinged_at = now
            self._delivery.beat(client, Ping())

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
                self._take(client, message, now, num_bytes)
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
                    self._delivery.offer(client, client.streams[request_id], now)
            case Ping():
                self._delivery.beat(client, Pong())

    def _greet(self, identity: bytes, hello: Hello, now: float, tenant: Tenant) -> None:
        self._drop(identity, "said hello again")
        answer = greeting(self._welcome, identity, hello)
        if isinstance(answer, Welcome):
            self._clients[identity] = ConnectedClient(identity, tenant, now, now)
        self._send(identity, answer)

    def _take(self, client: ConnectedClient, message: Question, now: float, num_bytes: int) -> None:
        """Owes the client an end of this, unless the driver refuses it."""
        identity, request_id = client.identity, message.request_id
        if request_id in client.streams:
            in_use = f"request id {request_id!r} is in use until its last message"
            self._turn_away(client, message, "duplicate_request", in_use)
            return
        over = self._ledger.refusal(client.tenant, now, spends=isinstance(message, Generate))
        if over is not None:
            self._turn_away(client, message, "quota_exceeded", *over)
            return
        if isinstance(message, Generate) and (why := client.tenant.refused_priority(message.params.get("priority"))):
            self._turn_away(client, message, "forbidden", why)
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

    def _turn_away(
        self, client: ConnectedClient, message: Question, code: str, why: str, retry_after_s: float | None = None
    ) -> None:
        """Refuse what the driver is not asked; it counts requests."""
        if isinstance(message, Generate):
            self._driver.count_refusal(code)
        self._send(client.identity, Error(message.request_id, code, why, retry_after_s))

    def _cut_off_stuck(self, client: ConnectedClient, now: float) -> None:
        """End the streams of a client that has something to read of each, and has read nothing for
        SILENCE_LIMIT.

        A client that reads one stream, or waits for more of one, may leave the others for later.
        """
        if client.seconds_unread(now) > SILENCE_LIMIT:
            unread = f"cut off: nothing was read for {SILENCE_LIMIT:g} s; read, and send credit"
            for request_id in list(client.streams):
                self._cut_off(client, request_id, unread)

    def _cut_off_longest(self, client: ConnectedClient) -> None:
        """End the longest waiting streams of a client for which too many bytes wait."""
        while (request_id := client.longest_beyond_limit) is not None:
            longest = (
                f"cut off: more than {MAX_BACKLOG_BYTES >> 20} MiB wait to be read, most of them of this; read faster"
            )
            self._cut_off(client, request_id, longest)

    def _cut_off(self, client: ConnectedClient, request_id: str, why: str) -> None:
        self._abort(client, request_id)
        self._refuse(client.identity, request_id, "slow_reader", why)

    def _abort(self, client: ConnectedClient, request_id: str) -> None:
        stream = client.remove(request_id)
        stream.drop()
        self._driver.abort(stream.reply.driver_id)

    def _refuse(self, identity: bytes, request_id: str | None, code: str, why: str) -> None:
        self._send(identity, Error(request_id, code, why))

    def _send(self, identity: bytes, message: ServerMessage) -> None:
        """Send an answer, now or when there is room; only to a known client is it sent later."""
        client = self._clients.get(identity)
        if client is not None:
            self._delivery.answer(client, message)
        else:
            self._post(identity, message)

    def _part(self, identity: bytes, code: str, error: str, why: str) -> None:
        """Drop a client with an error, which comes before whatever waits for room: that is lost."""
        self._post(identity, Error(None, code, error))
        self._drop(identity, why)

    def _drop(self, identity: bytes, why: str) -> None:
        client = self._clients.pop(identity, None)
        if client is None:
            return
        self._delivery.forget(client)
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
