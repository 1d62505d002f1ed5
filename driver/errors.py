"""The driver's errors, by whose fault they are; ``code`` is the word used on the wire.

DriverError
├── InvalidRequest             invalid_request          the client's: the message names what to change
│   └── ContextLengthExceeded  context_length_exceeded  prompt and output do not fit the model's context
├── NotFound                   not_found                the client's, or nobody's: there is no such model, or adapter
├── DuplicateRequest           duplicate_request        the client's: the id is in use until its last sample
├── Overloaded                 overloaded               nobody's: too many requests wait; try again later
├── Draining                   draining                 the operator's: no new requests, the open ones go on
├── Asleep                     asleep                   the operator's: no new requests until the driver is woken
├── DriverStopped              stopped                  the operator's: no new requests, the open ones are ended
└── InternalError              internal                 ours: a step failed, or a thread died
"""

from typing import ClassVar

from engine.request_limits import MAX_ERROR_LENGTH


def shortened(text: str, longest: int = MAX_ERROR_LENGTH) -> str:
    """At most ``longest`` characters of a text, which may quote a message: its two ends."""
    if len(text) <= longest:
        return text
    note = f"[... {len(text):,} characters in all ...]"
    end = longest // 4
    return text[: longest - end - len(note)] + note + text[-end:]


class DriverError(Exception):
    """Why a request failed or is refused; ``str(error)`` is for a person, and shortened."""

    code: ClassVar[str]

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


class InvalidRequest(DriverError):
    """The request is wrong, or cannot be served as it is."""

    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or the prompt and the output that was asked for, exceed the model's context."""

    code = "context_length_exceeded"

    def __init__(self, max_model_len: int, what: str, remedy: str) -> None:
        longest = f"this model's maximum context length is {max_model_len} tokens, prompt and output together"
        super().__init__(f"{longest}, but {what}: {remedy}")


class NotFound(DriverError):
    """Nothing of this name is served, or nothing that this client may use."""

    code = "not_found"


class DuplicateRequest(DriverError):
    """A request with this id is still open."""

    code = "duplicate_request"


class Overloaded(DriverError):
    """Too many requests wait; ``retry_after_s`` is the delay before a retry, in seconds."""

    code = "overloaded"

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Draining(DriverError):
    """The driver finishes its open requests and takes no more."""

    code = "draining"


class Asleep(DriverError):
    """The driver takes no requests until it is woken."""

    code = "asleep"


class DriverStopped(DriverError):
    """The driver takes no more requests."""

    code = "stopped"


class InternalError(DriverError):
    """A step with the request failed, or one of the driver's threads died."""

    code = "internal"
