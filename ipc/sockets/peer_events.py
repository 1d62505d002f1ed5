"""What a socket's process tells of its connections, the peers, and how sending to one fared."""

from dataclasses import dataclass
from enum import Enum, auto


class Sent(Enum):
    """How sending fared; nothing is ever waited for."""

    AWAY = auto()
    FULL = auto()
    """The connection is full: a client that does not read, or a slow network. Nothing was sent."""
    GONE = auto()
    """There is no such client any more."""


@dataclass(eq=False)
class Peer:
    """One connection: by whom, with which key or as which user of this machine."""

    identity: bytes
    serial: int
    key: str | None
    user: int | None
    num_on_the_way: int = 0
    num_bytes_on_the_way: int = 0
    was_full: bool = False


SEVERAL = [b"", b""]
"""Stands for the frames of a message that has several, which nobody reads."""


@dataclass(frozen=True)
class Said:
    """A message's frames: one, or SEVERAL."""

    peer: Peer
    frames: list[bytes]


@dataclass(frozen=True)
class HasRoom:
    """A connection that was full takes messages again."""

    peer: Peer


@dataclass(frozen=True)
class Lost:
    """A connection is over."""

    peer: Peer


@dataclass(frozen=True)
class Refused:
    """A new connection over a limit: an error's code and message; close it after sending that."""

    peer: Peer
    code: str
    why: str


Event = Said | HasRoom | Lost | Refused
