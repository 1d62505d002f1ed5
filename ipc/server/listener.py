"""A thread that answers the clients of one socket; other threads wake it through a bell.

The socket is in a process of its own, to which the thread has a link (``peers``); only this thread
uses it. Driver threads put samples into the outbox; what has gathered there for one request by the
thread's next turn is sent as one message. Nothing waits for a client: what cannot be sent at once
is not sent.
"""

import math
import select
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Protocol

from driver.request import ReturnSample
from driver.stages.safe_thread import SafeThread
from engine.request_limits import MAX_MESSAGE_BYTES
from ipc.errors import AddressError
from ipc.server.outbox import Outbox, Reply
from ipc.server.starting import StartingRules
from ipc.sockets.auth import Authority
from ipc.sockets.binding import file_of, listening
from ipc.sockets.peer_events import Event, HasRoom, Lost, Refused, Said, Sent
from ipc.sockets.peers import Peers
from ipc.sockets.router import SocketConfiguration
from ipc.sockets.spawner import Spawner
from ipc.sockets.tenants import Tenant, of_user
from ipc.wire.bell import Bell
from ipc.wire.codec import encode
from ipc.wire.messages import Error, ServerMessage

HARD_MAX_MESSAGE_BYTES = 4 * MAX_MESSAGE_BYTES
"""From here on libzmq does not even read the message, but hangs up."""
MESSAGES_PER_TURN = 64
"""Messages taken before the outbox gets its turn again."""
RELOAD_PATIENCE = 10.0
"""Seconds that new keys have to reach the socket's process, on a busy machine, too."""


class Rules(Protocol):
    """The answers to a socket's events, on the listener's thread; ``now`` is in seconds."""

    def hear(self, identity: bytes, frames: list[bytes], now: float, tenant: Tenant) -> None:
        """Takes one message, from this tenant."""

    def has_room(self, identity: bytes) -> None:
        """A connection that was full is not any more."""

    def lost(self, identity: bytes) -> None:
        """A connection is over."""

    def deliver(self, reply: Reply, sample: ReturnSample, now: float) -> None:
        """Take a sample from the driver."""

    @property
    def patience(self) -> float:
        """Seconds from one ``look`` to the next: 0 where there is more to do at once, infinity
        where there is nothing to look after."""

    def look(self, now: float) -> None:
        """Sees to what time brings."""


class Listener:
    """Listens at one checked address from ``start`` on, and answers from ``open`` on, waiting
    clients first; until then it tells them the ``progress`` of the start.

    ``start`` raises AddressError where it cannot listen. ``stop`` sends what is left in the outbox
    and frees the address. If the thread dies it calls ``on_failure``; the socket's process may
    die, and is replaced. With an ``authority`` only its tenants are admitted. Connections that are
    silent for ``silence_limit`` seconds are closed.
    """

    def __init__(
        self,
        name: str,
        spawner: Spawner,
        address: str,
        on_failure: Callable[[str], None],
        authority: Authority | None,
        progress: Callable[[], str],
        silence_limit: float | None = None,
    ) -> None:
        self.outbox = Outbox(bell := Bell())
        self._name = name
        self._bell = bell
        self._spawner = spawner
        self._address = address
        self._authority = authority
        self._silence_limit = silence_limit
        self._on_failure = on_failure
        self._starting = StartingRules(self.send, progress)
        self._rules: Rules = self._starting
        self._is_open = False
        self._stopping = False
        self._looked_at = 0.0
        self._called_at: float | None = None
        """When ``seconds_unresponsive`` last woke the thread; None once the thread has run."""
        self._reload: Future[None] | None = None
        """Pending until the process has the new keys."""
        self._bound: Future[None] = Future()
        self._file: tuple[int, int] | None = None
        """The socket's, if it has one."""
        self._thread = SafeThread(name, self._run, self._died)

    def start(self) -> None:
        """Bind and begin to listen."""
        if self._authority is not None:
            self._authority.on_reload(self._reload_keys)
        self._thread.start()
        self._bound.result()

    def open(self, rules: Rules) -> None:
        """Begin to answer."""
        self._rules = rules
        self._bell.ring()

    @property
    def num_restarts(self) -> int:
        """Processes of the socket that have died, and were followed by another."""
        return self._peers.num_deaths if self._bound.done() and self._bound.exception() is None else 0

    def seconds_unresponsive(self) -> float:
        """For how long thread or process have not reacted to earlier calls; wakes them again."""
        now = time.monotonic()
        waiting_since = [at for at in (self._called_at, self._peers.called_at) if at is not None]
        if self._called_at is None:
            self._called_at = now
        self._bell.ring()
        return now - min(waiting_since, default=now)

    def lost_address(self) -> str | None:
        """The address, if its file was removed or replaced, so that nobody new comes here."""
        return self._address if self._file is not None and file_of(self._address) != self._file else None

    def stop(self) -> None:
        """Answer what has arrived, send what is left and close; a second call does nothing."""
        self._stopping = True
        self._bell.ring()
        self._thread.join()

    def send(self, identity: bytes, message: ServerMessage) -> Sent:
        """Send one message to one client, now or not at all; only the thread itself may."""
        return self._peers.send(identity, encode(message))

    def close(self, identity: bytes) -> None:
        """End one client's connection, after it had time to read its last messages; only the thread itself may."""
        self._peers.close(identity)

    def _run(self) -> None:
        try:
            with listening(self._address) as end:
                self._file = file_of(self._address)
                self._peers = Peers(self._name, self._spawner, end, self._configuration())
                self._bound.set_result(None)
                try:
                    self._serve()
                finally:
                    end.close()
                    self._peers.stop()
        except AddressError as error:
            self._bound.set_exception(error)

    def _configuration(self) -> SocketConfiguration:
        return {
            "address": self._address,
            "max_message_bytes": HARD_MAX_MESSAGE_BYTES,
            "silence_limit": self._silence_limit,
            "secret": self._authority.secret if self._authority is not None else None,
            "keys": self._authority.keys() if self._authority is not None else [],
        }

    def _died(self, name: str, error: BaseException) -> None:
        if not self._bound.done():
            self._bound.set_exception(error)
        else:
            self._on_failure(f"the {name} thread died of {type(error).__name__}: {error}")

    def _serve(self) -> None:
        while not self._stopping:
            self._peers.attend(time.monotonic())
            self._turn()
            self._wait()
        self._peers.attend(time.monotonic())
        self._turn()  # what came in between the last turn and the call of stop
        while not self._rules.patience:
            self._rules.look(time.monotonic())

    def _wait(self) -> None:
        """Flush, and wait for something to do."""
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        self._peers.flush_and_poll(poll)
        due_at = min(self._peers.due_at, self._looked_at + self._rules.patience)
        patience = None if due_at == math.inf else max(0, math.ceil(1000 * (due_at - time.monotonic())))
        if any(descriptor == self._bell.fileno() for descriptor, _ in poll.poll(patience)):
            self._bell.clear()

    def _turn(self) -> None:
        now = time.monotonic()
        if self._called_at is not None:
            self._called_at = None
            self._peers.call(now)
        if self._reload is not None and self._authority is not None:
            reload, self._reload = self._reload, None
            self._peers.authorise(self._authority.keys(), reload)
        rules = self._rules
        if rules is not self._starting:
            while self._starting.early:
                identity, (frames, tenant) = self._starting.early.popitem()
                rules.hear(identity, frames, now, tenant)
        for _ in range(MESSAGES_PER_TURN):
            event = self._peers.next()
            if event is None:
                break
            self._hear(rules, event, now)
        self._answer(rules, now)

    def _answer(self, rules: Rules, now: float) -> None:
        if not self._is_open:
            self._is_open = True
            self._peers.open()
        for reply, sample in self.outbox.take():
            rules.deliver(reply, sample, now)
        if now >= self._looked_at + rules.patience:
            self._looked_at = now
            rules.look(now)

    def _hear(self, rules: Rules, event: Event, now: float) -> None:
        match event:
            case Said(peer, frames):
                tenant = of_user(peer.user) if self._authority is None else self._authority.tenant(peer.key or "")
                if tenant is None:
                    self.send(peer.identity, Error(None, "forbidden", "this key is not authorised any more"))
                else:
                    rules.hear(peer.identity, frames, now, tenant)
            case HasRoom(peer):
                rules.has_room(peer.identity)
            case Lost(peer):
                rules.lost(peer.identity)
            case Refused(peer, code, why):
                self.send(peer.identity, Error(None, code, why))
                self.close(peer.identity)

    def _reload_keys(self) -> None:
        """Send the keys to the process; wait until it has them, for RELOAD_PATIENCE at most."""
        reload: Future[None] = Future()
        self._reload = reload
        self._bell.ring()
        wait([reload], RELOAD_PATIENCE)
