"""Answers over HTTP: a JSON body, or why there is none."""

import math

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from driver.errors import NotFound
from ipc.connection.retry import RESTING
from ipc.errors import ConnectFailed, ConnectionLost, OdriverError, RequestFailed
from ipc.gateway.disconnect import Disconnected
from ipc.gateway.request_id import HUNG_UP, WHY
from ipc.openai.answer_bodies import ErrorAnswer
from ipc.openai.question import BodyError
from ipc.openai.translation import STATUS, error_answer, param_of

JSON = "application/json"
PART_BYTES = 1 << 18
"""Bytes of a response per write to the connection."""
RETRY_AFTER = 1.0
"""Seconds after which to come again, where the daemon does not say."""
FAULT = "the gateway failed: its log says more"

_encoder = msgspec.json.Encoder()


def encoded(answer: msgspec.Struct) -> bytes:
    """As JSON."""
    return _encoder.encode(answer)


def json_answer(answer: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A body of JSON."""
    return _Whole(encoded(answer), status, headers, JSON)


class _Whole(Response):
    """A response sent in parts, as its reader has room, whose memory is held to the end."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI call."""
        del scope, receive
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for start in range(0, len(self.body), PART_BYTES):
            part = bytes(self.body[start : start + PART_BYTES])
            await send({"type": "http.response.body", "body": part, "more_body": True})
        # This send waits until the reader has room.
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def failure(error: Exception, path: str | None = None) -> tuple[int, ErrorAnswer, float | None]:
    """Status and body for an exception at that path, and the Retry-After in seconds where a retry
    may help."""
    retry_after = None
    match error:
        case BodyError():
            retry_after = getattr(error, "retry_after", None)
            return error.status, error_answer(str(error), error.status, error.code, error.param), retry_after
        case RequestFailed():
            status, code = STATUS.get(error.code, 500), error.code
            if code == NotFound.code:
                return status, error_answer(str(error), status, "model_not_found", "model"), None
            if status in (429, 503):
                retry_after = error.retry_after_s or RETRY_AFTER
        case ConnectFailed():
            status, code, retry_after = 503, "unavailable", RETRY_AFTER
        case ConnectionLost():
            status, code, retry_after = 502, "connection_lost", RETRY_AFTER
        case HTTPException():
            status, code = error.status_code, error.detail.lower().replace(" ", "_")
            missing = f"there is nothing at {path}: OpenAI's addresses begin with /v1, and /openapi.json lists all"
            return status, error_answer(missing if status == 404 else error.detail, status, code), None
        case OverflowError() | RecursionError():
            why = "a number in the body is too large" if isinstance(error, OverflowError) else "it is nested too deeply"
            return 400, error_answer(f"the body is not what it should be: {why}", 400, "invalid_request"), None
        case _:
            return 500, error_answer(FAULT, 500, "internal"), None
    return status, error_answer(str(error), status, code, param_of(code, str(error), path)), retry_after


async def answer_failure(request: Request, error: Exception) -> Response:
    """An exception as an error response in OpenAI's format."""
    if isinstance(error, RequestFailed) and error.code in RESTING and hasattr(request.state, "daemon"):
        request.state.daemon.spare()
    status, answer, retry_after = failure(error, request.url.path)
    if status >= 500 and status != 503:  # with 503 a client comes again, as it is meant to
        setattr(request.state, WHY, str(error))
    headers = dict(getattr(error, "headers", None) or {})
    if retry_after is not None:
        headers["Retry-After"] = str(math.ceil(retry_after))
    return json_answer(answer, status, headers)


async def answer_nobody(request: Request, error: Exception) -> Response:
    """A response for a client that has disconnected; its status is for the log."""
    del request, error
    return Response(status_code=HUNG_UP)


OF_BODIES = (BodyError, OverflowError, RecursionError)
"""The last two come from schemas and the like: JSON that no message can hold."""
HANDLERS = dict.fromkeys((*OF_BODIES, OdriverError, HTTPException), answer_failure) | dict.fromkeys(
    (Disconnected, ClientDisconnect), answer_nobody
)
FAULT_ANSWER = json_answer(error_answer(FAULT, 500, "internal"), 500)
"""To whatever else is raised."""
