"""Controls the daemon: commands that never wait behind requests. It loads no jax.

with ControlClient() as control:
    print(control.status()["running"])
"""

import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import zmq

from driver.request import RequestOrder, UpdateMode
from engine.live.weight_source import SharedArray
from ipc.connection.call import request_frame
from ipc.connection.session import Session, check_process, started_context
from ipc.errors import ConnectFailed, ConnectionLost, RequestFailed
from ipc.wire.addresses import client_address, control_address
from ipc.wire.keys import client_key
from ipc.wire.messages import AdaptersReply, Error, ListAdapters, MetricsReply, Ok, RequestsReply, StatusReply
from ipc.wire.operations import (
    AbortRequest,
    AskedMessage,
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
)

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

Reply = TypeVar("Reply", Ok, StatusReply, MetricsReply, RequestsReply, AdaptersReply)

CHUNKS_UNDER_WAY = 4
"""Messages with parts of weights that the daemon has not answered."""


class ControlClient:
    """A connection to a daemon's control socket, for one thread; each method waits for the
    daemon's answer.

    ``address`` is the daemon's, and None as for ``Client``. ``timeout`` is how many seconds the daemon
    has to answer when it is connected to, and to be ready, as for ``Client``; without ``wait`` one
    that starts is not waited for. ``key`` is as in ``Client``. Raises AddressError, ConnectFailed if
    none answers, and DaemonStarting if it is not ready; the methods raise RequestFailed where the
    daemon refuses, and ConnectionLost where it goes away.
    """

    def __init__(
        self, address: str | None = None, timeout: float = 10.0, *, key: Path | str | None = None, wait: bool = True
    ) -> None:
        checked = control_address(client_address(address, has_key=key is not None))
        self._address = checked
        own = None if key is None else client_key(Path(key))
        self._process = os.getpid()
        self._serials = itertools.count(1)
        self._context = started_context(checked)
        self._poller = zmq.Poller()
        try:
            self._session = Session(self._context, checked, self._poller, own)
            self._connect(time.monotonic() + timeout, wait)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def status(self) -> dict[str, Any]:
        """The daemon's numbers: what runs and waits, pages, steps, tokens and more."""
        return self._ask(Status(self._new_request_id()), StatusReply).status

    def metrics(self) -> str:
        """The daemon's metrics in Prometheus's text format."""
        return self._ask(Metrics(self._new_request_id()), MetricsReply).text

    def requests(
        self, order: RequestOrder = "age", limit: int | None = None, client: str | None = None
    ) -> tuple[list[dict[str, Any]], int]:
        """The first ``limit`` open requests, of one client perhaps, and how many there are.

        The order is "age" (oldest first), "tokens", "rate" (most first) or "client". Each has
        ``id``, ``client``, ``user``, ``model``, ``state``, ``age_s``, ``prompt_tokens``,
        ``completion_tokens`` and ``tokens_per_second``, and none of its content.
        """
        reply = self._ask(ListRequests(self._new_request_id(), order, limit, client), RequestsReply)
        return reply.requests, reply.total

    def abort(self, request_id: str) -> str:
        """End any client's request, by the id that ``requests`` and the log have for it."""
        return self._command(AbortRequest(self._new_request_id(), request_id))

    def drain(self, timeout_s: float | None = None) -> str:
        """Drain the daemon: it finishes open requests within so many seconds, and ends."""
        return self._command(Drain(self._new_request_id(), timeout_s))

    def sleep(self, level: Literal[1, 2] = 1) -> str:
        """Put the daemon to sleep, without its pages' memory, and at level 2 without that of its
        weights; returns once open requests are done."""
        return self._command(Sleep(self._new_request_id(), level))

    def wake(self, tags: Sequence[Literal["weights", "kv_cache"]] = ()) -> str:
        """Have a sleeping daemon serve again; returns when it does. With ``tags`` it takes back so
        much alone."""
        return self._command(Wake(self._new_request_id(), list(tags)))

    def pause(self, mode: UpdateMode = "abort", *, clear_cache: bool = True) -> str:
        """Have the daemon run no step until ``resume``; returns when that is so.

        Open requests are kept as they are ("keep"), end first ("wait"), or are ended ("abort");
        those that come meanwhile wait. ``clear_cache`` forgets all that is computed.
        """
        return self._command(Pause(self._new_request_id(), mode, clear_cache))

    def resume(self) -> str:
        """Have a paused daemon go on."""
        return self._command(Resume(self._new_request_id()))

    def update_weights(
        self,
        weights: "Mapping[str, ArrayLike] | Path | str",
        *,
        mode: UpdateMode = "keep",
        keep_cache: bool = False,
        name: str = "",
    ) -> int:
        """Have other weights served from one step to the next; returns their version.

        ``weights`` are arrays by their names in a checkpoint, all or some, or a directory below
        the daemon's ``--weights-root`` that has all. Arrays go through shared memory to a daemon of
        this machine and user, and in messages to others. Open requests go on with the new weights
        ("keep"), end first ("wait"), or are ended ("abort"). With ``keep_cache`` nothing that the
        former weights have computed is computed again. ``name`` is for status and log.

        Raises RequestFailed where the weights do not fit or hold NaN: the former ones are served
        on.
        """
        update = partial(UpdateWeights, mode=mode, keep_cache=keep_cache, name=name)
        if isinstance(weights, Path | str):
            return self._update(update(self._new_request_id(), path=str(weights)))
        from ipc.connection.weight_transfer import contiguous, in_messages, in_shared_memory, shares_memory

        arrays = contiguous(weights)
        if shares_memory(self._address):
            with in_shared_memory(arrays) as shared:
                return self._update_shared(shared, update)
        waiting: deque[str] = deque()
        for chunk in in_messages(arrays, iter(self._new_request_id, "")):
            self._send(chunk)
            waiting.append(chunk.request_id)
            if len(waiting) == CHUNKS_UNDER_WAY:
                self._reply(waiting.popleft(), Ok)
        for request_id in waiting:
            self._reply(request_id, Ok)
        return self._update(update(self._new_request_id()))

    def update_shared(self, arrays: Mapping[str, SharedArray]) -> int:
        """As ``update_weights`` with arrays that are in the shared memory of the daemon's machine,
        and belong to its user."""
        return self._update_shared(arrays, UpdateWeights)

    def reload(self) -> str:
        """Have the daemon read its configuration and its keys again; what it has taken over."""
        return self._command(Reload(self._new_request_id()))

    def load_adapter(self, name: str, path: str | None = None, *, pin: bool = False, replace: bool = True) -> str:
        """Have the daemon load an adapter from a path below its ``--adapter-root``, by default its
        name; returns when requests can name it.

        One that is loaded already gets a new version in its place, unless it is not to be
        ``replace``d. One that is pinned is not evicted for others.
        """
        return self._command(LoadAdapter(self._new_request_id(), name, path, pin, replace))

    def unload_adapter(self, name: str) -> str:
        """Have the daemon refuse further requests with this adapter; open ones go on with it."""
        return self._command(UnloadAdapter(self._new_request_id(), name))

    def adapters(self) -> list[dict[str, Any]]:
        """The loaded adapters: ``name``, ``path``, ``version``, ``rank``, ``num_bytes``, ``pinned``,
        ``loaded_at`` (seconds since 1970) and ``open_requests``."""
        return self._ask(ListAdapters(self._new_request_id()), AdaptersReply).adapters

    def reset_prefix_cache(self) -> str:
        """Empty the prefix cache; requests that are open keep their pages."""
        return self._command(ResetPrefixCache(self._new_request_id()))

    def set_log_level(self, level: str) -> str:
        """Set the level of the daemon's log: "debug", "info", "warning" or "error"."""
        # The daemon checks the level.
        return self._command(LogLevel(self._new_request_id(), level))  # type: ignore[arg-type]

    def start_profile(self, name: str) -> str:
        """Have the daemon trace what its device and host do; where it will write that, in a new
        directory of this name.

        Of up to 64 letters, digits, '.', '_' and '-'.
        """
        return self._command(Profile(self._new_request_id(), name))

    def stop_profile(self) -> str:
        """End the trace; returns its directory. The daemon computes nothing meanwhile."""
        return self._command(Profile(self._new_request_id()))

    def close(self) -> None:
        """End the connection; a command that is under way goes on."""
        if not self._context.closed:
            self._session.close()
            self._context.term()

    def _new_request_id(self) -> str:
        return str(next(self._serials))

    def _command(self, command: AskedMessage) -> str:
        return self._ask(command, Ok).text

    def _update(self, command: UpdateWeights) -> int:
        version = self._ask(command, Ok).weight_version
        assert version is not None
        return version

    def _update_shared(self, arrays: Mapping[str, SharedArray], update: Callable[..., UpdateWeights]) -> int:
        from ipc.connection.weight_transfer import in_parts

        *parts, last = in_parts(arrays)
        for part in parts:
            self._command(UpdateWeights(self._new_request_id(), arrays=part, more=True))
        return self._update(update(self._new_request_id(), arrays=last))

    def _ask(self, command: AskedMessage, kind: type[Reply]) -> Reply:
        """The daemon's answer, which is of this kind and may take its time."""
        self._send(command)
        return self._reply(command.request_id, kind)

    def _send(self, command: AskedMessage) -> None:
        check_process(self._process)
        if self._context.closed:
            raise ConnectionLost("this client is closed")
        self._session.send(request_frame(command))

    def _reply(self, request_id: str, kind: type[Reply]) -> Reply:
        """The answer to a command that is sent; those to earlier ones that failed are passed."""
        while self._session.lost is None:
            now = time.monotonic()
            for answer, _ in self._session.receive(now):
                if isinstance(answer, Error) and answer.request_id in (None, request_id):
                    raise RequestFailed(answer.code, answer.message)
                if answer.request_id == request_id:
                    assert isinstance(answer, kind)
                    return answer
            self._session.keep_alive(now)
            self._wait(self._session.next_ping)
        raise ConnectionLost(self._session.lost)

    def _connect(self, deadline: float, wait: bool) -> None:
        while self._session.welcome is None:
            now = time.monotonic()
            list(self._session.receive(now))
            if self._session.lost is not None:
                raise ConnectFailed(self._session.lost)
            if self._session.welcome is None:
                if now >= deadline or (self._session.starting is not None and not wait):
                    raise self._session.failure()
                self._wait(deadline)

    def _wait(self, until: float) -> None:
        """Wait for whatever comes, or until then."""
        if self._session.lost is None:
            self._poller.poll(max(0, math.ceil(1000 * min(until - time.monotonic(), 3600))))
