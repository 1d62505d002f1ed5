"""Key files: the daemon's key, the keys that may connect, and their limits. All are TOML; secret
ones are private.

In the daemon's directory are ``server.toml``, its own pair, made when first needed, and
``clients/NAME.toml`` for each client, with its public key and its limits. The client's own file
has its secret key and the daemon's public key, by which it recognises the daemon.
"""

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import zmq
from msgspec import Meta, Struct

from engine.request_limits import MAX_PRIORITY
from ipc.errors import KeyFileError
from ipc.wire import owned_files

Z85 = Annotated[str, Meta(pattern=r"\A[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}\Z")]
"""32 bytes as ZeroMQ's RFC 32 writes them."""
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=0)]
"""Requests have 0 unless they name another; one below 0 goes before those of others."""
SERVER = "server.toml"
"""The name of the file of a daemon's pair."""
ALL = "*"
"""In place of the names of adapters: all of them."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class ServerKey(Struct, frozen=True, forbid_unknown_fields=True):
    """The daemon's own pair."""

    public: Z85
    secret: Z85


class ClientKey(Struct, frozen=True, forbid_unknown_fields=True):
    """A client's key: its own pair, and the public key of its daemon."""

    public: Z85
    secret: Z85
    server: Z85


class Limits(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits of an authorised key: open requests, tokens read and generated a minute, control.

    None is no limit. Its requests may have ``least_priority`` or a higher number, which is served later; those of a
    key with ``control`` any. ``adapters`` are the names of those that it may use, ALL for all; a key with
    ``control`` may use all.
    """

    public: Z85
    max_requests: Annotated[int, Meta(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Meta(ge=1)] | None = None
    control: bool = False
    adapters: tuple[str, ...] = ()
    least_priority: Priority = 0


def default_directory() -> Path:
    """The default directory of the daemon's keys."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "odriver" / "keys"


def server_key(directory: Path) -> ServerKey:
    """The daemon's pair, made now if there is none. Raises KeyFileError."""
    path = directory / SERVER
    if not os.path.lexists(path):
        public, secret = _new_pair()
        _make_directory(directory)
        _write(path, {"public": public, "secret": secret})
    return existing_server_key(directory)


def existing_server_key(directory: Path) -> ServerKey:
    """The daemon's pair. Raises KeyFileError, also if there is none."""
    return _read_secret(directory / SERVER, ServerKey)


def client_key(path: Path) -> ClientKey:
    """The key file that ``odriver keys new`` wrote for a client. Raises KeyFileError."""
    return _read_secret(path, ClientKey)


def authorized(directory: Path) -> dict[str, Limits]:
    """The authorised keys, by name. Raises KeyFileError where a file is no key, or has no name of
    one, which logs, tables and metrics could not show."""
    clients = directory / "clients"
    try:
        paths = [clients / name for name in owned_files.names(clients) if name.endswith(".toml")]
    except OSError as error:
        raise KeyFileError(f"cannot read the directory {clients}: {error.strerror}") from error
    for path in paths:
        _check_name(path.stem, f"{path} has no name of a key before .toml: ")
    found = {path.stem: _decoded(path, Limits)[0] for path in paths}
    names: dict[str, str] = {}
    for name, limits in found.items():
        if names.setdefault(limits.public, name) != name:
            raise KeyFileError(f"{names[limits.public]} and {name} in {directory} have the same key: revoke one")
    return found


def new(directory: Path, name: str, out: Path, **limits: int | bool | list[str]) -> None:
    """Make a key: authorise it and write the client's file. Raises KeyFileError if either
    exists."""
    authorised = _path(directory, name)
    for path in (authorised, out):
        if os.path.lexists(path):
            raise KeyFileError(f"{path} exists: choose another name, or revoke that key and remove the file")
    server = server_key(directory)
    _make_directory(authorised.parent)
    issued = issue(out, server)
    try:
        _write(authorised, {"public": issued.public, **limits})
    except KeyFileError:  # of no use, and in the way of the next attempt
        owned_files.remove(out)
        raise


def issue(out: Path, server: ServerKey) -> Limits:
    """Write the file of a new key that may control the daemon, once it is authorised. Raises
    KeyFileError."""
    public, secret = _new_pair()
    _write(out, {"public": public, "secret": secret, "server": server.public})
    return Limits(public, control=True)


def revoke(directory: Path, name: str) -> None:
    """Authorise this key no longer. Raises KeyFileError if there is none of that name."""
    try:
        owned_files.remove(_path(directory, name))
    except FileNotFoundError:
        raise KeyFileError(f"there is no key {name} in {directory}: see `odriver keys list`") from None
    except OSError as error:
        raise KeyFileError(f"cannot remove the key {name} of {directory}: {error.strerror}") from error


def _path(directory: Path, name: str) -> Path:
    _check_name(name)
    return directory / "clients" / f"{name}.toml"


def _check_name(name: str, where: str = "") -> None:
    if not _NAME.fullmatch(name):
        raise KeyFileError(f"{where}{name!r} cannot be a name: use up to 64 letters, digits, '.', '_' and '-'")


def _new_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _make_directory(directory: Path) -> None:
    try:
        with owned_files.opened_directory(directory, make=0o700):
            return
    except OSError as error:
        raise KeyFileError(f"cannot make the directory {directory}: {error.strerror}") from error


def _write(path: Path, fields: Mapping[str, str | int | bool | list[str]]) -> None:
    # JSON values of these types are TOML values.
    lines = [f"{name} = {msgspec.json.encode(value).decode()}\n" for name, value in fields.items()]
    try:
        owned_files.create(path, "".join(lines))
    except OSError as error:
        raise KeyFileError(f"cannot write {path}: {error.strerror}") from error


File = TypeVar("File")


def _read_secret(path: Path, kind: type[File]) -> File:
    found, mode = _decoded(path, kind)
    if mode & 0o077:
        raise KeyFileError(f"others may read the secret key in {path}: chmod 600 it, or make a new one")
    return found


def _decoded(path: Path, kind: type[File]) -> tuple[File, int]:
    """A key, and the mode of its file."""
    try:
        text, about = owned_files.read(path)
        return msgspec.toml.decode(text, type=kind), stat.S_IMODE(about.st_mode)
    except OSError as error:
        raise KeyFileError(f"cannot read the key {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise KeyFileError(f"{path} is no key: {error}") from error
