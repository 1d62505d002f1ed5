"""``odriver install-service`` and ``uninstall-service``: systemd units for this environment, and a
configuration."""

import json
import math
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine.config import EngineConfig
from ipc.commands.installation.service_files import ServiceFiles, files_of, not_entered, unreadable, with_absolute_paths
from ipc.commands.installation.systemd_units import (
    CONFIG,
    GATEWAY,
    STATE,
    UNIT,
    USER,
    USERS,
    refused,
    render_daemon,
    render_gateway,
)
from ipc.errors import OdriverError
from ipc.service.configuration import DaemonConfig
from ipc.service.http_config import HttpConfig
from ipc.service.settings import SECRETS, SETTINGS, SettingValue, configs, read_file, values_of
from ipc.wire import owned_files
from ipc.wire.addresses import SERVICE, checked_address, is_local, is_loopback

SERVICE_DEFAULTS: dict[str, Any] = {"bind": SERVICE, "socket_access": "group", "metrics_port": 8001}
"""Defaults of a service: a socket that only members of its group may use."""
KEYS = STATE / "keys"
"""Default directory of keys, for a service that other machines can reach."""

BOOTED_BY_SYSTEMD = Path("/run/systemd/system")
"""A directory that is there where systemd is the first process (sd_booted(3))."""


class InstallFailed(OdriverError):
    """The service cannot be installed this way; the message has the remedy."""


def install(
    given: Mapping[str, Any],
    *,
    show: bool,
    force: bool = False,
    unit: Path = UNIT,
    config: Path = CONFIG,
    users: Path = USERS,
) -> None:
    """Write the unit of a service with these settings, its gateway's unit beside it, and the
    configuration, or print them.

    An existing configuration is left as it is, and the unit is for what it says. Raises InstallFailed, before anything is written,
    where the service could not run, unless by ``force``; and ConfigurationError or AddressError
    for settings that cannot work.
    """
    _check_no_secrets(given, config, unit)
    present = {name: value for name, (value, _) in read_file(config).items()} if config.exists() else {}
    given = with_absolute_paths({name: value for name, value in given.items() if value is not None})
    settings = SERVICE_DEFAULTS | present | given
    loopback_only = is_local(checked_address(settings["bind"], has_key=True))
    if not loopback_only:
        settings = {"keys": KEYS, **settings}
    written = _toml(settings)
    engine, daemon, http = configs(_read_back(written, config))
    command = _command()
    # A virtual environment borrows its Python from elsewhere, often from somebody's home.
    environment = [Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()]
    read = files_of(engine, daemon, http)
    paths = [*read.files, *read.secrets]
    reads = [*environment, *paths, *(path.resolve() for path in paths)]
    stays_here = loopback_only and _stays_here(engine, daemon, http)
    text = render_daemon(command, reads, loopback_only=stays_here, is_remote=read.is_remote)
    gateway, gateway_text = unit.with_name(GATEWAY), render_gateway(command, environment)
    if show:
        files = {config: written, users: USER, unit: text, gateway: gateway_text}
        print("\n".join(f"# {path}\n{content}" for path, content in files.items()), end="")
        return
    obstacles = list(_obstacles(environment, read))
    for obstacle in obstacles:
        print(f"odriver: {obstacle}", file=sys.stderr)
    if obstacles and not force:
        raise InstallFailed("nothing is written: the service could not run as it is (--force writes it all the same)")
    if config.exists() and given:
        raise InstallFailed(f"{config} is there already: write the settings there, or remove it")
    if not config.exists():
        _write(config, written)
    _write(users, USER)
    _write(unit, text)
    _write(gateway, gateway_text)
    print(f"now: systemd-sysusers {users.name} && systemctl daemon-reload && systemctl enable --now {unit.name}")
    for step in _later_steps(unit.name, gateway.name, settings, http.address is not None, loopback_only):
        print(f"then, {step}")


def uninstall(*, unit: Path = UNIT, config: Path = CONFIG, users: Path = USERS) -> None:
    """Stop the service and its gateway, and remove their units; the configuration is put aside.

    Raises InstallFailed where there is nothing to remove, or it cannot be.
    """
    units, aside = [unit, unit.with_name(GATEWAY)], config.with_name(f"{config.name}.removed")
    found = [path for path in (*units, users) if path.exists()]
    if not found:
        raise InstallFailed(f"there is no {unit}: no service is installed")
    if BOOTED_BY_SYSTEMD.is_dir():
        _systemctl("disable", "--now", *(path.name for path in units if path.exists()))
    try:
        for path in found:
            path.unlink()
            print(f"removed {path}")
        if config.exists():
            config.rename(aside)
            print(f"{config} is now {aside}")
    except OSError as error:
        raise InstallFailed(f"cannot remove {error.filename}: {error.strerror}; try with sudo") from error
    if BOOTED_BY_SYSTEMD.is_dir():
        _systemctl("daemon-reload")
    print(f"the user odriver and what is in {STATE} stay: `userdel odriver` and rm remove them")


def _check_no_secrets(given: Mapping[str, Any], config: Path, unit: Path) -> None:
    """Raises InstallFailed for a setting that not everybody may read."""
    for name in SECRETS:
        if given.get(name) is not None:
            raise InstallFailed(
                f"{config} can be read by everybody, so {name} is not written there: make /etc/odriver/secrets with the line "
                f"{SETTINGS[name].variable}=... and mode 600, and say EnvironmentFile=/etc/odriver/secrets in `systemctl edit "
                f"{unit.name}`"
            )


def _later_steps(
    unit: str, gateway: str, settings: Mapping[str, Any], serves_http: bool, loopback_only: bool
) -> Iterator[str]:
    if not serves_http:
        yield f"for OpenAI's API at port 8000: systemctl enable --now {gateway}"
    if settings["bind"] == SERVICE:
        yield "for each user that is to use it: usermod -aG odriver NAME"
    if not loopback_only:
        yield f"for each client: odriver keys new NAME && systemctl reload {unit}"


def _systemctl(*arguments: str) -> None:
    done = subprocess.run(["systemctl", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InstallFailed(f"systemctl {' '.join(arguments)} failed: {done.stderr.strip()}")


def _command() -> Path:
    command = Path(sysconfig.get_path("scripts"), "odriver")
    if not command.exists():
        raise InstallFailed(f"there is no {command}: install oDriver into this environment with pip")
    if refused(command):
        raise InstallFailed(f"systemd runs no program whose path has quotes, backslashes or the like: move {command}")
    return command


def _toml(settings: Mapping[str, Any]) -> str:
    lines = [f"{name} = {_toml_value(value)}\n" for name, value in settings.items()]
    return "# What holds is shown by `odriver config`, all that can be set by `odriver serve --help`.\n" + "".join(
        lines
    )


def _toml_value(value: Any) -> str:
    """As in JSON, which TOML reads alike, but for numbers without end."""
    if isinstance(value, float) and math.isinf(value):
        return str(value)
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)


def _read_back(text: str, config: Path) -> dict[str, SettingValue]:
    """What a daemon reads in such a configuration. Raises InstallFailed, and ConfigurationError."""
    try:
        written = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InstallFailed(f"a setting cannot be written into {config}: {error}") from error
    defaults = {name: SettingValue(setting.default, "") for name, setting in SETTINGS.items()}
    return defaults | {name: value._replace(whence="") for name, value in values_of(written, config).items()}


def _stays_here(engine: EngineConfig, daemon: DaemonConfig, http: HttpConfig) -> bool:
    """Whether nothing but its own address leads beyond this machine: hosts, HTTP, metrics, traces."""
    hosts = [] if http.address is None else [http.address[0]]
    if daemon.metrics_port is not None:
        hosts.append(daemon.metrics_host)
    if daemon.otlp_traces_endpoint is not None:
        hosts.append(urlsplit(daemon.otlp_traces_endpoint).hostname or "")
    return engine.coordinator_address is None and all(host == "localhost" or is_loopback(host) for host in hosts)


def _write(path: Path, text: str) -> None:
    try:
        owned_files.replace(path, text)
    except OSError as error:
        raise InstallFailed(f"cannot write {path}: {error.strerror}; try with sudo, or with --print") from error
    print(f"wrote {path}")


def _obstacles(environment: list[Path], read: ServiceFiles) -> Iterator[str]:
    """Why a service with this environment, that reads these files, could not run here."""
    if not BOOTED_BY_SYSTEMD.is_dir():
        yield "systemd does not run this machine"
    yield from filter(None, map(not_entered, environment))
    yield from filter(None, map(unreadable, read.files))
    yield from filter(None, (unreadable(path, is_secret=True) for path in read.secrets))
