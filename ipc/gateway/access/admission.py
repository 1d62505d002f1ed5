"""Who gets in, and how often."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ipc.gateway.access.callers import Caller, Callers
from ipc.gateway.access.memory_limit import Memory
from ipc.gateway.access.peer_addresses import peer_of
from ipc.openai.request_bodies import BodyError


class Admission:
    """Around what only callers may use: says who asks, and holds them to their limits until the answer has ended.

    Only what is posted counts: a page that looks at the metrics every second has its caller's limits for talking.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it; raises BodyError."""
        callers: Callers = scope["app"].state.callers
        headers = Headers(scope=scope)
        if callers.everybody is not None:
            _check_host(headers.get("host"))
        caller = callers.identified(headers.get("authorization"))
        scope["state"]["caller"] = caller
        memory: Memory = scope["app"].state.memory
        client = scope.get("client")
        peer = caller.name or peer_of(client[0] if client else "")
        with ExitStack() as opened, memory.hold(peer) as held:
            if scope["method"] == "POST":
                opened.enter_context(_open(caller))

            async def send_and_end(message: Message) -> None:
                if message["type"] == "http.response.body" and not message.get("more_body", False):
                    opened.close()  # before, as whoever has all of an answer may ask again
                await send(message)

            scope["state"]["held"] = held
            await self._app(scope, receive, send_and_end)


def caller_of(request: Request) -> Caller:
    """Who asks."""
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
    """Raises BodyError for no name, as HTTP/1.0 allows it, and for one of somebody's, which a page in this machine's browser may have made its own.

    A browser lets a page read what comes from the host that it came from, whatever address that name has by now (DNS
    rebinding), and without API keys whoever reaches this address may ask.
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
