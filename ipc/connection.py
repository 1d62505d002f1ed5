"""The thread behind a Client: it owns the socket; the threads that call tell it what to do, and wait for answers."""

import itertools
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

import zmq

from ipc.bell import Bell
from ipc.errors import ConnectFailed, ConnectionLost, OdriverError
from ipc.messages import CREDITS, Abort, Credit, Token, Welcome, encode
from ipc.session import Answer, Session

LONGEST_WAIT = 3600.0
"""Seconds after which the thread looks around anyway: a timeout may be infinite, a poll's may not."""


class Call:
    """One question to the daemon and, in order, what comes back; it always ends, by an answer or by an error."""

    def __init__(self, request_id: str, frame: bytes, deadline: float) -> None:
        self.request_id = request_id
        self.frame = frame
        self.deadline = deadline
        """When to give up, as long as there is no daemon to send it to."""
        self.num_unacknowledged = 0
        """Pieces that have come since the daemon was last given credit for some."""
        self._answers: SimpleQueue[Answer | Welcome | OdriverError | None] = SimpleQueue()

    def put(self, answer: Answer | Welcome | OdriverError | None) -> None:
        """Let whoever waits have it; None when the caller has left."""
        self._answers.put(answer)

    def get(self) -> Answer | Welcome | None:
        """Wait for the next answer; raises OdriverError if there won't be one."""
        answer = self._answers.get()
        if isinstance(answer, OdriverError):
            raise answer
        return answer


class Connection:
    """Any number of calls at once over one socket, from any number of threads.

    Connects when there is a call and no connection, again too after one was lost, and then takes up to ``timeout``
    seconds; calls that were open when it was lost have failed. None of the methods waits but ``close``.
    """

    def __init__(self, address: str, timeout: float) -> None:
        self.welcome: Welcome | None = None
        """What the daemon said when it was last connected to."""
        self._address = address
        self._timeout = timeout
        self._process = os.getpid()
        self._serials = itertools.count(1)
        self._bell = Bell()
        self._inbox: deque[Callable[[], None]] = deque()
        """What callers want the thread to do."""
        self._closing = False
        self._ended = False
        self._session: Session | None = None
        self._waiting: dict[str, Call] = {}
        """Calls to send once there is a daemon, and after them those that it owes an answer."""
        self._open: dict[str, Call] = {}
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._poller.register(self._bell.fileno(), zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="odriver client", daemon=True)
        self._thread.start()

    def new_request_id(self) -> str:
        """One that no other call of this connection has."""
        return str(next(self._serials))

    def call(self, request_id: str, frame: bytes) -> Call:
        """Ask something. An empty frame asks for no more than to be connected, and is answered by Welcome."""
        if os.getpid() != self._process:
            raise ConnectionLost("this client was made before the process forked: make another one in the child")
        call = Call(request_id, frame, time.monotonic() + self._timeout)
        self._inbox.append(partial(self._begin, call))
        self._bell.ring()
        if self._ended:  # perhaps too late for the thread to have found it
            call.put(ConnectionLost("this client is closed"))
        return call

    def abort(self, call: Call) -> None:
        """Ask no more: the daemon stops working on it, and nothing more is heard of it."""
        call.put(None)
        self._inbox.append(partial(self._abort, call))
        self._bell.ring()

    def close(self) -> None:
        """End every call with ConnectionLost, the thread and the connection; a second time changes nothing."""
        if os.getpid() != self._process:
            return  # the thread and the sockets are the parent's
        self._closing = True
        self._bell.ring()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        finally:
            self._end()

    def _turn(self) -> None:
        if self._bell.fileno() in dict(self._poller.poll(self._patience())):
            self._bell.clear()
        while self._inbox:
            self._inbox.popleft()()
        if self._waiting and self._session is None:
            self._session = Session(self._context, self._address, self._poller)
        if self._session is not None:
            self._attend(self._session, time.monotonic())

    def _patience(self) -> int | None:
        """Milliseconds until there is something to do of which no socket and no bell will tell."""
        if self._session is None:
            return 0 if self._waiting else None
        due = min([self._session.next_ping, *(call.deadline for call in self._waiting.values())])
        return max(0, math.ceil(1000 * min(due - time.monotonic(), LONGEST_WAIT)))

    def _attend(self, session: Session, now: float) -> None:
        for answer in session.receive(now):
            self._hear(answer)
        if session.welcome is not None and session.lost is None:
            self._send_waiting(session, session.welcome)
        self._give_up(session, now)
        session.keep_alive(now)
        if session.lost is not None or (session.welcome is None and not self._waiting):
            self._drop(session)

    def _hear(self, answer: Answer) -> None:
        call = self._open.get(answer.request_id or "")
        if call is None:
            return  # aborted
        if isinstance(answer, Token):
            self._acknowledge(call)
        else:
            del self._open[call.request_id]
        call.put(answer)

    def _acknowledge(self, call: Call) -> None:
        """Give credit for what has come, half of all at a time, so that the rest is on its way meanwhile.

        It counts as read when it is here: how much of it waits for the caller is a matter of the caller's memory.
        """
        call.num_unacknowledged += 1
        if call.num_unacknowledged == CREDITS // 2 and self._session is not None:
            self._session.send(encode(Credit(call.request_id, call.num_unacknowledged)))
            call.num_unacknowledged = 0

    def _send_waiting(self, session: Session, welcome: Welcome) -> None:
        self.welcome = welcome
        for call in self._waiting.values():
            if call.frame:
                self._open[call.request_id] = call
                session.send(call.frame)
            else:
                call.put(welcome)
        self._waiting.clear()

    def _give_up(self, session: Session, now: float) -> None:
        for call in [call for call in self._waiting.values() if call.deadline <= now]:
            del self._waiting[call.request_id]
            why = ConnectFailed.silent if session.reached else ConnectFailed.nobody
            call.put(why(self._address))

    def _drop(self, session: Session) -> None:
        why = session.lost or ""
        for call in self._open.values():
            call.put(ConnectionLost(why))
        self._open.clear()
        if session.welcome is None:
            for call in self._waiting.values():
                call.put(ConnectFailed(why))
            self._waiting.clear()
        session.close()
        self._session = None

    def _begin(self, call: Call) -> None:
        self._waiting[call.request_id] = call

    def _abort(self, call: Call) -> None:
        self._waiting.pop(call.request_id, None)
        if self._open.pop(call.request_id, None) is not None and self._session is not None:
            self._session.send(encode(Abort(call.request_id)))

    def _end(self) -> None:
        self._ended = True  # before the inbox is looked at a last time: see call()
        while self._inbox:
            self._inbox.popleft()()
        for call in [*self._waiting.values(), *self._open.values()]:
            self._abort(call)
            call.put(ConnectionLost("this client was closed"))
        if self._session is not None:
            self._session.close()
        self._context.term()
