"""The daemon's own settings, and the configuration of a running daemon, which a reload reads
again.

Those of the engine are in engine/config.py, and those of HTTP in http_config.py; where a value
comes from is in settings.py.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from engine.config import EngineConfig
from engine.setting_fields import check_choices, require_setting, setting
from ipc.process.logs import configure_logging, set_level
from ipc.service.device_choice import DEVICES
from ipc.service.http_config import HttpConfig

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
        None, "DIR", "directory for the traces of `odriver profile` (default: odriver/profiles in XDG_STATE_HOME)"
    )
    weights_root: str | None = setting(
        None,
        "DIR",
        "directory, or gs://BUCKET/DIRECTORY, below which `odriver update-weights` may read new weights (default: none)",
    )
    socket_access: str = setting(
        "user", "", "who may use an ipc:// socket: the daemon's user alone, or its group too", choices=SOCKET_ACCESS
    )
    metrics_port: int | None = setting(None, "PORT", "HTTP port for /metrics and /health; 0 is any (default: none)")
    metrics_host: str = setting(
        "127.0.0.1", "HOST", "address of the metrics port, which is neither encrypted nor authenticated"
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        "URL",
        "send a trace of each request to this OpenTelemetry collector, such as http://localhost:4318/v1/traces "
        "(default: none)",
    )
    device: str = setting(
        "auto", "", "device to serve on; auto is a TPU or GPU if there is one, else the CPU", choices=DEVICES
    )
    log_level: str = setting("info", "", "lowest level that is logged", choices=LOG_LEVELS)
    log_format: str = setting("text", "", "format of the log on stderr", choices=LOG_FORMATS)

    def __post_init__(self) -> None:
        require_setting(self.drain_timeout >= 0, "drain_timeout", "0 or more seconds", self.drain_timeout)
        port = self.metrics_port
        require_setting(port is None or 0 <= port <= 65535, "metrics_port", "0 to 65535", port)
        check_choices(self)


def default_profile_directory() -> Path | None:
    """The default directory of traces; None for a user without a home."""
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "odriver" / "profiles"
    except RuntimeError:
        return None


ReadConfig = Callable[[], tuple[EngineConfig, DaemonConfig, HttpConfig]]
"""Reads the present configuration; raises ConfigurationError."""


class LiveConfiguration:
    """``engine`` and ``http`` as at the start, ``daemon`` as last reloaded. Raises
    ConfigurationError."""

    def __init__(self, read: ReadConfig, console: Console) -> None:
        self._read = read
        self._console = console
        self._listeners: list[Callable[[str, str], object]] = []
        self.engine, self.daemon, self.http = read()

    def on_log(self, tell: Callable[[str, str], object]) -> None:
        """Call this with level and format of the log when they change, on any thread."""
        self._listeners.append(tell)

    def apply(self) -> None:
        """Do what can be done at once: log as is configured."""
        configure_logging(self._console, self.daemon.log_level, self.daemon.log_format)
        self._tell(self.daemon.log_level)

    def set_log_level(self, level: str) -> None:
        """Log from this level on, until a reload brings another; on any thread."""
        set_level(level)
        self._tell(level)

    def reload(self) -> str:
        """Apply the changes that need no restart; says which, and which others there are.

        Raises ConfigurationError, and changes nothing then.
        """
        engine, daemon, http = self._read()
        changed = [*_changed(self.engine, engine), *_changed(self.daemon, daemon), *_changed(self.http, http)]
        taken = {name: getattr(daemon, name) for name in changed if name in RELOADABLE}
        self.daemon = replace(self.daemon, **taken)
        if taken.keys() & {"log_level", "log_format"}:  # else a level set by control would be lost
            self.apply()
        left = [name for name in changed if name not in RELOADABLE]
        text = ", ".join(taken) or "no setting that a running daemon can change"
        return f"{text}; what has changed of {', '.join(left)} holds after a restart" if left else text

    def _tell(self, level: str) -> None:
        for tell in self._listeners:
            tell(level, self.daemon.log_format)


Config = TypeVar("Config", EngineConfig, DaemonConfig, HttpConfig)


def _changed(before: Config, now: Config) -> list[str]:
    return [field.name for field in fields(before) if getattr(before, field.name) != getattr(now, field.name)]
