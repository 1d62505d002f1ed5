"""Authentication by CURVE (ZeroMQ's RFC 26): which keys may connect, and as which tenants."""

import logging
from collections.abc import Callable
from pathlib import Path

from ipc.errors import KeyFileError
from ipc.sockets.tenants import Tenant
from ipc.wire import keys

logger = logging.getLogger(__name__)

GATEWAY = "(gateway)"
"""The tenant of a daemon's own gateway; no key of a directory can have that name."""


class Authority:
    """The daemon's keys. Raises KeyFileError; any thread may call anything.

    A connection is accepted if its key is authorised; ``tenant`` gives its tenant while it is.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = keys.server_key(directory)
        self._issued: dict[str, Tenant] = {}
        self._tenants = self._read()
        self._listeners: list[Callable[[], None]] = []
        if not self._tenants:
            logger.warning(
                "no key may connect yet: make one with `odriver keys new NAME`, and start the daemon again (a service:"
                " `systemctl reload odriver`)"
            )

    @property
    def secret(self) -> str:
        """The daemon's secret key, for its sockets."""
        return self._key.secret

    def issue(self, path: Path) -> None:
        """Admit the daemon's own gateway, by a key for as long as this process lives; write it."""
        limits = keys.issue(path, self._key)
        self._issued[limits.public] = Tenant(GATEWAY, limits)
        self.reload()

    def keys(self) -> list[str]:
        """The public keys that may connect."""
        return list(self._tenants)

    def tenant(self, public: str) -> Tenant | None:
        """The tenant of a key; None if it is not authorised (any more)."""
        return self._tenants.get(public)

    def on_reload(self, tell: Callable[[], None]) -> None:
        """Call this when there may be other keys; it returns when they are in force."""
        self._listeners.append(tell)

    def reload(self) -> str:
        """Read the authorised keys again; says how many there are.

        Raises KeyFileError, and changes nothing then: also where the directory has not the daemon's pair any more, as
        one that is not mounted, or was removed and made again. Nobody could connect, not even to have it read again.
        """
        if keys.existing_server_key(self._directory) != self._key:
            raise KeyFileError(f"{self._directory} has another {keys.SERVER} than at the start: start the daemon again")
        self._tenants = self._read()
        for tell in self._listeners:
            tell()
        return f"{len(self._tenants)} keys may connect"

    def _read(self) -> dict[str, Tenant]:
        found = keys.authorized(self._directory)
        return {limits.public: Tenant(name, limits) for name, limits in found.items()} | self._issued
