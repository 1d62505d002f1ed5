"""``/health`` and ``/ready``: whether daemons make progress, and whether they accept requests;
``/load`` and ``/version``, as vLLM has them."""

import asyncio
from collections.abc import Callable
from importlib.metadata import version
from typing import Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from ipc.errors import DaemonStarting, OdriverError, RequestFailed
from ipc.gateway.answers import RETRY_AFTER, json_answer
from ipc.gateway.upstream.daemons import daemons_of
from ipc.gateway.upstream.remote_daemon import RemoteDaemon
from ipc.wire.messages import PROGRESS_LIMIT

UNKNOWN = "connected"
"""The state of a daemon that does not admit the gateway's key to its status."""


class DaemonHealth(Struct, frozen=True):
    """A daemon's state: "starting", "serving", "draining", "asleep", "stalled", "unreachable" or
    others."""

    model: str | None
    state: str
    detail: str | None = None


class Health(Struct, frozen=True):
    """How all are."""

    status: Literal["ok", "unavailable"]
    daemons: list[DaemonHealth]


class Load(Struct, frozen=True):
    """Requests that are open at the daemons."""

    server_load: int


class Version(Struct, frozen=True):
    """That of oDriver."""

    version: str


async def load(request: Request) -> Response:
    """How many requests are open; raises ConnectFailed where no daemon can be asked."""
    statuses = await daemons_of(request).ask_each(RemoteDaemon.status)
    return json_answer(Load(sum(status["open_requests"] for status in statuses.values())))


async def show_version(request: Request) -> Response:
    """The version that is installed."""
    del request
    return json_answer(Version(version("odriver")))


async def health(request: Request) -> Response:
    """200 while a daemon makes progress, or is idle; one that drains or sleeps is in health."""
    return await _answer(request, lambda state: state not in ("starting", "stalled", "unreachable"))


async def ping(request: Request) -> Response:
    """The same, by SageMaker's name."""
    return await health(request)


async def ready(request: Request) -> Response:
    """200 while a daemon takes requests."""
    return await _answer(request, lambda state: state in ("serving", UNKNOWN))


async def _answer(request: Request, suffices: Callable[[str], bool]) -> Response:
    daemons = daemons_of(request)
    daemons.seek()
    found = {daemon: _absent(daemon, daemon.trouble) for daemon in daemons if daemon.trouble is not None}
    away = list(found)
    for asked in ([daemon for daemon in daemons if daemon not in found], away):
        if not any(suffices(one.state) for one in found.values()):  # those that are away are asked last
            found |= dict(zip(asked, await asyncio.gather(*map(_health, asked)), strict=True))
    told = [found[daemon] for daemon in daemons]
    if any(suffices(one.state) for one in told):
        return json_answer(Health("ok", told))
    return json_answer(Health("unavailable", told), 503, {"Retry-After": f"{RETRY_AFTER:.0f}"})


async def _health(daemon: RemoteDaemon) -> DaemonHealth:
    try:
        status = await daemon.status()
    except RequestFailed as error:
        return DaemonHealth(daemon.model, UNKNOWN, str(error))
    except OdriverError as error:
        return _absent(daemon, error)
    stage, seconds = max(status["stages"].items(), key=lambda stage: stage[1])
    if seconds > PROGRESS_LIMIT:
        detail = f"nothing has got done in the {stage} stage for {seconds:.0f} s"
        return DaemonHealth(status["model"], "stalled", detail)
    return DaemonHealth(status["model"], status["state"])


def _absent(daemon: RemoteDaemon, why: OdriverError) -> DaemonHealth:
    return DaemonHealth(daemon.model, "starting" if isinstance(why, DaemonStarting) else "unreachable", str(why))
