"""Ending the work for a client that has disconnected."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

Result = TypeVar("Result")


class Disconnected(Exception):
    """The client has disconnected."""


async def unless_disconnected(receive: Receive, working: Coroutine[Any, Any, Result]) -> Result:
    """The result of the work, which is cancelled when the client goes; raises Disconnected then.

    The body of the request has been read before.
    """
    work = asyncio.ensure_future(working)
    leaving = asyncio.ensure_future(_disconnection(receive))
    try:
        await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise Disconnected
        return work.result()
    finally:
        work.cancel()
        leaving.cancel()
        await asyncio.wait((work, leaving))  # the work's last words


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
