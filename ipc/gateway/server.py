"""``odriver gateway``: serves the app until it is told to end."""

import logging
import os
import signal
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import uvicorn
from rich.console import Console

from ipc.errors import AddressError, AddressInUse
from ipc.gateway.app import make_app
from ipc.gateway.daemons import Daemon, Daemons
from ipc.logs import configure_logging
from ipc.systemd import notify

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT = 30.0
"""Seconds that what is open has to finish in, if nothing else is said."""
BACKLOG = 2048
"""Connections that wait to be accepted."""


def run(
    addresses: list[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    key: Path | None = None,
    drain_timeout: float = DRAIN_TIMEOUT,
    **tls: Any,
) -> int:
    """Serve these daemons at that address; the exit code. SIGTERM and SIGINT let what is open finish; a second forces."""
    console = Console(stderr=True)
    configure_logging(console)
    logging.getLogger("uvicorn").setLevel(logging.INFO)
    daemons = Daemons([Daemon(address, key) for address in addresses])
    with closing(_listen(host, port)) as listening:
        scheme = "https" if tls.get("ssl_certfile") else "http"
        at = f"[{host}]" if ":" in host else host
        url = f"{scheme}://{at}:{listening.getsockname()[1]}"
        logger.info("serving at %s", url)
        notify("READY=1", f"STATUS={url}")
        server = uvicorn.Server(_config(daemons, drain_timeout, tls))
        for number in (signal.SIGTERM, signal.SIGINT):  # which uvicorn raises again when it has ended in order
            signal.signal(number, lambda *_: None)
        server.run([listening])
    return os.EX_OK if server.started else 1


def _config(daemons: Daemons, drain_timeout: float, tls: dict[str, Any]) -> uvicorn.Config:
    return uvicorn.Config(
        make_app(daemons),
        log_config=None,
        lifespan="on",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=round(drain_timeout),
        **tls,
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=_family(host), backlog=BACKLOG)
    except OSError as error:
        if isinstance(error, OSError) and error.errno == 98:
            raise AddressInUse(f"address in use: another program listens at {host}, port {port}") from error
        raise AddressError(f"cannot listen at {host}, port {port}: {error.strerror or error}") from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
