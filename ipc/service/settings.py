"""A daemon's settings, by the first of: flag, variable, configuration file, default.

The table of settings is the fields of EngineConfig and DaemonConfig. ``max_num_seqs`` is
``--max-num-seqs`` as a flag, ``ODRIVER_MAX_NUM_SEQS`` as a variable and ``max_num_seqs`` in the
file, which is TOML without tables. The file is the one that ``--config`` or ``ODRIVER_CONFIG``
names, else the first that exists of FILES. A name that nothing has is an error, wherever it
stands, and so is a value of the wrong type. A variable that is empty is not set.
"""

import argparse
import difflib
import os
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from caching import instruction_set
from engine.config import EngineConfig
from engine.errors import ConfigurationError
from ipc.service.configuration import DaemonConfig

PREFIX = "ODRIVER_"
CONFIG_VARIABLE = PREFIX + "CONFIG"
NO_SETTINGS = (CONFIG_VARIABLE, instruction_set.VARIABLE)
"""Variables that begin like those of settings."""


@dataclass(frozen=True)
class Setting:
    """A row of the table; ``type`` is int, float, bool, str or Path."""

    name: str
    type: type
    default: Any
    metavar: str
    meaning: str
    choices: tuple[str, ...]

    @property
    def flag(self) -> str:
        """As on a command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """As in the environment."""
        return f"{PREFIX}{self.name.upper()}"


class SettingValue(NamedTuple):
    """The value of a setting, and where it comes from: a flag, a variable, a file or "default"."""

    value: Any
    whence: str


def _table(*configs: type) -> dict[str, Setting]:
    return {
        field.name: Setting(field.name, _plain(hints[field.name]), _default(field.default), **field.metadata)
        for config in configs
        for hints in [typing.get_type_hints(config)]
        for field in fields(config)
    }


def _plain(hint: Any) -> type:
    """``int`` of ``int | None``."""
    alternatives = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    (plain,) = (one for one in alternatives if one is not types.NoneType)
    return plain  # type: ignore[no-any-return]


def _default(default: Any) -> Any:
    assert default is not MISSING, "a setting has a default"
    return default


SETTINGS = _table(EngineConfig, DaemonConfig)


def files() -> list[Path]:
    """Where configuration files are looked for: the user's, then the machine's."""
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return [home / "odriver" / "config.toml", Path("/etc/odriver/config.toml")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting, and ``--config``. Flags not given are None or missing."""
    add_setting_arguments(parser)
    where = " or ".join(map(str, files()))
    parser.add_argument("--config", type=Path, metavar="FILE", help=f"settings in TOML (default: {where})")


def add_setting_arguments(parser: argparse.ArgumentParser) -> None:
    """A flag for each setting."""
    add = parser.add_argument
    for setting in SETTINGS.values():
        default = "" if setting.default in (None, False) else f" (default: {setting.default})"
        described: dict[str, Any] = {"help": setting.meaning + default}
        if setting.type is bool:
            described["action"] = argparse.BooleanOptionalAction
        else:
            described |= {"type": setting.type, "metavar": setting.metavar or None, "choices": setting.choices or None}
        if setting.name == "model":
            add("model", nargs="?", default=None, **described)
        else:
            add(setting.flag, **described)


def held(flags: Mapping[str, Any]) -> dict[str, SettingValue]:
    """The settings by name, with these options of ``add_arguments``; raises ConfigurationError."""
    given = {name: value for name, value in flags.items() if value is not None}
    asked = given.pop("config", None) or os.environ.get(CONFIG_VARIABLE)
    found = {name: SettingValue(setting.default, "default") for name, setting in SETTINGS.items()}
    path = Path(asked) if asked else next((one for one in files() if one.is_file()), None)
    if path is not None:
        found |= _read(path)
    found |= _variables()
    return found | {name: SettingValue(value, SETTINGS[name].flag) for name, value in given.items()}


def configs(found: Mapping[str, SettingValue]) -> tuple[EngineConfig, DaemonConfig]:
    """The configurations of engine and daemon; raises ConfigurationError."""
    engine, daemon = (
        {field.name: found[field.name].value for field in fields(of)} for of in (EngineConfig, DaemonConfig)
    )
    return EngineConfig(**engine), DaemonConfig(**daemon)


def _read(path: Path) -> dict[str, SettingValue]:
    try:
        with path.open("rb") as file:
            written = tomllib.load(file)
    except OSError as error:
        raise ConfigurationError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not TOML: {error}") from error
    for name in written:
        _check_known(name, SETTINGS, str(path))
    return {name: _held(SETTINGS[name], value, f"{path}: {name}", str(path)) for name, value in written.items()}


def _variables() -> dict[str, SettingValue]:
    by_variable = {setting.variable: setting for setting in SETTINGS.values()}
    ours = {name: value for name, value in os.environ.items() if name.startswith(PREFIX) and value}
    written = {name: value for name, value in ours.items() if name not in NO_SETTINGS}
    for name in written:
        _check_known(name, by_variable, "the environment")
    return {
        by_variable[name].name: _held(by_variable[name], value, name, name, strict=False)
        for name, value in written.items()
    }


def _check_known(name: str, known: Iterable[str], where: str) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise ConfigurationError(f"unknown setting {name!r} in {where}: did you mean {near[0]!r}?")


def _held(setting: Setting, value: Any, name: str, whence: str, *, strict: bool = True) -> SettingValue:
    """The setting's value; text, as of variables, is parsed to numbers and booleans."""
    try:
        if setting.type is Path:
            return SettingValue(Path(msgspec.convert(value, str)), whence)
        return SettingValue(msgspec.convert(value, setting.type, strict=strict), whence)
    except msgspec.ValidationError as error:
        kind = {int: "a whole number", float: "a number", bool: "true or false"}.get(setting.type, "a string")
        raise ConfigurationError(f"{name} must be {kind}, not {value!r}") from error
