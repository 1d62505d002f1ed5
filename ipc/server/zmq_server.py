"""The daemon's two sockets: one for work, and one for control, which is answered however much work
there is.

Each has a process of its own, which faces the clients (``socket_process``), and a thread here,
which answers them.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from engine.hub.roots import Root
from engine.request_limits import MAX_MESSAGE_BYTES, ServingLimits
from ipc.server.control import Control, Reloading
from ipc.server.driver_protocol import Driver
from ipc.server.held_answers import HeldAnswers
from ipc.server.listener import Listener
from ipc.server.work.client_table import Clients
from ipc.sockets.auth import Authority
from ipc.sockets.spawner import Spawner
from ipc.sockets.tenants import Tenant
from ipc.wire.addresses import control_address
from ipc.wire.messages import CREDITS, PROTOCOL_VERSION, SILENCE_LIMIT, Welcome

SILENCE_OF_CONNECTIONS = 2 * SILENCE_LIMIT
"""Seconds after which a silent connection is closed; its work was aborted before."""


class Server:
    """Serves a driver to clients, work at ``address`` and control at ``control_address(address)``.

    ``start`` binds the addresses and raises AddressError where it cannot; clients may connect from
    then on, and are answered from ``open`` on. ``stop`` sends what the driver has left in the
    outbox and frees the addresses. ``on_failure`` is called on a dying thread. ``on_drain`` is
    called on the control thread when a client drains the daemon, with the seconds to finish in or
    None for the default, ``on_reload`` when one asks it to reload, and ``on_log_level`` with the
    level that it is to log. Only tenants of an ``authority`` are admitted, everybody if there is
    none. ``profiles`` is the directory for traces, ``weights_root`` that of weights to come.
    """

    def __init__(
        self,
        address: str,
        on_failure: Callable[[str], None],
        on_drain: Callable[[float | None], None],
        on_reload: Reloading,
        on_log_level: Callable[[str], None],
        authority: Authority | None = None,
        profiles: Path | None = None,
        weights_root: Root | None = None,
    ) -> None:
        self._on_drain = on_drain
        self._on_reload = on_reload
        self._on_log_level = on_log_level
        self._authority = authority
        self._profiles = profiles
        self._weights_root = weights_root
        self._spawner = Spawner()
        self._num_clients: Callable[[], int] = lambda: 0
        self.progress = "starting"
        """How far the start is, for clients; the daemon sets it."""

        def listener(name: str, address: str, silence_limit: float | None = None) -> Listener:
            return Listener(name, self._spawner, address, on_failure, authority, lambda: self.progress, silence_limit)

        self._work = listener("sockets", address, SILENCE_OF_CONNECTIONS)
        self._control = listener("control", control_address(address))

    @property
    def num_clients(self) -> int:
        """Connected clients that have sent Hello."""
        return self._num_clients()

    @property
    def num_restarts(self) -> int:
        """Processes of the sockets that have died, and were followed by another."""
        return self._work.num_restarts + self._control.num_restarts

    def stages(self) -> dict[str, float]:
        """For how long each thread has not reacted to earlier calls; wakes them again."""
        return {"sockets": self._work.seconds_unresponsive(), "control": self._control.seconds_unresponsive()}

    def lost_addresses(self) -> list[str]:
        """Those whose file somebody has removed or replaced, so that nobody new comes here."""
        lost = self._work.lost_address(), self._control.lost_address()
        return [address for address in lost if address is not None]

    def start(self) -> None:
        """Bind and begin to listen. Who comes is told to wait, and how far the start is."""
        try:
            self._work.start()
            self._control.start()
        except BaseException:
            self.stop()
            raise

    def open(
        self,
        driver: Driver,
        model: str,
        limits: ServingLimits,
        metrics: Callable[[], str] = str,
        aliases: Sequence[str] = (),
        *,
        enable_lora: bool = False,
        fingerprint: str = "",
        description: Mapping[str, str] | None = None,
    ) -> None:
        """Begin to answer, waiting clients first; ``metrics`` returns Prometheus's text, and
        ``description`` is a part of the status."""
        welcome = Welcome(
            version=PROTOCOL_VERSION,
            model=model,
            aliases=list(aliases),
            default_sampling_params=limits.default_sampling_params,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            max_num_seqs=limits.max_num_seqs,
            max_message_bytes=MAX_MESSAGE_BYTES,
            credits=CREDITS,
            silence_limit=SILENCE_LIMIT,
            client_id="",
            enable_lora=enable_lora,
            fingerprint=fingerprint,
        )
        clients = Clients(driver, welcome, self._work.outbox, self._work.send, self._current)
        self._work.open(clients)
        self._num_clients = lambda: len(clients)
        self._control.open(
            Control(
                driver,
                welcome,
                description or {},
                self._num_clients,
                metrics,
                self._on_drain,
                self._on_reload,
                self._on_log_level,
                self.stages,
                self._control.outbox,
                HeldAnswers(self._control.send, self._control.close),
                self._profiles,
                self._weights_root,
            )
        )

    def stop(self) -> None:
        """Answer what has arrived, send what is left and close; a second call does nothing."""
        self._work.stop()
        self._control.stop()
        self._spawner.stop()

    def _current(self, tenant: Tenant) -> Tenant | None:
        """A tenant as of the last reload of the keys; None if the key has been revoked."""
        if self._authority is None or tenant.limits is None:
            return tenant
        return self._authority.tenant(tenant.limits.public)
