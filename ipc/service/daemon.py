"""The daemon: start, serve until stopped, shut down.

The start takes the address first. So a second daemon fails before it has loaded anything, and an
early client waits instead of being refused. READY follows when the model is loaded and every step
is compiled and has run once.

SIGTERM and SIGINT drain the daemon, as ``odriver drain`` does: it takes no new work, finishes open
requests and exits with 0. Requests that are not finished in time, or by a second signal, end with
an error. A signal after that ends the process at once. SIGHUP reloads the configuration and the
keys, and applies what needs no restart. A virtual machine that is about to stop says so, and the
daemon drains within the time that is left. If a thread of driver or sockets dies, or a stage hangs,
open requests end with an error, and the exit code asks for a restart.
"""

import faulthandler
import logging
import math
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from types import FrameType

from rich.console import Console

from driver.request import ReturnChannel
from engine.exit_codes import FAULT, MISCONFIGURED, STOPPED
from engine.hub.roots import Root
from engine.progress import Progress
from ipc.process.gateway_process import GatewayProcess
from ipc.process.signals import handling_signals
from ipc.process.systemd import extend_timeout, notify
from ipc.server.zmq_server import Server
from ipc.service import terminal
from ipc.service.configuration import LiveConfiguration, default_profile_directory
from ipc.service.monitoring.monitor import Monitor
from ipc.service.reloads import Reloads
from ipc.service.start_up import Load, Loaded, StartableDriver, load
from ipc.service.vm_notices import VMNotices, metadata_server
from ipc.sockets.auth import Authority
from ipc.wire.addresses import checked_address, default_address, is_local, open_to_group
from ipc.wire.bell import Bell
from ipc.wire.keys import default_directory
from ipc.wire.messages import PROGRESS_LIMIT

logger = logging.getLogger(__name__)

GATEWAY_TIMEOUT = 1.0
"""Seconds for the gateway to send the last of what is open."""
DRIVER_TIMEOUT = 3.0
"""Seconds for the driver's threads to finish their present item, such as a step of the device."""
SHUTDOWN_TIMEOUT = 4.5
"""Seconds for the whole shutdown; then the process ends with a traceback of all threads."""
DESCRIBED = ("dtype", "device", "operations")
"""The facts of the start that the status has, too."""
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

    def __init__(
        self,
        configuration: LiveConfiguration,
        console: Console,
        load: Load = load,
        gateway: GatewayProcess | None = None,
    ) -> None:
        self._configuration = configuration
        settings = configuration.daemon
        self._address = checked_address(settings.bind, has_key=True)
        directory = settings.keys or (None if is_local(self._address) else default_directory())
        self._authority = None if directory is None else Authority(directory)
        self._console = console
        self._load = load
        profiles = settings.profile_directory or default_profile_directory()
        self._server = Server(
            self._address,
            self._fail,
            self._ask_to_drain,
            self._ask_to_reload,
            configuration.set_log_level,
            self._authority,
            profiles and profiles.absolute(),
            None if settings.weights_root is None else Root(settings.weights_root, "weights_root"),
        )
        self._monitor = Monitor(settings, self._server, self.health)
        self._gateway = gateway
        if gateway is not None:
            configuration.on_log(gateway.log)
        self._driver: StartableDriver | None = None
        self._loaded: Loaded | None = None
        self._ends: SimpleQueue[tuple[int, str]] = SimpleQueue()
        """Exit code and reason; the first one counts."""
        self._bell = Bell()
        self._drains: SimpleQueue[tuple[float | None, str]] = SimpleQueue()
        """In how many seconds, None for ``drain_timeout``, and why."""
        self._drain_deadline = math.inf
        self._notices = VMNotices(self._ask_to_stop, metadata_server())
        self._starting = False
        self._signalled = False
        self._stopping = False
        self._reloads = Reloads([part.reload for part in (configuration, self._authority, gateway) if part is not None])

    def run(self) -> int:
        """Serve; returns the exit code. Raises ConfigurationError and AddressError."""
        why = "the daemon could not start"
        code = FAULT
        with handling_signals(self._on_signal, self._bell, at_terminal=self._console.is_terminal):
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
        self._notices.start()
        if self._configuration.daemon.socket_access == "group":
            open_to_group(self._address)
        self._monitor.start()
        if self._gateway is not None:
            issue = None if self._authority is None else self._authority.issue
            self._gateway.start(self._address, issue, self._gateway_ended)
        with terminal.start_up(self._console) as display:
            report = partial(self._report, display)
            loaded = self._load(self._configuration.engine, report, self._end, self._ask_to_stop)
        self._driver, self._loaded = loaded.driver, loaded
        self._monitor.observe(loaded)
        self._driver.start()
        self._server.open(
            self._driver,
            loaded.model,
            loaded.limits,
            self._monitor.metrics,
            loaded.aliases,
            enable_lora=loaded.enable_lora,
            fingerprint=loaded.fingerprint,
            description={name: loaded.facts[name] for name in DESCRIBED if name in loaded.facts},
        )
        if self._gateway is not None:
            self._gateway.wait_until_settled()
        self._starting = False
        notify("STATUS=serving")
        notify("READY=1")
        self._monitor.watch(self._hung, self._fail)
        facts = {"address": self._address}
        if self._monitor.metrics_url is not None:
            facts["metrics"] = self._monitor.metrics_url
        if self._gateway is not None:
            facts |= {"API": f"{self._gateway.url}/v1", "page": f"{self._gateway.url}/"}
        facts["started in"] = f"{time.monotonic() - began:.1f} s"
        connect = "" if self._address == default_address() else f" --connect {self._address}"
        connect += "" if self._authority is None else " --key NAME.key"
        facts["try"] = f'odriver complete "Once upon a time"{connect}'
        terminal.show_ready(self._console, loaded.facts | facts)

    def _report(self, display: terminal.StartUp, progress: Progress) -> None:
        self._server.progress = far = f"{progress.stage}: {terminal.amount(progress)}"
        display.show(progress)
        extend_timeout(START_PATIENCE)
        notify(f"STATUS={far}")

    def main_loop(self) -> tuple[int, str]:
        """Wait for the end; the exit code and the reason."""
        why = ""
        while self._ends.empty():
            left = self._drain_deadline - time.monotonic()
            if left <= 0:
                return STOPPED, why
            self._bell.wait(min(left, LONGEST_WAIT))
            self._reloads.run()
            while not self._drains.empty():
                timeout, why = self._drains.get()
                self._drain(timeout, why)
        return self._ends.get()

    def _drain(self, timeout: float | None, why: str) -> None:
        """Take no new work, and end once open requests are done; the others get the reason."""
        assert self._driver is not None
        timeout = self._configuration.daemon.drain_timeout if timeout is None else timeout
        timeout = min(timeout, LONGEST_DRAIN)
        if self._monitor.stalled() is not None:  # and what is stuck does not finish
            timeout = 0.0
        self._drain_deadline = min(self._drain_deadline, time.monotonic() + timeout)
        extend_timeout(timeout + SHUTDOWN_TIMEOUT)
        notify("STATUS=finishing what is open")
        logger.info("%s: nothing new is taken, and what is open has %g s to finish", why, timeout)
        self._driver.drain(lambda: self._drained(lambda: self._end(STOPPED, why)))

    def _drained(self, end: Callable[[], None]) -> None:
        """The driver has nothing open any more; the gateway may have answers to send yet."""
        if self._gateway is None:
            end()
        else:
            self._gateway.finish(end)

    def shutdown(self, why: str, *, fault: bool = False) -> None:
        """End open requests with the reason, as a fault of theirs perhaps, and close."""
        self._starting, self._stopping = False, True
        faulthandler.dump_traceback_later(SHUTDOWN_TIMEOUT, exit=True)
        self._notices.stop()
        self._monitor.stop_watching()
        notify("STOPPING=1")
        if self._driver is not None:
            end = self._driver.fail if fault else self._driver.stop
            end(why, timeout=DRIVER_TIMEOUT)
        self._server.stop()
        if self._gateway is not None:
            self._gateway.stop(GATEWAY_TIMEOUT)
        self._monitor.stop()
        faulthandler.cancel_dump_traceback_later()

    def health(self) -> str | None:
        """Why it is not healthy, for ``/health``; None if it is."""
        if self._driver is None or self._starting:
            return "starting"
        if self._drain_deadline < math.inf:
            return "draining"
        return self._monitor.stalled() or self._monitor.lost()

    def _hung(self, stage: str, seconds: float) -> None:
        """End after a hang, for a restart, with tracebacks of all threads in the log."""
        assert self._driver is not None
        why = f"nothing has got done in the {stage} stage for {seconds:.0f} s: the daemon ends, to be started anew"
        logger.error("%s; requests in the hands of a stage: %r", why, self._driver.stuck_requests(PROGRESS_LIMIT))
        faulthandler.dump_traceback(all_threads=True)
        # The main thread may hang too.
        faulthandler.dump_traceback_later(2 * SHUTDOWN_TIMEOUT, exit=True)
        self._fail(why)

    def _gateway_ended(self, code: int, how: str) -> None:
        """The gateway has ended by itself."""
        logger.error("%s", how)
        self._end(MISCONFIGURED if code == MISCONFIGURED else FAULT, how)

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

    def _ask_to_reload(self, request_id: str, channel: ReturnChannel) -> None:
        self._reloads.ask((request_id, channel))
        self._bell.ring()

    def _ask_to_stop(self, why: str, seconds: float = math.inf) -> None:
        """Drain, on any thread, as this or another host stops in so many seconds."""
        if self._starting:
            self._end(STOPPED, why)
        else:
            left = max(0.0, seconds - SHUTDOWN_TIMEOUT)
            self._drains.put((min(left, self._configuration.daemon.drain_timeout), why))
            self._bell.ring()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGHUP:
            self._reloads.ask()
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
