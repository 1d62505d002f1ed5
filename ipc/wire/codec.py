"""Messages to frames and back, and the errors that answer frames that are no message."""

from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec import Struct

from driver.errors import shortened
from engine.request_limits import MAX_MESSAGE_BYTES
from ipc.wire.fields import RequestId
from ipc.wire.form import NO_MESSAGE, check_message, encoded_field
from ipc.wire.messages import ClientMessage, Error, Hello, ServerMessage
from ipc.wire.operations import ControlMessage

Message = TypeVar("Message")


class MessageError(Exception):
    """A frame that is no message of this protocol; the text has the reason."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


class _Envelope(Struct):
    """The request id of an undecodable message, for the error that answers it."""

    request_id: RequestId | None = None


_encoder = msgspec.msgpack.Encoder()
_hello_decoder: msgspec.msgpack.Decoder[Hello] = msgspec.msgpack.Decoder(Hello)
_client_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
_control_decoder: msgspec.msgpack.Decoder[ControlMessage] = msgspec.msgpack.Decoder(ControlMessage)
_server_decoder: msgspec.msgpack.Decoder[ServerMessage] = msgspec.msgpack.Decoder(ServerMessage)
_envelope_decoder = msgspec.msgpack.Decoder(_Envelope)
_request_id_decoder: msgspec.msgpack.Decoder[str] = msgspec.msgpack.Decoder(RequestId)


def encode(message: ClientMessage | ControlMessage | ServerMessage) -> bytes:
    """One frame. Raises TypeError, ValueError or OverflowError if msgpack cannot hold it."""
    return _encoder.encode(message)


def decode_hello(frame: bytes) -> Hello:
    """Decode the only message that a daemon takes while it starts; raises MessageError."""
    try:
        return _hello_decoder.decode(frame)
    except NO_MESSAGE as error:
        raise MessageError("the daemon starts: say hello first, and wait for welcome") from error


def decode_client_message(frame: bytes) -> ClientMessage:
    """Decode a client's message; raises MessageError, also beyond a limit of form."""
    try:
        check_message(frame)
    except NO_MESSAGE as error:
        raise MessageError(str(error)) from error
    return _decoded(frame, _client_decoder)


def decode_control_message(frame: bytes) -> ControlMessage:
    """Decode a message to the control socket; raises MessageError for anything else."""
    return _decoded(frame, _control_decoder)


def decode_server_message(frame: bytes) -> ServerMessage:
    """Decode a daemon's message; raises MessageError for anything else."""
    return _decoded(frame, _server_decoder)


def _decoded(frame: bytes, decoder: msgspec.msgpack.Decoder[Message]) -> Message:
    try:
        return decoder.decode(frame)
    except NO_MESSAGE as error:
        raise MessageError(str(error)) from error


def peek_request_id(frame: bytes) -> str | None:
    """The request id in a frame that may be no message; None if there is none."""
    try:
        try:
            return _envelope_decoder.decode(frame).request_id
        except RecursionError:
            return _request_id_decoder.decode(encoded_field(frame, "request_id"))
    except NO_MESSAGE:
        return None


def read(frames: list[bytes], decode: Callable[[bytes], Message]) -> Message | Error:
    """Decode one message, or return the error for frames that are none."""
    if len(frames) != 1:
        return Error(None, "invalid_request", "a message is one frame, not several")
    frame = frames[0]
    if len(frame) > MAX_MESSAGE_BYTES:
        too_long = f"a message may have {MAX_MESSAGE_BYTES} bytes, not {len(frame)}"
        return Error(peek_request_id(frame), "message_too_long", too_long)
    try:
        return decode(frame)
    except MessageError as error:
        return Error(peek_request_id(frame), "invalid_request", f"malformed message: {error}")
