"""The check that all routes of operators are behind."""

from starlette.types import ASGIApp, Receive, Scope, Send

from ipc.gateway.access.callers import Caller
from ipc.openai.question import BodyError


class OperatorsOnly:
    """Middleware behind Authentication: admits callers that the file of API keys calls operators.

    Nobody else is one: not who has the key that all callers share, and where no key is asked for
    not who is on this machine. The daemon then checks the key that the caller has there.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI call; raises BodyError."""
        caller: Caller = scope["state"]["caller"]
        if caller.limits is None or not caller.limits.operator:
            raise BodyError(
                "this takes an operator's API key: one whose table in the file of --api-keys has `operator = true`",
                status=403,
                code="forbidden",
            )
        await self._app(scope, receive, send)
