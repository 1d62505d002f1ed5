"""One question to the daemon, and where what comes back goes."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from driver.errors import shortened
from engine.request_limits import MAX_DEPTH
from ipc.connection.read_ahead import Unread
from ipc.connection.retry import Resumption
from ipc.errors import ConnectionLost, OdriverError, RequestFailed, ResumeFailed
from ipc.wire.codec import MessageError, encode
from ipc.wire.messages import (
    AdaptersReply,
    Detokenize,
    Done,
    Generate,
    ListAdapters,
    Token,
    Tokenize,
    TokenizerInfo,
    TokenizerInfoReply,
    Welcome,
)
from ipc.wire.operations import AskedMessage

SingleQuestion = Tokenize | Detokenize | TokenizerInfo | ListAdapters
"""A request that has a single answer."""


class Interrupted(NamedTuple):
    """A completion that its connection has handed back: another one, or the same, can go on with it."""

    resumption: Resumption
    why: OdriverError
    deadline: float
    """When to give up, on the clock of ``time.monotonic``."""
    failure: ConnectionLost | None
    """The error then; None where the daemon has turned away what was new to it, and ``why`` is the error."""


Outcome = Token | Done | TokenizerInfoReply | AdaptersReply | Welcome | Interrupted | OdriverError | None
"""An answer, what interrupted it, an error instead, or None after an abort."""
Put = Callable[[Outcome], None]
"""Takes an outcome, on any thread, without waiting or raising."""


class Call:
    """Its outcomes come in order; the last is an answer that ends it, an error, None, or Interrupted
    where it ``is_handed_back`` instead of waiting in its connection to be resumed."""

    def __init__(
        self,
        request_id: str,
        frame: bytes,
        put: Put,
        deadline: float,
        unread: Unread | None = None,
        resumption: Resumption | None = None,
        *,
        is_handed_back: bool = False,
    ) -> None:
        self.request_id = request_id
        self.frame = frame
        self.put = put
        self.deadline = deadline
        """When to give up, as long as there is no daemon to send it to."""
        self.not_before = 0.0
        """When to send it, the earliest."""
        self.connect_at = 0.0
        """When to connect for it, the earliest."""
        self.unread = unread
        """The stream's untaken messages, taken with ``Connection.taken``; None for a single
        answer."""
        self.num_taken = 0
        """Pieces of it that have been taken; its reader alone counts."""
        self.interruption: ConnectionLost | None = None
        """The error if it is not resumed in time; None if it was not interrupted."""
        self.resumption = resumption
        """How to resume it after a lost connection; None if it is not to be."""
        self.is_handed_back = is_handed_back
        self.handed_over: Interrupted | None = None
        """What it goes on with; None for a new one."""

    def problem(self, welcome: Welcome) -> OdriverError | None:
        """Why it cannot be sent to this daemon; None if it can."""
        limit = welcome.max_message_bytes
        if len(self.frame) > limit:
            return RequestFailed("message_too_long", f"a message may have {limit} bytes, not {len(self.frame)}")
        mismatch = self.resumption and self.resumption.mismatch(welcome)
        return ResumeFailed(mismatch) if mismatch else None

    def lose(self, why: OdriverError, now: float, resume_timeout: float) -> bool:
        """End it with the error, or hand it back, or prepare it to be sent again; returns whether it
        is to be resumed."""
        if self.resumption is None:
            self.put(why)
            return False
        if self.is_handed_back and self.resumption.is_turned_away(why):
            self.put(Interrupted(self.resumption, why, self.deadline, None))
            return False
        if not self.resumption.outlasts(why):
            self.put(self.resumption.verdict(why))
            return False
        try:
            rest = self.resumption.rest(now, self.request_id)
        except MessageError as error:  # as the daemon would have said, had it been there
            self.put(RequestFailed("invalid_request", str(error)))
            return False
        self.deadline = self.resumption.interrupt(why, now) + resume_timeout
        self.interruption = ConnectionLost(f"{why}; within {resume_timeout:g} s it could not be resumed")
        if self.is_handed_back:
            self.put(Interrupted(self.resumption, why, self.deadline, self.interruption))
        else:
            self.not_before = now + self.resumption.delay()
            self.frame = encode(rest)
        return True

    def hand_back(self, why: ConnectionLost) -> None:
        """There is no daemon to send it to: another connection may go on with it, as this one was to."""
        assert self.handed_over is not None
        self.put(self.handed_over._replace(why=why))

    def postpone(self, now: float) -> bool:
        """Have it wait for a later attempt to connect; False if it is not to be resumed."""
        if self.resumption is None:
            return False
        self.connect_at = now + self.resumption.delay()
        return True


def request_frame(message: Generate | SingleQuestion | AskedMessage) -> bytes:
    """Encode a message of a client. Raises RequestFailed for what msgpack cannot hold."""
    try:
        return encode(message)
    except OverflowError as error:
        fields = msgspec.structs.asdict(message)
        where = next(_too_large(fields | fields.pop("params", {}), ""), "")
        why = f"{where}: a number is too large; integers are from -2**63 to 2**64 - 1"
        raise RequestFailed("invalid_request", why) from error
    except UnicodeEncodeError as error:
        why = f"a text holds half a surrogate pair at character {error.start}, which is no text"
        raise RequestFailed("invalid_request", why) from error
    except RecursionError as error:
        why = f"it is nested too deeply: maps and lists may be {MAX_DEPTH} deep"
        raise RequestFailed("invalid_request", why) from error
    except (TypeError, ValueError) as error:
        raise RequestFailed("invalid_request", f"no message can hold this: {shortened(str(error))}") from error


def _too_large(value: object, where: str) -> Iterator[str]:
    """Where there are integers that msgpack cannot hold, a key of a map among them."""
    match value:
        case dict():
            for name, inner in value.items():
                yield from _too_large(name, where)
                yield from _too_large(inner, f"{where}.{name}" if where else str(name))
        case list():
            for place, inner in enumerate(value):
                yield from _too_large(inner, f"{where}[{place}]")
        case msgspec.Struct():
            yield from _too_large(msgspec.structs.asdict(value), where)
        case int() if not -(1 << 63) <= value < 1 << 64:
            yield where
