"""What the daemon tells systemd, or whoever else listens at $NOTIFY_SOCKET (sd_notify(3))."""

import logging
import os
import socket

logger = logging.getLogger(__name__)


def notify(state: str) -> None:
    """Send one assignment, such as ``READY=1`` or ``STATUS=loading weights``; without a listener, nothing."""
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    address = "\0" + path[1:] if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.sendto(state.encode(), address)
    except OSError as error:  # serving matters more than being heard
        logger.warning("cannot tell NOTIFY_SOCKET=%s %r: %s", path, state, error)
