"""Reading the body of a request."""

import codecs
from typing import TypeVar

from starlette.requests import Request

from engine.request_limits import MAX_MESSAGE_BYTES
from ipc.gateway.access.memory_limit import held_by
from ipc.gateway.answers import JSON
from ipc.openai.question import BodyError
from ipc.openai.translation import decoded

Body = TypeVar("Body")

MAX_BODY_BYTES = 2 * MAX_MESSAGE_BYTES
"""The limit of an HTTP body; the daemon has its own limit for the message."""


CURLS = ("", "application/x-www-form-urlencoded")
"""The content type of a body from curl that is not told any."""
OF_BROWSERS = ("origin", "sec-fetch-site")
"""Headers that a browser sends with each body, and nobody else does."""


async def read(request: Request, kind: type[Body]) -> Body:
    """A JSON body of that kind; raises BodyError.

    A browser has to say that it is JSON. So a foreign page cannot send a body without asking us
    first (CORS), whoever else may have access.
    """
    content_type = request.headers.get("content-type", "")
    plain = content_type.partition(";")[0].strip().lower()
    if plain != JSON and (plain not in CURLS or any(name in request.headers for name in OF_BROWSERS)):
        said = f"not {content_type!r}" if content_type else "which the request does not say"
        raise BodyError(f"the content type must be {JSON}, {said}", status=415, code="unsupported_media_type")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise BodyError(
            f"a body must not be encoded, not even as {coding!r}", status=415, code="unsupported_media_type"
        )
    body = await _bytes(request)
    return decoded(body.removeprefix(codecs.BOM_UTF8), kind)  # which editors on Windows put in front of a file


async def read_if_any(request: Request, kind: type[Body]) -> Body:
    """The same; without a body its defaults."""
    headers = request.headers
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    return await read(request, kind) if has_body else kind()


async def read_nothing(request: Request) -> None:
    """Raises BodyError for a body that says anything, as nothing would read it."""
    if (await _bytes(request)).strip() not in (b"", b"{}"):
        raise BodyError("there must be no body here: parameters are a part of the address")


async def _bytes(request: Request) -> bytes:
    parts, size, held = [], 0, held_by(request)
    _check_size(int(request.headers.get("content-length", 0)))
    async for part in request.stream():
        held.add(len(part))
        parts.append(part)
        size += len(part)
        _check_size(size)
    return b"".join(parts)


def _check_size(size: int) -> None:
    if size > MAX_BODY_BYTES:
        raise BodyError(f"a body may have {MAX_BODY_BYTES} bytes", status=413, code="message_too_long")
