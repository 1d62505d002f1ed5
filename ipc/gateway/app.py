"""The gateway as an ASGI app: which address is answered by what."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from ipc.gateway import chat_completions, completions, health, metrics, models, page_files, tokens
from ipc.gateway.answers import HANDLERS
from ipc.gateway.daemons import Daemons
from ipc.gateway.request_id import RequestIds

ROUTES = [
    Route("/v1/chat/completions", chat_completions.create, methods=["POST"]),
    Route("/v1/completions", completions.create, methods=["POST"]),
    Route("/v1/models", models.index),
    Route("/v1/models/{model:path}", models.show),
    Route("/tokenize", tokens.tokenize, methods=["POST"]),
    Route("/detokenize", tokens.detokenize, methods=["POST"]),
    Route("/tokenizer_info", tokens.info),
    Route("/health", health.health),
    Route("/ready", health.ready),
    Route("/metrics", metrics.show),
    *page_files.ROUTES,
]


def make_app(daemons: Daemons) -> Starlette:
    """Answers for these daemons, to which it is connected for the app's lifespan."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        del app
        async with daemons:
            yield

    app = Starlette(routes=ROUTES, middleware=[Middleware(RequestIds)], exception_handlers=HANDLERS, lifespan=lifespan)
    app.state.daemons = daemons
    app.state.started_at = int(time.time())
    return app
