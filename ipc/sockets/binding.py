"""Listening sockets, which stay with the daemon when the socket's process ends."""

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ipc.errors import AddressError, AddressInUse
from ipc.wire.addresses import host_and_port, keep_private, reserved

BACKLOG = 512
"""Connections that the kernel queues until they are accepted."""


@contextmanager
def listening(address: str) -> Iterator[socket.socket]:
    """A listening socket at an address reserved for this daemon. Raises AddressError."""
    with reserved(address):
        try:
            end = _unix(address) if address.startswith("ipc://") else _tcp(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUse(f"address in use: another program listens at {address}") from error
            raise AddressError(f"cannot listen at {address}: {error.strerror}") from error
        with end:
            end.setblocking(False)
            yield end


def file_of(address: str) -> tuple[int, int] | None:
    """Which file a socket at an address is; None over TCP, and where there is none that we see."""
    if not address.startswith("ipc://"):
        return None
    try:
        file = Path(address.removeprefix("ipc://")).lstat()
    except OSError:
        return None
    return file.st_dev, file.st_ino


def _unix(address: str) -> socket.socket:
    path = Path(address.removeprefix("ipc://"))
    path.unlink(missing_ok=True)
    end = socket.socket(socket.AF_UNIX)
    try:
        end.bind(str(path))
        keep_private(address)  # before ``listen``: until then no other user can connect
        end.listen(BACKLOG)
    except BaseException:
        end.close()
        raise
    return end


def _tcp(address: str) -> socket.socket:
    host, port = host_and_port(address)
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    both = family == socket.AF_INET6 and host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(where[:2], family=family, backlog=BACKLOG, dualstack_ipv6=both)
