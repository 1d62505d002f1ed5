"""More of it than anybody needs: requests, connections, answers that nobody reads."""

import socket
import time
from contextlib import ExitStack, suppress

import msgspec

from ipc.wire.messages import PROTOCOL_VERSION
from scripts.benchmarks.hostile.peer import PATIENCE, Peer, generate, peers
from scripts.benchmarks.hostile.registry import DAEMON, KEYED, Door, attack

MANY = 1040
"""Just above what may wait."""
FRAMES = 100_000
PART = bytes(4 * 2**20)
LONG_AND_MORE = 3
"""Flags of a frame in ZMTP 3: its length has eight bytes, and another frame follows."""


@attack("H5: one client's requests fill the queue", DAEMON, KEYED)
def short_requests(door: Door) -> None:
    """Everybody else is to be heard all the same."""
    with Peer(door) as peer:
        for number in range(MANY):
            peer.say(generate(f"g{number}", "hi", max_tokens=1000, ignore_eos=True, timeout_s=20))
        time.sleep(door.seconds)


@attack("H5: one client's samples fill the queue", DAEMON)
def samples(door: Door) -> None:
    """Few requests, of as many samples as there may be."""
    with Peer(door) as peer:
        for number in range(40):
            peer.say(generate(f"g{number}", "hi", max_tokens=1000, ignore_eos=True, n=64, timeout_s=20))
        time.sleep(door.seconds)


@attack("H5: connections that fill the queue together", DAEMON, clients=16)
def together(door: Door) -> None:
    """Sixteen connections of one user."""
    with peers(door, 16) as many:
        for number in range(MANY // 16 + 1):
            for peer in many:
                peer.say(generate(f"g{number}", "hi", max_tokens=1000, ignore_eos=True, timeout_s=20))
        time.sleep(door.seconds)


@attack("greetings, aborts, credits and pings", DAEMON, KEYED)
def small_talk(door: Door) -> None:
    """Messages that cost nothing to send."""
    until = time.monotonic() + door.seconds
    with Peer(door) as peer:
        while time.monotonic() < until:
            for number in range(100):
                for message in (
                    {"type": "ping"}, {"type": "pong"}, {"type": "abort", "request_id": str(number)},
                    {"type": "credit", "request_id": str(number), "count": 32}, {"type": "tokenizer_info", "request_id": "i"},
                    {"type": "hello", "version": PROTOCOL_VERSION}, {"type": "hello", "version": 0}, b"\xc1",
                ):  # fmt: skip
                    peer.say(message)
            peer.hear(0.05)


@attack("requests that are aborted at once", DAEMON)
def come_and_go(door: Door) -> None:
    """Each is prepared for nothing."""
    with Peer(door) as peer:
        for number in range(2000):
            peer.say(generate(f"g{number}", "Once upon a time " * 40, max_tokens=100, n=4))
            peer.say({"type": "abort", "request_id": f"g{number}"})
        for _ in peer.heard(1.0):
            pass


@attack("H3: a stream that is not read", DAEMON, clients=4)
def unread(door: Door) -> None:
    """Nor is it given credit, or it is given more than there was."""
    with peers(door, 4, room=1) as many:
        for peer in many:
            for number in range(8):
                peer.say(generate(f"g{number}", stream=True, max_tokens=900, ignore_eos=True, n=32, logprobs=20))
                for _ in range(50):
                    peer.say({"type": "credit", "request_id": f"g{number}", "count": 32})
        time.sleep(door.seconds)


@attack("connections without a word", DAEMON, KEYED, clients=64)
def silent(door: Door) -> None:
    """More than there may be open files, and none that ends its handshake."""
    with ExitStack() as opened:
        for number in range(900):
            connection = opened.enter_context(socket.socket(socket.AF_UNIX))
            connection.settimeout(0.2)
            with suppress(OSError):
                connection.connect(door.address.removeprefix("ipc://") + (".control" if number % 2 else ""))
                if number % 3:
                    connection.sendall(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03"[: 1 + number % 11])
        time.sleep(door.seconds)


@attack("connections that come and go", DAEMON, clients=16)
def churn(door: Door) -> None:
    """Each asks something and is gone before the answer."""
    for _ in range(20):
        with peers(door, 16, hello=False) as many:
            for peer in many:
                peer.say({"type": "hello", "version": PROTOCOL_VERSION})
                peer.say(generate("g", stream=True, max_tokens=500))


@attack("messages of many frames", DAEMON, KEYED, clients=4)
def many_frames(door: Door) -> None:
    """libzmq bounds a frame. Each is dropped, and ends its connection; libzmq connects again."""
    until = time.monotonic() + door.seconds
    with peers(door, 4) as many:
        while time.monotonic() < until:
            for peer in many:
                peer.say_frames([b""] * FRAMES)
            time.sleep(0.2)


@attack("a message without an end", DAEMON)
def endless(door: Door) -> None:
    """Each frame says that another follows; as much of it as is taken."""
    until = time.monotonic() + door.seconds
    while time.monotonic() < until:
        with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):  # it is cut off
            connection.settimeout(PATIENCE)
            connection.connect(door.address.removeprefix("ipc://"))
            _greet(connection)
            while time.monotonic() < until:
                connection.sendall(bytes([LONG_AND_MORE]) + len(PART).to_bytes(8, "big"))
                connection.sendall(PART)


def _greet(connection: socket.socket) -> None:
    """Be a DEALER without keys (ZMTP 3.1), and say hello."""
    connection.sendall(b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32))
    kind, name = b"\x0bSocket-Type" + len("DEALER").to_bytes(4, "big") + b"DEALER", b"\x08Identity" + bytes(4)
    ready = b"\x05READY" + kind + name
    connection.sendall(b"\x04" + bytes([len(ready)]) + ready)
    hello = msgspec.msgpack.encode({"type": "hello", "version": PROTOCOL_VERSION})
    connection.sendall(b"\x00" + bytes([len(hello)]) + hello)
