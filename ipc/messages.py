"""The wire protocol: every message between a client and the daemon, and its version.

A message is one frame: a msgpack map whose ``type`` names it and whose other keys are the fields below.
A client (DEALER) says ``hello`` first and waits for ``welcome``. Request ids are the client's own, unique
among its open requests, and every answer bears the id of the request it answers. A ``generate`` is answered
by any number of ``token`` and then one ``done`` or one ``error``; a ``status`` by ``status_reply`` or
``error``; a ``profile`` by ``done``, whose text is the directory, or ``error``; ``abort`` has no answer of
its own, the request it ends gets its ``done`` with reason "abort".
An ``error`` without a request id concerns the connection itself: after it, say hello again.
A client that has been silent for half a minute is taken for lost, so an idle one pings.

Texts, token ids and log-probabilities of ``token`` and ``done`` are what is new since the last message; ``usage`` is the
total. With ``n`` above 1, ``index`` says which of the outputs a message belongs to; a ``token`` with a ``finish_reason``
is the last of its output, and the ``done`` of the request is the last of the output that took longest.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

PROTOCOL_VERSION = 1

PING_INTERVAL = 5.0
"""Seconds between the pings of a client."""
SILENCE_LIMIT = 30.0
"""Seconds of silence after which either side takes the other for lost: several pings."""

RequestId = Annotated[str, Meta(min_length=1, max_length=128)]


class MessageError(Exception):
    """A frame that is no message of this protocol; the text says why."""


class Hello(Struct, tag="hello", tag_field="type", frozen=True):
    """Opens a connection. The one message that may hold fields we do not know: it is how versions are told apart."""

    version: int


class Generate(Struct, tag="generate", tag_field="type", frozen=True, forbid_unknown_fields=True):
    """Asks for a completion of ``prompt`` (text or token ids) or of chat ``messages``; ``params`` as SamplingParams.

    Without ``stream`` all of it comes at its end. ``resume_token_ids``, if any, are for each of ``n`` samples what an
    earlier request, with the same ``seed``, gave before it was cut off: only what follows comes, ``usage`` counts
    all, and a sample that is whole already gets its ``finish_reason`` again and nothing else.
    """

    request_id: RequestId
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    params: dict[str, Any] = {}
    stream: bool = True
    resume_token_ids: list[list[int]] = []


class Abort(Struct, tag="abort", tag_field="type", frozen=True, forbid_unknown_fields=True):
    """Ends an open request; one that is unknown or done is no error."""

    request_id: RequestId


class Status(Struct, tag="status", tag_field="type", frozen=True, forbid_unknown_fields=True):
    """Asks how the daemon is."""

    request_id: RequestId


class Profile(Struct, tag="profile", tag_field="type", frozen=True, forbid_unknown_fields=True):
    """Begins a trace of the daemon, for a directory as the daemon sees it; without one, ends and writes it."""

    request_id: RequestId
    directory: str | None = None


class Ping(Struct, tag="ping", tag_field="type", frozen=True, forbid_unknown_fields=True):
    """Says that the client is there, and asks whether the daemon is."""


class Usage(Struct, frozen=True):
    """Tokens that a request cost."""

    prompt_tokens: int
    completion_tokens: int


class Logprob(Struct, frozen=True, omit_defaults=True):
    """One token's log-probability (natural), its rank (1 is the likeliest), and its text, with ``detokenize``."""

    logprob: float
    rank: int
    decoded_token: str | None = None


class Welcome(Struct, tag="welcome", tag_field="type", frozen=True, forbid_unknown_fields=True):
    """Answers ``hello``: what is served here. ``max_model_len`` is in tokens, prompt and completion together.

    Token ids go from 0 to ``vocab_size - 1``.
    """

    version: int
    model: str
    max_model_len: int
    vocab_size: int
    max_message_bytes: int


class Token(Struct, tag="token", tag_field="type", frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A piece of a completion that goes on.

    ``logprobs``, if asked for, has a map for each token id: Logprobs by token id, its own first and then the
    likeliest; ``prompt_logprobs`` the same for prompt tokens, and nil for the first of them.
    """

    request_id: str
    text: str
    token_ids: list[int]
    index: int = 0
    finish_reason: str | None = None
    logprobs: list[dict[int, Logprob]] = []
    prompt_logprobs: list[dict[int, Logprob] | None] = []


class Done(Struct, tag="done", tag_field="type", frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The last piece of a completion, and why it ended: stop, length, repetition, timeout or abort."""

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: str
    usage: Usage
    index: int = 0
    logprobs: list[dict[int, Logprob]] = []
    prompt_logprobs: list[dict[int, Logprob] | None] = []


class Error(Struct, tag="error", tag_field="type", frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What was wrong, with a request (nothing more will come for it) or with the connection.

    ``code`` is invalid_request, duplicate_request, overloaded, stopped, unsupported_version, message_too_long or
    internal. With overloaded, ``retry_after_s`` says in how many seconds to try again. A duplicate_request is the one error after which more may come: for the first bearer of the id.
    """

    request_id: str | None
    code: str
    message: str
    retry_after_s: float | None = None


class StatusReply(Struct, tag="status_reply", tag_field="type", frozen=True, forbid_unknown_fields=True):
    """The daemon's numbers, by name."""

    request_id: str
    status: dict[str, Any]


class Pong(Struct, tag="pong", tag_field="type", frozen=True, forbid_unknown_fields=True):
    """Answers ``ping``."""


ClientMessage = Hello | Generate | Abort | Status | Profile | Ping
ServerMessage = Welcome | Token | Done | Error | StatusReply | Pong


class _Envelope(Struct):
    """What a message that cannot be taken as a whole may still tell: whose answer the error is."""

    request_id: RequestId | None = None


_encoder = msgspec.msgpack.Encoder()
_client_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
_server_decoder: msgspec.msgpack.Decoder[ServerMessage] = msgspec.msgpack.Decoder(ServerMessage)
_envelope_decoder = msgspec.msgpack.Decoder(_Envelope)

_NOT_A_MESSAGE = (ValueError, RecursionError)
"""What msgspec raises over rubbish: its own errors and bad UTF-8, and the second for lists nested a hundred thousand deep."""


def encode(message: ClientMessage | ServerMessage) -> bytes:
    """One frame. Raises TypeError or ValueError where a field holds what msgpack cannot."""
    return _encoder.encode(message)


def decode_client_message(frame: bytes) -> ClientMessage:
    """What a client said; raises MessageError for anything else."""
    try:
        return _client_decoder.decode(frame)
    except _NOT_A_MESSAGE as error:
        raise MessageError(str(error)) from error


def decode_server_message(frame: bytes) -> ServerMessage:
    """What the daemon said; raises MessageError for anything else."""
    try:
        return _server_decoder.decode(frame)
    except _NOT_A_MESSAGE as error:
        raise MessageError(str(error)) from error


def peek_request_id(frame: bytes) -> str | None:
    """The request id in a frame that may otherwise be no message, None where there is none to be read."""
    try:
        return _envelope_decoder.decode(frame).request_id
    except _NOT_A_MESSAGE:
        return None
