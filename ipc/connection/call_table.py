"""The calls of a connection: those that wait for a daemon, and those that it has yet to answer.

Only the connection's thread uses this. No socket, thread or clock is in this file; times are in
seconds, and the caller's.
"""

import logging
import math
from collections.abc import Callable

from ipc.connection.call import Call
from ipc.connection.read_ahead import ReadAhead
from ipc.connection.session import Answer
from ipc.errors import ConnectFailed, ConnectionLost, OdriverError, RequestFailed
from ipc.wire.codec import encode
from ipc.wire.messages import Abort, AdaptersReply, Credit, Done, Error, Token, TokenizerInfoReply, Welcome

logger = logging.getLogger(__name__)


class CallTable:
    """``send`` sends a frame to the daemon, if there is one."""

    def __init__(self, address: str, resume_timeout: float | None, send: Callable[[bytes], None]) -> None:
        self._address = address
        self._resume_timeout = resume_timeout
        self._send = send
        self._welcome: Welcome | None = None
        """The daemon's that calls were last sent to."""
        self._refused_by: Welcome | None = None
        """The welcome of a daemon that ends and has turned a request away."""
        self._postponed_by = ""
        """The error for which calls were last postponed, until they were sent."""
        self._waiting: dict[str, Call] = {}
        """Calls to send once a daemon is there; below them the calls it has yet to answer."""
        self._open: dict[str, Call] = {}
        self.read_ahead = ReadAhead(self._give_credit)

    @property
    def waits(self) -> bool:
        """Whether calls wait for a daemon."""
        return bool(self._waiting)

    @property
    def connect_at(self) -> float:
        """When to connect for those that wait; infinity without any."""
        return min([call.connect_at for call in self._waiting.values()], default=math.inf)

    def due_at(self, now: float) -> float:
        """When a waiting call is to be sent, or given up."""
        due = math.inf
        for call in self._waiting.values():
            due = min(due, call.deadline, call.not_before if call.not_before > now else math.inf)
        return due

    def begin(self, call: Call) -> None:
        """One more is to be sent."""
        self._waiting[call.request_id] = call

    def abort(self, call: Call) -> None:
        """Nothing more of it is to come."""
        if call.unread is not None:
            self.read_ahead.drop(call.unread)
        self._waiting.pop(call.request_id, None)
        if self._open.pop(call.request_id, None) is not None:
            self._send(encode(Abort(call.request_id)))

    def hear(self, answer: Answer, num_bytes: int, now: float) -> None:
        """Pass on an answer to its call."""
        try:
            self._hear(answer, num_bytes, now)
        except Exception:
            logger.exception("an answer to request %r could not be taken", answer.request_id)
            if (call := self._open.pop(answer.request_id or "", None)) is not None:
                call.put(
                    RequestFailed("internal", "this program failed with an answer of the daemon: its log says more")
                )

    def send_waiting(self, welcome: Welcome, now: float) -> None:
        """Send what waits to the daemon that said this welcome."""
        if self._welcome is not welcome and (resumed := self._num_interrupted()):
            logger.info("connected to %s: %d requests are resumed", self._address, resumed)
        self._welcome, self._postponed_by = welcome, ""
        for call in [call for call in self._waiting.values() if call.not_before <= now]:
            del self._waiting[call.request_id]
            problem = call.problem(welcome)
            if problem is not None:
                call.put(problem)
            elif not call.frame:
                call.put(welcome)
            else:
                self._open[call.request_id] = call
                if call.unread is not None:
                    self.read_ahead.begin(call.unread)
                self._send(call.frame)

    def postpone(self, error: ConnectFailed, now: float) -> None:
        """There was no room for a connection: what can be resumed waits for another attempt, and the
        rest fails."""
        for call in [call for call in self._waiting.values() if not call.postpone(now)]:
            del self._waiting[call.request_id]
            call.put(error)
        if self._waiting and self._postponed_by != str(error):  # warn once, however many attempts fail
            logger.warning("%s: %d requests wait", error, len(self._waiting))
            self._postponed_by = str(error)

    def give_up(self, now: float, failure: Callable[[], OdriverError]) -> None:
        """End what has waited until its deadline, with its interruption or this failure."""
        for call in [call for call in self._waiting.values() if call.deadline <= now]:
            del self._waiting[call.request_id]
            call.put(call.interruption or failure())

    def lose(self, why: str, now: float) -> None:
        """The connection is lost: what was open ends, or waits to be resumed, here or elsewhere."""
        resumed = [call for call in self._open.values() if self._lose(call, ConnectionLost(why), now)]
        self._open.clear()
        self._warn_of_waiting(why, resumed)
        for call in [call for call in self._waiting.values() if call.handed_over is not None]:
            del self._waiting[call.request_id]
            call.hand_back(ConnectionLost(why))

    def fail_waiting(self, error: OdriverError) -> None:
        """End what waits."""
        for call in self._waiting.values():
            call.put(error)
        self._waiting.clear()

    def end(self) -> None:
        """Abort all, as the client is closed."""
        for call in [*self._waiting.values(), *self._open.values()]:
            self.abort(call)
            call.put(ConnectionLost("this client was closed"))

    def _hear(self, answer: Answer, num_bytes: int, now: float) -> None:
        call = self._open.get(answer.request_id or "")
        if call is None:
            return  # aborted
        if not isinstance(answer, Token):
            del self._open[call.request_id]
        if isinstance(answer, Error):
            self._refused(call, RequestFailed(answer.code, answer.message, answer.retry_after_s), now)
        elif isinstance(answer, Token | Done):
            self._hand_on(call, answer, num_bytes)
        elif isinstance(answer, TokenizerInfoReply | AdaptersReply):
            call.put(answer)
        if call.unread is not None and not isinstance(answer, Token):
            self.read_ahead.end(call.unread)

    def _hand_on(self, call: Call, answer: Token | Done, num_bytes: int) -> None:
        new = answer if call.resumption is None else call.resumption.take(answer)
        if call.unread is not None and new is None:
            self.read_ahead.skip(call.unread)
        elif call.unread is not None:
            self.read_ahead.arrive(call.unread, num_bytes)
        if new is not None:
            call.put(new)

    def _give_credit(self, request_id: str, count: int) -> None:
        self._send(encode(Credit(request_id, count)))

    def _refused(self, call: Call, error: RequestFailed, now: float) -> None:
        is_resumed = self._lose(call, error, now)
        if is_resumed and self._refused_by is not self._welcome:  # warn once per connection
            self._refused_by = self._welcome
            self._warn_of_waiting(str(error), [call])

    def _lose(self, call: Call, why: OdriverError, now: float) -> bool:
        """End a call, hand it back, or keep it for resumption; returns whether it is to be resumed."""
        is_resumed = call.lose(why, now, self._resume_timeout or 0.0)
        if is_resumed and not call.is_handed_back:
            self._waiting[call.request_id] = call
        return is_resumed

    def _warn_of_waiting(self, why: str, lost: list[Call]) -> None:
        """Of those that wait here, and those just lost that are handed back."""
        if waiting := self._num_interrupted() + sum(call.is_handed_back for call in lost):
            logger.warning("%s: %d requests wait up to %g s to be resumed", why, waiting, self._resume_timeout)

    def _num_interrupted(self) -> int:
        return sum(call.interruption is not None for call in self._waiting.values())
