"""What holds for a running daemon: read at its start, and again at every reload, which takes over what it can."""

import logging
from collections.abc import Callable
from dataclasses import fields, replace

from rich.console import Console

from engine.config import EngineConfig
from engine.errors import ConfigurationError
from ipc.process.logs import configure_logging
from ipc.service.daemon_config import DaemonConfig

logger = logging.getLogger(__name__)

RELOADABLE = ("drain_timeout", "log_level", "log_format")
"""Settings that a reload takes over."""

ReadConfig = Callable[[], tuple[EngineConfig, DaemonConfig]]
"""Reads what is configured by now; raises ConfigurationError."""


class LiveConfiguration:
    """``engine`` as at the start, ``daemon`` as of the last reload. Raises ConfigurationError, but never in a reload."""

    def __init__(self, read: ReadConfig, console: Console) -> None:
        self._read = read
        self._console = console
        self.engine, self.daemon = read()

    def apply(self) -> None:
        """Do what can be done at once: log as is configured."""
        configure_logging(self._console, self.daemon.level, self.daemon.log_format)

    def reload(self) -> None:
        """Take over what has changed and needs no restart, and log the rest; of a configuration that is wrong, nothing."""
        try:
            engine, daemon = self._read()
        except ConfigurationError as error:
            logger.error("nothing is reloaded: %s", error)
            return
        changed = [*_changed(self.engine, engine), *_changed(self.daemon, daemon)]
        taken = {name: getattr(daemon, name) for name in changed if name in RELOADABLE}
        self.daemon = replace(self.daemon, **taken)
        if taken.keys() & {"log_level", "log_format"}:  # or a level that was set over control would be lost
            self.apply()
        logger.info("reloaded: %s", ", ".join(taken) or "nothing to take over")
        left = [name for name in changed if name not in RELOADABLE]
        if left:
            logger.warning("what has changed of %s holds after a restart", ", ".join(left))


def _changed(before: EngineConfig | DaemonConfig, now: EngineConfig | DaemonConfig) -> list[str]:
    return [field.name for field in fields(before) if getattr(before, field.name) != getattr(now, field.name)]
