"""The wire protocol as bytes."""

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.request import Timings
from ipc.wire.codec import (
    MessageError,
    decode_client_message,
    decode_control_message,
    decode_server_message,
    encode,
    peek_request_id,
)
from ipc.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    ClientMessage,
    Credit,
    Done,
    Error,
    Generate,
    Hello,
    Ok,
    Ping,
    Pong,
    RequestsReply,
    ServerMessage,
    Starting,
    StatusReply,
    Token,
    Usage,
    Welcome,
)
from ipc.wire.operations import (
    AbortRequest,
    ControlMessage,
    Drain,
    ListRequests,
    LogLevel,
    Profile,
    Reload,
    ResetPrefixCache,
    Sleep,
    Status,
    Wake,
)

CLIENT_MESSAGES = [
    Hello(PROTOCOL_VERSION),
    Generate("a", prompt="Once", params={"temperature": 0.5, "stop": ["x"]}),
    Generate("b", prompt=[1, 2, 3]),
    Generate("c", messages=[{"role": "user", "content": "3 + 4?"}]),
    Generate("d", messages=[], tools=[{"type": "function"}], chat_template_kwargs={"enable_thinking": False}),
    Abort("a"),
    Credit("a", 16),
    Ping(),
    Pong(),
]
TIMINGS = Timings(
    queue_time_s=1.0, prefill_time_s=2.0, time_to_first_token_s=3.0, decode_time_s=4.0, tokens_per_second=0.75
)
CONTROL_MESSAGES = [
    Hello(PROTOCOL_VERSION),
    Status("d"),
    ListRequests("d"),
    ListRequests("d", "rate", 5, "alice"),
    AbortRequest("e", "00a1:7"),
    Reload("e"),
    ResetPrefixCache("e"),
    Drain("f"),
    Drain("f", timeout_s=2.5),
    Sleep("g"),
    Wake("h"),
    LogLevel("i", "debug"),
    Profile("j", name="trace-1"),
    Profile("k"),
    Ping(),
    Pong(),
]
SERVER_MESSAGES = [
    Welcome(PROTOCOL_VERSION, "demo", 512, 2048, 64, 1000, 32, 30.0, "00a1"),
    Starting("compiling: 9 of 19 functions"),
    RequestsReply("d", [{"id": "00a1:7", "state": "decode"}], 3),
    Token("a", " upon", [7, 8]),
    Done("a", "", [], "stop", Usage(3, 4)),
    Done("a", "", [], "stop", Usage(3, 4, 2, TIMINGS)),
    Error("a", "invalid_request", "no"),
    Error(None, "unsupported_version", "no"),
    StatusReply("d", {"running": 0}),
    Ok("e", "aborted"),
    Ping(),
    Pong(),
]


@pytest.mark.parametrize("message", CLIENT_MESSAGES, ids=lambda message: type(message).__name__)
def test_client_messages_survive_the_wire(message: ClientMessage) -> None:
    """What a client encodes, the daemon decodes to the same."""
    assert decode_client_message(encode(message)) == message


@pytest.mark.parametrize("message", CONTROL_MESSAGES, ids=lambda message: type(message).__name__)
def test_control_messages_survive_the_wire(message: ControlMessage) -> None:
    """As those of the work socket do."""
    assert decode_control_message(encode(message)) == message


@pytest.mark.parametrize("message", SERVER_MESSAGES, ids=lambda message: type(message).__name__)
def test_server_messages_survive_the_wire(message: ServerMessage) -> None:
    """What the daemon encodes, a client decodes to the same."""
    assert decode_server_message(encode(message)) == message


def test_a_message_is_a_map_with_a_type() -> None:
    """The encoding is plain msgpack that any language can write."""
    assert msgspec.msgpack.decode(encode(Abort("a"))) == {"type": "abort", "request_id": "a"}


@pytest.mark.parametrize("message", CLIENT_MESSAGES[1:], ids=lambda message: type(message).__name__)
def test_an_unknown_field_is_refused_by_name(message: ClientMessage) -> None:
    """Nothing that a client says is silently ignored."""
    frame = _with(message, surprise=1)

    with pytest.raises(MessageError, match="surprise"):
        decode_client_message(frame)


def test_a_hello_of_a_later_version_can_still_be_read() -> None:
    """A hello may hold fields of the future, so that its version can be refused in words."""
    assert decode_client_message(_with(Hello(99), colour="blue")) == Hello(99)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"GET / HTTP/1.1\r\n",
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode({"type": "explode"}),
        msgspec.msgpack.encode({"request_id": "a"}),
        msgspec.msgpack.encode({"type": "generate"}),
        msgspec.msgpack.encode({"type": "generate", "request_id": ""}),
        msgspec.msgpack.encode({"type": "generate", "request_id": "a" * 129}),
        msgspec.msgpack.encode({"type": "generate", "request_id": 7}),
        msgspec.msgpack.encode({"type": "generate", "request_id": "a", "prompt": 5}),
        msgspec.msgpack.encode({"type": "generate", "request_id": "a", "prompt": [1.5]}),
        msgspec.msgpack.encode({"type": "generate", "request_id": "a", "params": [1]}),
        msgspec.msgpack.encode({"type": "token", "request_id": "a", "text": "", "token_ids": []}),
        b"\x82\xa4type\xa5abort\xaarequest_id\xa2\xff\xfe",
        b"\x83\xa4type\xa8generate\xaarequest_id\xa1a\xa6params\x81\xa1a" + b"\x91" * 100_000,
        encode(Abort("a")) + b"\x00",
        encode(Abort("a"))[:-1],
    ],
)
def test_what_is_no_client_message_is_a_message_error(frame: bytes) -> None:
    """Truncated, mistyped, nested without end, of another protocol: all are one kind of error."""
    with pytest.raises(MessageError):
        decode_client_message(frame)


DEEP = b"\x91" * 100_000 + b"\x01"
"""Lists in lists, deeper than any version of Python follows."""


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_the_message_error(frame: bytes) -> None:
    """Whatever arrives, decoding gives a message or MessageError."""
    for decode in (decode_client_message, decode_server_message):
        with suppress(MessageError):
            decode(frame)
    peek_request_id(frame)


@given(st.sampled_from([encode(message) for message in CLIENT_MESSAGES]), st.data())
def test_damaged_messages_raise_nothing_but_the_message_error(frame: bytes, data: st.DataObject) -> None:
    """A message with one byte changed is a message or a MessageError."""
    position = data.draw(st.integers(0, len(frame) - 1))
    damaged = frame[:position] + bytes([data.draw(st.integers(0, 255))]) + frame[position + 1 :]

    try:
        decode_client_message(damaged)
    except MessageError:
        peek_request_id(damaged)


@pytest.mark.parametrize(
    ("frame", "request_id"),
    [
        (msgspec.msgpack.encode({"type": "generate", "request_id": "a", "prompt": 5}), "a"),
        (msgspec.msgpack.encode({"prompt": ["x"] * 1000, "request_id": "late"}), "late"),
        (msgspec.msgpack.encode({"type": "ping"}), None),
        (msgspec.msgpack.encode({"request_id": "a" * 129}), None),
        (msgspec.msgpack.encode([1]), None),
        (b"\xff", None),
        (b"\x82\xaarequest_id\xa1a\xa6params" + DEEP, "a"),
        (b"\x82\xa6params" + DEEP + b"\xaarequest_id\xa4late", "late"),
        (b"\x83\xa6params" + DEEP + b"\xa1b\xd9\x28" + b"x" * 40 + b"\xaarequest_id\xa0", None),
        (b"\x82\xa6params" + DEEP[:-1], None),
        (b"\x82\xa6params" + b"\xdd\x00\x02\x00\x00" + b"\x01" * 2**17 + DEEP + b"\xaarequest_id\xa1a", None),
        (b"\x82\xa6params" + DEEP, None),
        (b"\x91" + DEEP, None),
    ],
)
def test_an_error_can_name_the_request_of_a_bad_message(frame: bytes, request_id: str | None) -> None:
    """Where a bad message has a legal request id, it can be read."""
    assert peek_request_id(frame) == request_id


def _with(message: ClientMessage, **fields: object) -> bytes:
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(encode(message)), **fields})
