"""oDriver for programs: its clients, what they return, and the errors that they raise.

    from odriver import Client

    with Client() as client:
        for piece in client.generate("Once upon a time", max_tokens=64):
            print(piece.text, end="", flush=True)

This module only names them; each is documented where it is defined. It loads no jax.
"""

from driver.request import Logprob, Timings, Usage
from ipc.async_client import AsyncClient, AsyncStream
from ipc.client import Client, Stream
from ipc.control_client import ControlClient
from ipc.errors import (
    AddressError,
    ConnectFailed,
    ConnectionLost,
    DaemonStarting,
    KeyFileError,
    OdriverError,
    RequestFailed,
    ResumeFailed,
)
from ipc.wire.completion import Choice, Completion, Message, Piece, TokenLogprobs

__all__ = [
    "AddressError",
    "AsyncClient",
    "AsyncStream",
    "Choice",
    "Client",
    "Completion",
    "ConnectFailed",
    "ConnectionLost",
    "ControlClient",
    "DaemonStarting",
    "KeyFileError",
    "Logprob",
    "Message",
    "OdriverError",
    "Piece",
    "RequestFailed",
    "ResumeFailed",
    "Stream",
    "Timings",
    "TokenLogprobs",
    "Usage",
]
