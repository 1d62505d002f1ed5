"""HTTP as nobody should speak it."""

import json
import time
from contextlib import suppress
from typing import Any

from scripts.benchmarks.hostile.peer import connected, held, post
from scripts.benchmarks.hostile.registry import GATEWAY, Door, GotThrough, attack

MANY = 900
"""Connections: with those that serve the honest, just about what there may be open files."""
COMPLETIONS = "/v1/completions"


@attack("H3: streams that are not read", GATEWAY, clients=4)
def unread(door: Door) -> None:
    """As much as can be had, by who takes nothing."""
    body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "n": 64, "logprobs": 20, "stream": True}
    with held(door.url, 4, _request(body), window=2048):
        time.sleep(2 * door.seconds)


@attack("H4: bodies that never end", GATEWAY, clients=16)
def half_bodies(door: Door) -> None:
    """Of as many connections as there can be."""
    _hold(door, f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{".encode())


@attack("H4: chunks that never end", GATEWAY, clients=16)
def half_chunks(door: Door) -> None:
    """The same without a length."""
    _hold(door, f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{{".encode())


@attack("H4: heads that never end", GATEWAY, clients=16)
def half_heads(door: Door) -> None:
    """Or have not begun."""
    _hold(door, b"GET / HTTP/1.1\r\nHost: loc")


@attack("H4: connections without a word", GATEWAY, clients=16)
def silent(door: Door) -> None:
    """They are accepted, and that is all."""
    _hold(door, b"")


def _hold(door: Door, said: bytes) -> None:
    with held(door.url, MANY, said):
        time.sleep(door.seconds)


@attack("H4: megabytes of bodies at once", GATEWAY, clients=16)
def large_bodies(door: Door) -> None:
    """Each just below what is taken, and not whole."""
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8000000\r\n\r\n".encode()
    with held(door.url, 64, head + b'{"prompt": "' + b"x" * 2_000_000):
        time.sleep(door.seconds)


@attack("H5: one body of many prompts and samples", GATEWAY)
def many_prompts(door: Door) -> None:
    """A thousand of these and 64 of those."""
    body = {"prompt": ["hi"] * 1024, "n": 64, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with held(door.url, 1, _request(body)):
        time.sleep(door.seconds)


@attack("LOW: heads of another time", GATEWAY)
def odd_heads(door: Door) -> None:
    """Each is answered or hung up on."""
    for said in (
        b"GET /health HTTP/1.0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00" * 100,
        b"GET /\x1b[31m HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ):
        with connected(door.url) as connection, suppress(OSError):
            connection.settimeout(0.5)
            connection.sendall(said)
            connection.recv(65536)
    if post(door, COMPLETIONS, {"prompt": "x", "max_tokens": 1})[0] != 200:
        raise GotThrough("an ordinary request is not answered")


@attack("bodies that are none", GATEWAY)
def odd_bodies(door: Door) -> None:
    """Each is answered with words."""
    for body in (
        b"", b"{", b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}", b'{"prompt": 1e400}', b'{"prompt": "\\ud800"}', b"null", b"[]",
        b'{"prompt": ' + b"9" * 1_000_000 + b"}", b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", b" " * 7_000_000,
        b'{"prompt": "x", "prompt": "y", "max_tokens": 1}', b'{"a":1,' * 100_000, b'{"prompt": "' + b"\\u0000" * 1_000_000 + b'"}',
    ):  # fmt: skip
        for path in (COMPLETIONS, "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"):
            post(door, path, body)


@attack("hanging up in the middle", GATEWAY, clients=64)
def hang_up(door: Door) -> None:
    """What was asked for is to end with it; until then it is the work of more than 64 clients that ask for one sample."""
    body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "n": 8, "stream": True}
    with held(door.url, 16, _request(body)):
        time.sleep(0.3)


def _request(body: dict[str, Any]) -> bytes:
    """What a POST of it looks like."""
    data = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
