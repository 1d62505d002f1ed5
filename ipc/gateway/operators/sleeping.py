"""``/sleep``, ``/wake_up``, ``/is_sleeping`` and ``/reset_prefix_cache``, as vLLM has them.

Their answers are vLLM's, with what each daemon says besides.
"""

import asyncio
from functools import partial
from typing import Any, Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from ipc.control_client import ControlClient
from ipc.gateway.answers import json_answer
from ipc.gateway.bodies import read_nothing
from ipc.gateway.operators.operator_commands import MODEL, commanded, meant, ordered, parameters, switch
from ipc.gateway.upstream.daemons import daemons_of
from ipc.gateway.upstream.remote_daemon import RemoteDaemon
from ipc.openai.question import BodyError

LEVELS: dict[str, Literal[1, 2]] = {"1": 1, "2": 2}
TAGS: dict[str, Literal["weights", "kv_cache"]] = {"weights": "weights", "kv_cache": "kv_cache"}


class Sleeping(Struct, frozen=True):
    """Whether all daemons sleep."""

    is_sleeping: bool


class Slept(Struct, frozen=True):
    """What ``/sleep`` has done."""

    level: int
    message: str
    status: Literal["sleeping"] = "sleeping"


class Woken(Struct, frozen=True):
    """What ``/wake_up`` has done; ``tags`` are those that were asked for, and ``status`` says whether all serve again."""

    status: Literal["awake", "sleeping"]
    tags: list[str] | None
    message: str


class Emptied(Struct, frozen=True):
    """What ``/reset_prefix_cache`` has done."""

    message: str
    success: bool = True


async def sleep(request: Request) -> Response:
    """Finish what is open and free the pages' memory."""
    await read_nothing(request)
    given = parameters(request, "level", "mode")
    level, mode = given.get("level", "1"), given.get("mode", "wait")
    if level not in LEVELS:
        raise BodyError(f"level must be 1, for the memory of pages, or 2, for weights too, not {level}", "level")
    if mode != "wait":
        raise BodyError(f"mode must be wait, not {mode}: what is open ends first", "mode")
    message = await commanded(request, partial(ControlClient.sleep, level=LEVELS[level]))
    return json_answer(Slept(LEVELS[level], message))


async def wake_up(request: Request) -> Response:
    """Take that memory again, and serve; with ``tags`` so much of it alone."""
    await read_nothing(request)
    given = parameters(request, "tags")
    tags = request.query_params.getlist("tags")
    for tag in tags:
        if tag not in TAGS:
            raise BodyError(f"tags are {' and '.join(TAGS)}, not {tag}", "tags")
    daemons = await meant(request, given.get(MODEL))
    message = await ordered(request, daemons, partial(ControlClient.wake, tags=[TAGS[tag] for tag in tags]))
    is_awake = not any(map(_sleeps, await asyncio.gather(*(daemon.status() for daemon in daemons))))
    return json_answer(Woken("awake" if is_awake else "sleeping", tags or None, message))


async def is_sleeping(request: Request) -> Response:
    """Whether all daemons sleep, or fall asleep."""
    statuses = await daemons_of(request).ask_each(RemoteDaemon.status)
    return json_answer(Sleeping(all(map(_sleeps, statuses.values()))))


async def reset_prefix_cache(request: Request) -> Response:
    """Forget the pages of prompts, those in the host's memory too. Running requests keep theirs, which nobody finds then."""
    await read_nothing(request)
    given = parameters(request, "reset_running_requests", "reset_external")
    switch("reset_external", given)
    if switch("reset_running_requests", given):
        raise BodyError(
            "reset_running_requests must be false: /pause?mode=keep&clear_cache=true has them computed again",
            "reset_running_requests",
        )
    return json_answer(Emptied(await commanded(request, ControlClient.reset_prefix_cache)))


def _sleeps(status: dict[str, Any]) -> bool:
    return status["state"] in ("asleep", "falling asleep")
