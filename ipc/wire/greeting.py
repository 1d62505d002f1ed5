"""A ZeroMQ server's greeting, which names its security mechanism (ZMTP, RFC 23)."""

from ipc.wire.addresses import connected

_SIGNATURE_AND_VERSION = b"\xff" + bytes(8) + b"\x7f\x03"
"""The part of our greeting that a server requires before it sends all of its own."""
_LENGTH, _MECHANISM = 64, slice(12, 32)


def mechanism(address: str, timeout: float) -> str | None:
    """NULL or CURVE; None if the server does not say within ``timeout`` seconds.

    With libzmq it is a matter of chance which side learns of a mismatch: each disconnects as soon
    as it has the other's whole greeting, though its own may not be sent yet.
    """
    greeting = b""
    try:
        with connected(address) as connection:
            connection.settimeout(timeout)
            connection.sendall(_SIGNATURE_AND_VERSION)
            while len(greeting) < _LENGTH:
                data = connection.recv(_LENGTH - len(greeting))
                if not data:
                    return None
                greeting += data
    except OSError:
        return None
    return greeting[_MECHANISM].rstrip(b"\0").decode(errors="replace")
