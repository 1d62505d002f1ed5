"""Authentication of requests: API keys, hosts and rates."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ipc.gateway.access.callers import NOT_KNOWN, Caller, Callers, Unauthorized
from ipc.gateway.access.memory_limit import Memory
from ipc.gateway.access.peer_addresses import peer_of
from ipc.openai.question import BodyError


class Authentication:
    """Middleware of all operations that need a caller: finds the caller and applies its limits
    until the answer ends.

    Only POST requests count: a page that polls the metrics does not use up its caller's rate.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI call; raises BodyError."""
        callers: Callers = scope["app"].state.callers
        headers = Headers(scope=scope)
        if callers.is_open:
            _check_host(headers.get("host"))
        caller = callers.identified(headers.get("authorization"))
        scope["state"]["caller"] = caller
        memory: Memory = scope["app"].state.memory
        client = scope.get("client")
        peer = caller.name or peer_of(client[0] if client else "")
        with ExitStack() as opened, memory.hold(peer) as held, caller.working():
            if scope["method"] == "POST":
                opened.enter_context(_open(caller))

            is_answered = False

            async def send_and_end(message: Message) -> None:
                nonlocal is_answered
                is_answered = True
                if message["type"] == "http.response.body" and not message.get("more_body", False):
                    opened.close()  # first: a client with a complete answer may send again
                await send(message)

            scope["state"]["held"] = held
            try:
                await self._app(scope, receive, send_and_end)
            except asyncio.CancelledError:
                if not caller.is_removed:
                    raise
                if not is_answered:
                    raise Unauthorized(NOT_KNOWN) from None


def caller_of(request: Request) -> Caller:
    """The caller of a request."""
    caller: Caller = request.state.caller
    return caller


@contextmanager
def _open(caller: Caller) -> Iterator[None]:
    caller.begin(time.monotonic())
    try:
        yield
    finally:
        caller.end()


def _check_host(host: str | None) -> None:
    """Check the Host header. Raises BodyError for a missing one, which HTTP/1.0 allows, and for a
    foreign name.

    Without API keys every peer of this address has access. A browser lets a page read what comes
    from the page's own host, whatever address that name resolves to by now (DNS rebinding).
    """
    if host is None:
        raise BodyError("there must be a Host header: without API keys this is served to localhost alone")
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        if name.lower() not in ("localhost", ""):
            raise BodyError(
                f"without API keys this is served to localhost alone, and not as {name!r}", status=403, code="forbidden"
            ) from None
