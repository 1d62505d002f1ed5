"""The thread behind a client: it owns the socket, and takes work from a queue."""

import itertools
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

from ipc.connection.call import Call, Interrupted, Put, SingleQuestion, request_frame
from ipc.connection.call_table import CallTable
from ipc.connection.read_ahead import CREDIT_STEP, Unread
from ipc.connection.retry import Resumption, with_seed
from ipc.connection.session import Session, check_process, started_context
from ipc.errors import ConnectFailed, ConnectionLost
from ipc.wire.bell import Bell
from ipc.wire.codec import encode
from ipc.wire.completion import Message
from ipc.wire.keys import ClientKey
from ipc.wire.messages import Detokenize, Generate, ListAdapters, Tokenize, Welcome

LONGEST_WAIT = 3600.0
"""Seconds of the longest poll: a call's timeout may be infinite, a poll's may not."""


class Connection:
    """Any number of concurrent calls over one socket, from any number of threads.

    Connects when there is a call and no connection, also after a loss, within ``timeout`` seconds;
    calls that were open then have failed. With a ``resume_timeout``, completions do not fail: they
    wait that many seconds for a daemon, which then resumes them; so do questions to the tokenizer,
    which the daemon answers. Those that are handed back do neither: whoever asked has any connection
    go on with them. No method blocks but ``close``.

    The daemon gets credit for messages that arrive and, once MAX_READ_AHEAD_BYTES are untaken,
    only for those that are ``taken``.
    """

    def __init__(self, address: str, timeout: float, resume_timeout: float | None, key: ClientKey | None) -> None:
        self._context = started_context(address)
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
        self._refusal = ConnectFailed.nobody(address)
        """Why calls wait without a session."""
        self._calls = CallTable(address, resume_timeout, self._send)
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
        if session is None or session.lost is not None or self._ended or os.getpid() != self._process:
            return False
        return session.welcome is self._welcome is not None

    @property
    def has_ended(self) -> bool:
        """Whether its thread has, so that nothing can be asked any more."""
        return self._ended

    def check_process(self) -> None:
        """Raises ConnectionLost in a forked child: nothing is sent and nothing comes there."""
        check_process(self._process)

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
        is_handed_back: bool = False,
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
        resumption = Resumption(frame, time.monotonic(), model)
        return self._call(request_id, frame, put, Unread(request_id), resumption, is_handed_back=is_handed_back)

    def go_on(self, interrupted: Interrupted, put: Put) -> Call:
        """Send the rest of a completion that this connection or another one has handed back; otherwise as
        ``generate``."""
        self.check_process()
        resumption, request_id, now = interrupted.resumption, self._new_request_id(), time.monotonic()
        frame = encode(resumption.rest(now, request_id))
        deadline = max(interrupted.deadline, now + self._timeout)  # its reader may have come late
        call = Call(request_id, frame, put, deadline, Unread(request_id), resumption, is_handed_back=True)
        call.interruption, call.handed_over = interrupted.failure, interrupted
        call.not_before = now if interrupted.failure is None else now + resumption.delay()
        return self._begin(call)

    def ask(self, put: Put, message_of: Callable[[str], SingleQuestion]) -> Call:
        """Send a request that has a single answer, made with the request id; the answer is put."""
        request_id = self._new_request_id()
        message = message_of(request_id)
        frame = request_frame(message)
        # What a tokenizer says the next daemon's says too; which adapters the one before had is not to be known.
        if self._resume_timeout is None or isinstance(message, ListAdapters):
            return self._call(request_id, frame, put)
        model = message.model if isinstance(message, Tokenize | Detokenize) else ""
        return self._call(request_id, frame, put, resumption=Resumption(frame, time.monotonic(), model))

    def _new_request_id(self) -> str:
        return str(next(self._serials))

    def _call(
        self,
        request_id: str,
        frame: bytes,
        put: Put,
        unread: Unread | None = None,
        resumption: Resumption | None = None,
        *,
        is_handed_back: bool = False,
    ) -> Call:
        self.check_process()
        patience = self._timeout
        # Like earlier calls, a call that can resume waits for the daemon to return.
        if resumption is not None and self._welcome is not None:
            patience = self._resume_timeout or 0.0
        deadline = time.monotonic() + patience
        return self._begin(Call(request_id, frame, put, deadline, unread, resumption, is_handed_back=is_handed_back))

    def _begin(self, call: Call) -> Call:
        self._inbox.append(partial(self._take_up, call))
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
        self._inbox.append(partial(self._calls.read_ahead.take, call.unread))
        if self._calls.read_ahead.withholds and call.num_taken % CREDIT_STEP == 0:
            self._bell.ring()

    def abort(self, call: Call) -> None:
        """Abort a call: the daemon stops working on it, and nothing more is put."""
        call.put(None)
        self._inbox.append(partial(self._calls.abort, call))
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
        now = time.monotonic()
        if self._session is None and self._calls.connect_at <= now:
            self._connect(now)
        if self._session is not None:
            self._attend(self._session, time.monotonic())
        else:
            self._calls.give_up(now, lambda: self._refusal)

    def _take_up(self, call: Call) -> None:
        is_welcome = self._session is not None and self._session.welcome is not None
        if call.handed_over is None or is_welcome:
            self._calls.begin(call)
        else:
            call.hand_back(ConnectionLost(f"the daemon at {self._address} went away"))

    def _patience(self) -> int | None:
        """Milliseconds until there is work that neither socket nor bell announces."""
        now = time.monotonic()
        due = min(self._calls.due_at(now), self._calls.connect_at if self._session is None else self._session.next_ping)
        return None if due == math.inf else max(0, math.ceil(1000 * min(due - now, LONGEST_WAIT)))

    def _connect(self, now: float) -> None:
        try:
            self._session = Session(self._context, self._address, self._poller, self._key)
        except ConnectFailed as error:
            self._refuse(error, now)

    def _refuse(self, error: ConnectFailed, now: float) -> None:
        """There is no room for a connection at present."""
        self._refusal = error
        self._calls.postpone(error, now)

    def _attend(self, session: Session, now: float) -> None:
        for answer, num_bytes in session.receive(now):
            self._calls.hear(answer, num_bytes, now)
        if session.welcome is not None and session.lost is None:
            self._welcome = session.welcome
            self._calls.send_waiting(session.welcome, now)
        self._calls.give_up(now, session.failure)
        session.keep_alive(now)
        if session.lost is not None or (session.welcome is None and not self._calls.waits):
            self._drop(session)

    def _drop(self, session: Session) -> None:
        why, now = session.lost or "", time.monotonic()
        if session.welcome is not None:
            self._calls.lose(why, now)
        elif session.code == "overloaded":
            self._refuse(ConnectFailed(why), now)
        else:
            self._calls.fail_waiting(ConnectFailed(why))
        session.close()
        self._session = None

    def _send(self, frame: bytes) -> None:
        if self._session is not None:
            self._session.send(frame)

    def _end(self) -> None:
        self._ended = True  # before the inbox is looked at a last time: see call()
        while self._inbox:
            self._inbox.popleft()()
        self._calls.end()
        if self._session is not None:
            self._session.close()
        self._context.destroy(linger=0)
