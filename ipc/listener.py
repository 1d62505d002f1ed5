"""A thread that owns one ROUTER, which clients connect to, and hears a bell, which other threads ring.

The thread is the only one that touches the socket. Driver threads leave samples in the outbox; whatever has gathered
there for one request when the thread comes by leaves as one message. Nobody waits for a client: what cannot be sent at
once is not sent.
"""

import errno
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Protocol

import zmq

from driver.request import ReturnSample
from driver.safe_thread import SafeThread
from ipc.addresses import keep_private, reserved
from ipc.auth import Authority
from ipc.bell import Bell
from ipc.errors import AddressError, AddressInUse
from ipc.frames import MAX_MESSAGE_BYTES
from ipc.messages import Error, ServerMessage, encode
from ipc.outbox import Outbox, Reply
from ipc.stream import Sent
from ipc.tenants import EVERYBODY, Tenant

HARD_MAX_MESSAGE_BYTES = 4 * MAX_MESSAGE_BYTES
"""From here on libzmq does not even read the message, but hangs up."""
RECEIVE_HIGH_WATER = 16
"""Messages of one client held unread; beyond them it waits in its own memory, not in ours."""
SEND_HIGH_WATER = 1000
"""Messages held for a client that does not read, beside what its stream's credits allow."""
LINGER = 1000
"""Milliseconds that the last messages have to leave when the socket closes."""
KEEPALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 30, zmq.TCP_KEEPALIVE_INTVL: 10, zmq.TCP_KEEPALIVE_CNT: 3}
"""Of TCP connections: seconds of silence until the kernel asks, between its questions, and how many go unanswered."""
MESSAGES_PER_TURN = 64
"""Messages taken before the outbox gets its turn again."""

Context = zmq.Context["zmq.Socket[bytes]"]


class Rules(Protocol):
    """What is answered. The listener's thread alone calls it; ``now`` is in seconds."""

    def hear(self, identity: bytes, frames: list[bytes], now: float, tenant: Tenant) -> None:
        """Takes one message, from this tenant."""

    def deliver(self, reply: Reply, sample: ReturnSample, now: float) -> None:
        """Takes what a driver has said."""

    @property
    def patience(self) -> float:
        """Seconds from one ``look`` to the next; infinity where there is nothing to look after."""

    def look(self, now: float) -> None:
        """Sees to what time brings."""


class Listener:
    """Listens at one checked address, from ``start`` on, and answers from ``open`` on, those first who have been waiting.

    ``start`` raises AddressError where it cannot. ``stop`` sends what is left in the outbox and gives the address back.
    ``on_failure`` is called, on the dying thread, should the thread die. With an ``authority``, which has been started for
    the context, only its tenants get in.
    """

    def __init__(
        self,
        name: str,
        context: Context,
        address: str,
        on_failure: Callable[[str], None],
        authority: Authority | None,
    ) -> None:
        self.outbox = Outbox(bell := Bell())
        self._bell = bell
        self._context = context
        self._address = address
        self._authority = authority
        self._on_failure = on_failure
        self._rules: Rules | None = None
        self._stopping = False
        self._looked_at = 0.0
        self._called_at: float | None = None
        """When ``seconds_unheard`` called, until the thread comes by."""
        self._bound: Future[None] = Future()
        self._thread = SafeThread(name, self._run, self._died)

    def start(self) -> None:
        """Bind and begin to listen."""
        self._thread.start()
        self._bound.result()

    def open(self, rules: Rules) -> None:
        """Begin to answer."""
        self._rules = rules
        self._bell.ring()

    def seconds_unheard(self) -> float:
        """For how long the thread has not come by though it was called, by this method; it calls again."""
        now, called_at = time.monotonic(), self._called_at
        if called_at is not None:
            return now - called_at
        self._called_at = now
        self._bell.ring()
        return 0.0

    def stop(self) -> None:
        """Answer what has arrived, send what there is and close; a second time changes nothing."""
        self._stopping = True
        self._bell.ring()
        self._thread.join()

    def send(self, identity: bytes, message: ServerMessage) -> Sent:
        """Send one message to one client, now or not at all; only the thread itself may."""
        try:
            self._router.send_multipart([identity, encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return Sent.GONE
        return Sent.AWAY

    def _run(self) -> None:
        try:
            with reserved(self._address), self._bound_router() as self._router:
                self._bound.set_result(None)
                self._serve()
        except AddressError as error:
            self._bound.set_exception(error)

    def _died(self, name: str, error: BaseException) -> None:
        if not self._bound.done():
            self._bound.set_exception(error)
        else:
            self._on_failure(f"the {name} thread died of {type(error).__name__}: {error}")

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell.fileno(), zmq.POLLIN)
        while not self._stopping:
            self._wait(poller)
            if self._rules is not None:
                poller.register(self._router, zmq.POLLIN)
                self._turn(self._rules)
        if self._rules is not None:
            self._turn(self._rules)  # what came in between the last turn and the call of stop

    def _wait(self, poller: zmq.Poller) -> None:
        patience = None  # for ever, while there is nothing to look after
        if self._rules is not None and self._rules.patience < math.inf:
            patience = max(0, math.ceil(1000 * (self._looked_at + self._rules.patience - time.monotonic())))
        if self._bell.fileno() in dict(poller.poll(patience)):
            self._bell.clear()

    def _turn(self, rules: Rules) -> None:
        self._called_at = None
        now = time.monotonic()
        for _ in range(MESSAGES_PER_TURN):
            try:
                self._receive(rules, now)
            except zmq.Again:
                break
        for reply, sample in self.outbox.take():
            rules.deliver(reply, sample, now)
        if now >= self._looked_at + rules.patience:
            self._looked_at = now
            rules.look(now)

    def _receive(self, rules: Rules, now: float) -> None:
        if self._authority is None and not self._address.startswith("ipc://"):
            identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            rules.hear(identity, frames, now, EVERYBODY)
            return
        first, *rest = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
        if self._authority is None:
            tenant: Tenant | None = Tenant("", user=_user_of(rest[0]))
        else:
            tenant = self._authority.tenant(str(rest[0].get("User-Id")))
        if tenant is None:
            self.send(first.bytes, Error(None, "forbidden", "this key is not authorised any more"))
            return
        rules.hear(first.bytes, [frame.bytes for frame in rest], now, tenant)

    @contextmanager
    def _bound_router(self) -> Iterator["zmq.Socket[bytes]"]:
        router = self._context.socket(zmq.ROUTER)
        try:
            # Before binding: libzmq ends the session of a peer that has gone by what the listener copied then, at first
            # for ever. One that goes while we close, with messages unsent, would have context.term wait for ever.
            router.setsockopt(zmq.LINGER, LINGER)
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            router.setsockopt(zmq.MAXMSGSIZE, HARD_MAX_MESSAGE_BYTES)
            router.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
            router.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
            router.setsockopt(zmq.IPV6, 1 if "[" in self._address else 0)
            # The kernel closes what leads to a machine that is gone; a peer that is merely frozen it takes for alive.
            for option, value in KEEPALIVE.items():
                router.setsockopt(option, value)
            if self._authority is not None:
                self._authority.secure(router)
            _bind(router, self._address)
            yield router
        finally:
            router.close()


def _user_of(frame: zmq.Frame) -> int | None:
    """Whose process has sent it over ``ipc://``; None of one that was gone before libzmq could ask the kernel."""
    try:
        _, user, *_ = str(frame.get("Peer-Address")).split(":")  # HOST:USER:GROUP:PROCESS
    except zmq.ZMQError:
        return None
    return int(user)


def _bind(router: "zmq.Socket[bytes]", address: str) -> None:
    try:
        router.bind(address)
        if address.startswith("ipc://"):
            keep_private(address)
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(f"address in use: another program listens at {address}") from error
        raise AddressError(f"cannot listen at {address}: {error.strerror}") from error
