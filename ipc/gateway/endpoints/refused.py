"""Endpoints of OpenAI's API that are not served here, refused by name."""

from typing import NoReturn

from starlette.requests import Request

from ipc.openai.question import BodyError


async def refuse_embeddings(request: Request) -> NoReturn:
    """Raises BodyError."""
    del request
    raise BodyError("embeddings are not supported: the models that are served here generate text")
