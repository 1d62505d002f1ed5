"""What operators ask of a daemon, over its control socket; ipc/PROTOCOL.md describes it."""

from typing import Annotated, Literal

from msgspec import Meta

from driver.request import RequestOrder, UpdateMode
from engine.live.weight_source import SharedArray
from engine.request_limits import MAX_NAME_LENGTH, MAX_TARGET_LENGTH, MAX_TENSORS
from ipc.wire.fields import AdapterPath, Message, Model, ProfileName, RequestId, TensorName
from ipc.wire.messages import Hello, ListAdapters, Ping, Pong


class Status(Message, frozen=True):
    """Asks how the daemon is."""

    request_id: RequestId


class Metrics(Message, frozen=True):
    """Asks for the metrics in Prometheus's text format."""

    request_id: RequestId


class ListRequests(Message, frozen=True):
    """Asks for the open requests: the first ``limit`` of them in this order, of one client
    perhaps."""

    request_id: RequestId
    order: RequestOrder = "age"
    limit: Annotated[int, Meta(ge=1)] | None = None
    client: Annotated[str, Meta(max_length=MAX_TARGET_LENGTH)] | None = None


class AbortRequest(Message, frozen=True):
    """Ends any client's request, ``target``: the client's id, a colon, its request id."""

    request_id: RequestId
    target: Annotated[str, Meta(max_length=MAX_TARGET_LENGTH)]


class Drain(Message, frozen=True):
    """Drains the daemon: it finishes open requests within so many seconds, and ends."""

    request_id: RequestId
    timeout_s: Annotated[float, Meta(ge=0)] | None = None


class Sleep(Message, frozen=True):
    """Puts the daemon to sleep: it finishes open requests and frees its pages' memory, and at
    level 2 the weights' too."""

    request_id: RequestId
    level: Literal[1, 2] = 1


class Wake(Message, frozen=True):
    """Has a sleeping daemon take that memory again, read its weights again, and serve.

    With ``tags`` it does so much of it alone, and serves when it has both.
    """

    request_id: RequestId
    tags: list[Literal["weights", "kv_cache"]] = []


class Pause(Message, frozen=True):
    """Has the daemon run no step: open requests are kept as they are, end first, or are ended.

    Requests that come meanwhile wait. With ``clear_cache`` nothing stays computed.
    """

    request_id: RequestId
    mode: UpdateMode = "abort"
    clear_cache: bool = True


class Resume(Message, frozen=True):
    """Has a paused daemon go on."""

    request_id: RequestId


class WeightChunk(Message, frozen=True):
    """Some bytes of one tensor of the weights that ``update_weights`` is to have served.

    ``data`` is what the tensor has from its byte ``offset`` on, in row-major order and little-endian.
    """

    request_id: RequestId
    name: TensorName
    dtype: Annotated[str, Meta(max_length=32)]
    """Numpy's name or that of the safetensors format."""
    shape: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=8)]
    offset: Annotated[int, Meta(ge=0)]
    data: bytes


class UpdateWeights(Message, frozen=True):
    """Has other weights served: those of ``path``, those in shared memory by tensor, or those of
    the connection's ``weight_chunk`` messages.

    With ``more`` nothing is served yet: the connection's next one has further tensors in shared memory.
    Open requests are kept and go on with them, end first, or are ended. With ``keep_cache`` what
    the former weights have computed is not computed again. ``name`` is the operator's for them.
    """

    request_id: RequestId
    path: Annotated[str, Meta(max_length=MAX_TARGET_LENGTH)] | None = None
    arrays: Annotated[dict[TensorName, SharedArray], Meta(max_length=MAX_TENSORS)] | None = None
    mode: UpdateMode = "keep"
    keep_cache: bool = False
    name: Annotated[str, Meta(max_length=MAX_NAME_LENGTH, pattern=r"\A[ -~]*\Z")] = ""
    more: bool = False


class Reload(Message, frozen=True):
    """Has the daemon read its configuration and its keys again."""

    request_id: RequestId


class ResetPrefixCache(Message, frozen=True):
    """Empties the prefix cache."""

    request_id: RequestId


class LogLevel(Message, frozen=True):
    """Sets the least severe level that the daemon logs."""

    request_id: RequestId
    level: Literal["debug", "info", "warning", "error"]


class Profile(Message, frozen=True):
    """Begins a trace under a new name; without a name, ends and writes it."""

    request_id: RequestId
    name: ProfileName | None = None


class LoadAdapter(Message, frozen=True):
    """Loads an adapter of this name from below the daemon's ``--adapter-root``: from its own name
    if there is no path.

    One that is loaded already gets a new version, unless it is not to be ``replace``d. One that is
    pinned is not evicted, and stays pinned until it is unloaded.
    """

    request_id: RequestId
    name: Model
    path: AdapterPath | None = None
    pin: bool = False
    replace: bool = True


class UnloadAdapter(Message, frozen=True):
    """Unloads an adapter; open requests go on with it."""

    request_id: RequestId
    name: Model


AskedMessage = (
    Status
    | Metrics
    | ListRequests
    | AbortRequest
    | Drain
    | Sleep
    | Wake
    | Pause
    | Resume
    | WeightChunk
    | UpdateWeights
    | Reload
    | ResetPrefixCache
    | ListAdapters
    | LoadAdapter
    | UnloadAdapter
    | LogLevel
    | Profile
)
"""Messages to the control socket that are answered by their request id."""
ControlMessage = Hello | AskedMessage | Ping | Pong
