"""Keys: what one may not do with them."""

import time

from ipc.wire.messages import PROTOCOL_VERSION
from scripts.benchmarks.hostile.peer import Peer, generate, refused
from scripts.benchmarks.hostile.registry import KEYED, Door, GotThrough, attack

POOR = 500
"""Tokens a minute of the key "poor"."""
PROMPT = [300 + number % 200 for number in range(400)]


@attack("H6: tokens without paying, by hello", KEYED)
def hello_again(door: Door) -> None:
    """Greet again before the end, and nothing was delivered."""
    _evade(door, {"type": "hello", "version": PROTOCOL_VERSION})


@attack("H6: tokens without paying, by abort", KEYED)
def abort(door: Door) -> None:
    """Abort before the end."""
    _evade(door, {"type": "abort", "request_id": "x"})


@attack("H6: tokens without paying, by hanging up", KEYED)
def hang_up(door: Door) -> None:
    """Be gone before the end."""
    _evade(door, None)


def _evade(door: Door, leave: dict[str, object] | None) -> None:
    """Have prompts computed and leave at the first token, until it is refused."""
    worked, until = 0, time.monotonic() + door.seconds
    peer = Peer(door, key="poor")
    try:
        while time.monotonic() < until:
            peer.say(generate("x", [*PROMPT, len(PROMPT) + worked % 97], stream=True, max_tokens=100, ignore_eos=True))
            first = next((heard for heard in peer.heard(2.0) if heard["type"] != "welcome"), None)
            if first is None or refused([first]):
                return
            worked += len(PROMPT)
            if worked > 8 * POOR:
                raise GotThrough(f"{worked:,} tokens were computed for a key of {POOR} a minute")
            if leave is None:
                peer.close()
                peer = Peer(door, key="poor")
            else:
                peer.say(leave)
    finally:
        peer.close()
