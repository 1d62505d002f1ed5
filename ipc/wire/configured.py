"""Where a configuration file is looked for, and the one of its settings that clients have too:
``bind``, the daemon's address.

The other settings, and what they mean, are in ipc/service/settings.py.
"""

import logging
import os
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.errors import ConfigurationError
from ipc.errors import AddressError

logger = logging.getLogger(__name__)

FILE_VARIABLE = "ODRIVER_CONFIG"
BIND_VARIABLE = "ODRIVER_BIND"


def files() -> list[Path]:
    """Where configuration files are looked for: the user's, then the machine's."""
    homes = [Path(os.environ["XDG_CONFIG_HOME"])] if os.environ.get("XDG_CONFIG_HOME") else []
    with suppress(RuntimeError):  # a user without a home
        homes = homes or [Path.home() / ".config"]
    return [*(home / "odriver" / "config.toml" for home in homes), Path("/etc/odriver/config.toml")]


def config_file(given: Path | None) -> Path | None:
    """The configuration file: the one that is given, that ODRIVER_CONFIG names, or that is there."""
    named = given or os.environ.get(FILE_VARIABLE)
    return Path(named) if named else next(filter(_is_there, files()), None)


def _is_there(path: Path) -> bool:
    """Whether there is such a file. In a directory that our user may not enter there is none of
    ours: HOME is still another user's where a process has changed its own."""
    try:
        return path.is_file()
    except PermissionError as error:
        logger.info("%s is not looked for: %s", path, error.strerror)
        return False


def read_toml(path: Path) -> dict[str, Any]:
    """What a configuration file says; raises ConfigurationError."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigurationError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not TOML: {error}") from error


def configured_bind(given: Path | None) -> str | None:
    """``bind`` of the environment, else of the configuration file; raises AddressError."""
    if os.environ.get(BIND_VARIABLE):
        return os.environ[BIND_VARIABLE]
    path = config_file(given)
    try:
        bind = None if path is None else read_toml(path).get("bind")
    except ConfigurationError as error:
        raise AddressError(str(error)) from error
    if not isinstance(bind, str | None):
        raise AddressError(f"{path}: bind must be a string, not {bind!r}")
    return bind
