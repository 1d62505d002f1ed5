"""What a daemon tells its own gateway while that serves, and hears of it: msgpack over a
SOCK_SEQPACKET socket."""

import msgspec
from msgspec import Struct


class Log(Struct, frozen=True, tag="log"):
    """Log so from now on."""

    level: str
    log_format: str


class ReloadKeys(Struct, frozen=True, tag="reload_keys"):
    """Read the API keys again, and say what has come of it."""

    serial: int


class Reloaded(Struct, frozen=True):
    """The answer to ``ReloadKeys``; ``error`` is why the keys are what they were."""

    serial: int
    text: str = ""
    error: str = ""


Order = Log | ReloadKeys
LONGEST = 1 << 16
"""Bytes of a message."""
read_order = msgspec.msgpack.Decoder(Order).decode
read_answer = msgspec.msgpack.Decoder(Reloaded).decode
write = msgspec.msgpack.Encoder().encode
