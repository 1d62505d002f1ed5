"""``/sleep``, ``/wake_up``, ``/is_sleeping`` and ``/reset_prefix_cache``, as vLLM has them."""

from functools import partial
from typing import Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from ipc.control_client import ControlClient
from ipc.gateway.answers import json_answer
from ipc.gateway.bodies import read_nothing
from ipc.gateway.operators.operator_commands import commanded, parameters
from ipc.gateway.upstream.daemons import Daemons
from ipc.gateway.upstream.remote_daemon import RemoteDaemon
from ipc.openai.question import BodyError

LEVELS: dict[str, Literal[1, 2]] = {"1": 1, "2": 2}
TAGS: dict[str, Literal["weights", "kv_cache"]] = {"weights": "weights", "kv_cache": "kv_cache"}


class Sleeping(Struct, frozen=True):
    """Whether all daemons sleep."""

    is_sleeping: bool


async def sleep(request: Request) -> Response:
    """Finish what is open and free the pages' memory."""
    await read_nothing(request)
    level = parameters(request, "level").get("level", "1")
    if level not in LEVELS:
        raise BodyError(f"level must be 1, for the memory of pages, or 2, for weights too, not {level}", "level")
    return await commanded(request, partial(ControlClient.sleep, level=LEVELS[level]))


async def wake_up(request: Request) -> Response:
    """Take that memory again, and serve; with ``tags`` so much of it alone."""
    await read_nothing(request)
    parameters(request, "tags")
    tags = request.query_params.getlist("tags")
    for tag in tags:
        if tag not in TAGS:
            raise BodyError(f"tags are {' and '.join(TAGS)}, not {tag}", "tags")
    return await commanded(request, partial(ControlClient.wake, tags=[TAGS[tag] for tag in tags]))


async def is_sleeping(request: Request) -> Response:
    """Whether all daemons sleep, or fall asleep."""
    daemons: Daemons = request.app.state.daemons
    statuses = await daemons.ask_each(RemoteDaemon.status)
    return json_answer(Sleeping(all(status["state"] in ("asleep", "falling asleep") for status in statuses.values())))


async def reset_prefix_cache(request: Request) -> Response:
    """Forget the pages of prompts."""
    await read_nothing(request)
    parameters(request)
    return await commanded(request, ControlClient.reset_prefix_cache)
