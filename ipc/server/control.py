"""The control socket's rules. It has a thread of its own and never waits behind work.

There is no socket, thread or clock in this file. Commands that take time answer later, through the
outbox.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from driver.adapters import commands
from driver.errors import DriverError, InvalidRequest
from driver.request import ReturnChannel, ReturnSample
from engine.hub.roots import OutsideRoot, Root
from engine.live.weight_source import SharedWeights, WeightArrays, WeightFiles, WeightSource
from ipc.server.driver_protocol import Driver
from ipc.server.held_answers import HeldAnswers
from ipc.server.isolation import Work, isolating
from ipc.server.outbox import Outbox, Reply
from ipc.server.shared_answers import greeting, listed_adapters
from ipc.server.weight_uploads import WeightUploads
from ipc.sockets.tenants import EVERYBODY, Tenant
from ipc.wire.codec import decode_control_message, read
from ipc.wire.messages import (
    Error,
    Hello,
    ListAdapters,
    MetricsReply,
    Ok,
    Ping,
    Pong,
    RequestsReply,
    ServerMessage,
    StatusReply,
    Welcome,
)
from ipc.wire.operations import (
    AbortRequest,
    ControlMessage,
    Drain,
    ListRequests,
    LoadAdapter,
    LogLevel,
    Metrics,
    Pause,
    Profile,
    Reload,
    ResetPrefixCache,
    Resume,
    Sleep,
    Status,
    UnloadAdapter,
    UpdateWeights,
    Wake,
    WeightChunk,
)

LateCommand = (
    Sleep | Wake | Pause | Resume | UpdateWeights | Reload | ResetPrefixCache | LoadAdapter | UnloadAdapter | Profile
)
Command = ListRequests | AbortRequest | Drain | LogLevel | WeightChunk | LateCommand
Reloading = Callable[[str, ReturnChannel], None]
"""Has the daemon reload; the channel gets one sample, of this request id."""


class Control:
    """Answers control messages. It keeps no state but weights that a client is sending.

    ``description`` is what the status has in words, by name. ``drain``, given seconds or None, ends
    the daemon once its work is done. ``reload`` has it read its configuration again, and
    ``set_log_level`` log from a level on. ``profiles`` is the directory of traces, and
    ``weights_root`` that of weights, None if there is none.
    """

    def __init__(
        self,
        driver: Driver,
        welcome: Welcome,
        description: Mapping[str, str],
        num_clients: Callable[[], int],
        metrics: Callable[[], str],
        drain: Callable[[float | None], None],
        reload: Reloading,
        set_log_level: Callable[[str], None],
        socket_stages: Callable[[], dict[str, float]],
        outbox: Outbox,
        answers: HeldAnswers,
        profiles: Path | None,
        weights_root: Root | None,
    ) -> None:
        self._driver = driver
        self._welcome = welcome
        self._description = description
        self._num_clients = num_clients
        self._metrics = metrics
        self._drain = drain
        self._reload = reload
        self._set_log_level = set_log_level
        self._socket_stages = socket_stages
        self._outbox = outbox
        self._answers = answers
        self._send = answers.send
        self._profiles = profiles
        self._weights_root = weights_root
        self._uploads = WeightUploads()
        self._now = 0.0
        self._stage = isolating("control", self._break_off)

    @property
    def patience(self) -> float:
        """Nothing to check."""
        return math.inf

    def hear(self, identity: bytes, frames: list[bytes], now: float, tenant: Tenant = EVERYBODY) -> None:
        """Takes one message, whatever it may hold, and answers it, unless its client is cut off."""
        if self._answers.has_cut_off(identity):
            return
        self._now = now
        self._stage.work(Work(identity, tenant.name, partial(self._hear, identity, frames, tenant), frames=frames))

    def deliver(self, reply: Reply, sample: ReturnSample, now: float) -> None:
        """Send the result of a command."""
        del now
        self._stage.work(Work(reply.identity, "", partial(self._deliver, reply, sample), reply.request_id))

    def look(self, now: float) -> None:
        """Nothing to check."""

    def _hear(self, identity: bytes, frames: list[bytes], tenant: Tenant) -> None:
        message = read(frames, decode_control_message)
        answer = message if isinstance(message, Error) else self._answer(identity, message, tenant)
        if answer is not None:
            self._send(identity, answer)

    def has_room(self, identity: bytes) -> None:
        """Send what waits for it."""
        self._answers.has_room(identity)

    def lost(self, identity: bytes) -> None:
        """Forget weights that it was sending, and what waits for it."""
        self._uploads.lost(identity)
        self._answers.lost(identity)

    def _deliver(self, reply: Reply, sample: ReturnSample) -> None:
        error = sample.error
        if error is None:
            version = sample.weight_versions[0][0] if sample.weight_versions else None
            self._send(reply.identity, Ok(reply.request_id, sample.text, version))
        else:
            self._send(reply.identity, Error(reply.request_id, error.code, error.message))

    def _break_off(self, identity: bytes, request_id: str | None, error: DriverError) -> None:
        """Answer a command that raised."""
        self._send(identity, Error(request_id, error.code, str(error)))

    def _answer(self, identity: bytes, message: ControlMessage, tenant: Tenant) -> ServerMessage | None:
        """The answer, or None where it comes later, or there is none to give."""
        match message:
            case Hello():
                return greeting(self._welcome, identity, message)
            case Ping():
                return Pong()
            case Pong():
                return None
            case ListAdapters(request_id=request_id):
                return listed_adapters(self._driver, request_id, tenant)
        may = tenant.may_look if isinstance(message, Status | Metrics) else tenant.may_control
        if not may:
            return Error(message.request_id, "forbidden", _not_yours(tenant))
        match message:
            case Status(request_id=request_id):
                return StatusReply(request_id, self._status())
            case Metrics(request_id=request_id):
                return MetricsReply(request_id, self._metrics())
        try:
            return self._do(Reply(self._outbox, identity, message.request_id), message)
        except DriverError as error:
            return Error(message.request_id, error.code, str(error))

    def _do(self, reply: Reply, command: Command) -> ServerMessage | None:
        request_id = reply.request_id
        match command:
            case ListRequests(order=order, limit=limit, client=client):
                rows, total = self._driver.requests(order, limit, client)
                listed = [msgspec.structs.replace(row, model=row.model or self._welcome.model) for row in rows]
                return RequestsReply(request_id, [msgspec.structs.asdict(row) for row in listed], total)
            case AbortRequest(target=target):
                if not self._driver.abort(target):
                    open_ones = "`odriver requests` lists those that are"
                    return Error(request_id, "not_found", f"no request {target!r} is open; {open_ones}")
                return Ok(request_id, f"{target} is aborted")
            case Drain(timeout_s=timeout):
                self._drain(timeout)
                return Ok(request_id, "draining: nothing new is taken, and the daemon ends when what is open is done")
            case LogLevel(level=level):
                self._set_log_level(level)
                return Ok(request_id, f"logging {level} and above")
            case WeightChunk(name=name):
                self._uploads.add(reply.identity, command, self._now)
                return Ok(request_id, f"some of {name} is here")
            case UpdateWeights(more=True, path=None, arrays=dict(arrays)):
                self._uploads.add_shared(reply.identity, arrays)
                return Ok(request_id, "further tensors are to come")
            case UpdateWeights(more=True):
                raise InvalidRequest("more says that further tensors in shared memory come: it is for arrays alone")
        self._begin(reply, command)
        return None

    def _begin(self, reply: Reply, command: LateCommand) -> None:
        """Have a command done that answers later."""
        match command:
            case Sleep() | Wake() | Pause() | Resume() | UpdateWeights():
                self._change(reply, command)
            case Reload():
                self._reload(reply.driver_id, reply)
            case ResetPrefixCache():
                self._driver.operations.reset_prefix_cache(reply.driver_id, reply)
            case LoadAdapter(name=name, path=path, pin=pin, replace=replace):
                self._driver.operations.command_adapters(
                    commands.LoadAdapter(reply.driver_id, reply, name, path, pin, replace)
                )
            case UnloadAdapter(name=name):
                self._driver.operations.command_adapters(commands.UnloadAdapter(reply.driver_id, reply, name))
            case Profile(name=name):
                directory = None if name is None else self._profile(name)
                self._driver.operations.profile(reply.driver_id, directory, reply)

    def _change(self, reply: Reply, command: Sleep | Wake | Pause | Resume | UpdateWeights) -> None:
        """Have the whole engine changed."""
        request_id = reply.driver_id
        match command:
            case Sleep(level=level):
                self._driver.operations.sleep(request_id, reply, level)
            case Wake(tags=tags):
                weights, pages = (not tags or tag in tags for tag in ("weights", "kv_cache"))
                self._driver.operations.wake(request_id, reply, weights=weights, pages=pages)
            case Pause(mode=mode, clear_cache=clear_cache):
                self._driver.operations.pause(request_id, reply, mode, clear_cache=clear_cache)
            case Resume():
                self._driver.operations.resume(request_id, reply)
            case UpdateWeights(mode=mode, keep_cache=keep_cache, name=name):
                source = self._source(reply.identity, command)
                self._driver.operations.update_weights(
                    request_id, reply, source, mode, keep_cache=keep_cache, name=name
                )

    def _source(self, identity: bytes, command: UpdateWeights) -> WeightSource:
        """The new weights that are meant; raises InvalidRequest."""
        match command.path, self._uploads.take_shared(identity, command.arrays):
            case str(), dict():
                raise InvalidRequest("weights come from a path or from shared memory, not from both")
            case str(path), _:
                if self._weights_root is None:
                    raise InvalidRequest(
                        "this daemon reads weights from no path: start it with --weights-root DIR, or send arrays"
                    )
                try:
                    return WeightFiles(self._weights_root.find(path))
                except OutsideRoot as refusal:
                    raise InvalidRequest(str(refusal)) from refusal
            case _, dict(arrays):
                return SharedWeights(arrays)
        return WeightArrays(self._uploads.take(identity))

    def _profile(self, name: str) -> str:
        """The directory for a trace of that name; raises InvalidRequest if there is none."""
        if self._profiles is None:
            raise InvalidRequest("this daemon has no directory for profiles: start it with --profile-directory DIR")
        return str(self._profiles / name)

    def _status(self) -> dict[str, object]:
        snapshot: dict[str, Any] = msgspec.to_builtins(self._driver.status())
        snapshot["stages"] |= self._socket_stages()
        aliases = {"aliases": self._welcome.aliases} if self._welcome.aliases else {}
        fingerprint = {"fingerprint": self._welcome.fingerprint} if self._welcome.fingerprint else {}
        names = {"model": self._welcome.model, **aliases, **fingerprint}
        return {**names, **self._description, "clients": self._num_clients(), **snapshot}


def _not_yours(tenant: Tenant) -> str:
    """Why a tenant may not control the daemon, and what to do."""
    if tenant.limits is not None:
        return f"key {tenant.name} may not control the daemon; `odriver keys new NAME --control` makes one that may"
    if tenant.user is not None:
        return f"user {tenant.user} may not control the daemon: its own user may, root (sudo), and the holder of a key for it"
    return (
        "over TCP this takes a key, as any user of this machine could ask for it: start the daemon with --keys DIR, "
        "or at ipc:///path/to.sock, where its own user and root may"
    )
