"""HTTP/1.1 on a connection, by uvicorn, which would take a request's head of any length and wait for it for ever."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 1 << 16
"""Of the first line and the headers; more are refused."""
HEAD_TIMEOUT = 30.0
"""Seconds that they have to arrive, from the beginning of the connection or from their first byte."""


class Protocol(HttpToolsProtocol):
    """Closes a connection whose next request does not begin in order."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_bytes = 0
        self._in_head = True
        self._head_ended = False
        """Whether one has ended, or what came behind it, with the data that came last."""
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As asyncio has it."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """As asyncio has it."""
        if self._in_head and self._deadline is None:
            self._wait()
        self._head_bytes += len(data)
        self._head_ended = False
        super().data_received(data)
        if self._head_ended:
            self._head_bytes = 0  # though some of the next may have come with it
        elif self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"headers may have {MAX_HEAD_BYTES} bytes")

    def on_headers_complete(self) -> None:
        """As httptools has it."""
        self._in_head, self._head_ended = False, True
        self._wait_no_more()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """As httptools has it."""
        self._in_head = self._head_ended = True
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio has it."""
        self._wait_no_more()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._deadline = self.loop.call_later(HEAD_TIMEOUT, self.transport.close)

    def _wait_no_more(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
