"""``odriver gateway``: serves the app until it is stopped."""

import asyncio
import errno
import logging
import math
import os
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from rich.console import Console
from starlette.applications import Starlette

from engine.errors import ConfigurationError
from ipc.errors import AddressError, AddressInUse
from ipc.gateway.access.callers import Callers
from ipc.gateway.access.connection_limit import MAX_CONNECTIONS, RESERVED_FILES, ConnectionLimit
from ipc.gateway.access.peer_addresses import TrustedProxies
from ipc.gateway.app import make_app
from ipc.gateway.daemons import Daemons, RemoteDaemon
from ipc.gateway.http_protocol import Protocol
from ipc.process import open_files
from ipc.process.logs import configure_logging
from ipc.process.systemd import notify
from ipc.wire.addresses import is_loopback

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT = 30.0
"""Default seconds to finish open requests in."""
BACKLOG = 2048
"""Connections that wait to be accepted."""


def run(
    addresses: list[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    key: Path | None = None,
    api_keys: Path | None = None,
    trusted_proxies: str = "",
    max_connections: int = MAX_CONNECTIONS,
    drain_timeout: float = DRAIN_TIMEOUT,
    log_level: str = "info",
    log_format: str = "text",
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
    **tls: Any,
) -> int:
    """Serve these daemons at that address; returns the exit code.

    SIGTERM and SIGINT let open requests finish; a second signal forces the end.
    ``trusted_proxies`` are addresses or networks, separated by commas, whose X-Forwarded-For is
    believed.
    """
    console = Console(stderr=True)
    configure_logging(console, logging.getLevelNamesMapping()[log_level.upper()], log_format)
    open_files.raise_limit()
    _check_reach(host, api_keys, tls)
    proxies = [proxy.strip() for proxy in trusted_proxies.split(",") if proxy.strip()]
    limit = _connection_limit(max_connections, proxies)
    callers = Callers(api_keys, key)
    daemon_at = partial(RemoteDaemon, key=key, tool_call_parser=tool_call_parser, reasoning_parser=reasoning_parser)
    app = make_app(Daemons([daemon_at(address) for address in addresses]), callers)
    with closing(_listen(host, port)) as listening:
        scheme = "https" if tls.get("ssl_certfile") else "http"
        at = f"[{host}]" if ":" in host else host
        url = f"{scheme}://{at}:{listening.getsockname()[1]}"
        server = _Server(_config(app, drain_timeout, proxies, limit, tls), url, callers.reload)
        for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises these again at its end
            signal.signal(number, server.end)
        server.run([listening])
    return os.EX_OK if server.started else 1


class _Server(uvicorn.Server):
    """A server that announces its address when it is ready, and handles SIGHUP."""

    def __init__(self, config: uvicorn.Config, url: str, reload: Callable[[], None]) -> None:
        super().__init__(config)
        self._url = url
        self._reload = reload

    def end(self, number: int, frame: FrameType | None) -> None:
        """A signal that has come before uvicorn listens to it, or again at its end."""
        del number, frame
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload)
        await super().startup(sockets)
        if self.started:
            logger.info("serving at %s", self._url)
            notify("READY=1", f"STATUS={self._url}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        left = self.config.timeout_graceful_shutdown
        logger.info("nothing new is taken, and what is open has %s s to finish", left)
        await super().shutdown(sockets)


def _check_reach(host: str, api_keys: Path | None, tls: dict[str, Any]) -> None:
    """Raises ConfigurationError where other machines could use the daemons without a key."""
    if is_loopback(host):
        return
    if api_keys is None:
        raise ConfigurationError(
            f"other machines may reach {host}, and anybody there could use the models: name those who may with "
            "--api-keys FILE, or serve at 127.0.0.1"
        )
    if tls.get("ssl_certfile") is None:
        logger.warning("API keys and all requests travel unencrypted: give --ssl-certfile and --ssl-keyfile")


def _connection_limit(most: int, proxies: list[str]) -> ConnectionLimit:
    """As many as there may be open files for; raises ConfigurationError."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and most > files - RESERVED_FILES:
        most = max(1, files - RESERVED_FILES)
        logger.warning("%d connections may be open at once, as %d files may (ulimit -n)", most, files)
    try:
        trusted = TrustedProxies(proxies)
    except ValueError as error:
        raise ConfigurationError(f"--trusted-proxies: {error}") from error
    return ConnectionLimit(most, trusted.__contains__)


def _config(
    app: Starlette, drain_timeout: float, proxies: list[str], limit: ConnectionLimit, tls: dict[str, Any]
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,  # ours has the request's name
        http=partial(Protocol, limit=limit),  # type: ignore[arg-type]
        proxy_headers=bool(proxies),
        forwarded_allow_ips=proxies,
        lifespan="on",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=math.ceil(drain_timeout),
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
