"""HTTP/1.1 by uvicorn, with deadlines for its peers and a limit of the head's length."""

import asyncio
from http import HTTPStatus
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ipc.gateway.access import pace
from ipc.gateway.access.connection_limit import ConnectionLimit
from ipc.gateway.access.pace import BodyPace, SendPace
from ipc.gateway.access.peer_addresses import peer_of
from ipc.gateway.answers import encoded
from ipc.openai.translation import error_answer

MAX_HEAD_BYTES = 1 << 16
"""The limit of the first line and the headers together."""
MAX_AHEAD = 8
"""Requests that one connection may have waiting behind the one that is answered (pipelining)."""
HEAD_TIMEOUT = 30.0
"""Seconds for a head to arrive, from the connection's beginning or the first byte."""


class BadHead(Exception):
    """A head that is refused; its text is the answer."""


class Protocol(HttpToolsProtocol):
    """Closes a connection whose peer does not begin a request in order, send the rest of it, or
    read its answer.

    With a ``limit``, which all connections share, one that is too many is refused, or another
    gives way to it.
    """

    def __init__(self, *arguments: Any, limit: ConnectionLimit | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.host = self.peer = ""
        self._limit = ConnectionLimit() if limit is None else limit
        self._head_bytes = self._header_bytes = 0
        self._has_host = False
        self._in_head = True
        self._offer = b""
        """The head of a request that asks for another protocol, without that."""
        self._head_ended = False
        """Whether the request has ended, or more than a request came, with the last data."""
        self._why_bad = ""
        self._answered: RequestResponseCycle | None = None
        """The request that is answered, which ``cycle`` is not where others have come behind it."""
        self._body: BodyPace | None = None
        """The pace of a body that is not complete."""
        self._arrival: asyncio.TimerHandle | None = None
        self._departure: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by asyncio."""
        super().connection_made(transport)
        # Any unsent byte then pauses the writer; with high=0 asyncio's TLS pauses without one.
        transport.set_write_buffer_limits(high=1, low=0)
        self.host = self.client[0] if self.client else ""
        self.peer = peer_of(self.host)
        if self._limit.admit(self):
            self._wait_for_head()
        else:
            self._refuse(503, "overloaded", "too many connections are open: try again later")

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        if self.transport.is_closing():
            return
        if self._in_head and self._arrival is None:
            self._wait_for_head()
        if self._body is not None:
            self._body.receive(len(data))
        self._head_bytes += len(data)
        self._head_ended = False
        self._parse(data)
        if self._body is not None and self._arrival is None and not self.transport.is_closing():
            self._wait_for_body(self._body)
        if self._head_ended:
            self._head_bytes = 0  # though some of the next may have come with it
        elif self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"headers may have {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        """Called by httptools."""
        self._header_bytes, self._has_host = 0, False
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Called by httptools; raises BadHead."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by httptools; raises BadHead."""
        self._count(len(name) + len(value) + len(": \r\n"))
        if name.lower() == b"host":
            if self._has_host:
                self._spoil("there may be one Host header")
            self._has_host = True
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Called by httptools; raises BadHead."""
        if len(self.pipeline) >= MAX_AHEAD:
            self._spoil(f"{MAX_AHEAD} requests may wait for their turn on one connection")
        if not self._has_host and self.parser.get_http_version() != "1.0":
            self._spoil("there must be a Host header")
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._offer = self._head_without_offer()
            return
        self._in_head, self._head_ended = False, True
        self._wait_no_more()
        self._body = BodyPace(self.loop.time())
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Called by httptools, behind the head of a request that asks for another protocol, too."""
        if self._offer:
            return
        self._in_head = self._head_ended = True
        self._body = None
        self._wait_no_more()
        self._limit.work(self)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Called by uvicorn."""
        if not self.pipeline or self._body is not None:
            self._limit.wait(self)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn, with a less specific message. An answer that has begun takes no other into it: the
        connection ends."""
        if self.pipeline or (
            self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        ):
            self._close()
        else:
            self._refuse(400, "invalid_request", self._why_bad or msg)

    def pause_writing(self) -> None:
        """Called by asyncio."""
        super().pause_writing()
        self._watch_departure()

    def resume_writing(self) -> None:
        """Called by asyncio."""
        super().resume_writing()
        self._watch_departure_no_more()

    def give_way(self) -> None:
        """End at once: another connection has its place."""
        if self._body is None or self.cycle.response_started:
            self.transport.abort()
        else:
            self._refuse(503, "overloaded", "too many connections are open, and this request did not come: try again")

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self._limit.remove(self)
        self._wait_no_more()
        self._watch_departure_no_more()
        if self._answered is not None and self._answered is not self.cycle:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Called by uvicorn."""
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _parse(self, data: bytes) -> None:
        """Parse all of it, as if nobody asked for another protocol.

        A server may ignore that it is asked (RFC 9110, 7.8). httptools takes what follows that head
        for the other protocol, even a body, and Java's client asks for HTTP/2 so in each first
        request: that head is parsed once more, without it.
        """
        self._unset_keepalive_if_required()
        left = [memoryview(data)]
        try:
            while left:
                part = left.pop()
                try:
                    self.parser.feed_data(part)
                except HttpParserUpgrade as upgrade:
                    left += [part[upgrade.args[0] :], memoryview(self._offer)]
                    self._offer = b""
        except HttpParserError:
            self.logger.warning("a request that is no HTTP came from %s", self.host)
            self.send_400_response("this is no HTTP request that can be read")

    def _head_without_offer(self) -> bytes:
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _count(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        if self._header_bytes > MAX_HEAD_BYTES:
            self._spoil(f"headers may have {MAX_HEAD_BYTES} bytes")

    def _spoil(self, why: str) -> None:
        self._why_bad = why
        raise BadHead(why)

    def _refuse(self, status: int, code: str, why: str) -> None:
        """Respond to what did not become a request of the app, and close the connection."""
        body = encoded(error_answer(why, status, code))
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self._close()

    def _close(self) -> None:
        self._wait_no_more()
        self.transport.close()

    def _wait_for_head(self) -> None:
        self._arrival = self.loop.call_later(HEAD_TIMEOUT, self._close)

    def _wait_for_body(self, body: BodyPace) -> None:
        self._arrival = self.loop.call_at(body.deadline(), self._look_at_body, body)

    def _look_at_body(self, body: BodyPace) -> None:
        now = self.loop.time()
        if self.pipeline or self.flow.read_paused:  # reading is paused on our side
            self._body = body = BodyPace(now)
        if now < body.deadline():
            self._wait_for_body(body)
        elif self.cycle.response_started:
            self._close()
        else:
            self._refuse(408, "timeout", "the rest of the body did not come in time")

    def _wait_no_more(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _watch_departure(self) -> None:
        """Abort the connection if its peer does not read, even while it is being closed."""
        self._watch_departure_no_more()
        sending = SendPace(self.transport.get_write_buffer_size())
        self._departure = self.loop.call_later(pace.SEND_TIMEOUT, self._look_at_departure, sending)

    def _look_at_departure(self, sending: SendPace) -> None:
        if sending.is_too_slow(self.transport.get_write_buffer_size()):
            self.transport.abort()
        else:
            self._departure = self.loop.call_later(pace.SEND_TIMEOUT, self._look_at_departure, sending)

    def _watch_departure_no_more(self) -> None:
        if self._departure is not None:
            self._departure.cancel()
            self._departure = None
