"""``odriver gateway``: serves the app until it is told to end."""

import asyncio
import errno
import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import uvicorn
from rich.console import Console
from starlette.applications import Starlette

from engine.errors import ConfigurationError
from ipc.addresses import is_loopback
from ipc.errors import AddressError, AddressInUse
from ipc.gateway.app import make_app
from ipc.gateway.callers import Callers
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
    api_keys: Path | None = None,
    drain_timeout: float = DRAIN_TIMEOUT,
    **tls: Any,
) -> int:
    """Serve these daemons at that address; the exit code. SIGTERM and SIGINT let what is open finish; a second forces."""
    console = Console(stderr=True)
    configure_logging(console)
    logging.getLogger("uvicorn").setLevel(logging.INFO)
    _check_reach(host, api_keys, tls)
    callers = Callers(api_keys, key)
    app = make_app(Daemons([Daemon(address, key) for address in addresses]), callers)
    with closing(_listen(host, port)) as listening:
        scheme = "https" if tls.get("ssl_certfile") else "http"
        at = f"[{host}]" if ":" in host else host
        url = f"{scheme}://{at}:{listening.getsockname()[1]}"
        logger.info("serving at %s", url)
        notify("READY=1", f"STATUS={url}")
        server = _Server(_config(app, drain_timeout, tls))
        server.when_hung_up = callers.reload
        for number in (signal.SIGTERM, signal.SIGINT):  # which uvicorn raises again when it has ended in order
            signal.signal(number, lambda *_: None)
        server.run([listening])
    return os.EX_OK if server.started else 1


class _Server(uvicorn.Server):
    """One that hears SIGHUP."""

    when_hung_up: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.when_hung_up)
        await super().startup(sockets)


def _check_reach(host: str, api_keys: Path | None, tls: dict[str, Any]) -> None:
    """Raises ConfigurationError where other machines could have the daemons work without saying who they are."""
    if is_loopback(host):
        return
    if api_keys is None:
        raise ConfigurationError(
            f"other machines may reach {host}, and anybody there could use the models: name those who may with "
            "--api-keys FILE, or serve at 127.0.0.1"
        )
    if tls.get("ssl_certfile") is None:
        logger.warning("API keys and all that is said travel unencrypted: give --ssl-certfile and --ssl-keyfile")


def _config(app: Starlette, drain_timeout: float, tls: dict[str, Any]) -> uvicorn.Config:
    return uvicorn.Config(
        app,
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
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(f"address in use: another program listens at {host}, port {port}") from error
        raise AddressError(f"cannot listen at {host}, port {port}: {error.strerror or error}") from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
