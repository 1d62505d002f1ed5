"""File descriptors of connections: their peers, what is under way in them, and how to end them."""

import fcntl
import os
import resource
import socket
import struct
import sys
import termios

USER = "uid "
"""Prefix of a peer that is a user of this machine."""


def peer_of(descriptor: int) -> str | None:
    """The user or the machine at the other end, by the kernel's word; None if it has gone."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as end:
            if end.family == socket.AF_UNIX:
                _, uid, _ = struct.unpack("=iII", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                return f"{USER}{uid}"
            host: str = end.getpeername()[0]
            if end.family == socket.AF_INET6 and "." not in host:
                # One machine has all addresses of a /64.
                return socket.inet_pton(socket.AF_INET6, host)[:8].hex()
            return host
    except OSError:
        return None


def shut(descriptor: int, peer: str) -> None:
    """End a connection of libzmq's, which sees its peer gone; not if the number was reused."""
    if peer_of(descriptor) != peer:
        return
    try:
        with socket.socket(fileno=os.dup(descriptor)) as end:
            end.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it has gone just now


def num_unread(descriptor: int) -> int:
    """The bytes that have arrived and are not read yet; 0 if it has gone."""
    return _asked(descriptor, termios.FIONREAD)


def num_unsent(descriptor: int) -> int:
    """The bytes that are written and have not left this machine, or have not been read by its peer
    on this one. 0 if it has gone.

    They stay above 0 as long as libzmq has more to write, once it has begun to.
    """
    return _asked(descriptor, termios.TIOCOUTQ)


def _asked(descriptor: int, request: int) -> int:
    try:
        return int.from_bytes(fcntl.ioctl(descriptor, request, bytes(4)), sys.byteorder)
    except OSError:
        return 0


def is_chosen(routing_id: bytes) -> bool:
    """Whether the peer chose its routing id: libzmq's have five bytes, the first of them 0."""
    return len(routing_id) != 5 or routing_id[0] != 0


def raise_open_files_limit() -> int:
    """Have as many open files as may be; how many those are."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most if most != resource.RLIM_INFINITY else 2**20
