"""The ROUTER that clients connect to, and its configuration by the daemon."""

from typing import TypedDict

import zmq

RECEIVE_HIGH_WATER = 16
"""Messages of one client held unread; beyond them it waits in its own memory, not in ours."""
SEND_HIGH_WATER = 500
"""Messages queued for a client that does not read; as many more may be on their way here, and of
either no more than some MiB."""
LINGER = 1000
"""Milliseconds that the last messages have to leave when the socket closes."""
KEEPALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 30, zmq.TCP_KEEPALIVE_INTVL: 10, zmq.TCP_KEEPALIVE_CNT: 3}
"""TCP keepalive: seconds of silence, seconds between probes, and their number."""
HELLO_LIMIT = 10.0
"""Seconds within which a connection must send something."""

_DOMAIN = "odriver"


class SocketConfiguration(TypedDict):
    """The daemon's first message."""

    address: str
    max_message_bytes: int
    """Longer messages are not even read, but end their connection."""
    silence_limit: float | None
    """Seconds after which a silent connection is closed."""
    secret: str | None
    """The daemon's secret key: with it, none but authorised keys may connect."""
    keys: list[str]


def new_router(context: "zmq.Context[zmq.Socket[bytes]]", configuration: SocketConfiguration) -> "zmq.Socket[bytes]":
    """A ROUTER with all its options, not bound yet."""
    router = context.socket(zmq.ROUTER)
    # Before binding: libzmq ends the session of a peer that has gone by what the listener
    # copied then.
    router.setsockopt(zmq.LINGER, LINGER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.MAXMSGSIZE, configuration["max_message_bytes"])
    router.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
    router.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
    router.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * HELLO_LIMIT))
    router.setsockopt(zmq.IPV6, 1 if "[" in configuration["address"] else 0)
    # The kernel closes what leads to a machine that is gone; a peer that is merely frozen it
    # takes for alive.
    for option, value in KEEPALIVE.items():
        router.setsockopt(option, value)
    # With a domain libzmq asks about everybody, and not about those with keys alone.
    router.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
    if configuration["secret"] is not None:
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, configuration["secret"].encode())
    return router
