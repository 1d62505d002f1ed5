"""The socket that HTTP is served at."""

import errno
import socket

from engine.errors import ConfigurationError
from ipc.errors import AddressError, AddressInUse

HOST, PORT = "127.0.0.1", 8000
"""Where HTTP is served by default."""
MAX_CONNECTIONS = 4096
"""Connections that may be open by default, if there may be as many open files."""
BACKLOG = 2048
"""Connections that wait to be accepted."""


def host_and_port(text: str) -> tuple[str, int]:
    """Those of ``8000``, ``0.0.0.0:8000`` or ``[::1]:8000``; raises ConfigurationError."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535 or (":" in host and not host.startswith("[")):
        raise ConfigurationError(f"http must be PORT or HOST:PORT, not {text!r}")
    host = host.strip("[]") or HOST
    return (HOST if host == "localhost" else host), int(port)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; raises AddressError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(f"address in use: another program listens at {host}, port {port}") from error
        raise AddressError(f"cannot listen at {host}, port {port}: {error.strerror or error}") from error


def url_of(listening: socket.socket, *, is_encrypted: bool) -> str:
    """The address for a browser on this machine."""
    host, port = listening.getsockname()[:2]
    return http_url(host, port, is_encrypted=is_encrypted)


def http_url(host: str, port: int, *, is_encrypted: bool = False) -> str:
    """With an IPv6 address in brackets."""
    return f"{'https' if is_encrypted else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
