"""What the driver answers instead of tokens, by whose fault it is; ``code`` is the word used on the wire.

DriverError
├── InvalidRequest      invalid_request     the client's: change the request; the message names what
├── DuplicateRequest    duplicate_request   the client's: the id is in use until its last sample
├── Overloaded          overloaded          nobody's: too many wait; try again later
├── Draining            draining            the operator's: no new work, what is open is finished
├── Asleep              asleep              the operator's: no new work until the daemon is woken
├── DriverStopped       stopped             the operator's: no new work, open requests are told why
└── InternalError       internal            ours: a step failed, or a thread died and the driver stops
"""

from typing import ClassVar

from engine.request_limits import MAX_ERROR_LENGTH


def shortened(text: str, longest: int = MAX_ERROR_LENGTH) -> str:
    """The text in so many characters: of its beginning, which says what it is, and of its end; it may quote a message."""
    if len(text) <= longest:
        return text
    note = f"[... {len(text):,} characters in all ...]"
    end = longest // 4
    return text[: longest - end - len(note)] + note + text[-end:]


class DriverError(Exception):
    """A request's end other than by tokens; ``str(error)`` is for a person to read, and shortened."""

    code: ClassVar[str]

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


class InvalidRequest(DriverError):
    """The request asks for what cannot be done."""

    code = "invalid_request"


class DuplicateRequest(DriverError):
    """A request with this id is still open."""

    code = "duplicate_request"


class Overloaded(DriverError):
    """Too much waits already; ``retry_after_s`` says when to come again."""

    code = "overloaded"

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Draining(DriverError):
    """The driver finishes what it has and takes no more work."""

    code = "draining"


class Asleep(DriverError):
    """The driver takes no work until it is woken."""

    code = "asleep"


class DriverStopped(DriverError):
    """The driver takes no more work."""

    code = "stopped"


class InternalError(DriverError):
    """A step failed that the request was in, or one of the driver's threads died."""

    code = "internal"
