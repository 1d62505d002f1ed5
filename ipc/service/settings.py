"""A daemon's settings, by the first of: flag, variable, configuration file, default.

The table of settings is the fields of EngineConfig, DaemonConfig and HttpConfig. ``max_num_seqs`` is
``--max-num-seqs`` as a flag, ``ODRIVER_MAX_NUM_SEQS`` as a variable and ``max_num_seqs`` in the
file, which is TOML without tables. The file is the one that ``--config`` or ``ODRIVER_CONFIG``
names, else the first that exists of ``configured.files``. A name that nothing has is an error, wherever it
stands, and so is a value of the wrong type. A variable that is empty is not set.
"""

import argparse
import difflib
import json
import os
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from caching import instruction_set
from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.setting_fields import require_setting
from ipc.service.configuration import DaemonConfig
from ipc.service.http_config import HttpConfig
from ipc.wire.configured import FILE_VARIABLE, config_file, read_toml

PREFIX = "ODRIVER_"
NO_SETTINGS = (FILE_VARIABLE, instruction_set.VARIABLE)
"""Variables that begin like those of settings."""
_OF_KUBERNETES = re.compile(
    rf"{PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)=.*"
    rf"|{PREFIX}(\w+_)?PORT=(tcp|udp|sctp)://.*"
)
"""Variables, with their values, that its containers have for each Service in their namespace: for one
called ``odriver`` or ``odriver-...`` they begin like those of settings."""
STRINGS = tuple[str, ...]
"""Several words on a command line, an array in a file, and separated by commas in a variable, where
each may be an object in JSON."""
KINDS = {int: "a whole number", float: "a number", bool: "true or false", STRINGS: "a list of strings"}
"""What a value has to be, by the type of its setting; of any other it is a string."""


@dataclass(frozen=True)
class Setting:
    """A row of the table; ``type`` is int, float, bool, str, Path or ``tuple[str, ...]``."""

    name: str
    type: Any
    default: Any
    metavar: str
    meaning: str
    choices: tuple[str, ...]

    @property
    def flag(self) -> str:
        """As on a command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def default_words(self) -> str:
        """What holds where it is None or empty, as its meaning says."""
        return self.meaning.rpartition("(default: ")[2].removesuffix(")") if "(default: " in self.meaning else "none"

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
        field.name: Setting(field.name, _plain(hints[field.name]), field.default, **field.metadata)
        for config in configs
        for hints in [typing.get_type_hints(config)]
        for field in fields(config)
        if field.metadata
    }


def _plain(hint: Any) -> Any:
    """``int`` of ``int | None``."""
    alternatives = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    (plain,) = (one for one in alternatives if one is not types.NoneType)
    return plain


SETTINGS = _table(EngineConfig, DaemonConfig, HttpConfig)
SECRETS = ("api_key",)
"""Settings whose values are not shown."""
GATEWAY_OPTIONS = (
    *("api_key", "api_keys", "ssl_certfile", "ssl_keyfile", "tool_call_parser", "reasoning_parser"),
    *("allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials"),
    *("trusted_proxies", "max_connections", "drain_timeout", "log_level", "log_format"),
)
"""Settings of a gateway, of the daemon's own or another."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting, and ``--config``. Flags not given are None or missing."""
    add_setting_arguments(parser)
    add_config_argument(parser)


def add_config_argument(parser: argparse.ArgumentParser) -> None:
    """``--config``."""
    where = "~/.config/odriver/config.toml, else /etc/odriver/config.toml"
    parser.add_argument("--config", type=Path, metavar="FILE", help=f"settings in TOML (default: {where})")


def add_setting_arguments(parser: argparse.ArgumentParser, names: Iterable[str] = SETTINGS) -> None:
    """A flag for each setting of these names."""
    add = parser.add_argument
    for setting in map(SETTINGS.__getitem__, names):
        is_said = setting.default in (None, (), "") or setting.default is False
        default = "" if is_said else f" (default: {setting.default})"
        described: dict[str, Any] = {"help": setting.meaning + default}
        if setting.type is bool:
            described["action"] = argparse.BooleanOptionalAction
        elif setting.type == STRINGS:
            described |= {"nargs": "+", "metavar": setting.metavar}
        else:
            described |= {
                "type": _argument(setting.type),
                "metavar": setting.metavar or None,
                "choices": setting.choices or None,
            }
        if setting.name == "model":
            add("model", nargs="?", default=None, **described)
        else:
            add(setting.flag, **described)


def _argument(kind: Any) -> Any:
    """What parses a flag's value of this type."""

    def number(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {KINDS[kind]}, not {text!r}") from None

    return number if kind in (int, float) else kind


def held(flags: Mapping[str, Any]) -> dict[str, SettingValue]:
    """The settings by name, with these options of ``add_arguments``; raises ConfigurationError."""
    given = {name: value for name, value in flags.items() if value is not None}
    path = config_file(given.pop("config", None))
    found = {name: SettingValue(setting.default, "default") for name, setting in SETTINGS.items()}
    if path is not None:
        found |= read_file(path)
    found |= _variables()
    found |= {
        name: SettingValue(tuple(value) if isinstance(value, list) else value, SETTINGS[name].flag)
        for name, value in given.items()
    }
    with _telling_sources(found):
        _check_texts(found)
    return found


def configs(found: Mapping[str, SettingValue]) -> tuple[EngineConfig, DaemonConfig, HttpConfig]:
    """The configurations of engine, daemon and HTTP; raises ConfigurationError."""
    with _telling_sources(found):
        engine, daemon = EngineConfig(**_values(found, EngineConfig)), DaemonConfig(**_values(found, DaemonConfig))
    return engine, daemon, http_config(found)


def with_sources(complaint: str, found: Mapping[str, SettingValue]) -> str:
    """A complaint, and where the settings that it names, or quotes the text of, come from.

    A flag is in its reader's sight, and so it is not told.
    """
    sources = {
        name: whence
        for name, (value, whence) in found.items()
        if whence not in ("default", SETTINGS[name].flag)
        and f"({name} comes from " not in complaint
        and (re.search(rf"\b{name}\b", complaint) or (isinstance(value, str | Path) and str(value) in complaint))
    }
    return complaint + "".join(f" ({name} comes from {whence})" for name, whence in sources.items())


def http_config(found: Mapping[str, SettingValue]) -> HttpConfig:
    """The configuration of HTTP; raises ConfigurationError."""
    with _telling_sources(found):
        return HttpConfig(**_values(found, HttpConfig))


def shown(found: Mapping[str, SettingValue]) -> dict[str, SettingValue]:
    """The settings for people, without secrets."""
    hidden = {name: found[name]._replace(value="(not shown)") for name in SECRETS if found[name].value is not None}
    return {**found, **hidden}


def _values(found: Mapping[str, SettingValue], config: type) -> dict[str, Any]:
    return {field.name: found[field.name].value for field in fields(config) if field.metadata}


@contextmanager
def _telling_sources(found: Mapping[str, SettingValue]) -> Iterator[None]:
    """A ConfigurationError from the block says where the settings come from."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(with_sources(str(error), found)) from error


def _check_texts(found: Mapping[str, SettingValue]) -> None:
    """Texts are those that a message to a client can hold, which a command line's bytes need not be."""
    for name, (value, _) in found.items():
        for text in value if isinstance(value, tuple) else (value,):
            is_utf8 = not isinstance(text, str) or text.encode(errors="ignore").decode() == text
            require_setting(is_utf8, name, "UTF-8", repr(text))


def read_file(path: Path) -> dict[str, SettingValue]:
    """The settings of a configuration file, by name; raises ConfigurationError."""
    return values_of(read_toml(path), path)


def values_of(written: Mapping[str, Any], path: Path) -> dict[str, SettingValue]:
    """The settings that are written in such a file, by name; raises ConfigurationError."""
    for name in written:
        _check_known(name, SETTINGS, str(path))
    return {name: _held(SETTINGS[name], value, f"{path}: {name}", str(path)) for name, value in written.items()}


def _variables() -> dict[str, SettingValue]:
    by_variable = {setting.variable: setting for setting in SETTINGS.values()}
    ours = {name: value for name, value in os.environ.items() if name.startswith(PREFIX) and value}
    written = {
        name: value
        for name, value in ours.items()
        if name not in NO_SETTINGS and not _OF_KUBERNETES.fullmatch(f"{name}={value}")
    }
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
    """The setting's value; text, as of variables, is parsed to numbers, booleans and lists."""
    try:
        if setting.type is Path:
            return SettingValue(Path(msgspec.convert(value, str)), whence)
        if setting.name == "http" and type(value) is int:  # a port needs no quotes in a file
            value = str(value)
        if setting.type == STRINGS and not strict:
            value = _separated(value)
        return SettingValue(msgspec.convert(value, setting.type, strict=strict), whence)
    except msgspec.ValidationError as error:
        kind = KINDS.get(setting.type, "a string")
        raise ConfigurationError(f"{name} must be {kind}, not {value!r}") from error


def _separated(text: str) -> list[str]:
    """The words between commas, of which an object in JSON is one."""
    words = []
    while True:
        text = text.lstrip()
        end = _end_of_object(text)
        rest, comma, after = text[end:].partition(",")
        words.append((text[:end] + rest).strip())
        if not comma:
            return words
        text = after


def _end_of_object(text: str) -> int:
    """Where the object ends with which the text begins; 0 if it begins with none."""
    try:
        return json.JSONDecoder().raw_decode(text)[1] if text.startswith("{") else 0
    except json.JSONDecodeError:
        return 0
