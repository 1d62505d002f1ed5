"""The daemons that a gateway serves, by the models that they have."""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from starlette.requests import Request

from engine.request_limits import MAX_MODEL_LENGTH
from ipc.errors import ConnectFailed, ConnectionLost
from ipc.gateway.access.callers import Caller
from ipc.gateway.upstream.remote_daemon import RemoteDaemon
from ipc.openai.question import BodyError
from ipc.openai.translation import check_model

Answer = TypeVar("Answer")


class Daemons:
    """One or more daemons; ``async with`` begins to connect, and ends the connections."""

    def __init__(self, daemons: list[RemoteDaemon]) -> None:
        self._daemons = daemons
        self._turns = defaultdict[tuple[RemoteDaemon, ...], Iterator[int]](itertools.count)
        """By those who take them."""

    async def __aenter__(self) -> Self:
        self.seek()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for daemon in self._daemons:
            await daemon.close()

    def __iter__(self) -> Iterator[RemoteDaemon]:
        return iter(self._daemons)

    def seek(self) -> None:
        """Look for those that are not connected."""
        for daemon in self._daemons:
            daemon.seek()

    async def reach(self) -> list[RemoteDaemon]:
        """The reachable daemons; raises ConnectFailed if there are none. One that is away is not waited for where
        another is connected."""
        self.seek()
        return await self._connected([], lambda _: False)

    async def _connected(
        self, awaited: list[RemoteDaemon], suffices: Callable[[RemoteDaemon], bool]
    ) -> list[RemoteDaemon]:
        """Connect to all at once, until one suffices or all have been tried; those that are connected, ``awaited`` first.
        Once one is, of those that are away these alone are waited for. Raises ConnectFailed where none is."""
        others = [daemon for daemon in self._daemons if daemon not in awaited]
        connecting = {asyncio.create_task(daemon.reach()): daemon for daemon in [*awaited, *others]}
        pending, found = set(connecting), list[RemoteDaemon]()
        try:
            while pending and not any(suffices(daemon) for daemon in found):
                pending = (await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED))[1]
                found = [daemon for task, daemon in connecting.items() if task.done() and task.exception() is None]
                if found and all(connecting[task].trouble and connecting[task] not in awaited for task in pending):
                    break
        finally:
            for task in pending:
                task.cancel()
        if not found:
            next(iter(connecting)).result()
        return found

    async def ask_each(self, ask: Callable[[RemoteDaemon], Coroutine[Any, Any, Answer]]) -> dict[RemoteDaemon, Answer]:
        """The answers of those that are reachable until they have answered; raises ConnectFailed or ConnectionLost if
        there are none."""
        return await _answers(await self.reach(), ask)

    async def serving(self, model: str | None, caller: Caller) -> RemoteDaemon:
        """A daemon that serves this model or adapter, in turn, of those that are connected if one is. Raises BodyError
        if none, and ConnectFailed.

        If it can only be an adapter of one daemon, that daemon says whether it is.
        """
        self.seek()
        known = _serving(self._daemons, model)
        if there := [daemon for daemon in known if daemon.client.is_connected]:
            return self.next_of(there)
        can_tell = bool(known or model)
        found = await self._connected(known, lambda daemon: can_tell and bool(_serving([daemon], model)))
        for daemon in _serving(found, model):
            return daemon
        for daemon in known:
            if daemon not in found:
                raise ConnectFailed(str(daemon.trouble or ConnectFailed.nobody(daemon.address)))
        having = [] if not model or len(model) > MAX_MODEL_LENGTH else await _with_adapter(found, model, caller)
        if having:
            return self.next_of(having)
        served = [name for daemon in found for name in daemon.models]
        check_model(model, served)
        raise BodyError(f"say which model: {' and '.join(dict.fromkeys(served))} are served here", "model")

    def next_of(self, able: list[RemoteDaemon]) -> RemoteDaemon:
        """The one whose turn it is, of those that do not rest if there are any."""
        having = tuple(daemon for daemon in able if not daemon.rests) or tuple(able)
        return having[next(self._turns[having]) % len(having)]


def daemons_of(request: Request) -> Daemons:
    """Those of the gateway that a request has come to."""
    daemons: Daemons = request.app.state.daemons
    return daemons


def _serving(daemons: list[RemoteDaemon], model: str | None) -> list[RemoteDaemon]:
    """Those known to serve the model; without a model all must serve the same."""
    if model is None and len({daemon.model for daemon in daemons if daemon.models or daemon.trouble is None}) > 1:
        return []
    return [daemon for daemon in daemons if daemon.models and (model is None or model in daemon.models)]


async def _with_adapter(daemons: list[RemoteDaemon], name: str, caller: Caller) -> list[RemoteDaemon]:
    """Those that have the adapter for this caller, or the one that may have it."""
    able = [daemon for daemon in daemons if daemon.client.welcome.enable_lora]
    if len(able) < 2:
        return able
    found = await _answers(able, lambda daemon: daemon.adapters(caller))
    return [daemon for daemon, rows in found.items() if any(row["name"] == name for row in rows)]


async def _answers(
    daemons: list[RemoteDaemon], ask: Callable[[RemoteDaemon], Coroutine[Any, Any, Answer]]
) -> dict[RemoteDaemon, Answer]:
    """Those that are there; raises the error of the first where none is."""
    outcomes = await asyncio.gather(*(ask(daemon) for daemon in daemons), return_exceptions=True)
    answers: dict[RemoteDaemon, Answer] = {}
    for daemon, outcome in zip(daemons, outcomes, strict=True):
        if not isinstance(outcome, BaseException):
            answers[daemon] = outcome
        elif not isinstance(outcome, ConnectFailed | ConnectionLost):
            raise outcome
    if not answers and isinstance(outcomes[0], BaseException):
        raise outcomes[0]
    return answers
