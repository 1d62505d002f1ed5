"""The control socket, the log, and the metrics port."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.benchmarks.hostile.peer import Peer, connected, generate, held, post
from scripts.benchmarks.hostile.registry import DAEMON, GATEWAY, KEYED, Door, GotThrough, attack

FORGED = "2026-11-21 00:00:00,000 ERROR ipc.service.daemon: FORGED"
WORDS = [f"x{end}{FORGED}\x1b[31m\x9b2J" for end in ("\n", "\r", "\u2028", "\x0b", "\x85", "\r\n")]
COMMANDS: list[dict[str, Any]] = [
    {"type": "drain", "timeout_s": 0.0},
    {"type": "drain", "timeout_s": float("inf")},
    {"type": "sleep"},
    {"type": "log_level", "level": "error"},
    {"type": "abort_request", "target": "x"},
    {"type": "profile", "name": "x"},
    {"type": "status"},
    {"type": "metrics"},
]
PATHS = ("gs://bucket/x", "/tmp/x", "../x", "a/b", "http://127.0.0.1:1/", "", ".", "..", "x\0y", "x\n")


@attack("M1: forged lines of the log", DAEMON, KEYED)
def forge(door: Door) -> None:
    """By a request's id, which the log has."""
    with Peer(door) as peer:
        for words in WORDS:
            peer.ask(generate(words[:128], max_tokens=1))
            peer.ask(generate(words[:128], no_such=words))
    _look(door)


@attack("M1: forged lines of the log, by path", GATEWAY)
def forge_by_path(door: Door) -> None:
    """By an address that nothing is at, before anybody is asked who they are."""
    for words in WORDS:
        quoted = "".join(f"%{byte:02x}" for byte in words.encode())
        post(door, f"/{quoted}", {})
        post(door, "/v1/completions", {"prompt": "x", words: 1, "max_tokens": 1})
        post(door, "/v1/completions", {"prompt": "x", "max_tokens": 1}, **{"X-Request-Id": "a\tb"})
    _look(door)


def _look(door: Door) -> None:
    for log in door.logs:
        text = Path(log).read_text(encoding="utf-8", errors="replace")
        if any(line.startswith("2026-11-21") for line in text.splitlines()):
            raise GotThrough(f"a line of {Path(log).name} is forged")
        if any(hidden in text for hidden in "\x1b\x9b\u2028"):
            raise GotThrough(f"{Path(log).name} has what a terminal obeys")


@attack("M3: commands of who may not", KEYED)
def command(door: Door) -> None:
    """With a key that was not made for it."""
    with Peer(door, key="plain", control=True) as peer:
        for message in COMMANDS:
            answer = peer.ask({**message, "request_id": "c"})
            if answer.get("code") != "forbidden":
                raise GotThrough(f"{message['type']} is answered {answer}")


@attack("M4: profiles elsewhere", DAEMON)
def profile(door: Door) -> None:
    """To wherever the daemon may write, or to machines that it may reach."""
    with Peer(door, control=True) as peer:
        for path in PATHS:
            for field in ("name", "directory"):
                answer = peer.ask({"type": "profile", "request_id": "p", field: path})
                if answer["type"] != "error":
                    peer.ask({"type": "profile", "request_id": "p"})
                    raise GotThrough(f"a profile for {path!r} is taken")


@attack("M5: drains that never are", DAEMON)
def drains(door: Door) -> None:
    """NaN and less than nothing; how an endless one ends is looked at last of all."""
    with Peer(door, control=True) as peer:
        for seconds in (float("nan"), -1.0, -float("inf"), "1", []):
            answer = peer.ask({"type": "drain", "request_id": "d", "timeout_s": seconds})
            if answer.get("code") != "invalid_request":
                raise GotThrough(f"a drain of {seconds} s is answered {answer}")


@attack("M10: slow connections to the metrics port", DAEMON)
def metrics(door: Door) -> None:
    """More than there may be, with a byte now and then."""
    with held(door.metrics, 300, b"GET /met") as slow:
        for connection in slow[::10]:
            with suppress(OSError):
                connection.sendall(b"r")
        with connected(door.metrics) as scrape:
            scrape.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            if b" 200 " not in scrape.recv(64):
                raise GotThrough("a scrape is not answered")
