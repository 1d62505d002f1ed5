"""What clients and a daemon say to each other, and the protocol's version; ipc/PROTOCOL.md describes it.

What operators ask is in ipc/wire/operations.py.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from driver.errors import shortened
from driver.request import Logprob, Usage
from engine.request_limits import MAX_N
from ipc.wire.escaping import visible
from ipc.wire.fields import Message, Messages, Model, RequestId, Tools, TraceParent, User

PROTOCOL_VERSION = 6

PING_INTERVAL = 5.0
"""Seconds of silence after which either side pings the other."""
SILENCE_LIMIT = 30.0
"""Seconds of silence after which either side takes the other for lost: several pings."""
PROGRESS_LIMIT = 60.0
"""Seconds with one item, or without a step, after which a daemon's stage is stalled."""

CREDITS = 32
"""Messages of one request that may be sent before the client has reported reading any."""


class Hello(Message, frozen=True, forbid_unknown_fields=False):
    """Opens a connection. It alone may have unknown fields, so that versions can be told apart."""

    version: int


class Generate(Message, frozen=True):
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


class Tokenize(Message, frozen=True):
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


class Detokenize(Message, frozen=True):
    """Asks for the text of token ids, special ones as they are spelt; it comes with Done."""

    request_id: RequestId
    token_ids: list[int]
    user: User = ""
    model: Model = ""


class TokenizerInfo(Message, frozen=True):
    """Asks what the tokenizer is."""

    request_id: RequestId


class ListAdapters(Message, frozen=True):
    """Asks for the adapters that the client may use."""

    request_id: RequestId


class Abort(Message, frozen=True):
    """Ends an open request; one that is unknown or done is no error."""

    request_id: RequestId


class Credit(Message, frozen=True):
    """``count`` more messages of an open request have been read; otherwise it has no effect."""

    request_id: RequestId
    count: Annotated[int, Meta(ge=1, le=CREDITS)]


class Ping(Message, frozen=True):
    """Checks that the other side is there. Either side may send it."""


class Pong(Message, frozen=True):
    """Answers ``ping``."""


class Welcome(Message, frozen=True):
    """Answers ``hello`` with what is served. ``max_model_len`` is in tokens, prompt and completion
    together.

    Token ids go from 0 to ``vocab_size - 1``. ``max_num_seqs`` sequences run at once. ``credits``
    is CREDITS, ``silence_limit`` SILENCE_LIMIT. ``client_id`` is the client's name in the daemon's
    log and in ``abort_request``. ``aliases`` are further names of the model.
    ``default_sampling_params`` are its own values of parameters that requests leave out;
    ``max_tokens`` among them is a limit of every request. With ``enable_lora`` requests may name
    adapters. ``fingerprint`` is shared by daemons that make the same tokens of the same, but for
    rounding, by the weights of their start: of the checkpoint, the dtypes and quantization, the
    tokenizer and the seed.
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
    fingerprint: str = ""

    @property
    def models(self) -> list[str]:
        """All names of the model."""
        return [self.model, *self.aliases]

    def adapter_of(self, model: str | None) -> str:
        """The adapter that this is the name of, or no name; "" for the model itself."""
        return "" if model is None or model in self.models else model


class Starting(Message, frozen=True):
    """Answers ``hello`` while the daemon starts, and says anew how far it is; ``welcome`` follows.

    ``text`` is for people.
    """

    text: str


class Token(Message, frozen=True):
    """A piece of a completion that goes on.

    ``logprobs``, if asked for, has a map for each token id: Logprobs by token id, its own first
    and then the likeliest; ``prompt_logprobs`` the same for prompt tokens, and nil for the first
    of them. ``stop_reason`` is the stop string or the id of ``stop_token_ids`` that ended it.
    The last piece of an output has ``weight_versions``: of each version of the weights that made
    tokens of it the number, and the index of the first; none if it is 1 for all. Another piece has
    those that begin with it, if any; those of a resumed output begin with the first new token.
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


class Done(Message, frozen=True):
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


class Error(Message, frozen=True):
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


class StatusReply(Message, frozen=True):
    """The daemon's numbers, by name."""

    request_id: str
    status: dict[str, Any]


class RequestsReply(Message, frozen=True):
    """Open requests, each as a map, and how many there are with those that are left out."""

    request_id: str
    requests: list[dict[str, Any]]
    total: int


class TokenizerInfoReply(Message, frozen=True):
    """The tokenizer, by the names of Hugging Face's tokenizer_config.json."""

    request_id: str
    info: dict[str, Any]


class AdaptersReply(Message, frozen=True):
    """The adapters that the client may use, each as a map."""

    request_id: str
    adapters: list[dict[str, Any]]


class MetricsReply(Message, frozen=True):
    """The metrics in Prometheus's text format."""

    request_id: str
    text: str


class Ok(Message, frozen=True):
    """A control command has been done; ``text`` says what, for people.

    ``weight_version`` is that of new weights.
    """

    request_id: str
    text: str
    weight_version: int | None = None


ClientMessage = Hello | Generate | Tokenize | Detokenize | TokenizerInfo | ListAdapters | Abort | Credit | Ping | Pong
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
