"""Notices that this virtual machine will stop, from the metadata server of Compute Engine.

The server keeps a request until a value changes (cloud.google.com/compute/docs/metadata). A Spot
VM has 30 seconds from ``preempted``; any that is not migrated, such as one with a TPU, has 60 from
``maintenance-event``. ``upcoming-maintenance`` has the window of planned maintenance.
"""

import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

logger = logging.getLogger(__name__)

PRODUCT_NAME = Path("/sys/class/dmi/id/product_name")
"""The firmware's name of the machine: "Google Compute Engine", or another."""
ADDRESS = "169.254.169.254"
"""Of the metadata server, without asking DNS; a service's unit admits link-local addresses."""
FLAVOR = {"Metadata-Flavor": "Google"}
LONGEST_WAIT = 60
"""Seconds after which the server answers though nothing has changed."""
RETRY_INTERVAL = 5.0
"""Seconds after an error, or a key that has no value yet."""
PACE = 1.0
"""Seconds between requests, should a server not wait."""
PREEMPTION_SECONDS, MAINTENANCE_SECONDS = 30.0, 60.0
KEYS = ("preempted", "maintenance-event", "upcoming-maintenance")

Heard = Callable[[str, float], None]
"""(why, seconds): the machine stops in so many seconds. Called once, on a thread of VMNotices."""


def metadata_server(product_name: Path = PRODUCT_NAME) -> str | None:
    """Its HOST or HOST:PORT; None on other machines, found out without any network.

    The variables are those of Google's libraries: GCE_METADATA_HOST names a server, and
    NO_GCE_CHECK=true says that there is none.
    """
    if os.environ.get("NO_GCE_CHECK") == "true":
        return None
    if host := os.environ.get("GCE_METADATA_HOST"):
        return host
    try:
        is_google = product_name.read_text().startswith("Google")
    except OSError:
        return None
    return os.environ.get("GCE_METADATA_IP", ADDRESS) if is_google else None


def seconds_left(key: str, value: str) -> tuple[str, float] | None:
    """Why and when the machine stops, by a key's value; None if it does not."""
    if key == "preempted" and value == "TRUE":
        return "this Spot VM is preempted", PREEMPTION_SECONDS
    if key == "maintenance-event" and value == "TERMINATE_ON_HOST_MAINTENANCE":
        return "this VM is stopped for maintenance of its host", MAINTENANCE_SECONDS
    if key == "upcoming-maintenance" and "ONGOING" in value:
        return "maintenance of this VM's host has begun", MAINTENANCE_SECONDS
    return None


class VMNotices:
    """Watches a metadata server, on a thread for each key; does nothing where there is none."""

    def __init__(self, heard: Heard, server: str | None) -> None:
        self._heard = heard
        self._server = server
        self._stopped = threading.Event()
        self._turn = threading.Lock()
        self._connections: dict[str, HTTPConnection] = {}

    def start(self) -> None:
        """Begin to watch; never waits for the server."""
        if self._server is None:
            return
        logger.info("notices of preemption and maintenance come from the metadata server at %s", self._server)
        for key in KEYS:
            threading.Thread(target=self._watch, args=(key,), name=f"metadata {key}", daemon=True).start()

    def stop(self) -> None:
        """Hear nothing more."""
        self._stopped.set()
        for connection in list(self._connections.values()):
            with suppress(OSError, AttributeError):  # it has just been closed
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _watch(self, key: str) -> None:
        etag = before = ""
        silent = False
        while not self._stopped.is_set():
            try:
                value, etag = self._ask(key, etag)
            except (OSError, HTTPException, ValueError) as error:
                if not (silent or self._stopped.is_set()):
                    logger.warning(
                        "the metadata server at %s does not say %s (%r): it is asked again", self._server, key, error
                    )
                silent, etag = True, ""
                self._stopped.wait(RETRY_INTERVAL)
                continue
            silent = False
            if notice := seconds_left(key, value):
                self._hear(*notice)
                return
            if value != before and key == "upcoming-maintenance":
                logger.warning("maintenance of this VM's host is planned: %s", value)
            before = value
            self._stopped.wait(PACE if etag else RETRY_INTERVAL)

    def _ask(self, key: str, etag: str) -> tuple[str, str]:
        """A key's value and ETag, both empty if it has none; with an ETag, waits for another.

        Raises OSError, HTTPException, and ValueError if what answers is no metadata server.
        """
        assert self._server is not None
        connection = self._connections[key] = HTTPConnection(self._server, timeout=LONGEST_WAIT + RETRY_INTERVAL)
        try:
            wait = f"?wait_for_change=true&timeout_sec={LONGEST_WAIT}&last_etag={etag}" if etag else ""
            connection.request("GET", f"/computeMetadata/v1/instance/{key}{wait}", headers=FLAVOR)
            reply = connection.getresponse()
            body = reply.read(1 << 16).decode(errors="replace").strip()
            if reply.status == 404:
                return "", ""
            if reply.status != 200 or reply.getheader("Metadata-Flavor") != "Google":
                raise ValueError(f"{reply.status} {reply.reason}")
            return body, reply.getheader("ETag") or ""
        finally:
            connection.close()

    def _hear(self, why: str, seconds: float) -> None:
        with self._turn:
            if not self._stopped.is_set():
                self._stopped.set()
                self._heard(why, seconds)
