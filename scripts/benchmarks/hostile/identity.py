"""Names of connections that are not one's own."""

import time
from contextlib import ExitStack, suppress

from scripts.benchmarks.hostile.peer import PATIENCE, Peer, generate
from scripts.benchmarks.hostile.registry import DAEMON, KEYED, Door, GotThrough, attack

AHEAD = range(-2, 12)
"""Of the counter of names that the server gives, as far as a client can tell it."""


def _squat(door: Door, counter: int, stack: ExitStack) -> None:
    for ahead in AHEAD:
        name = b"\0" + ((counter + ahead) & 0xFFFFFFFF).to_bytes(4, "big")
        stack.enter_context(Peer(door, name=name, hello=False)).say({"type": "ping"})


@attack("C5: the next connection's name is taken", DAEMON, KEYED, clients=16)
def squat(door: Door) -> None:
    """libzmq gives names by counting, and ends the process where one is taken already."""
    with ExitStack() as stack:
        first = stack.enter_context(Peer(door))
        with suppress(ValueError, KeyError):
            told = bytes.fromhex(first.welcome["client_id"])
            _squat(door, int.from_bytes(told[1:5], "big"), stack)
        for _ in range(len(AHEAD) + 2):
            if not stack.enter_context(Peer(door)).welcome:
                raise GotThrough("a new client is not welcomed")


@attack("C5: names of all shapes", DAEMON, KEYED, clients=16)
def shapes(door: Door) -> None:
    """Short, long, like the server's own, and several with the same."""
    names = [
        b"\0",
        b"\0\0",
        b"\0" * 5,
        b"\0\xff\xff\xff\xff",
        b"\0" + b"x" * 254,
        b"x" * 255,
        b"a",
        b"a",
        b"\xff",
        b"\n\x1b",
    ]
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(Peer(door, name=name, hello=False)).say(generate("g"))
        time.sleep(0.1)
        if not stack.enter_context(Peer(door)).welcome:
            raise GotThrough("a new client is not welcomed")


@attack("M12: a name of one's own", DAEMON, KEYED, clients=2)
def own_name(door: Door) -> None:
    """Nobody has one, so nobody is kept out by one, or heard in another's place."""
    with Peer(door, name=b"somebody") as squatter, Peer(door) as other:
        if squatter.welcome.get("type") == "welcome":
            raise GotThrough("a connection has chosen its name")
        if other.welcome.get("type") != "welcome":
            raise GotThrough("a new client is not welcomed")
        other.say(generate("mine", stream=True, max_tokens=5))
        squatter.say({"type": "abort", "request_id": "mine"})
        for heard in other.heard(PATIENCE):
            if heard["type"] == "done":
                if heard["finish_reason"] == "abort":
                    raise GotThrough("another connection has aborted a request")
                return
        raise GotThrough("a request beside a connection that names itself is not answered")
