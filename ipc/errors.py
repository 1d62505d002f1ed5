"""The errors of the daemon's clients, by whose fault they are.

OdriverError
    AddressError        the address cannot be used: wrong form, unsafe directory
        AddressInUse    another process listens there
    KeyFileError        a file of keys is missing, wrong, or open to others
    ConnectFailed       no daemon answered there, or it refused us
        DaemonStarting  the daemon there is not ready yet
    ConnectionLost      the daemon went away, or the client was closed, with the request open
        ResumeFailed    the one that came back cannot go on with it
    RequestFailed       the daemon's answer to one request: a code and a message
    BatchError          a batch's input or output cannot be read, written or told apart
"""

from typing import Self


class OdriverError(Exception):
    """Anything that ``ipc`` raises on purpose; the message is for people."""


class AddressError(OdriverError, ValueError):
    """The address cannot be used; the message has the reason."""


class AddressInUse(AddressError):
    """Another process listens at the address."""


class KeyFileError(OdriverError):
    """A key file cannot be used; the message has its name and the reason."""


class ConnectFailed(OdriverError):
    """No daemon answered at the address in time, or it refused the connection."""

    @classmethod
    def nobody(cls, address: str) -> Self:
        """For an address where nobody listens."""
        return cls(f"no daemon answers at {address}: start one with `odriver serve`")

    @classmethod
    def silent(cls, address: str) -> Self:
        """For an address where something listens and does not answer."""
        return cls(f"the daemon at {address} does not answer: it may be stuck")


class DaemonStarting(ConnectFailed):
    """The daemon at the address was not ready in time; the message says how far it was."""


class ConnectionLost(OdriverError):
    """The connection ended while a request was open; no more pieces come."""


class ResumeFailed(ConnectionLost):
    """The daemon that came back cannot continue the request; the message has the difference."""


class RequestFailed(OdriverError):
    """The daemon refused or ended one request; ``code`` is one of ``ipc.wire.messages.Error``'s.

    ``retry_after_s`` is the number of seconds to wait before a retry, where the daemon was
    overloaded.
    """

    def __init__(self, code: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[type[Self], tuple[str, str, float | None]]:
        # Pickle, which passes it between processes, would make it of what Exception has alone: the message.
        return type(self), (self.code, self.message, self.retry_after_s)


class BatchError(OdriverError):
    """The files of a batch are wrong; the message says where and what to do."""
