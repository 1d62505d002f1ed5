"""From a peer's frames to a message, or to the error that answers them."""

from collections.abc import Callable
from typing import TypeVar

from engine.request_limits import MAX_MESSAGE_BYTES
from ipc.wire.messages import Error, MessageError, peek_request_id

Message = TypeVar("Message")


def read(frames: list[bytes], decode: Callable[[bytes], Message]) -> Message | Error:
    """Decode one message, or return the error for frames that are none."""
    if len(frames) != 1:
        return Error(None, "invalid_request", f"a message is one frame, not {len(frames)}")
    frame = frames[0]
    if len(frame) > MAX_MESSAGE_BYTES:
        too_long = f"a message may have {MAX_MESSAGE_BYTES} bytes, not {len(frame)}"
        return Error(peek_request_id(frame), "message_too_long", too_long)
    try:
        return decode(frame)
    except MessageError as error:
        return Error(peek_request_id(frame), "invalid_request", f"malformed message: {error}")
