"""Every message of the wire protocol, and its version; ipc/PROTOCOL.md describes it."""

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from driver.errors import shortened
from driver.request import Logprob, RequestOrder, UpdateMode, Usage
from engine.live.weight_source import SharedArray
from engine.request_limits import (
    MAX_MESSAGES,
    MAX_MODEL_LENGTH,
    MAX_N,
    MAX_NAME_LENGTH,
    MAX_PATH_LENGTH,
    MAX_REQUEST_ID_LENGTH,
    MAX_TARGET_LENGTH,
    MAX_TENSOR_NAME_LENGTH,
    MAX_TENSORS,
    MAX_TOOLS,
)
from ipc.wire.escaping import visible

PROTOCOL_VERSION = 6

PING_INTERVAL = 5.0
"""Seconds of silence after which either side pings the other."""
SILENCE_LIMIT = 30.0
"""Seconds of silence after which either side takes the other for lost: several pings."""
PROGRESS_LIMIT = 60.0
"""Seconds with one item, or without a step, after which a daemon's stage is stalled."""

CREDITS = 32
"""Messages of one request that may be sent before the client has reported reading any."""

RequestId = Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID_LENGTH, pattern=r"\A[ -~]*\Z")]
"""Printable ASCII: it is written into logs and onto terminals verbatim."""
Messages = Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)]
Tools = Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]

TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
TraceParent = Annotated[str, Meta(pattern=rf"\A({TRACEPARENT.pattern})?\Z")]
"""W3C's ``traceparent``, or nothing."""
TensorName = Annotated[str, Meta(min_length=1, max_length=MAX_TENSOR_NAME_LENGTH)]
"""As in a checkpoint."""
User = Annotated[str, Meta(max_length=128)]
Model = Annotated[str, Meta(max_length=MAX_MODEL_LENGTH)]
AdapterPath = Annotated[str, Meta(min_length=1, max_length=MAX_PATH_LENGTH)]
ProfileName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
"""The name of a directory in the daemon's profile directory: no path, and nothing hidden."""


class _Message(
    Struct,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="type",
    tag=lambda name: re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower(),
):
    """A message with its own name as its type: AbortRequest is ``abort_request``."""


class Hello(_Message, frozen=True, forbid_unknown_fields=False):
    """Opens a connection. It alone may have unknown fields, so that versions can be told apart."""

    version: int


class Generate(_Message, frozen=True):
    """Asks for a completion of ``prompt`` (text or token ids) or of chat ``messages``; ``params``
    as SamplingParams.

    ``tools`` are functions that the model may call, as OpenAI has them, and
    ``chat_template_kwargs`` switches of the chat template. Without ``stream`` all of it comes at
    its end. ``resume_token_ids``, if any, are for each of ``n`` samples what an earlier request,
    with the same ``seed``, gave before it was cut off: only what follows comes, ``usage`` counts
    all, and a sample that is whole already gets its ``finish_reason`` again and nothing else.
    ``user`` says for which of its own users a client asks: they take turns, and share what the
    client may have. ``traceparent`` is the span that the request's is a child of. ``model`` names
    an adapter, or the model itself, which it is without a name.
    """

    request_id: RequestId
    prompt: str | list[int] | None = None
    messages: Messages | None = None
    tools: Tools = []
    chat_template_kwargs: dict[str, Any] = {}
    params: dict[str, Any] = {}
    stream: bool = True
    resume_token_ids: Annotated[list[list[int]], Meta(max_length=MAX_N)] = []
    user: User = ""
    traceparent: TraceParent = ""
    model: Model = ""


class Tokenize(_Message, frozen=True):
    """Asks for the token ids that a prompt, or chat messages, would have, the last
    ``truncate_prompt_tokens`` perhaps; they come with Done."""

    request_id: RequestId
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools = []
    chat_template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool = True
    user: User = ""
    truncate_prompt_tokens: Annotated[int, Meta(ge=1)] | None = None
    model: Model = ""


class Detokenize(_Message, frozen=True):
    """Asks for the text of token ids, special ones as they are spelt; it comes with Done."""

    request_id: RequestId
    token_ids: list[int]
    user: User = ""
    model: Model = ""


class TokenizerInfo(_Message, frozen=True):
    """Asks what the tokenizer is."""

    request_id: RequestId


class ListAdapters(_Message, frozen=True):
    """Asks for the adapters that the client may use."""

    request_id: RequestId


class Abort(_Message, frozen=True):
    """Ends an open request; one that is unknown or done is no error."""

    request_id: RequestId


class Credit(_Message, frozen=True):
    """``count`` more messages of an open request have been read; otherwise it has no effect."""

    request_id: RequestId
    count: Annotated[int, Meta(ge=1, le=CREDITS)]


class Ping(_Message, frozen=True):
    """Checks that the other side is there. Either side may send it."""


class Pong(_Message, frozen=True):
    """Answers ``ping``."""


class Status(_Message, frozen=True):
    """Asks how the daemon is."""

    request_id: RequestId


class Metrics(_Message, frozen=True):
    """Asks for the metrics in Prometheus's text format."""

    request_id: RequestId


class ListRequests(_Message, frozen=True):
    """Asks for the open requests: the first ``limit`` of them in this order, of one client
    perhaps."""

    request_id: RequestId
    order: RequestOrder = "age"
    limit: Annotated[int, Meta(ge=1)] | None = None
    client: Annotated[str, Meta(max_length=MAX_TARGET_LENGTH)] | None = None


class AbortRequest(_Message, frozen=True):
    """Ends any client's request, ``target``: the client's id, a colon, its request id."""

    request_id: RequestId
    target: Annotated[str, Meta(max_length=MAX_TARGET_LENGTH)]


class Drain(_Message, frozen=True):
    """Drains the daemon: it finishes open requests within so many seconds, and ends."""

    request_id: RequestId
    timeout_s: Annotated[float, Meta(ge=0)] | None = None


class Sleep(_Message, frozen=True):
    """Puts the daemon to sleep: it finishes open requests and frees its pages' memory, and at
    level 2 the weights' too."""

    request_id: RequestId
    level: Literal[1, 2] = 1


class Wake(_Message, frozen=True):
    """Has a sleeping daemon take that memory again, read its weights again, and serve.

    With ``tags`` it does so much of it alone, and serves when it has both.
    """

    request_id: RequestId
    tags: list[Literal["weights", "kv_cache"]] = []


class Pause(_Message, frozen=True):
    """Has the daemon run no step: open requests are kept as they are, end first, or are ended.

    Requests that come meanwhile wait. With ``clear_cache`` nothing stays computed.
    """

    request_id: RequestId
    mode: UpdateMode = "abort"
    clear_cache: bool = True


class Resume(_Message, frozen=True):
    """Has a paused daemon go on."""

    request_id: RequestId


class WeightChunk(_Message, frozen=True):
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


class UpdateWeights(_Message, frozen=True):
    """Has other weights served: those of ``path``, those in shared memory by tensor, or those of
    the connection's ``weight_chunk`` messages.

    Open requests are kept and go on with them, end first, or are ended. With ``keep_cache`` what
    the former weights have computed is not computed again. ``name`` is the operator's for them.
    """

    request_id: RequestId
    path: Annotated[str, Meta(max_length=MAX_TARGET_LENGTH)] | None = None
    arrays: Annotated[dict[TensorName, SharedArray], Meta(max_length=MAX_TENSORS)] | None = None
    mode: UpdateMode = "keep"
    keep_cache: bool = False
    name: Annotated[str, Meta(max_length=MAX_NAME_LENGTH, pattern=r"\A[ -~]*\Z")] = ""


class Reload(_Message, frozen=True):
    """Has the daemon read its configuration and its keys again."""

    request_id: RequestId


class ResetPrefixCache(_Message, frozen=True):
    """Empties the prefix cache."""

    request_id: RequestId


class LogLevel(_Message, frozen=True):
    """Sets the least severe level that the daemon logs."""

    request_id: RequestId
    level: Literal["debug", "info", "warning", "error"]


class Profile(_Message, frozen=True):
    """Begins a trace under a new name; without a name, ends and writes it."""

    request_id: RequestId
    name: ProfileName | None = None


class LoadAdapter(_Message, frozen=True):
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


class UnloadAdapter(_Message, frozen=True):
    """Unloads an adapter; open requests go on with it."""

    request_id: RequestId
    name: Model


class Welcome(_Message, frozen=True):
    """Answers ``hello`` with what is served. ``max_model_len`` is in tokens, prompt and completion
    together.

    Token ids go from 0 to ``vocab_size - 1``. ``max_num_seqs`` sequences run at once. ``credits``
    is CREDITS, ``silence_limit`` SILENCE_LIMIT. ``client_id`` is the client's name in the daemon's
    log and in ``abort_request``. ``aliases`` are further names of the model.
    ``default_sampling_params`` are its own values of parameters that requests leave out;
    ``max_tokens`` among them is a limit of every request. With ``enable_lora`` requests may name
    adapters.
    """

    version: int
    model: str
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    max_message_bytes: int
    credits: int
    silence_limit: float
    client_id: str
    aliases: list[str] = []
    default_sampling_params: dict[str, Any] = {}
    enable_lora: bool = False

    @property
    def models(self) -> list[str]:
        """All names of the model."""
        return [self.model, *self.aliases]

    def adapter_of(self, model: str | None) -> str:
        """The adapter that this is the name of, or no name; "" for the model itself."""
        return "" if model is None or model in self.models else model


class Starting(_Message, frozen=True):
    """Answers ``hello`` while the daemon starts, and says anew how far it is; ``welcome`` follows.

    ``text`` is for people.
    """

    text: str


class Token(_Message, frozen=True):
    """A piece of a completion that goes on.

    ``logprobs``, if asked for, has a map for each token id: Logprobs by token id, its own first
    and then the likeliest; ``prompt_logprobs`` the same for prompt tokens, and nil for the first
    of them. ``stop_reason`` is the stop string or the id of ``stop_token_ids`` that ended it.
    The last piece of an output has ``weight_versions``: of each version of the weights that made
    tokens of it the number, and the index of the first; none if it is 1 for all.
    """

    request_id: str
    text: str
    token_ids: list[int]
    index: int = 0
    finish_reason: str | None = None
    logprobs: list[dict[int, Logprob]] = []
    prompt_logprobs: list[dict[int, Logprob] | None] = []
    stop_reason: int | str | None = None
    weight_versions: list[tuple[int, int]] = []


class Done(_Message, frozen=True):
    """The last piece, and why it ended: stop, length, repetition, timeout or abort."""

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: str
    usage: Usage
    index: int = 0
    logprobs: list[dict[int, Logprob]] = []
    prompt_logprobs: list[dict[int, Logprob] | None] = []
    stop_reason: int | str | None = None
    weight_versions: list[tuple[int, int]] = []


class Error(_Message, frozen=True):
    """An error of a request, which ends it, or of the connection.

    ``code`` is one of those in PROTOCOL.md. duplicate_request is the one error after which more
    may come, for the request that had the id first. ``retry_after_s``, with overloaded and
    quota_exceeded, is the seconds to wait before a retry.
    """

    request_id: str | None
    code: str
    message: str
    retry_after_s: float | None = None

    def __post_init__(self) -> None:
        """Shorten and escape the message: it may quote megabytes of a client's text."""
        msgspec.structs.force_setattr(self, "message", visible(shortened(self.message)))


class StatusReply(_Message, frozen=True):
    """The daemon's numbers, by name."""

    request_id: str
    status: dict[str, Any]


class RequestsReply(_Message, frozen=True):
    """Open requests, each as a map, and how many there are with those that are left out."""

    request_id: str
    requests: list[dict[str, Any]]
    total: int


class TokenizerInfoReply(_Message, frozen=True):
    """The tokenizer, by the names of Hugging Face's tokenizer_config.json."""

    request_id: str
    info: dict[str, Any]


class AdaptersReply(_Message, frozen=True):
    """The adapters that the client may use, each as a map."""

    request_id: str
    adapters: list[dict[str, Any]]


class MetricsReply(_Message, frozen=True):
    """The metrics in Prometheus's text format."""

    request_id: str
    text: str


class Ok(_Message, frozen=True):
    """A control command has been done; ``text`` says what, for people.

    ``weight_version`` is that of new weights.
    """

    request_id: str
    text: str
    weight_version: int | None = None


ClientMessage = Hello | Generate | Tokenize | Detokenize | TokenizerInfo | ListAdapters | Abort | Credit | Ping | Pong
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
ServerMessage = (
    Welcome
    | Starting
    | Token
    | Done
    | Error
    | TokenizerInfoReply
    | AdaptersReply
    | StatusReply
    | MetricsReply
    | RequestsReply
    | Ok
    | Ping
    | Pong
)
