"""Notifications for systemd, or any other listener at $NOTIFY_SOCKET (sd_notify(3))."""

import logging
import os
import socket
import time

logger = logging.getLogger(__name__)

LONGEST_EXTENSION = 30 * 86400.0
"""The longest extension that systemd accepts, in seconds."""


def notify(*assignments: str) -> None:
    """Send assignments, such as ``READY=1``, as one message; without a listener, nothing."""
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    address = "\0" + path[1:] if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.sendto("\n".join(assignments).encode(), address)
    except OSError as error:  # serving matters more than notifying
        logger.warning("cannot notify NOTIFY_SOCKET=%s of %r: %s", path, assignments, error)


def notify_reloading() -> None:
    """A reload begins; READY=1 has to follow."""
    notify("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")


def extend_timeout(seconds: float) -> None:
    """Announce that a start or stop ends, or is extended again, within so many seconds."""
    notify(f"EXTEND_TIMEOUT_USEC={round(1e6 * min(LONGEST_EXTENSION, seconds))}")


def watchdog_interval() -> float | None:
    """Systemd's watchdog timeout in seconds (sd_watchdog_enabled(3)); None without one."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    if not microseconds.isdecimal() or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(microseconds) / 1e6 or None
