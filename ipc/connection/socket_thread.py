"""The thread behind a client: it owns the socket, and takes work from a queue."""

import itertools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import zmq

from ipc.connection.call import Call, Put, SingleQuestion, request_frame
from ipc.connection.read_ahead import CREDIT_STEP, ReadAhead, Unread
from ipc.connection.retry import Resumption, with_seed
from ipc.connection.session import Answer, Session
from ipc.errors import ConnectFailed, ConnectionLost, OdriverError, RequestFailed
from ipc.wire.bell import Bell
from ipc.wire.codec import encode
from ipc.wire.completion import Message
from ipc.wire.keys import ClientKey
from ipc.wire.messages import Abort, AdaptersReply, Credit, Done, Error, Generate, Token, TokenizerInfoReply, Welcome

logger = logging.getLogger(__name__)

LONGEST_WAIT = 3600.0
"""Seconds of the longest poll: a call's timeout may be infinite, a poll's may not."""


class Connection:
    """Any number of concurrent calls over one socket, from any number of threads.

    Connects when there is a call and no connection, also after a loss, within ``timeout`` seconds;
    calls that were open then have failed. With a ``resume_timeout``, completions do not fail: they
    wait that many seconds for a daemon, which then resumes them. No method blocks but ``close``.

    The daemon gets credit for messages that arrive and, once MAX_READ_AHEAD_BYTES are untaken,
    only for those that are ``taken``.
    """

    def __init__(self, address: str, timeout: float, resume_timeout: float | None, key: ClientKey | None) -> None:
        self._address = address
        self._key = key
        self._welcome: Welcome | None = None
        self._timeout = timeout
        self._resume_timeout = resume_timeout
        self._process = os.getpid()
        self._serials = itertools.count(1)
        self._bell = Bell()
        self._inbox: deque[Callable[[], None]] = deque()
        """Callers' work for the thread."""
        self._closing = False
        self._ended = False
        self._session: Session | None = None
        self._refused_by: Session | None = None
        """The session in which a daemon that ends has last turned a request away."""
        self._waiting: dict[str, Call] = {}
        """Calls to send once a daemon is there; below them the calls it has yet to answer."""
        self._open: dict[str, Call] = {}
        self._read_ahead = ReadAhead(self._give_credit)
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._poller.register(self._bell.fileno(), zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="odriver client", daemon=True)
        self._thread.start()

    @property
    def welcome(self) -> Welcome:
        """The daemon's welcome of the last connection; raises ConnectFailed before the first."""
        if self._welcome is None:
            raise ConnectFailed(f"this client has not been connected to {self._address} yet")
        return self._welcome

    @property
    def is_up(self) -> bool:
        """Whether a daemon is connected, as far as the thread knows; ``welcome`` is then its
        own."""
        session = self._session
        if session is None or session.lost is not None or self._ended:
            return False
        return session.welcome is self._welcome is not None

    @property
    def has_ended(self) -> bool:
        """Whether its thread has, so that nothing can be asked any more."""
        return self._ended

    def connect(self, put: Put) -> Call:
        """Ask for no more than to be connected; Welcome is put."""
        return self._call(self._new_request_id(), b"", put)

    def generate(
        self,
        put: Put,
        *,
        prompt: str | list[int] | None = None,
        messages: list[Message] | None = None,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        params: dict[str, Any],
        stream: bool = True,
        user: str = "",
        traceparent: str = "",
        model: str = "",
    ) -> Call:
        """Send a completion request. Tokens are put, then Done; take each, or abort the call."""
        request_id = self._new_request_id()
        generate = Generate(
            request_id,
            prompt,
            messages,
            tools or [],
            chat_template_kwargs or {},
            params,
            stream,
            user=user,
            traceparent=traceparent,
            model=model,
        )
        if self._resume_timeout is None:
            return self._call(request_id, request_frame(generate), put, Unread(request_id))
        # Streamed in any case, as what has come need not come again.
        frame = request_frame(msgspec.structs.replace(generate, params=with_seed(params), stream=True))
        return self._call(request_id, frame, put, Unread(request_id), Resumption(frame, time.monotonic()))

    def ask(self, put: Put, message_of: Callable[[str], SingleQuestion]) -> Call:
        """Send a request that has a single answer, made with the request id; the answer is put."""
        request_id = self._new_request_id()
        return self._call(request_id, request_frame(message_of(request_id)), put)

    def _new_request_id(self) -> str:
        return str(next(self._serials))

    def _call(
        self,
        request_id: str,
        frame: bytes,
        put: Put,
        unread: Unread | None = None,
        resumption: Resumption | None = None,
    ) -> Call:
        if os.getpid() != self._process:
            raise ConnectionLost("this client was made before the process forked: make another one in the child")
        patience = self._timeout
        # Like earlier calls, a call that can resume waits for the daemon to return.
        if resumption is not None and self._welcome is not None:
            patience = self._resume_timeout or 0.0
        call = Call(request_id, frame, put, time.monotonic() + patience, unread, resumption)
        self._inbox.append(partial(self._begin, call))
        self._bell.ring()
        if self._ended:  # perhaps too late for the thread to have found it
            call.put(ConnectionLost("this client is closed"))
        return call

    def taken(self, call: Call) -> None:
        """Record that the reader of a stream has taken its oldest untaken message.

        The thread is woken if it waits for that to give credit; otherwise it sees it in its next
        turn.
        """
        assert call.unread is not None
        call.num_taken += 1
        self._inbox.append(partial(self._read_ahead.take, call.unread))
        if self._read_ahead.withholds and call.num_taken % CREDIT_STEP == 0:
            self._bell.ring()

    def abort(self, call: Call) -> None:
        """Abort a call: the daemon stops working on it, and nothing more is put."""
        call.put(None)
        self._inbox.append(partial(self._abort, call))
        self._bell.ring()

    def close(self) -> None:
        """End every call with ConnectionLost, the thread and the connection. It may be
        repeated."""
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
            self._session = Session(self._context, self._address, self._poller, self._key)
        if self._session is not None:
            self._attend(self._session, time.monotonic())

    def _patience(self) -> int | None:
        """Milliseconds until there is work that neither socket nor bell announces."""
        if self._session is None:
            return 0 if self._waiting else None
        now, due = time.monotonic(), self._session.next_ping
        for call in self._waiting.values():
            due = min(due, call.deadline, call.not_before if call.not_before > now else math.inf)
        return max(0, math.ceil(1000 * min(due - now, LONGEST_WAIT)))

    def _attend(self, session: Session, now: float) -> None:
        for answer, num_bytes in session.receive(now):
            try:
                self._hear(answer, num_bytes, now)
            except Exception:
                logger.exception("an answer to request %r could not be taken", answer.request_id)
                if (call := self._open.pop(answer.request_id or "", None)) is not None:
                    call.put(
                        RequestFailed("internal", "this program failed with an answer of the daemon: its log says more")
                    )
        if session.welcome is not None and session.lost is None:
            self._send_waiting(session, session.welcome, now)
        self._give_up(session, now)
        session.keep_alive(now)
        if session.lost is not None or (session.welcome is None and not self._waiting):
            self._drop(session)

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
            self._read_ahead.end(call.unread)

    def _hand_on(self, call: Call, answer: Token | Done, num_bytes: int) -> None:
        new = answer if call.resumption is None else call.resumption.take(answer)
        if call.unread is not None and new is None:
            self._read_ahead.skip(call.unread)
        elif call.unread is not None:
            self._read_ahead.arrive(call.unread, num_bytes)
        if new is not None:
            call.put(new)

    def _give_credit(self, request_id: str, count: int) -> None:
        if self._session is not None:
            self._session.send(encode(Credit(request_id, count)))

    def _refused(self, call: Call, error: RequestFailed, now: float) -> None:
        waits = self._lose(call, error, now)
        if waits and self._refused_by is not self._session:  # warn once per session
            self._refused_by = self._session
            self._warn_of_waiting(str(error))

    def _lose(self, call: Call, why: OdriverError, now: float) -> bool:
        """End a call, or keep it for resumption; returns whether it is kept."""
        is_kept = call.lose(why, now, self._resume_timeout or 0.0)
        if is_kept:
            self._waiting[call.request_id] = call
        return is_kept

    def _send_waiting(self, session: Session, welcome: Welcome, now: float) -> None:
        if self._welcome is not welcome and (resumed := self._num_interrupted()):
            logger.info("connected to %s: %d requests are resumed", self._address, resumed)
        self._welcome = welcome
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
                    self._read_ahead.begin(call.unread)
                session.send(call.frame)

    def _give_up(self, session: Session, now: float) -> None:
        for call in [call for call in self._waiting.values() if call.deadline <= now]:
            del self._waiting[call.request_id]
            call.put(call.interruption or session.failure())

    def _drop(self, session: Session) -> None:
        why, now = session.lost or "", time.monotonic()
        for call in self._open.values():
            self._lose(call, ConnectionLost(why), now)
        self._open.clear()
        self._warn_of_waiting(why)
        if session.welcome is None:
            for call in self._waiting.values():
                call.put(ConnectFailed(why))
            self._waiting.clear()
        session.close()
        self._session = None

    def _warn_of_waiting(self, why: str) -> None:
        if waiting := self._num_interrupted():
            logger.warning("%s: %d requests wait up to %g s to be resumed", why, waiting, self._resume_timeout)

    def _num_interrupted(self) -> int:
        return sum(call.interruption is not None for call in self._waiting.values())

    def _begin(self, call: Call) -> None:
        self._waiting[call.request_id] = call

    def _abort(self, call: Call) -> None:
        if call.unread is not None:
            self._read_ahead.drop(call.unread)
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
