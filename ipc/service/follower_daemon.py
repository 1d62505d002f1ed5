"""A process other than process 0 of a daemon on several hosts: it has its part of the model and no
clients.

The main thread listens for signals and to process 0; another thread builds the part and executes
the commands. Either ends the process at once when it is over: only process 0 needs to know, and a
step may hang.
"""

import faulthandler
import logging
import os
import signal
import sys
import time
from functools import partial
from queue import SimpleQueue
from types import FrameType
from typing import NoReturn

from driver.execution.progress import COMMAND_PATIENCE
from driver.stages.safe_thread import SafeThread
from engine.build import build_executor
from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.exit_codes import FAULT, MISCONFIGURED, STOPPED
from engine.hosts.follower import execute_commands
from engine.hosts.processes import Member, follow
from engine.hosts.sent_weights import stage_as_told
from engine.hub.obtain import obtained
from engine.step.commands import AskToStop, Command, Leave, Left, WriteWeights
from ipc.process.heap import freeze_heap
from ipc.process.systemd import extend_timeout, notify
from ipc.service.facts_alike import facts_alike
from ipc.service.monitoring.watchdog import Watchdog
from ipc.service.vm_notices import VMNotices, metadata_server

logger = logging.getLogger(__name__)

START_PATIENCE = 600.0
"""As the daemon's."""


class FollowerDaemon:
    """One of them, to be ``run`` once, in the main thread."""

    def __init__(self, config: EngineConfig) -> None:
        assert config.hosts is not None
        self._config = config
        self._hosts = config.hosts
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._thread = SafeThread("follower", self._execute, self._died)
        self._member: Member | None = None
        self._signalled = False
        self._busy_since: float | None = None
        self._watchdog = Watchdog(self._stages, self._hung, lambda why: _end(FAULT, why))

    def run(self) -> NoReturn:
        """Follow process 0 to the end. Raises ConfigurationError, DevicesUnavailable,
        HostsError."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        # At a terminal SIGHUP means that it is gone; elsewhere it means reload: nothing to do.
        if not sys.stderr.isatty():
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        extend_timeout(START_PATIENCE)
        notify("STATUS=waiting for the other processes")
        self._config = obtained(self._config, lambda _: extend_timeout(START_PATIENCE))
        self._member = member = follow(self._hosts, facts_alike(self._config))
        VMNotices(lambda why, seconds: member.say(AskToStop(why, seconds)), metadata_server()).start()
        self._thread.start()
        while not isinstance(command := self._member.listen(), Leave):
            self._commands.put(command)
        _end(command.code, command.why)

    def _execute(self) -> None:
        try:
            executor = build_executor(self._config, lambda _: extend_timeout(START_PATIENCE))
        except ConfigurationError as error:
            self._leave(MISCONFIGURED, str(error))
        freeze_heap()
        notify("READY=1", "STATUS=following process 0")
        self._watchdog.start()
        logger.info(
            "process %d of %d is ready, and follows process 0 at %s: clients are served there",
            self._hosts.process_id, self._hosts.num_processes, self._hosts.coordinator_address,
        )  # fmt: skip
        assert self._member is not None
        SafeThread("stage weights", partial(stage_as_told, executor, self._member.weights), self._died).start()
        execute_commands(executor, self._next)

    def _next(self) -> Command:
        self._busy_since = None
        command = self._commands.get()
        self._busy_since = time.monotonic() + (COMMAND_PATIENCE if isinstance(command, WriteWeights) else 0.0)
        return command

    def _stages(self) -> dict[str, float]:
        """For how long it has been at one command."""
        since = self._busy_since
        return {"execution": 0.0 if since is None else max(0.0, time.monotonic() - since)}

    def _hung(self, stage: str, seconds: float) -> None:
        faulthandler.dump_traceback(all_threads=True)
        _end(FAULT, f"nothing has got done in the {stage} stage for {seconds:.0f} s")

    def _died(self, name: str, error: BaseException) -> None:
        del name
        self._leave(FAULT, str(error))

    def _leave(self, code: int, why: str) -> NoReturn:
        """End, and have process 0 end alike: what all find at once, such as other weights, either may say first."""
        assert self._member is not None
        self._member.say(Left(code, why))
        _end(code, why)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        why = f"it was stopped by {signal.Signals(number).name}"
        if self._signalled or self._member is None:
            os._exit(128 + number if self._signalled else STOPPED)
        self._signalled = True
        self._member.say(AskToStop(why))


def _end(code: int, why: str) -> NoReturn:
    logger.log(logging.ERROR if code else logging.INFO, "stopped: %s", why)
    logging.shutdown()
    os._exit(code)
