"""Ports for servers that a test has to name before they listen."""

import itertools
import os
import socket
from contextlib import ExitStack

FIRST, COUNT = 10_000, 20_000
"""Below those that Linux gives to whoever asks for any: what is free here stays free until its server has it."""
_numbers = itertools.count(os.getpid() * 997)
"""Each process begins somewhere else, and comes to a port again only after all others."""


def free_port(count: int = 1) -> int:
    """The first of so many ports in a row that nobody listens at, of 127.0.0.1."""
    for number in _numbers:
        port = FIRST + number * count % COUNT
        with ExitStack() as probes:
            try:
                for offset in range(count):
                    probes.enter_context(socket.create_server(("127.0.0.1", port + offset)))
            except OSError:
                continue
            return port
    raise AssertionError("the numbers do not end")
