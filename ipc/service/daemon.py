"""The daemon: start, serve until stopped, shut down.

The start takes the address first. So a second daemon fails before it has loaded anything, and an
early client waits instead of being refused. READY follows when the model is loaded and every step
is compiled and has run once.

SIGTERM and SIGINT drain the daemon, as ``odriver drain`` does: it takes no new work, finishes open
requests and exits with 0. Requests that are not finished in time, or by a second signal, end with
an error. A signal after that ends the process at once. SIGHUP reloads the configuration and the
keys, and applies what needs no restart. If a thread of driver or sockets dies, or a stage hangs,
open requests end with an error, and the exit code asks for a restart.
"""

import faulthandler
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType

from rich.console import Console

from engine.progress import Progress
from ipc.process.systemd import extend_timeout, notify, notify_reloading
from ipc.server.zmq_server import Server
from ipc.service import terminal
from ipc.service.configuration import LiveConfiguration, default_profile_directory
from ipc.service.exposition import Exposition
from ipc.service.metrics_server import MetricsServer
from ipc.service.start_up import Load, Loaded, StartableDriver, load
from ipc.service.watchdog import Watchdog
from ipc.sockets.auth import Authority
from ipc.wire.addresses import checked_address, default_address, is_local, open_to_group
from ipc.wire.bell import Bell
from ipc.wire.keys import default_directory
from ipc.wire.messages import PROGRESS_LIMIT

logger = logging.getLogger(__name__)

STOPPED = os.EX_OK
FAULT = 1
MISCONFIGURED = os.EX_CONFIG
"""Exit codes: after MISCONFIGURED a restart is of no use, after FAULT it may be."""

DRIVER_TIMEOUT = 3.0
"""Seconds for the driver's threads to finish their present item, such as a step of the device."""
SHUTDOWN_TIMEOUT = 4.5
"""Seconds for the whole shutdown; then the process ends with a traceback of all threads."""
START_PATIENCE = 600.0
"""Seconds that systemd waits for each compilation or stage of the start."""
LONGEST_DRAIN = 7 * 86400.0
"""Seconds that a drain takes at most; a longer timeout means no limit."""
LONGEST_WAIT = 3600.0
"""Seconds of the main thread's longest poll, which may not be infinite."""


class Interrupted(BaseException):
    """A signal came during start-up."""


class Daemon:
    """One daemon. ``run`` it once, in the main thread, which gets the signals."""

    def __init__(self, configuration: LiveConfiguration, console: Console, load: Load = load) -> None:
        self._configuration = configuration
        settings = configuration.daemon
        self._address = checked_address(settings.bind, has_key=True)
        directory = settings.keys or (None if is_local(self._address) else default_directory())
        self._authority = None if directory is None else Authority(directory)
        self._console = console
        self._load = load
        profiles = settings.profile_directory or default_profile_directory()
        self._server = Server(
            self._address, self._fail, self._ask_to_drain, self._authority, profiles and profiles.absolute()
        )
        self._exposition = Exposition()
        self._exposition.gauge("odriver_clients", "Clients that are connected", lambda: self._server.num_clients)
        restarts = "Processes of the sockets that died and were followed by another"
        self._exposition.counter("odriver_socket_restarts", restarts, lambda: self._server.num_restarts)
        self._exposition.gauge(
            "odriver_sockets_busy_seconds",
            "Since a socket thread was called and has not come by",
            lambda: max(self._server.stages().values()),
        )
        self._metrics: MetricsServer | None = None
        if settings.metrics_port is not None:
            host, port = settings.metrics_host, settings.metrics_port
            self._metrics = MetricsServer(host, port, self.health, self._exposition)
        self._driver: StartableDriver | None = None
        self._loaded: Loaded | None = None
        self._ends: SimpleQueue[tuple[int, str]] = SimpleQueue()
        """Exit code and reason; the first one counts."""
        self._bell = Bell()
        self._drains: SimpleQueue[tuple[float | None, str]] = SimpleQueue()
        """In how many seconds, None for ``drain_timeout``, and why."""
        self._drain_deadline = math.inf
        self._watchdog: Watchdog | None = None
        self._starting = False
        self._signalled = False
        self._stopping = False
        self._reload_asked = False

    def run(self) -> int:
        """Serve; returns the exit code. Raises ConfigurationError and AddressError."""
        why = "the daemon could not start"
        code = FAULT
        with _handling_signals(self._on_signal, self._bell, at_terminal=self._console.is_terminal):
            try:
                self.startup()
                why = "the daemon failed"
                code, why = self.main_loop()
            except Interrupted:
                code, why = self._ends.get()
            finally:
                self.shutdown(why, fault=code == FAULT)
        if self._loaded is not None:
            self._loaded.leave(code, why)
        logger.info("stopped: %s", why)
        return code

    def startup(self) -> None:
        """Take the address, load, start the threads, and say READY."""
        self._starting, began = True, time.monotonic()
        self._server.start()
        if self._configuration.daemon.socket_access == "group":
            open_to_group(self._address)
        if self._metrics is not None:
            self._metrics.start()
        with terminal.start_up(self._console) as display:
            loaded = self._load(self._configuration.engine, lambda progress: _report(display, progress), self._fail)
        self._driver, self._loaded = loaded.driver, loaded
        self._driver.start()
        if loaded.metrics is not None:
            self._exposition.add(loaded.metrics)
        self._server.open(self._driver, loaded.model, loaded.limits, self._exposition.text)
        self._starting = False
        notify("STATUS=serving")
        notify("READY=1")
        self._watchdog = Watchdog(self._stages, self._hung, self._fail)
        self._watchdog.start()
        facts = {"address": self._address}
        if self._metrics is not None:
            facts["metrics"] = f"{self._metrics.url}/metrics"
        facts["started in"] = f"{time.monotonic() - began:.1f} s"
        connect = "" if self._address == default_address() else f" --connect {self._address}"
        connect += "" if self._authority is None else " --key NAME.key"
        facts["try"] = f'odriver complete "Once upon a time"{connect}'
        terminal.show_ready(self._console, loaded.facts | facts)

    def main_loop(self) -> tuple[int, str]:
        """Wait for the end; the exit code and the reason."""
        why = ""
        while self._ends.empty():
            left = self._drain_deadline - time.monotonic()
            if left <= 0:
                return STOPPED, why
            self._bell.wait(min(left, LONGEST_WAIT))
            if self._reload_asked:
                self._reload_asked = False
                self.reload()
            while not self._drains.empty():
                timeout, why = self._drains.get()
                self._drain(timeout, why)
        return self._ends.get()

    def _drain(self, timeout: float | None, why: str) -> None:
        """Take no new work, and end once open requests are done; the others get the reason."""
        assert self._driver is not None
        timeout = self._configuration.daemon.drain_timeout if timeout is None else timeout
        timeout = min(timeout, LONGEST_DRAIN)
        if self._stalled() is not None:  # and what is stuck does not finish
            timeout = 0.0
        self._drain_deadline = min(self._drain_deadline, time.monotonic() + timeout)
        extend_timeout(timeout + SHUTDOWN_TIMEOUT)
        notify("STATUS=finishing what is open")
        logger.info("%s: nothing new is taken, and what is open has %g s to finish", why, timeout)
        self._driver.drain(lambda: self._end(STOPPED, why))

    def reload(self) -> None:
        """Read the configuration again."""
        notify_reloading()
        self._configuration.reload()
        if self._authority is not None:
            self._authority.reload()
        notify("READY=1")

    def shutdown(self, why: str, *, fault: bool = False) -> None:
        """End open requests with the reason, as a fault of theirs perhaps, and close."""
        self._starting, self._stopping = False, True
        faulthandler.dump_traceback_later(SHUTDOWN_TIMEOUT, exit=True)
        if self._watchdog is not None:
            self._watchdog.stop()
        notify("STOPPING=1")
        if self._driver is not None:
            end = self._driver.fail if fault else self._driver.stop
            end(why, timeout=DRIVER_TIMEOUT)
        self._server.stop()
        if self._metrics is not None:
            self._metrics.stop()
        faulthandler.cancel_dump_traceback_later()

    def health(self) -> str | None:
        """What is wrong, for ``/health``; None if nothing is."""
        if self._driver is None or self._starting:
            return "starting"
        if self._drain_deadline < math.inf:
            return "draining"
        return self._stalled()

    def _stalled(self) -> str | None:
        """The stage that has been busy with one item for too long, if any."""
        stages = self._stages()
        stage = max(stages, key=stages.__getitem__)
        if stages[stage] <= PROGRESS_LIMIT:
            return None
        return f"nothing has got done in the {stage} stage for {stages[stage]:.0f} s"

    def _stages(self) -> dict[str, float]:
        """For how many seconds each stage and socket thread has been busy with one item."""
        assert self._driver is not None
        return {**self._driver.stages(), **self._server.stages()}

    def _hung(self, stage: str, seconds: float) -> None:
        """End after a hang, for a restart, with tracebacks of all threads in the log."""
        assert self._driver is not None
        why = f"nothing has got done in the {stage} stage for {seconds:.0f} s: the daemon ends, to be started anew"
        logger.error("%s; requests in the hands of a stage: %r", why, self._driver.stuck_requests(PROGRESS_LIMIT))
        faulthandler.dump_traceback(all_threads=True)
        # The main thread may hang too.
        faulthandler.dump_traceback_later(2 * SHUTDOWN_TIMEOUT, exit=True)
        self._fail(why)

    def _fail(self, why: str) -> None:
        self._end(FAULT, why)

    def _end(self, code: int, why: str) -> None:
        self._ends.put((code, why))
        if self._starting:  # the start may wait for ever for a dead process
            os.kill(os.getpid(), signal.SIGTERM)
        self._bell.ring()

    def _ask_to_drain(self, timeout: float | None) -> None:
        self._drains.put((timeout, "the daemon was drained by an operator"))
        self._bell.ring()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGHUP:
            self._reload_asked = True
            return
        why = f"the daemon was stopped by {signal.Signals(number).name}"
        if self._stopping:
            os._exit(128 + number)
        if self._starting:
            self._stopping = True
            self._ends.put((STOPPED, why))
            raise Interrupted
        self._drains.put((0.0 if self._signalled else None, why))
        self._signalled = True


def _report(display: terminal.StartUp, progress: Progress) -> None:
    display.show(progress)
    extend_timeout(START_PATIENCE)
    notify(f"STATUS={progress.stage}: {terminal.amount(progress)}")


@contextmanager
def _handling_signals(
    handle: Callable[[int, FrameType | None], None], bell: Bell, *, at_terminal: bool
) -> Iterator[None]:
    """Handle signals, which also ring the bell: Python's own waits may miss a signal that comes as
    they begin.

    At a terminal SIGHUP means that the terminal is gone, and has its default action.
    """
    wakeup = signal.set_wakeup_fd(bell.write_fd)
    numbers = (signal.SIGTERM, signal.SIGINT) if at_terminal else (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
