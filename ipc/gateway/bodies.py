"""What is in the body of a request."""

from typing import TypeVar

from starlette.requests import Request

from ipc.openai_format import decoded
from ipc.openai_requests import BodyError

Body = TypeVar("Body")

JSON = "application/json"


async def read(request: Request, kind: type[Body]) -> Body:
    """A JSON body of that kind; raises BodyError."""
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != JSON:
        said = f"not {content_type!r}" if content_type else "which the request does not say"
        raise BodyError(f"the content type must be {JSON}, {said}", status=415, code="unsupported_media_type")
    return decoded(await request.body(), kind)
