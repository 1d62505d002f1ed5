"""``/health``: whether requests get answers."""

from starlette.requests import Request
from starlette.responses import Response

from ipc.gateway.daemons import Daemons


async def health(request: Request) -> Response:
    """200 while a daemon is there."""
    daemons: Daemons = request.app.state.daemons
    await daemons.reach()
    return Response()
