"""The name of a request, in the answer's header and body and in the log, and its trace."""

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ipc.wire.fields import TRACEPARENT

logger = logging.getLogger(__name__)

HEADER = "X-Request-Id"
HUNG_UP = 499
"""Nginx's status for a client that disconnected before the answer."""
WHY = "why"
"""In the state of a request's scope: by what it failed, where that is no fault of the client's."""
_USABLE = re.compile(r"[\x21-\x7e]{1,128}")


class RequestIds:
    """Middleware that names each request, by the client's ``X-Request-Id`` or a new id, and
    returns the name; ``request_id_of`` may give it another.

    An exception of the app is logged under that name and answered by ``fault``.
    """

    def __init__(self, app: ASGIApp, fault: ASGIApp) -> None:
        self._app = app
        self._fault = fault

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        state = scope.setdefault("state", {})
        state["has_own_id"] = bool(_USABLE.fullmatch(given))
        state["request_id"] = given if state["has_own_id"] else uuid.uuid4().hex
        began, status = time.monotonic(), HUNG_UP

        async def send_with_name(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = state["request_id"]
            await send(message)

        try:
            await self._app(scope, receive, send_with_name)
        except Exception:
            logger.exception("request %s failed", state["request_id"], extra={"request_id": state["request_id"]})
            state[WHY] = "the gateway failed"
            if status == HUNG_UP:  # no response yet; an incomplete one ends as a closed connection
                await self._fault(scope, receive, send_with_name)
        finally:
            _log(scope, state["request_id"], status, time.monotonic() - began)


def request_id_of(request: Request, in_body: str | None) -> str:
    """The name of a request: the one in its body, if it has none in its head."""
    if in_body is not None and not request.state.has_own_id:
        request.state.request_id = in_body
    return str(request.state.request_id)


def traceparent_of(request: Request) -> str:
    """W3C's ``traceparent`` of a request; empty if there is none, or none that is well-formed."""
    given = request.headers.get("traceparent", "")
    return given if TRACEPARENT.fullmatch(given) else ""


def _log(scope: Scope, name: str, status: int, seconds: float) -> None:
    caller = scope["state"].get("caller")
    who = (caller and caller.name) or (scope.get("client") or ("",))[0]
    why = scope["state"].get(WHY)
    looked = scope["method"] == "GET" and status < 400  # as a page or Prometheus does all the time
    level = logging.WARNING if why else logging.DEBUG if looked else logging.INFO
    how = f", {'broken off' if status < 400 else 'failed'}: {why}" if why else ""
    logger.log(
        level,
        "%s %s %s: %d in %.3f s, request %s%s",
        who,
        scope["method"],
        scope["path"],
        status,
        seconds,
        name,
        how,
        extra={"request_id": name, "caller": who, "status": status, "seconds": round(seconds, 6)}
        | ({"error": why} if why else {}),
    )
