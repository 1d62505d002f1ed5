"""Serves the app at a socket until it is stopped: ``odriver gateway``, and a daemon's ``--http``."""

import asyncio
import logging
import math
import os
import resource
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from engine.errors import ConfigurationError
from ipc.errors import KeyFileError
from ipc.gateway.access.callers import Callers
from ipc.gateway.access.connection_limit import RESERVED_FILES, ConnectionLimit
from ipc.gateway.access.cross_origin import cross_origin
from ipc.gateway.access.peer_addresses import TrustedProxies
from ipc.gateway.app import make_app
from ipc.gateway.http_protocol import Protocol
from ipc.gateway.upstream.daemons import Daemons
from ipc.gateway.upstream.remote_daemon import RemoteDaemon
from ipc.process import gateway_orders, open_files
from ipc.process.gateway_orders import Log, Order, Reloaded, ReloadKeys
from ipc.process.http_socket import listen, url_of
from ipc.process.logs import configure_logging, stderr_console
from ipc.process.systemd import extend_timeout, notify

logger = logging.getLogger(__name__)

LONGEST_DRAIN = 7 * 86400.0
"""Seconds that a drain takes at most; a longer timeout means no limit."""


def run(addresses: list[str], *, host: str, port: int, **options: Any) -> int:
    """Serve these daemons at that address until SIGTERM or SIGINT; returns the exit code.

    The other options are those of ``serve``. Raises ConfigurationError and AddressError.
    """
    with closing(listen(host, port)) as listening:
        url = url_of(listening, is_encrypted=options.get("ssl_certfile") is not None)

        def announce() -> None:
            logger.info("serving at %s", url)
            notify("READY=1", f"STATUS={url}")

        def announce_end(seconds: float) -> None:
            extend_timeout(seconds)
            logger.info("nothing new is taken, and what is open has %g s to finish", seconds)

        return serve(listening, addresses, on_ready=announce, on_end=announce_end, **options)


def serve(
    listening: socket.socket,
    addresses: list[str],
    *,
    on_ready: Callable[[], None],
    on_end: Callable[[float], None] = lambda seconds: None,  # noqa: ARG005
    daemon: socket.socket | None = None,
    key: Path | None = None,
    resume_timeout: float | None = None,
    api_key: str | None = None,
    api_keys: Path | None = None,
    trusted_proxies: str,
    max_connections: int,
    allowed_origins: Sequence[str] = (),
    allowed_methods: Sequence[str] = (),
    allowed_headers: Sequence[str] = (),
    allow_credentials: bool = False,
    drain_timeout: float,
    log_level: str,
    log_format: str,
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
    **tls: Any,
) -> int:
    """Serve these daemons at a socket that listens; returns the exit code.

    SIGTERM and SIGINT let open requests finish, and so does the end of ``daemon``, a socket to the
    process that this one belongs to, from which its orders come; a SIGINT after that forces the end.
    ``resume_timeout`` is RemoteDaemon's. ``trusted_proxies`` are addresses or networks, separated by commas, whose X-Forwarded-For is
    believed.
    """
    configure_logging(stderr_console(), log_level, log_format)
    open_files.raise_limit()
    proxies = [proxy.strip() for proxy in trusted_proxies.split(",") if proxy.strip()]
    limit = _connection_limit(max_connections, proxies)
    callers = Callers(api_keys, key, api_key)
    daemon_at = partial(
        RemoteDaemon,
        key=key,
        resume_timeout=resume_timeout,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
    )
    around = cross_origin(allowed_origins, allowed_methods, allowed_headers, credentials=allow_credentials)
    app = make_app(Daemons([daemon_at(address) for address in addresses]), callers, around)
    config = _config(app, drain_timeout, proxies, limit, tls)
    try:
        config.load()
    except OSError as error:
        raise ConfigurationError(f"the certificate and its key cannot be used: {error}") from error
    server = _Server(config, on_ready, on_end, callers, daemon)
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises these again at its end
        signal.signal(number, server.end)
    server.run([listening])
    return os.EX_OK if server.started else 1


class _Server(uvicorn.Server):
    """A server that says when it is ready and when it ends, handles SIGHUP, and obeys its
    daemon."""

    def __init__(
        self,
        config: uvicorn.Config,
        on_ready: Callable[[], None],
        on_end: Callable[[float], None],
        callers: Callers,
        daemon: socket.socket | None,
    ) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._on_end = on_end
        self._callers = callers
        self._daemon = daemon

    def end(self, number: int, frame: FrameType | None) -> None:
        """A signal that has come before uvicorn listens to it, or again at its end."""
        del number, frame
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        await super().startup(sockets)
        if self._daemon is not None:
            loop.add_reader(self._daemon, self._hear, self._daemon)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_end(self.config.timeout_graceful_shutdown or 0)
        await super().shutdown(sockets)

    def _reload(self) -> None:
        """A signal has come to read the API keys again."""
        try:
            logger.info("%s", self._callers.reload() or "there is no file of API keys to read again")
        except KeyFileError as error:
            logger.error("the API keys are not reloaded: %s", error)

    def _hear(self, daemon: socket.socket) -> None:
        """Do what the daemon orders; end when it has gone."""
        try:
            order = daemon.recv(gateway_orders.LONGEST)
        except ConnectionResetError:
            order = b""
        if order:
            self._obey(daemon, gateway_orders.read_order(order))
        else:
            asyncio.get_running_loop().remove_reader(daemon)
            self.should_exit = True

    def _obey(self, daemon: socket.socket, order: Order) -> None:
        match order:
            case Log(level=level, log_format=log_format):
                configure_logging(stderr_console(), level, log_format)
            case ReloadKeys(serial=serial):
                try:
                    answer = Reloaded(serial, text=self._callers.reload())
                except KeyFileError as error:
                    answer = Reloaded(serial, error=str(error))
                daemon.send(gateway_orders.write(answer))


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
        timeout_graceful_shutdown=math.ceil(min(drain_timeout, LONGEST_DRAIN)),
        **tls,
    )
