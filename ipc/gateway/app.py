"""The gateway as an ASGI app: which address is answered by what."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from ipc.gateway import openapi
from ipc.gateway.access.authentication import Authentication
from ipc.gateway.access.callers import Callers
from ipc.gateway.access.memory_limit import Memory
from ipc.gateway.answers import FAULT_ANSWER, HANDLERS
from ipc.gateway.endpoints import page_files
from ipc.gateway.operations import OPERATIONS, Operation
from ipc.gateway.operators.operators_only import OperatorsOnly
from ipc.gateway.operators.weights import Gathered
from ipc.gateway.request_id import RequestIds
from ipc.gateway.upstream.daemons import Daemons


def make_app(daemons: Daemons, callers: Callers, around: Sequence[Middleware] = ()) -> Starlette:
    """Answers callers for these daemons, to which it is connected for the app's lifespan.

    Each answer, of whatever kind, passes through what is ``around``.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        del app
        async with daemons:
            yield

    app = Starlette(
        routes=[*map(_route, OPERATIONS), Route("/openapi.json", openapi.show), *page_files.ROUTES],
        middleware=[*around, Middleware(RequestIds, FAULT_ANSWER)],
        exception_handlers=HANDLERS,
        lifespan=lifespan,
    )
    app.state.daemons, app.state.callers = daemons, callers
    app.state.memory, app.state.gathered_weights = Memory(), Gathered()
    app.state.started_at = int(time.time())
    return app


def _route(operation: Operation) -> Route:
    return Route(operation.path, operation.run, methods=[operation.method], middleware=_checks(operation))


def _checks(operation: Operation) -> list[Middleware]:
    if operation.public:
        return []
    return [Middleware(Authentication), *([Middleware(OperatorsOnly)] if operation.for_operators else [])]
