"""A request to a gateway over a connection of its own, and its answer as a stream: as little as that takes.

What is measured is the gateway, and whoever asks shares the machine with it.
"""

import asyncio
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

COMPLETIONS = "/v1/completions"


class HttpFailed(Exception):
    """No stream, or none to its end; the message is what was answered instead."""


class EventReader(asyncio.Protocol):
    """Sends a request, and tells of each event or comment of the answer; ``ended`` is done with it, or why it is not."""

    def __init__(self, request: bytes, on_event: Callable[[bytes], None]) -> None:
        self._request = request
        self._on_event = on_event
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._complete = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As asyncio has it."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """As asyncio has it."""
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        """As httptools has it."""
        *events, self._rest = (self._rest + body).split(b"\n\n")
        for event in events:
            self._on_event(event)

    def on_message_complete(self) -> None:
        """As httptools has it."""
        self._complete = self._parser.get_status_code() == 200

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio has it."""
        if self.ended.done():
            return
        if self._complete:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(HttpFailed(self._rest.decode() or f"the connection was closed: {exc}"))


async def post(url: str, body: dict[str, Any], on_event: Callable[[bytes], None]) -> EventReader:
    """Ask a gateway for a completion; ``on_event`` hears of what comes, each without the line that ends it."""
    at = urlsplit(url)
    content = msgspec.json.encode(body)
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {at.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    request = head.encode() + content
    _, reader = await asyncio.get_running_loop().create_connection(
        lambda: EventReader(request, on_event), at.hostname, at.port
    )
    return reader
