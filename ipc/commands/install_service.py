"""``odriver install-service`` and ``uninstall-service``: systemd units for this environment, and a
configuration."""

import json
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.hub.names import Place, place_of
from ipc.errors import OdriverError
from ipc.service.settings import SECRETS, SETTINGS, SettingValue, configs, http_config, read_file
from ipc.service.systemd_units import CONFIG, GATEWAY, UNIT, USER, USERS, render_daemon, render_gateway
from ipc.wire import owned_files
from ipc.wire.addresses import SERVICE, checked_address, is_local, is_loopback

SERVICE_DEFAULTS: dict[str, Any] = {"bind": SERVICE, "socket_access": "group", "metrics_port": 8001}
"""Defaults of a service: a socket that only members of its group may use."""
KEYS = Path("/var/lib/odriver/keys")
"""Default directory of keys, for a service that other machines can reach."""

READ = ("model", "tokenizer", "chat_template", "adapter_root")
"""Settings that name what the service reads; it may also be elsewhere than in a directory."""
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
    settings = SERVICE_DEFAULTS | present | {name: value for name, value in given.items() if value is not None}
    loopback_only = is_local(checked_address(settings["bind"], has_key=True))
    if not loopback_only:
        settings = {"keys": KEYS, **settings}
    place = place_of(settings["model"]) if settings.get("model") is not None else Place.DIRECTORY
    for name in ("model", "adapter_root"):
        if settings.get(name) is not None and Path(settings[name]).is_dir():
            settings[name] = Path(settings[name]).resolve()
    command = _command()
    values = {name: SettingValue(settings.get(name, setting.default), "") for name, setting in SETTINGS.items()}
    configs(values)
    http = http_config(values).address
    # A virtual environment borrows its Python from elsewhere, often from somebody's home.
    environment = [Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()]
    reads = [*environment, *(value for value in settings.values() if isinstance(value, Path))]
    one_host = settings.get("coordinator_address") is None
    is_remote = place is not Place.DIRECTORY or str(settings.get("adapter_root")).startswith("gs://")
    stays_here = loopback_only and one_host and (http is None or is_loopback(http[0]))
    text = render_daemon(command, reads, loopback_only=stays_here, is_remote=is_remote)
    gateway, gateway_text = unit.with_name(GATEWAY), render_gateway(command, environment)
    if show:
        files = {config: _toml(settings), users: USER, unit: text, gateway: gateway_text}
        print("\n".join(f"# {path}\n{content}" for path, content in files.items()), end="")
        return
    obstacles = _obstacles([*environment, *(settings[name] for name in READ if isinstance(settings.get(name), Path))])
    for obstacle in obstacles:
        print(f"odriver: {obstacle}", file=sys.stderr)
    if obstacles and not force:
        raise InstallFailed("nothing is written: the service could not run as it is (--force writes it all the same)")
    if config.exists() and any(value is not None for value in given.values()):
        raise InstallFailed(f"{config} is there already: write the settings there, or remove it")
    if not config.exists():
        _write(config, _toml(settings))
    _write(users, USER)
    _write(unit, text)
    _write(gateway, gateway_text)
    print(f"now: systemd-sysusers {users.name} && systemctl daemon-reload && systemctl enable --now {unit.name}")
    for step in _later_steps(unit.name, gateway.name, settings, http is not None, loopback_only):
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
    print("the user odriver and what is in /var/lib/odriver stay: `userdel odriver` and rm remove them")


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


def _obstacles(reads: list[Path]) -> list[str]:
    """Why a service that reads these files and directories could not run here."""
    obstacles = [] if BOOTED_BY_SYSTEMD.is_dir() else ["systemd does not run this machine"]
    return obstacles + [why for why in map(_unreadable, reads) if why is not None]


def _unreadable(path: Path) -> str | None:
    """Why the service's user, who owns nothing else, cannot read a file or a directory."""
    if not path.exists():
        return f"there is no {path}"
    for one in (*reversed(path.parents), path):
        if one.is_dir() and not stat.S_IMODE(one.stat().st_mode) & 0o001:
            return f"the service cannot enter {one}: chmod o+x it, or move {path}"
    return None
