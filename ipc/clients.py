"""The clients that have said hello, what each has open, and what is answered to everything a client may say.

All rules of the protocol's server side are here; there is no socket, thread or clock in this file.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from driver.errors import DriverError, Overloaded
from driver.request import ActiveRequest, ReturnSample
from ipc import messages
from ipc.messages import (
    PING_INTERVAL,
    PROTOCOL_VERSION,
    SILENCE_LIMIT,
    Abort,
    ClientMessage,
    Done,
    Error,
    Generate,
    Hello,
    Logprob,
    MessageError,
    Ping,
    Pong,
    Profile,
    ServerMessage,
    Status,
    StatusReply,
    Token,
    Usage,
    Welcome,
)
from ipc.outbox import Outbox, Reply

logger = logging.getLogger(__name__)

Send = Callable[[bytes, ServerMessage], str | None]
"""Sends to one client without waiting; says what is wrong where the client cannot be reached."""


class Driver(Protocol):
    """What the sockets ask of the driver; none of it waits."""

    def submit_request(self, request: ActiveRequest) -> None:
        """Takes a request or raises DriverError."""

    def abort(self, request_id: str) -> None:
        """Ends a request; unknown ids are ignored."""

    def status(self) -> msgspec.Struct:
        """A snapshot."""

    def profile(self, request_id: str, directory: str | None, channel: Reply) -> None:
        """Begins a trace, or ends it where there is no directory, and tells the channel; or raises DriverError."""


@dataclass(eq=False)
class _Client:
    heard_at: float
    replies: dict[str, Reply] = field(default_factory=dict)
    """By the client's request id: what it is owed an end of."""


class Clients:
    """Answers clients, each for itself: what one does wrong, only that one hears of. Times are in seconds."""

    def __init__(self, driver: Driver, welcome: Welcome, outbox: Outbox, send: Send) -> None:
        self._driver = driver
        self._welcome = welcome
        self._outbox = outbox
        self._post = send
        self._clients: dict[bytes, _Client] = {}
        self._judged_at = 0.0

    def __len__(self) -> int:
        return len(self._clients)

    def hear(self, identity: bytes, frames: list[bytes], now: float) -> None:
        """Takes one message of one client, whatever it may hold, and answers it."""
        if identity in self._clients:
            self._clients[identity].heard_at = now
        if len(frames) != 1:
            self._refuse(identity, None, "invalid_request", f"a message is one frame, not {len(frames)}")
            return
        frame, limit = frames[0], self._welcome.max_message_bytes
        if len(frame) > limit:
            too_long = f"a message may have {limit} bytes, not {len(frame)}"
            self._refuse(identity, messages.peek_request_id(frame), "message_too_long", too_long)
            return
        try:
            message = messages.decode_client_message(frame)
        except MessageError as error:
            malformed = f"malformed message: {error}"
            self._refuse(identity, messages.peek_request_id(frame), "invalid_request", malformed)
            return
        self._answer(identity, message, now)

    def deliver(self, reply: Reply, sample: ReturnSample) -> None:
        """Passes on what the driver has for a request, unless its client is gone."""
        client = self._clients.get(reply.identity)
        if client is None or client.replies.get(reply.request_id) is not reply:
            return
        if sample.is_last:
            del client.replies[reply.request_id]
        for message in _messages(reply.request_id, sample):
            self._send(reply.identity, message)

    def drop_silent(self, now: float) -> None:
        """Takes those for lost that have not been heard of for SILENCE_LIMIT; to be called at least every PING_INTERVAL.

        If it was not, it is we who were frozen or starved, and nobody's silence counts from before.
        """
        absent = now - self._judged_at > 2 * PING_INTERVAL
        self._judged_at = now
        for identity, client in list(self._clients.items()):
            if absent:
                client.heard_at = now
            elif now - client.heard_at > SILENCE_LIMIT:
                self._drop(identity, f"silent for {SILENCE_LIMIT:g} s")

    def _answer(self, identity: bytes, message: ClientMessage, now: float) -> None:
        if isinstance(message, Hello):
            self._greet(identity, message, now)
            return
        client = self._clients.get(identity)
        if client is None:
            request_id = None if isinstance(message, Ping) else message.request_id
            self._refuse(identity, request_id, "invalid_request", "say hello first: this connection is new or was lost")
            return
        match message:
            case Generate():
                self._generate(identity, client, message)
            case Abort(request_id=request_id) if request_id in client.replies:
                self._driver.abort(_driver_id(identity, request_id))
            case Status(request_id=request_id):
                self._send(identity, StatusReply(request_id, self._status()))
            case Profile():
                self._profile(identity, client, message)
            case Ping():
                self._send(identity, Pong())

    def _greet(self, identity: bytes, hello: Hello, now: float) -> None:
        self._drop(identity, "said hello again")
        if hello.version != PROTOCOL_VERSION:
            unsupported = f"this daemon speaks version {PROTOCOL_VERSION} of the protocol, not {hello.version}"
            self._refuse(identity, None, "unsupported_version", unsupported)
            return
        self._clients[identity] = _Client(now)
        self._send(identity, self._welcome)

    def _generate(self, identity: bytes, client: _Client, message: Generate) -> None:
        def submit(request_id: str, reply: Reply) -> None:
            request = ActiveRequest(
                request_id=request_id,
                prompt=message.prompt,
                messages=message.messages,
                params=message.params,
                client=identity.hex(),
                resume_token_ids=message.resume_token_ids,
                channel=reply,
            )
            self._driver.submit_request(request)

        reply = Reply(self._outbox, identity, message.request_id, stream=message.stream)
        self._submit(client, reply, submit)

    def _profile(self, identity: bytes, client: _Client, message: Profile) -> None:
        reply = Reply(self._outbox, identity, message.request_id)
        self._submit(
            client, reply, lambda request_id, reply: self._driver.profile(request_id, message.directory, reply)
        )

    def _submit(self, client: _Client, reply: Reply, submit: Callable[[str, Reply], None]) -> None:
        """Owes the client an end of this, unless the driver refuses it."""
        identity, request_id = reply.identity, reply.request_id
        if request_id in client.replies:
            in_use = f"request id {request_id!r} is in use until its last message"
            self._refuse(identity, request_id, "duplicate_request", in_use)
            return
        client.replies[request_id] = reply
        try:
            submit(_driver_id(identity, request_id), reply)
        except DriverError as error:
            del client.replies[request_id]
            retry_after = error.retry_after_s if isinstance(error, Overloaded) else None
            self._send(identity, Error(request_id, error.code, str(error), retry_after))

    def _status(self) -> dict[str, object]:
        snapshot: dict[str, object] = msgspec.to_builtins(self._driver.status())
        return {"model": self._welcome.model, "clients": len(self._clients), **snapshot}

    def _refuse(self, identity: bytes, request_id: str | None, code: str, why: str) -> None:
        self._send(identity, Error(request_id, code, why))

    def _send(self, identity: bytes, message: ServerMessage) -> None:
        problem = self._post(identity, message)
        if problem is not None:
            self._drop(identity, problem)

    def _drop(self, identity: bytes, why: str) -> None:
        client = self._clients.pop(identity, None)
        if client is None:
            return
        if client.replies:
            logger.info("client %s is gone (%s): %d requests are aborted", identity.hex(), why, len(client.replies))
        for request_id in client.replies:
            self._driver.abort(_driver_id(identity, request_id))


def _driver_id(identity: bytes, request_id: str) -> str:
    """What the driver calls a request: two clients may use the same ids."""
    return f"{identity.hex()}:{request_id}"


def _messages(request_id: str, sample: ReturnSample) -> list[ServerMessage]:
    index, logprobs, prompt_logprobs = sample.index, _wired(sample.logprobs), _wired(sample.prompt_logprobs)
    if sample.finish_reason is not None and sample.usage is not None:
        usage = Usage(sample.usage.prompt_tokens, sample.usage.completion_tokens)
        reason = sample.finish_reason
        return [Done(request_id, sample.text, sample.token_ids, reason, usage, index, logprobs, prompt_logprobs)]
    pieces: list[ServerMessage] = []
    if sample.text or sample.token_ids or prompt_logprobs or sample.finish_reason:
        pieces.append(
            Token(request_id, sample.text, sample.token_ids, index, sample.finish_reason, logprobs, prompt_logprobs)
        )
    if sample.error is not None:
        pieces.append(Error(request_id, sample.error.code, sample.error.message))
    return pieces


def _wired(logprobs: list[Any]) -> list[Any]:
    """The driver's log-probabilities as the wire's."""
    return [
        tokens and {id_: Logprob(at.logprob, at.rank, at.decoded_token) for id_, at in tokens.items()}
        for tokens in logprobs
    ]
