"""The name of a request, in the answer's header and body and in the log."""

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

HEADER = "X-Request-Id"
HUNG_UP = 499
"""Nginx's status for a client that disconnected before the answer."""
_USABLE = re.compile(r"[\x21-\x7e]{1,128}")


class RequestIds:
    """Middleware that names each request, by the client's ``X-Request-Id`` or a new id, and
    returns the name.

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
        name = given if _USABLE.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = name
        began, status = time.monotonic(), HUNG_UP

        async def send_with_name(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = name
            await send(message)

        try:
            await self._app(scope, receive, send_with_name)
        except Exception:
            logger.exception("request %s failed", name, extra={"request_id": name})
            if status == HUNG_UP:  # no response yet; an incomplete one ends as a closed connection
                await self._fault(scope, receive, send_with_name)
        finally:
            _log(scope, name, status, time.monotonic() - began)


def request_id_of(request: Request) -> str:
    """The name of a request."""
    return str(request.state.request_id)


def _log(scope: Scope, name: str, status: int, seconds: float) -> None:
    caller = scope["state"].get("caller")
    who = (caller and caller.name) or (scope.get("client") or ("",))[0]
    looked = scope["method"] == "GET" and status < 400  # as a page or Prometheus does all the time
    logger.log(
        logging.DEBUG if looked else logging.INFO,
        "%s %s %s: %d in %.3f s, request %s",
        who,
        scope["method"],
        scope["path"],
        status,
        seconds,
        name,
        extra={"request_id": name, "caller": who, "status": status, "seconds": round(seconds, 6)},
    )
