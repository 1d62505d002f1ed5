"""The daemon's socket thread: a ROUTER that clients connect to, and a bell that the driver's threads ring.

The thread is the only one that touches the socket and the table of clients. Driver threads leave samples in the
outbox; whatever has gathered there for one request when the thread comes by leaves as one message. Nobody waits for a
client: what cannot be sent at once is not sent, and a client that does not read is cut off.
"""

import errno
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import zmq

from driver.safe_thread import SafeThread
from engine.config import ServingLimits
from ipc.addresses import reserved
from ipc.bell import Bell
from ipc.clients import Clients, Driver
from ipc.errors import AddressError, AddressInUse
from ipc.messages import PING_INTERVAL, PROTOCOL_VERSION, ServerMessage, Welcome, encode
from ipc.outbox import Outbox

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 4 * 2**20
"""The longest message taken: a million token ids fit. What is longer is refused by name."""
HARD_MAX_MESSAGE_BYTES = 4 * MAX_MESSAGE_BYTES
"""From here on libzmq does not even read the message, but hangs up."""
RECEIVE_HIGH_WATER = 16
"""Messages of one client held unread; beyond them it waits in its own memory, not in ours."""
SEND_HIGH_WATER = 1000
"""Messages held for a client that does not read. One that falls so far behind is cut off."""
LINGER = 1000
"""Milliseconds that the last messages have to leave when the socket closes."""
MESSAGES_PER_TURN = 64
"""Messages taken before the outbox gets its turn again."""


class Server:
    """Serves a driver to clients at one address.

    ``start`` takes the address and raises AddressError where it cannot; clients may connect from then on, and are
    answered from ``open`` on. ``stop`` sends what the driver has left in the outbox and gives the address back.
    ``on_failure`` is called, on the dying thread, should the thread die.
    """

    def __init__(self, address: str, on_failure: Callable[[str], None]) -> None:
        self._address = address
        self._on_failure = on_failure
        self._bell = Bell()
        self._outbox = Outbox(self._bell)
        self._clients: Clients | None = None
        self._stopping = False
        self._bound: Future[None] = Future()
        self._thread = SafeThread("sockets", self._run, self._died)

    def start(self) -> None:
        """Bind and begin to listen."""
        self._thread.start()
        self._bound.result()

    def open(self, driver: Driver, model: str, limits: ServingLimits) -> None:
        """Begin to answer, those first who have been waiting."""
        welcome = Welcome(PROTOCOL_VERSION, model, limits.max_model_len, limits.vocab_size, MAX_MESSAGE_BYTES)
        self._clients = Clients(driver, welcome, self._outbox, self._send)
        self._bell.ring()

    def stop(self) -> None:
        """Answer what has arrived, send what there is and close; a second time changes nothing."""
        self._stopping = True
        self._bell.ring()
        self._thread.join()

    def _run(self) -> None:
        try:
            with reserved(self._address), _bound_router(self._address) as self._router:
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
        self._next_sweep = 0.0
        while not self._stopping:
            self._wait(poller)
            if self._clients is not None:
                poller.register(self._router, zmq.POLLIN)
                self._turn(self._clients)
        if self._clients is not None:
            self._turn(self._clients)  # what came in between the last turn and the call of stop

    def _wait(self, poller: zmq.Poller) -> None:
        patience = None  # for ever, while there is no client to lose
        if self._clients is not None and len(self._clients) > 0:
            patience = max(0, math.ceil(1000 * (self._next_sweep - time.monotonic())))
        if self._bell.fileno() in dict(poller.poll(patience)):
            self._bell.clear()

    def _turn(self, clients: Clients) -> None:
        now = time.monotonic()
        for _ in range(MESSAGES_PER_TURN):
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            clients.hear(identity, frames, now)
        for reply, sample in self._outbox.take():
            clients.deliver(reply, sample)
        if now >= self._next_sweep:
            clients.drop_silent(now)
            self._next_sweep = now + PING_INTERVAL

    def _send(self, identity: bytes, message: ServerMessage) -> str | None:
        try:
            self._router.send_multipart([identity, encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            return "cut off: it does not read what it asked for"
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return "the connection ended"
        return None


@contextmanager
def _bound_router(address: str) -> Iterator["zmq.Socket[bytes]"]:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    try:
        # Before binding: libzmq ends the session of a peer that has gone by what the listener copied then, at first for
        # ever. One that goes while we close, with messages unsent, would have context.term wait for ever.
        router.setsockopt(zmq.LINGER, LINGER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.MAXMSGSIZE, HARD_MAX_MESSAGE_BYTES)
        router.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
        router.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
        router.setsockopt(zmq.IPV6, 1 if "[" in address else 0)
        _bind(router, address)
        yield router
    finally:
        router.close()
        context.term()


def _bind(router: "zmq.Socket[bytes]", address: str) -> None:
    umask = os.umask(0o077)  # nobody else may connect to an ipc:// socket, wherever it lies
    try:
        router.bind(address)
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(f"address in use: another program listens at {address}") from error
        raise AddressError(f"cannot listen at {address}: {error.strerror}") from error
    finally:
        os.umask(umask)
