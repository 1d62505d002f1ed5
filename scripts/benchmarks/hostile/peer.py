"""Who attacks: connections on which anything may be said, to the daemon and to the gateway."""

import json
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

from ipc.wire.addresses import control_address
from ipc.wire.keys import client_key
from ipc.wire.messages import PROTOCOL_VERSION
from scripts.benchmarks.hostile.registry import Door, GotThrough

PATIENCE = 10.0
"""Seconds in which whatever is asked has to be answered, if only by a refusal."""
SHOWN = 60
"""Characters of a request that are quoted."""


class Peer:
    """A DEALER that has said hello, unless it is not to; ``name`` is the routing id that it chooses."""

    def __init__(
        self, door: Door, *, key: str = "", name: bytes = b"", hello: bool = True, control: bool = False, room: int = 0
    ) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        if name:
            self._socket.setsockopt(zmq.ROUTING_ID, name)
        if room:
            self._socket.setsockopt(zmq.RCVHWM, room)
        if file := door.keys.get(key or "plain"):
            own = client_key(Path(file))
            for option, value in (
                (zmq.CURVE_PUBLICKEY, own.public), (zmq.CURVE_SECRETKEY, own.secret), (zmq.CURVE_SERVERKEY, own.server),
            ):  # fmt: skip
                self._socket.setsockopt(option, value.encode())
        self._socket.connect(control_address(door.address) if control else door.address)
        self.welcome: dict[str, Any] = {}
        if hello:
            self.say({"type": "hello", "version": PROTOCOL_VERSION})
            self.welcome = self.hear(PATIENCE) or {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Hang up; what was just said may still leave."""
        self._context.destroy()

    def say(self, message: Any) -> None:
        """Send a message, or the bytes of none; where nobody takes it, it is dropped."""
        frame = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
        with suppress(zmq.Again):
            self._socket.send(frame, zmq.NOBLOCK)

    def say_frames(self, frames: list[bytes]) -> None:
        """Send one message of so many frames; where nobody takes it, it is dropped."""
        with suppress(zmq.Again):
            self._socket.send_multipart(frames, zmq.NOBLOCK)

    def hear(self, seconds: float) -> dict[str, Any] | None:
        """What comes next within so many seconds; a ping is answered."""
        until = time.monotonic() + seconds
        while self._socket.poll(max(0, int(1000 * (until - time.monotonic())))):
            heard: dict[str, Any] = msgspec.msgpack.decode(self._socket.recv(), strict=False)
            if heard["type"] == "ping":
                self.say({"type": "pong"})
            elif heard["type"] != "pong":
                return heard
        return None

    def ask(self, message: dict[str, Any], seconds: float = PATIENCE) -> dict[str, Any]:
        """Send a request and wait for its end; raises GotThrough where none comes."""
        self.say(message)
        for heard in self.heard(seconds):
            if heard.get("request_id") in (message.get("request_id"), None) and heard["type"] != "token":
                return heard
        raise GotThrough(f"no answer within {seconds:g} s to {str(message)[:SHOWN]}...")

    def heard(self, seconds: float) -> Iterator[dict[str, Any]]:
        """Whatever comes within so many seconds."""
        until = time.monotonic() + seconds
        while (heard := self.hear(max(0.0, until - time.monotonic()))) is not None:
            yield heard


def generate(
    request_id: str, prompt: Any = "Once upon a time", *, stream: bool = False, **params: Any
) -> dict[str, Any]:
    """A request for a completion."""
    return {
        "type": "generate", "request_id": request_id, "prompt": prompt, "stream": stream, "params": params,
    }  # fmt: skip


def chat(request_id: str, *messages: Any, **fields: Any) -> dict[str, Any]:
    """A request for a reply."""
    return {"type": "generate", "request_id": request_id, "messages": [*messages], "stream": False, **fields}


@contextmanager
def peers(door: Door, count: int, **options: Any) -> Iterator[list[Peer]]:
    """So many at once."""
    many = [Peer(door, **options) for _ in range(count)]
    try:
        yield many
    finally:
        for peer in many:
            peer.close()


def post(door: Door, path: str, body: Any, seconds: float = PATIENCE, **headers: str) -> tuple[int, bytes]:
    """Status and body of what the gateway answers; raises GotThrough where that is nothing."""
    connection = HTTPConnection(door.url, timeout=seconds)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body)
        connection.request("POST", path, data, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except TimeoutError:
        raise GotThrough(f"no answer within {seconds:g} s to {path} {str(body)[:SHOWN]}...") from None
    except (OSError, HTTPException):
        return 0, b""  # hung up on
    finally:
        connection.close()


def connected(at: str) -> socket.socket:
    """A connection to HOST:PORT on which nothing is said yet."""
    host, _, port = at.rpartition(":")
    connection = socket.socket()
    connection.settimeout(PATIENCE)
    connection.connect((host, int(port)))
    return connection


@contextmanager
def held(at: str, count: int, said: bytes, *, window: int = 0) -> Iterator[list[socket.socket]]:
    """So many connections on which this has been said, as far as they can be had; a small ``window`` takes little."""
    open_ones: list[socket.socket] = []
    host, _, port = at.rpartition(":")
    try:
        with suppress(OSError):
            for _ in range(count):
                one = socket.socket()
                open_ones.append(one)
                one.settimeout(1.0)
                if window:
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
                one.connect((host, int(port)))
                one.sendall(said)
        yield open_ones
    finally:
        for one in open_ones:
            one.close()


def refused(answers: Iterable[dict[str, Any]]) -> list[str]:
    """The codes of those that are errors."""
    return [answer["code"] for answer in answers if answer["type"] == "error"]
