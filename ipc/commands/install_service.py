"""``odriver install-service``: systemd units for this environment, and a configuration."""

import json
import os
import stat
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ipc.errors import OdriverError
from ipc.service.settings import SETTINGS, SettingValue, configs
from ipc.service.systemd_units import CONFIG, GATEWAY, UNIT, USER, USERS, render_daemon, render_gateway
from ipc.wire import owned_files
from ipc.wire.addresses import SERVICE, checked_address, is_local

SERVICE_DEFAULTS: dict[str, Any] = {"bind": SERVICE, "socket_access": "group", "metrics_port": 8001}
"""Defaults of a service: a socket that only members of its group may use."""
KEYS = Path("/var/lib/odriver/keys")
"""Default directory of keys, for a service that other machines can reach."""


class InstallFailed(OdriverError):
    """The service cannot be installed this way; the message has the remedy."""


def install(
    given: Mapping[str, Any], *, show: bool, unit: Path = UNIT, config: Path = CONFIG, users: Path = USERS
) -> None:
    """Write the unit of a service with these settings, its gateway's unit beside it, and the
    configuration, or print them.

    An existing configuration is left as it is. Raises InstallFailed, and ConfigurationError or
    AddressError for settings that cannot work.
    """
    settings = SERVICE_DEFAULTS | {name: value for name, value in given.items() if value is not None}
    loopback_only = is_local(checked_address(settings["bind"], has_key=True))
    if not loopback_only:
        settings = {"keys": KEYS, **settings}
    if settings.get("model") is not None:
        settings["model"] = Path(settings["model"]).resolve()
    command = _command()
    configs({name: SettingValue(settings.get(name, setting.default), "") for name, setting in SETTINGS.items()})
    # A virtual environment borrows its Python from elsewhere, often from somebody's home.
    environment = [Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()]
    reads = [*environment, *filter(None, [settings.get("model")])]
    one_host = settings.get("coordinator_address") is None
    text = render_daemon(command, reads, loopback_only=loopback_only and one_host)
    gateway, gateway_text = unit.with_name(GATEWAY), render_gateway(command, environment)
    if show:
        files = {config: _toml(settings), users: USER, unit: text, gateway: gateway_text}
        print("\n".join(f"# {path}\n{content}" for path, content in files.items()), end="")
        return
    if config.exists() and any(value is not None for value in given.values()):
        raise InstallFailed(f"{config} is there already: write the settings there, or remove it")
    if not config.exists():
        _write(config, _toml(settings))
    _write(users, USER)
    _write(unit, text)
    _write(gateway, gateway_text)
    for path in reads:
        _warn_if_unreadable(path)
    print(f"now: systemd-sysusers {users.name} && systemctl daemon-reload && systemctl enable --now {unit.name}")
    print(f"then, for OpenAI's API at port 8000: systemctl enable --now {gateway.name}")
    if settings["bind"] == SERVICE:
        print("then, for each user that is to use it: usermod -aG odriver NAME")
    if not loopback_only:
        print(f"then, for each client: odriver keys new NAME && systemctl reload {unit.name}")


def _command() -> Path:
    command = Path(sysconfig.get_path("scripts"), "odriver")
    if not command.exists():
        raise InstallFailed(f"there is no {command}: install oDriver into this environment with pip")
    return command


def _toml(settings: Mapping[str, Any]) -> str:
    """Strings are written as in JSON, which TOML reads alike."""
    lines = [
        f"{name} = {json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)}\n"
        for name, value in settings.items()
    ]
    return "# What holds is shown by `odriver config`, all that can be set by `odriver serve --help`.\n" + "".join(
        lines
    )


def _write(path: Path, text: str) -> None:
    try:
        owned_files.replace(path, text)
    except OSError as error:
        raise InstallFailed(f"cannot write {path}: {error.strerror}; try with sudo, or with --print") from error
    print(f"wrote {path}")


def _warn_if_unreadable(path: Path) -> None:
    """Warn if the service's user, who owns nothing else, cannot reach the path."""
    for one in (*reversed(path.parents), path):
        if one.exists() and not stat.S_IMODE(os.stat(one).st_mode) & 0o001:
            print(f"odriver: the service cannot enter {one}: chmod o+x it, or move {path}", file=sys.stderr)
            return
