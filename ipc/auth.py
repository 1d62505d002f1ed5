"""Who may connect by CURVE (ZeroMQ's RFC 26): the answer to libzmq's question (ZAP, RFC 27) about each connection."""

import logging
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from ipc import keys
from ipc.errors import KeyFileError
from ipc.tenants import Tenant

logger = logging.getLogger(__name__)

DOMAIN = "odriver"


class Authority:
    """The daemon's keys. Raises KeyFileError; any thread may call anything.

    A connection is let in if its key is authorised then; ``tenant`` says whether it still is, and as whom.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = keys.server_key(directory)
        self._tenants = self._read()
        self._authenticator: ThreadAuthenticator | None = None
        if not self._tenants:
            logger.warning("no key may connect yet: make one with `odriver keys new NAME`, then send the daemon SIGHUP")

    def start(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        """Answer for the sockets of this context; before any of them is bound."""
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(DOMAIN, self)

    def stop(self) -> None:
        """Answer no more; a second time changes nothing."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None

    def secure(self, socket: "zmq.Socket[bytes]") -> None:
        """Have a socket, not yet bound, take none but authorised keys."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._key.secret.encode())
        socket.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)

    def tenant(self, public: str) -> Tenant | None:
        """Whose key that is; None if it is not authorised (any more)."""
        return self._tenants.get(public)

    def reload(self) -> None:
        """Read the authorised keys again; of a directory that is wrong, nothing."""
        try:
            self._tenants = self._read()
        except KeyFileError as error:
            logger.error("the keys are not reloaded: %s", error)
            return
        logger.info("%d keys may connect", len(self._tenants))

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether this key may connect; pyzmq asks."""
        del domain
        return key.decode() in self._tenants

    def _read(self) -> dict[str, Tenant]:
        found = keys.authorized(self._directory)
        return {limits.public: Tenant(name, limits) for name, limits in found.items()}
