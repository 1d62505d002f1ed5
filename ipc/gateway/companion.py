"""The program of a daemon's own gateway (``odriver serve --http``), which the daemon starts.

It gets its options and the socket that listens over a socket from the daemon, later orders
(gateway_orders.py), and ends when the daemon has closed that one, which the daemon's end does,
however it comes.
"""

import ctypes
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ConfigurationError
from engine.exit_codes import MISCONFIGURED, STOPPED
from ipc.errors import OdriverError
from ipc.gateway.http_server import serve
from ipc.process import gateway_orders
from ipc.process.gateway_process import SERVING

PATHS = ("key", "api_keys")
_PR_SET_NAME = 15
"""prctl(2)"""


def main(control: int) -> int:
    """Be the program; ``control`` is the file descriptor of the socket to the daemon."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"odriver-gateway")
    with socket.socket(fileno=control) as daemon:
        options, descriptors, _, _ = socket.recv_fds(daemon, gateway_orders.LONGEST, 1)
        if not options:
            return STOPPED  # the daemon has gone
        try:
            with socket.socket(fileno=descriptors[0]) as listening:
                return _serve(daemon, listening, msgspec.msgpack.decode(options))
        except (ConfigurationError, OdriverError, OSError) as error:
            with suppress(BrokenPipeError):  # the daemon has gone meanwhile
                daemon.send(str(error).encode())
            return MISCONFIGURED


def _serve(daemon: socket.socket, listening: socket.socket, options: dict[str, Any]) -> int:
    def announce() -> None:
        daemon.send(SERVING)

    paths = {name: Path(options[name]) for name in PATHS if options.get(name) is not None}
    return serve(listening, [options.pop("address")], on_ready=announce, daemon=daemon, **(options | paths))
