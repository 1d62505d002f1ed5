"""Sending an operator's command to daemons, over a control connection with the caller's key."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from threading import Thread

from msgspec import Struct
from starlette.requests import Request

from ipc.control_client import ControlClient
from ipc.gateway.access.authentication import caller_of
from ipc.gateway.upstream.daemons import daemons_of
from ipc.gateway.upstream.remote_daemon import RemoteDaemon
from ipc.openai.question import BodyError
from ipc.openai.translation import check_model

MODEL = "model"
"""The parameter of every command that says which daemons are meant; without it all are."""
SWITCHES = {"true": True, "false": False, "1": True, "0": False}
Command = Callable[[ControlClient], str]
"""Does it at one daemon, and waits; says for people what has been done."""


class Done(Struct, frozen=True):
    """What has been done: ``ordered``'s lines."""

    message: str


async def commanded(request: Request, command: Command) -> str:
    """Have it done at each daemon that the address means; otherwise as ``ordered``."""
    return await ordered(request, await meant(request, request.query_params.get(MODEL)), command)


async def ordered(request: Request, daemons: list[RemoteDaemon], command: Command) -> str:
    """Have it done at each of these, which say what they have done, a line each.

    Raises OdriverError where one of them refuses or is away; the others have done it.
    """
    caller = caller_of(request)
    connections = [partial(ControlClient, daemon.address, daemon.timeout, key=caller.key) for daemon in daemons]
    done = await asyncio.gather(
        *(_in_thread(partial(_do, one, command)) for one in connections), return_exceptions=True
    )
    for outcome in done:
        if isinstance(outcome, BaseException):
            raise outcome
    return "\n".join(map(str, done))


def parameters(request: Request, *names: str) -> dict[str, str]:
    """The parameters of a command's address. Raises BodyError for one without a meaning."""
    given = dict(request.query_params)
    for name in given:
        if name not in (*names, MODEL):
            known = " and ".join((*names, MODEL))
            raise BodyError(f"unknown parameter {name!r}: this has {known}", name)
    return given


def switch(name: str, given: Mapping[str, str], default: str = "false") -> bool:
    """A parameter that is true or false. Raises BodyError for anything else."""
    value = given.get(name, default).lower()
    if value not in SWITCHES:
        raise BodyError(f"{name} must be true or false, not {value}", name)
    return SWITCHES[value]


async def meant(request: Request, model: str | None) -> list[RemoteDaemon]:
    """The daemons that serve this model, or all. Raises BodyError where none does, and ConnectFailed."""
    daemons = daemons_of(request)
    if model is None:
        return list(daemons)
    reached = await daemons.reach()
    known = [daemon for daemon in daemons if daemon in reached or daemon.trouble]
    check_model(model, [name for daemon in known for name in daemon.models])
    return [daemon for daemon in known if model in daemon.models]


def _do(connect: Callable[[], ControlClient], command: Command) -> str:
    with connect() as control:
        return command(control)


async def _in_thread(do: Callable[[], str]) -> str:
    """Its result, from a thread of its own: a command may wait for as long as requests are open,
    and neither status nor the end of this process waits for it."""
    done: Future[str] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(do())
        except Exception as error:  # noqa: BLE001 - it is raised where this is awaited
            done.set_exception(error)

    Thread(target=run, name="operator's command", daemon=True).start()
    return await asyncio.wrap_future(done)
