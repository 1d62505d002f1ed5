"""``/pause``, ``/resume`` and the four phases of new weights, by vLLM's names.

Between ``/start_weight_update`` and ``/finish_weight_update`` the weights of all ``/update_weights``
are gathered, and then written at once: all of them or none. Without a start each is written by
itself.
"""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from driver.request import UpdateMode
from engine.live.weight_source import SharedArray
from ipc.control_client import ControlClient
from ipc.gateway.access.authentication import caller_of
from ipc.gateway.answers import json_answer
from ipc.gateway.bodies import read, read_if_any, read_nothing
from ipc.gateway.operators.operator_commands import MODEL, Done, commanded, meant, ordered, parameters, switch
from ipc.gateway.upstream.daemons import daemons_of
from ipc.gateway.upstream.remote_daemon import RemoteDaemon
from ipc.openai.question import BodyError

MODES: Mapping[str, UpdateMode] = {"abort": "abort", "wait": "wait", "keep": "keep"}
IDLE_LIMIT = 60.0
"""Seconds without a word of an update's operator, after which another one's may begin."""


class Paused(Struct, frozen=True):
    """Whether all daemons are paused."""

    is_paused: bool


class Changed(Struct, frozen=True):
    """What ``/pause`` or ``/resume`` has done."""

    status: Literal["paused", "resumed"]
    message: str


class InitWeightTransfer(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``/init_weight_transfer_engine``: there is nothing to set up."""

    init_info: dict[str, Any] = {}


class StartWeightUpdate(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``/start_weight_update``. Tensors always have their names in a checkpoint."""

    is_checkpoint_format: bool = True


class UpdateInfo(Struct, frozen=True, forbid_unknown_fields=True):
    """New weights: a directory, or tensors in shared memory, a list entry each."""

    path: str | UnsetType = UNSET
    names: list[str] = []
    dtype_names: list[str] = []
    shapes: list[list[int]] = []
    object_names: list[str] = []
    offsets: list[int] = []


class UpdateWeightsBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``/update_weights``."""

    update_info: UpdateInfo


class FinishWeightUpdate(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``/finish_weight_update``. Daemons number their weights themselves."""

    weight_version: None = None


class Gathered:
    """The tensors of an update that has been started, of this gateway, and the ``model`` that it is for: None for all."""

    def __init__(self) -> None:
        self.model: str | None = None
        self._tensors: dict[str, SharedArray] | None = None
        """None while none is started."""
        self._by = ""
        self._last = 0.0

    @property
    def is_started(self) -> bool:
        """Whether there is one."""
        return self._tensors is not None

    def start(self, by: str, model: str | None) -> bool:
        """Begin anew, by this operator; whether tensors are dropped. Raises BodyError while another
        one's goes on."""
        is_left = bool(self._tensors)
        self._take_turn(by)
        self._tensors, self.model, self._by, self._last = {}, model, by, time.monotonic()
        return is_left

    def go_on(self, by: str, model: str | None) -> None:
        """A phase after the start, by this operator; what another one has left is dropped. Raises BodyError while
        another one's goes on, and for another model than that of the start."""
        self._take_turn(by)
        if self.is_started and model not in (None, self.model):
            named = "none" if self.model is None else repr(self.model)
            raise BodyError(f"{MODEL} must be that of the start of the update, which is {named}, not {model!r}", MODEL)

    def add(self, tensors: dict[str, SharedArray]) -> None:
        """More of it."""
        assert self._tensors is not None
        self._tensors |= tensors
        self._last = time.monotonic()

    def take(self) -> dict[str, SharedArray]:
        """All of it, which ends it. Raises BodyError if there is none."""
        tensors, self._tensors = self._tensors, None
        if not tensors:
            raise BodyError("no update has been started, or it has no weights", status=409, code="conflict")
        return tensors

    def _take_turn(self, by: str) -> None:
        """Drop what another operator has left. Raises BodyError while that one's goes on: who adds to it or ends it
        would have weights served that belong to two."""
        if self._tensors is None or by == self._by:
            return
        if time.monotonic() - self._last < IDLE_LIMIT:
            raise BodyError("another operator has started an update: it is to finish it", status=409, code="conflict")
        self._tensors = None


async def pause(request: Request) -> Response:
    """Compute nothing until ``/resume``; ``mode`` says what becomes of open requests."""
    await read_nothing(request)
    given = parameters(request, "mode", "clear_cache")
    mode, clears = given.get("mode", "abort"), switch("clear_cache", given, "true")
    if mode not in MODES:
        raise BodyError(f"mode must be abort, wait or keep, not {mode}", "mode")
    message = await commanded(request, partial(ControlClient.pause, mode=MODES[mode], clear_cache=clears))
    return json_answer(Changed("paused", message))


async def resume(request: Request) -> Response:
    """Go on."""
    await read_nothing(request)
    parameters(request)
    return json_answer(Changed("resumed", await commanded(request, ControlClient.resume)))


async def is_paused(request: Request) -> Response:
    """Whether all daemons are paused."""
    statuses = await daemons_of(request).ask_each(RemoteDaemon.status)
    return json_answer(Paused(all(status["state"] == "paused" for status in statuses.values())))


async def init_weight_transfer_engine(request: Request) -> Response:
    """Nothing is to be set up; what would be for another transport is refused."""
    parameters(request)
    body = await read(request, InitWeightTransfer)
    if body.init_info:
        names = ", ".join(sorted(body.init_info))
        raise BodyError(
            f"init_info must be empty: weights come from a path or from shared memory, not by {names}", "init_info"
        )
    return json_answer(Done("Weight transfer initialized"))


async def start_weight_update(request: Request) -> Response:
    """Gather what comes until ``/finish_weight_update``, for the model that this names."""
    model = parameters(request).get(MODEL)
    body = await read(request, StartWeightUpdate)
    if not body.is_checkpoint_format:
        raise BodyError(
            "is_checkpoint_format must be true: tensors have their names in a checkpoint", "is_checkpoint_format"
        )
    await meant(request, model)
    is_left = _gathered(request).start(caller_of(request).name, model)
    return json_answer(
        Done(f"Weight update started{', and what an earlier one had sent is dropped' if is_left else ''}")
    )


async def update_weights(request: Request) -> Response:
    """Write these weights, or gather them."""
    model = parameters(request).get(MODEL)
    info = (await read(request, UpdateWeightsBody)).update_info
    gathered = _gathered(request)
    gathered.go_on(caller_of(request).name, model)
    if info.path is not UNSET:
        if gathered.is_started or info.names:
            raise BodyError("a path has all weights: name no tensors, and start no update", "update_info")
        path = info.path
        return json_answer(Done(await commanded(request, lambda control: _version(control.update_weights(path)))))
    tensors = _tensors(info)
    if not gathered.is_started:
        return json_answer(Done(await commanded(request, lambda control: _version(control.update_shared(tensors)))))
    gathered.add(tensors)
    return json_answer(Done("gathered"))


async def finish_weight_update(request: Request) -> Response:
    """Write what has been gathered, for the model that its start named."""
    await read_if_any(request, FinishWeightUpdate)
    model, gathered = parameters(request).get(MODEL), _gathered(request)
    gathered.go_on(caller_of(request).name, model)
    tensors = gathered.take()
    daemons = await meant(request, gathered.model)
    return json_answer(Done(await ordered(request, daemons, lambda control: _version(control.update_shared(tensors)))))


def _gathered(request: Request) -> Gathered:
    gathered: Gathered = request.app.state.gathered_weights
    return gathered


def _tensors(info: UpdateInfo) -> dict[str, SharedArray]:
    count = len(info.names)
    if not count or any(
        len(each) != count for each in (info.object_names, info.offsets, info.dtype_names, info.shapes)
    ):
        raise BodyError(
            "names, dtype_names, shapes, object_names and offsets must have an entry for each tensor", "update_info"
        )
    if len(set(info.names)) < count:
        raise BodyError("names must name each tensor once", "update_info")
    places = map(SharedArray, info.object_names, info.offsets, info.dtype_names, info.shapes)
    return dict(zip(info.names, places, strict=True))


def _version(version: int) -> str:
    return f"version {version} of the weights is served"
