"""ipc/PROTOCOL.md against a real server: its conversations, its tables and its limits."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest
import zmq
from fake_driver import FakeDriver, serving
from raw_client import LONGEST_POLL

from driver.errors import DriverError, InvalidRequest
from driver.request import ActiveRequest
from engine.request_limits import MAX_MESSAGE_BYTES
from ipc.wire.addresses import control_address
from ipc.wire.messages import CREDITS, PING_INTERVAL, PROTOCOL_VERSION, SILENCE_LIMIT, ClientMessage, ServerMessage
from ipc.wire.operations import ControlMessage

DOCUMENT = (Path(__file__).parent.parent / "ipc" / "PROTOCOL.md").read_text()
CONVERSATIONS = re.findall(r"^```hex (work|control)\n(.*?)^```$", DOCUMENT, flags=re.DOTALL | re.MULTILINE)


class OneNumber(msgspec.Struct):
    open_requests: int
    stages: dict[str, float]


class TalkingDriver(FakeDriver):
    """What is held begins with one word, and there is one number to tell."""

    def status(self) -> msgspec.Struct:
        return OneNumber(len(self.open), {})

    def submit_request(self, request: ActiveRequest) -> None:
        super().submit_request(request)
        if not self.held.empty():
            self.say(self.take(), "Hi", [7])


def frames(conversation: str) -> Iterator[tuple[str, bytes]]:
    """Who says what: ``C`` or ``S``, and the bytes; what follows a ``#`` is for people."""
    for said in re.split(r"^(?=[CS] )", conversation, flags=re.MULTILINE):
        if said.strip():
            lines = [line.partition("#")[0] for line in said.splitlines()]
            yield said[0], bytes.fromhex("".join(lines)[1:])


@pytest.mark.parametrize(("socket", "conversation"), CONVERSATIONS)
def test_the_conversations_are_what_a_server_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, socket: str, conversation: str
) -> None:
    """Byte by byte, for a client that the daemon calls "64656d6f"."""
    address = f"ipc://{tmp_path}/o.sock"
    monkeypatch.setattr("ipc.sockets.peers.new_identity", lambda: bytes.fromhex("64656d6f"))
    with serving(address, TalkingDriver()):
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(address if socket == "work" else control_address(address))
        for speaker, frame in frames(conversation):
            if speaker == "C":
                dealer.send(frame)
            else:
                assert dealer.poll(LONGEST_POLL)
                assert dealer.recv() == frame, msgspec.msgpack.decode(frame)
        context.destroy(linger=0)


def test_there_are_conversations_on_both_sockets() -> None:
    """The test before has something to do."""
    assert {socket for socket, _ in CONVERSATIONS} == {"work", "control"}


def fields_of(message: type[msgspec.Struct]) -> set[str]:
    """A message's fields, as the document's tables have them: optional ones with a question mark."""
    return {field.name + ("" if field.required else "?") for field in msgspec.structs.fields(message)}


@pytest.mark.parametrize(
    ("heading", "messages"),
    [
        ("From the client, on the work socket", get_args(ClientMessage)),
        ("From the client, on the control socket", get_args(ControlMessage)),
        ("From the daemon", get_args(ServerMessage)),
    ],
)
def test_every_message_is_listed_with_its_fields(heading: str, messages: tuple[type[msgspec.Struct], ...]) -> None:
    """And none that there is not."""
    section = DOCUMENT.partition(f"### {heading}\n")[2].partition("\n#")[0]
    rows = re.findall(r"^\| `(\w+)` \|(.*?)\|", section, flags=re.MULTILINE)
    listed = {name: set(re.findall(r"`(\w+\??)`", fields)) for name, fields in rows}

    assert listed == {str(message.__struct_config__.tag): fields_of(message) for message in messages}


def test_every_error_is_listed() -> None:
    """Those of the driver and those of the sockets."""
    section = DOCUMENT.partition("## Errors\n")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE))
    of_sockets = ["message_too_long", "unsupported_version", "slow_reader", "quota_exceeded", "forbidden", "not_found"]

    of_driver = [*DriverError.__subclasses__(), *InvalidRequest.__subclasses__()]
    assert listed == {error.code for error in of_driver} | set(of_sockets)


def test_the_limits_are_what_they_are() -> None:
    """The numbers in the text."""
    for limit in (
        f"version **{PROTOCOL_VERSION}**",
        f"{MAX_MESSAGE_BYTES:,} bytes",
        f"{CREDITS} messages",
        f"every {PING_INTERVAL:g} seconds",
        f"{SILENCE_LIMIT:g} seconds",
    ):
        assert limit in DOCUMENT
