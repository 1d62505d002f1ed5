"""The daemon's own settings, and the configuration of a running daemon, which a reload reads
again.

Those of the engine are in engine/config.py; where a value comes from is in settings.py.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

from rich.console import Console

from engine.config import EngineConfig, setting
from engine.errors import ConfigurationError
from ipc.process.logs import configure_logging

logger = logging.getLogger(__name__)

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
SOCKET_ACCESS = ("user", "group")
RELOADABLE = ("drain_timeout", "log_level", "log_format")
"""Settings that a reload takes over."""


@dataclass(frozen=True, kw_only=True)
class DaemonConfig:
    """Raises ConfigurationError for values that cannot work; ``bind`` is checked when used."""

    bind: str | None = setting(None, "ADDR", "ipc:///path/to.sock or tcp://HOST:PORT (default: a private socket)")
    keys: Path | None = setting(
        None,
        "DIR",
        "admit only keys of this directory (default: its own where other machines reach the address, else none)",
    )
    drain_timeout: float = setting(
        30.0, "S", "seconds to finish open requests in when the daemon is stopped; inf is no limit"
    )
    profile_directory: Path | None = setting(
        None, "DIR", "where what `odriver profile` asks for is written (default: odriver/profiles in XDG_STATE_HOME)"
    )
    socket_access: str = setting(
        "user", "", "who may use an ipc:// socket: the daemon's user, or its group, too", choices=SOCKET_ACCESS
    )
    metrics_port: int | None = setting(None, "PORT", "HTTP port for /metrics and /health; 0 is any (default: none)")
    metrics_host: str = setting("127.0.0.1", "HOST", "address of that port; it is neither encrypted nor authenticated")
    log_level: str = setting("info", "", "the least that is logged of our own", choices=LOG_LEVELS)
    log_format: str = setting("text", "", "of the log on stderr", choices=LOG_FORMATS)

    def __post_init__(self) -> None:
        if not self.drain_timeout >= 0:
            raise ConfigurationError(f"drain_timeout must be 0 or more seconds, not {self.drain_timeout}")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535:
            raise ConfigurationError(f"metrics_port must be 0 to 65535, not {self.metrics_port}")
        for name, choices in (
            ("log_level", LOG_LEVELS),
            ("log_format", LOG_FORMATS),
            ("socket_access", SOCKET_ACCESS),
        ):
            value = getattr(self, name)
            if value not in choices:
                raise ConfigurationError(f"{name} must be {_either(choices)}, not {value}")

    @property
    def level(self) -> int:
        """``log_level`` as the number that logging knows."""
        return logging.getLevelNamesMapping()[self.log_level.upper()]


def default_profile_directory() -> Path | None:
    """The default directory of traces; None for a user without a home."""
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "odriver" / "profiles"
    except RuntimeError:
        return None


def _either(choices: tuple[str, ...]) -> str:
    return f"{', '.join(choices[:-1])} or {choices[-1]}"


ReadConfig = Callable[[], tuple[EngineConfig, DaemonConfig]]
"""Reads the present configuration; raises ConfigurationError."""


class LiveConfiguration:
    """``engine`` as at the start, ``daemon`` as last reloaded. Raises ConfigurationError."""

    def __init__(self, read: ReadConfig, console: Console) -> None:
        self._read = read
        self._console = console
        self.engine, self.daemon = read()

    def apply(self) -> None:
        """Do what can be done at once: log as is configured."""
        configure_logging(self._console, self.daemon.level, self.daemon.log_format)

    def reload(self) -> None:
        """Apply the changes that need no restart, and log the others; errors change nothing."""
        try:
            engine, daemon = self._read()
        except ConfigurationError as error:
            logger.error("nothing is reloaded: %s", error)
            return
        changed = [*_changed(self.engine, engine), *_changed(self.daemon, daemon)]
        taken = {name: getattr(daemon, name) for name in changed if name in RELOADABLE}
        self.daemon = replace(self.daemon, **taken)
        if taken.keys() & {"log_level", "log_format"}:  # else a level set by control would be lost
            self.apply()
        logger.info("reloaded: %s", ", ".join(taken) or "nothing to take over")
        left = [name for name in changed if name not in RELOADABLE]
        if left:
            logger.warning("what has changed of %s holds after a restart", ", ".join(left))


def _changed(before: EngineConfig | DaemonConfig, now: EngineConfig | DaemonConfig) -> list[str]:
    return [field.name for field in fields(before) if getattr(before, field.name) != getattr(now, field.name)]
