"""API keys: a TOML file with a table for each caller, to be read by its owner alone.

    [alice]
    api_key = "sk-..."             # what alice sends, as `Authorization: Bearer sk-...`
    key = "alice.key"              # her key at the daemons, from `odriver keys new alice`
    requests_per_minute = 60
    max_requests = 4
    least_priority = -10           # her requests may go before those of others, if her key allows it, too (0)
    operator = true                # she may also have the daemons sleep and the like

If the daemons require keys, callers without one use the gateway's.
"""

import hashlib
import re
import stat
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from ipc.errors import KeyFileError
from ipc.wire.keys import Priority

_API_KEY = re.compile(r"[\x21-\x7e]{16,512}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class ApiKey(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file; None is no limit."""

    api_key: str
    key: str | None = None
    requests_per_minute: Annotated[int, Meta(ge=1)] | None = None
    max_requests: Annotated[int, Meta(ge=1)] | None = None
    operator: bool = False
    least_priority: Priority = 0

    def __post_init__(self) -> None:
        if not _API_KEY.fullmatch(self.api_key):
            raise ValueError("api_key must be 16 to 512 characters of ASCII without spaces")


def read_api_keys(path: Path) -> dict[str, ApiKey]:
    """By name; raises KeyFileError."""
    try:
        text = path.read_bytes()
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise KeyFileError(f"cannot read the API keys {path}: {error.strerror}") from error
    if mode & 0o077:
        raise KeyFileError(f"others may read the API keys in {path}: chmod 600 it")
    try:
        tables = msgspec.toml.decode(text, type=dict[str, dict[str, Any]])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise KeyFileError(f"{path} holds no API keys: {error}") from error
    for name in tables:
        if not _NAME.fullmatch(name):
            raise KeyFileError(f"{path}: {name!r} is no name: use up to 64 letters, digits, '.', '_' and '-'")
    found = {name: _entry(path, name, table) for name, table in tables.items()}
    if len({entry.api_key for entry in found.values()}) < len(found):
        raise KeyFileError(f"{path}: two callers have the same API key")
    return found


def _entry(path: Path, name: str, table: dict[str, Any]) -> ApiKey:
    """A caller's table; raises KeyFileError, without a word of the key itself."""
    try:
        return msgspec.convert(table, ApiKey)
    except msgspec.ValidationError as error:
        raise KeyFileError(f"{path} holds no API keys: in [{name}], {error}") from error


def digest(api_key: str) -> bytes:
    """The digest by which keys are compared, so that timing reveals nothing about a key."""
    return hashlib.sha256(api_key.encode()).digest()
