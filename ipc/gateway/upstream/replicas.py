"""The daemon that a request is asked of, and the replicas that go on with it where that one goes away."""

import asyncio
import logging
import time
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request

from ipc.async_client import AsyncClient, succeeded
from ipc.connection.call import Interrupted
from ipc.connection.retry import GOING, RESTING, Resumption
from ipc.errors import ConnectFailed, ConnectionLost, OdriverError, RequestFailed
from ipc.gateway.access.authentication import caller_of
from ipc.gateway.access.callers import Caller
from ipc.gateway.access.peer_addresses import peer_of_request
from ipc.gateway.upstream.daemons import Daemons, daemons_of
from ipc.gateway.upstream.remote_daemon import RETRY_INTERVAL, RemoteDaemon
from ipc.wire.messages import Welcome

logger = logging.getLogger(__name__)


class Reached(NamedTuple):
    """A daemon and the connection for one caller, or for one peer where callers share it, whose
    requests name the adapter that is asked for, and go on at another replica where that daemon goes away."""

    daemon: RemoteDaemon
    client: AsyncClient


async def daemon_for(request: Request, model: str | None) -> Reached:
    """The daemon for a request; an empty name is none, as in vLLM. Raises as ``Daemons.serving``, and for a refused
    key."""
    daemons, caller, model = daemons_of(request), caller_of(request), model or None
    daemon = await daemons.serving(model, caller)
    welcome = daemon.client.welcome
    adapter = welcome.adapter_of(model)
    going_on = _GoingOn(daemons, welcome, caller, adapter)
    try:
        await daemon.client_of(caller).connect()
    except ConnectFailed:
        others = await going_on.others(daemon)
        if not others:
            raise
        daemon = daemons.next_of(others)
    request.state.daemon = daemon
    client = daemon.client_of(caller).on_behalf_of(caller.name or peer_of_request(request)).of_model(adapter)
    return Reached(daemon, succeeded(client, partial(going_on.successor, (daemon,))))


class _GoingOn(NamedTuple):
    """How the completions of a request go on that began at a daemon of this welcome."""

    daemons: Daemons
    welcome: Welcome
    caller: Caller
    adapter: str

    async def successor(self, had: tuple[RemoteDaemon, ...], interrupted: Interrupted) -> AsyncClient:
        """The connection for what the last of those that had it interrupted; raises the error where there is none in
        time."""
        last = had[-1]
        code = interrupted.why.code if isinstance(interrupted.why, RequestFailed) else None
        if code in RESTING:
            last.spare()
        elif code not in (None, *GOING) and interrupted.failure is not None and interrupted.deadline < time.monotonic():
            raise interrupted.failure  # of a daemon that goes away a reader may hear late
        daemon = await self._next(had, interrupted)
        if daemon is not last:
            logger.info("%s: a request goes on at %s", interrupted.why, daemon.address)
        return succeeded(daemon.client_of(self.caller), partial(self.successor, (*had, daemon)))

    async def _next(self, had: tuple[RemoteDaemon, ...], interrupted: Interrupted) -> RemoteDaemon:
        """Another replica that takes requests, the last daemon where it does, or whichever does so first. What may be
        the cause of two daemons' ends goes to no third: to one of them, when it is back."""
        last, resumption = had[-1], interrupted.resumption
        while True:
            obstacles = [obstacle for daemon in self.daemons if (obstacle := daemon.obstacle()) is not None]
            others = await self.others(last, resumption)
            if able := [daemon for daemon in others if daemon in had or not resumption.is_suspect]:
                return self.daemons.next_of(able)
            if interrupted.failure is None:
                raise interrupted.why
            if self._may_return_to(last, resumption.fingerprint) and await self._connects(last):
                return last
            seconds = min(RETRY_INTERVAL, interrupted.deadline - time.monotonic())
            if seconds <= 0:
                raise interrupted.failure
            await _until_one_ends(obstacles, seconds)

    async def others(self, last: RemoteDaemon, begun: Resumption | None = None) -> list[RemoteDaemon]:
        """Those but the last that can have the request now, and go on with what has come of it."""
        fingerprint, weight_version = (None, None) if begun is None else (begun.fingerprint, begun.weight_version)
        replicas = [
            daemon
            for daemon in self.daemons
            if daemon is not last and self._is_replica(daemon, fingerprint) and daemon.obstacle() is None
        ]
        able = await asyncio.gather(*(self._is_able(daemon, weight_version) for daemon in replicas))
        return [daemon for daemon, is_able in zip(replicas, able, strict=True) if is_able]

    def _may_return_to(self, last: RemoteDaemon, fingerprint: str | None) -> bool:
        """Whether it is there, and is a replica still or the only one there was."""
        replicas = [daemon for daemon in self.daemons if self._is_replica(daemon, fingerprint)]
        return last.obstacle() is None and (last in replicas or not replicas)

    def _is_replica(self, daemon: RemoteDaemon, fingerprint: str | None) -> bool:
        """Whether it answers as the first does, by what it last said in its welcome: of this fingerprint, None for
        any."""
        if not daemon.models or _served(daemon.client.welcome) != _served(self.welcome):
            return False
        return fingerprint in (None, daemon.client.welcome.fingerprint)

    async def _is_able(self, daemon: RemoteDaemon, weight_version: int | None) -> bool:
        return await self._can_have_it(daemon) and await _has_weights(daemon, weight_version)

    async def _can_have_it(self, daemon: RemoteDaemon) -> bool:
        """Whether the caller can be connected to it, and it has the adapter for it."""
        if not self.adapter:
            return await self._connects(daemon)
        try:
            return any(row["name"] == self.adapter for row in await daemon.adapters(self.caller))
        except OdriverError:  # it is away, or ends
            return False

    async def _connects(self, daemon: RemoteDaemon) -> bool:
        try:
            await daemon.client_of(self.caller).connect()
        except ConnectFailed:
            return False
        return True


async def _until_one_ends(obstacles: list[asyncio.Task[None]], seconds: float) -> None:
    """Or for so many seconds. Raises what one ends with."""
    if not obstacles:
        await asyncio.sleep(seconds)
        return
    for ended in (await asyncio.wait(obstacles, timeout=seconds, return_when=asyncio.FIRST_COMPLETED))[0]:
        ended.result()


async def _has_weights(daemon: RemoteDaemon, version: int | None) -> bool:
    """Whether it serves those of this version, None for any; so it is taken to where its status is not for this
    gateway, which then does not update it either."""
    try:
        return version is None or (await daemon.status())["weight_version"] == version
    except RequestFailed:
        return True
    except (ConnectFailed, ConnectionLost):
        return False


def _served(welcome: Welcome) -> tuple[str, int, int, dict[str, Any]]:
    """What decides an answer, of what a daemon says of itself."""
    return welcome.model, welcome.vocab_size, welcome.max_model_len, welcome.default_sampling_params
