"""What the rules of both sockets answer alike, and how they send it."""

from collections.abc import Callable

import msgspec

from ipc.server.driver_protocol import Driver
from ipc.sockets.peer_events import Sent
from ipc.sockets.tenants import Tenant
from ipc.wire.messages import PROTOCOL_VERSION, AdaptersReply, Error, Hello, ServerMessage, Welcome

Send = Callable[[bytes, ServerMessage], Sent]
"""Sends to one client without waiting."""


def greeting(welcome: Welcome, identity: bytes, hello: Hello) -> Welcome | Error:
    """The answer to ``hello``: a client of another protocol version is refused."""
    if hello.version == PROTOCOL_VERSION:
        return msgspec.structs.replace(welcome, client_id=identity.hex())
    return unsupported(hello)


def unsupported(hello: Hello) -> Error:
    """The answer to a client of another protocol version."""
    words = f"this daemon speaks version {PROTOCOL_VERSION} of the protocol, not {hello.version}"
    return Error(None, "unsupported_version", words)


def listed_adapters(driver: Driver, request_id: str, tenant: Tenant) -> AdaptersReply:
    """The adapters that a tenant may use."""
    rows = driver.adapters.rows(tenant.adapters)
    return AdaptersReply(request_id, [msgspec.structs.asdict(row) for row in rows])
