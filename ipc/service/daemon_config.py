"""What an operator may set of the daemon itself; what they may set of the engine is in engine/config.py."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigurationError
from engine.setting import setting

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
SOCKET_ACCESS = ("user", "group")


@dataclass(frozen=True, kw_only=True)
class DaemonConfig:
    """Raises ConfigurationError where a value cannot work; ``bind`` is checked when it is used (ipc/wire/addresses.py)."""

    bind: str | None = setting(None, "ADDR", "ipc:///path/to.sock or tcp://HOST:PORT (default: a private socket)")
    keys: Path | None = setting(
        None,
        "DIR",
        "admit only keys of this directory (default: its own where other machines reach the address, else none)",
    )
    drain_timeout: float = setting(
        30.0, "S", "seconds to finish what is open in when the daemon is told to end; inf is as many as it takes"
    )
    profile_directory: Path | None = setting(
        None, "DIR", "where what `odriver profile` asks for is written (default: odriver/profiles in XDG_STATE_HOME)"
    )
    socket_access: str = setting(
        "user", "", "who may use an ipc:// socket: the daemon's user, or its group, too", choices=SOCKET_ACCESS
    )
    metrics_port: int | None = setting(None, "PORT", "HTTP port for /metrics and /health; 0 is any (default: none)")
    metrics_host: str = setting(
        "127.0.0.1", "HOST", "where that port is; nothing there is encrypted or asks who you are"
    )
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
    """Where traces are written if nothing else is said; None for a user without a home."""
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "odriver" / "profiles"
    except RuntimeError:
        return None


def _either(choices: tuple[str, ...]) -> str:
    return f"{', '.join(choices[:-1])} or {choices[-1]}"
