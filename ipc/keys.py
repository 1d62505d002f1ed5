"""Key files: who the daemon is, who may connect to it, and what they may; all TOML, and the secret ones for their owner alone.

In the daemon's directory are ``server.toml``, its own pair, made when it is first needed, and ``clients/NAME.toml`` for each
client, with its public key and its limits. The secret half of that is in a file that the client is given, together with
the daemon's public key, by which it knows the daemon.
"""

import os
import re
import stat
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import zmq
from msgspec import Meta, Struct

from ipc.errors import KeyFileError

Z85 = Annotated[str, Meta(pattern=r"^[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}$")]
"""32 bytes as ZeroMQ's RFC 32 writes them."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class ServerKey(Struct, frozen=True, forbid_unknown_fields=True):
    """The daemon's own pair."""

    public: Z85
    secret: Z85


class ClientKey(Struct, frozen=True, forbid_unknown_fields=True):
    """What a client connects with: its own pair, and the public key of the one daemon that they are for."""

    public: Z85
    secret: Z85
    server: Z85


class Limits(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What an authorised key may: requests open at once, tokens read and generated a minute, and the control socket.

    None is no limit.
    """

    public: Z85
    max_requests: Annotated[int, Meta(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Meta(ge=1)] | None = None
    control: bool = False


def default_directory() -> Path:
    """Where the daemon's keys are if nothing else is said."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "odriver" / "keys"


def server_key(directory: Path) -> ServerKey:
    """The daemon's pair, made now if there is none. Raises KeyFileError."""
    path = directory / "server.toml"
    if not path.exists():
        public, secret = _new_pair()
        _make_directory(directory)
        _write(path, {"public": public, "secret": secret})
    return _read_secret(path, ServerKey)


def client_key(path: Path) -> ClientKey:
    """What ``odriver keys new`` has written for a client. Raises KeyFileError."""
    return _read_secret(path, ClientKey)


def authorized(directory: Path) -> dict[str, Limits]:
    """Who may connect, by name. Raises KeyFileError where a file is no key."""
    found = {path.stem: _read(path, Limits) for path in sorted((directory / "clients").glob("*.toml"))}
    names: dict[str, str] = {}
    for name, limits in found.items():
        if names.setdefault(limits.public, name) != name:
            raise KeyFileError(f"{names[limits.public]} and {name} in {directory} have the same key: revoke one")
    return found


def new(directory: Path, name: str, out: Path, **limits: int | bool) -> None:
    """Make a key: authorise its public half, and write the client's file. Raises KeyFileError where either is there."""
    authorised = _path(directory, name)
    for path in (authorised, out):
        if path.exists():
            raise KeyFileError(f"{path} exists: choose another name, or revoke that key and remove the file")
    server = server_key(directory)
    public, secret = _new_pair()
    _make_directory(authorised.parent)
    _write(out, {"public": public, "secret": secret, "server": server.public})
    _write(authorised, {"public": public, **limits})


def revoke(directory: Path, name: str) -> None:
    """Authorise this key no longer. Raises KeyFileError if there is none of that name."""
    try:
        _path(directory, name).unlink()
    except FileNotFoundError:
        raise KeyFileError(f"there is no key {name} in {directory}: see `odriver keys list`") from None


def _path(directory: Path, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise KeyFileError(f"{name!r} cannot be a name: use up to 64 letters, digits, '.', '_' and '-'")
    return directory / "clients" / f"{name}.toml"


def _new_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _make_directory(directory: Path) -> None:
    try:
        if not directory.exists():
            directory.mkdir(mode=0o700, parents=True)
            _hand_over(directory)
    except OSError as error:
        raise KeyFileError(f"cannot make the directory {directory}: {error.strerror}") from error


def _write(path: Path, fields: dict[str, str | int | bool]) -> None:
    lines = [f"{name} = {msgspec.json.encode(value).decode()}\n" for name, value in fields.items()]  # as in TOML
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.writelines(lines)
        _hand_over(path)
    except OSError as error:
        raise KeyFileError(f"cannot write {path}: {error.strerror}") from error


def _hand_over(path: Path) -> None:
    """What root makes among another user's files, such as those of the service, is that user's to read."""
    if os.geteuid() == 0:
        owner = path.parent.stat()
        os.chown(path, owner.st_uid, owner.st_gid)


File = TypeVar("File")


def _read_secret(path: Path, kind: type[File]) -> File:
    found = _read(path, kind)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise KeyFileError(f"others may read the secret key in {path}: chmod 600 it, or make a new one")
    return found


def _read(path: Path, kind: type[File]) -> File:
    try:
        return msgspec.toml.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise KeyFileError(f"cannot read the key {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise KeyFileError(f"{path} is no key: {error}") from error
