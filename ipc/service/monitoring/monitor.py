"""What is seen of a daemon: its metrics, ``/health``, traces of requests, and its watchdog."""

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ipc.server.zmq_server import Server
from ipc.service.configuration import DaemonConfig
from ipc.service.monitoring.exposition import Exposition
from ipc.service.monitoring.metrics_server import MetricsServer
from ipc.service.monitoring.watchdog import Watchdog
from ipc.service.start_up import Loaded, StartableDriver
from ipc.wire.messages import PROGRESS_LIMIT

if TYPE_CHECKING:
    from driver.metrics.request_traces import RequestTraces

logger = logging.getLogger(__name__)


class Monitor:
    """Of the daemon with these settings and sockets; ``health`` says why it is not healthy, if so.

    Its driver comes with ``observe``, before which there is no ``stalled`` and no ``watch``.
    """

    def __init__(self, settings: DaemonConfig, server: Server, health: Callable[[], str | None]) -> None:
        self._server = server
        self._driver: StartableDriver | None = None
        self._exposition = Exposition()
        self._exposition.gauge("odriver_clients", "Clients that are connected", lambda: server.num_clients)
        restarts = "Processes of the sockets that died and were followed by another"
        self._exposition.counter("odriver_socket_restarts", restarts, lambda: server.num_restarts)
        self._exposition.gauge(
            "odriver_sockets_busy_seconds",
            "Since a socket thread was called and has not come by",
            lambda: max(server.stages().values()),
        )
        lost = "Sockets whose file was removed, so that nobody new can connect"
        self._exposition.gauge("odriver_lost_sockets", lost, lambda: len(server.lost_addresses()))
        self._said_lost: str | None = None
        self._metrics: MetricsServer | None = None
        if settings.metrics_port is not None:
            self._metrics = MetricsServer(settings.metrics_host, settings.metrics_port, health, self._exposition)
        self._traces: RequestTraces | None = None
        if settings.otlp_traces_endpoint is not None:
            from driver.metrics import request_traces

            self._traces = request_traces.RequestTraces(settings.otlp_traces_endpoint)
        self._watchdog: Watchdog | None = None

    def start(self) -> None:
        """Serve metrics and health over HTTP, if they are wanted there. Raises AddressError."""
        if self._metrics is not None:
            self._metrics.start()

    @property
    def metrics_url(self) -> str | None:
        """Where metrics are served over HTTP, if they are."""
        return None if self._metrics is None else f"{self._metrics.url}/metrics"

    def metrics(self) -> str:
        """All metrics, in Prometheus's text format."""
        return self._exposition.text()

    def observe(self, loaded: Loaded) -> None:
        """Show what has been loaded, too; before its driver starts."""
        self._driver = loaded.driver
        if self._traces is not None:
            loaded.driver.observe(partial(self._traces.ended, loaded.model))
        if loaded.metrics is not None:
            self._exposition.add(loaded.metrics)

    def watch(self, on_hang: Callable[[str, float], None], on_failure: Callable[[str], None]) -> None:
        """Begin to look for progress, with the two as of a Watchdog."""
        self._watchdog = Watchdog(self._stages, on_hang, on_failure, look_at_rest=self._say_lost)
        self._watchdog.start()

    def stalled(self) -> str | None:
        """The stage that has been busy with one item for too long, if any."""
        stages = self._stages()
        stage = max(stages, key=stages.__getitem__)
        if stages[stage] <= PROGRESS_LIMIT:
            return None
        return f"nothing has got done in the {stage} stage for {stages[stage]:.0f} s"

    def lost(self) -> str | None:
        """Why nobody new can connect, if so; who is connected is served on."""
        addresses = self._server.lost_addresses()
        if not addresses:
            return None
        return f"{', '.join(addresses)}: somebody has removed the socket, and nobody new can connect: start the daemon anew"

    def stop_watching(self) -> None:
        """Look for progress no more: the daemon ends."""
        if self._watchdog is not None:
            self._watchdog.stop()

    def stop(self) -> None:
        """Give the port back, and send the last traces."""
        if self._metrics is not None:
            self._metrics.stop()
        if self._traces is not None:
            self._traces.close()

    def _say_lost(self) -> None:
        """Log it, once."""
        lost = self.lost()
        if lost is not None and lost != self._said_lost:
            logger.error("%s", lost)
        self._said_lost = lost

    def _stages(self) -> dict[str, float]:
        """For how many seconds each stage and socket thread has been busy with one item."""
        assert self._driver is not None
        return {**self._driver.stages(), **self._server.stages()}
