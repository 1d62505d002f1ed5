"""What an attack is, and which there are: each module of attacks adds its own when it is imported."""

from collections.abc import Callable

from msgspec import Struct

DAEMON, GATEWAY, KEYED = "daemon", "gateway", "keyed daemon"
"""What is attacked."""


class GotThrough(Exception):
    """An attack did what it was to do; the message says what."""


class Door(Struct, frozen=True):
    """Where one who attacks can knock, and what they know."""

    address: str
    """Of the daemon."""
    url: str = ""
    """Of the gateway, HOST:PORT."""
    metrics: str = ""
    """Of the daemon's metrics port, HOST:PORT."""
    keys: dict[str, str] = {}
    """Files of keys, by name: "plain" may not control, "poor" has 500 tokens a minute; empty where none are asked for."""
    logs: list[str] = []
    """Files that daemon and gateway log to, which are looked into to see what an attack has written."""
    seconds: float = 4.0
    """How long an attack goes on, at most by much."""


Run = Callable[[Door], None]


class Attack(Struct, frozen=True):
    """``run`` is called again and again while there is time; it raises GotThrough for what it can see by itself."""

    name: str
    target: str
    clients: int
    """Connections that it has at once, as far as they cost the daemon what ordinary ones would."""
    run: Run


ATTACKS: list[Attack] = []


def attack(name: str, *targets: str, clients: int = 1) -> Callable[[Run], Run]:
    """Adds a function to ATTACKS, for each of these targets."""

    def add(run: Run) -> Run:
        ATTACKS.extend(Attack(name, target, clients, run) for target in targets)
        return run

    return add
