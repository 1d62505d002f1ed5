"""Server-sent events (HTML Living Standard, 9.2), which OpenAI's clients read streams from.

While no event comes, comments keep proxies from closing the connection. After the first event or
comment the status is sent, so later errors are events.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ipc.errors import ConnectionLost, OdriverError, RequestFailed
from ipc.gateway.access.callers import NOT_KNOWN
from ipc.gateway.answers import FAULT, encoded, failure
from ipc.gateway.disconnect import Disconnected, unless_disconnected
from ipc.gateway.request_id import WHY
from ipc.openai.answer_bodies import ErrorAnswer
from ipc.openai.question import BodyError

logger = logging.getLogger(__name__)

PING_INTERVAL = 10.0
"""Seconds without an event after which there is a comment."""

PING, DONE = b": ping\n\n", b"data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream(Response):
    """Sends the iterator's events, each item some whole events, and if it raises what
    ``error_event`` makes of that; ``done`` ends the stream.

    An exception before the first event is raised here, so that it gets a status.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        done: bytes = DONE,
        error_event: Callable[[ErrorAnswer], bytes] = lambda error: event(encoded(error)),
    ) -> None:
        super().__init__(None, headers=_HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._done = done
        self._error_event = error_event
        self._started = False
        self._is_read = True
        """Whether the client is still there."""
        self._spoke_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI call."""

        async def receive_and_note() -> Message:
            message = await receive()
            self._is_read &= message["type"] != "http.disconnect"
            return message

        pinging = asyncio.create_task(self._ping(send))
        try:
            with suppress(Disconnected):
                await unless_disconnected(receive_and_note, self._stream(scope, send))
        finally:
            pinging.cancel()

    async def _stream(self, scope: Scope, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        self._spoke_at = clock()
        try:
            async with aclosing(self._events) as all_events:
                async for events in all_events:
                    self._spoke_at = clock()
                    await self._say(send, events)
        except Disconnected:
            raise
        except (BodyError, OdriverError, asyncio.CancelledError) as error:
            if not (self._started and self._is_read):
                raise
            ended = ConnectionLost(_why_cancelled(scope)) if isinstance(error, asyncio.CancelledError) else error
            await self._break_off(scope, send, ended)
        except Exception:
            if not self._started:
                raise
            logger.exception("a stream has failed")
            await self._break_off(scope, send, RequestFailed("internal", FAULT))
        await self._say(send, self._done)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _break_off(self, scope: Scope, send: Send, error: BodyError | OdriverError) -> None:
        """Say why no more comes, after a status that said nothing of it."""
        scope["state"][WHY] = str(error)
        await self._say(send, self._error_event(failure(error, scope["path"])[1]))

    async def _say(self, send: Send, events: bytes) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": events, "more_body": True})

    async def _ping(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(PING_INTERVAL)
            if clock() - self._spoke_at >= PING_INTERVAL:
                await self._say(send, PING)


def _why_cancelled(scope: Scope) -> str:
    caller = scope["state"].get("caller")
    return NOT_KNOWN if caller is not None and caller.is_removed else "the gateway ends"


def event(data: bytes) -> bytes:
    """One event."""
    return b"data: " + data + b"\n\n"
