"""The daemon's addresses: ``ipc://`` sockets that only their owner can reach, loopback TCP, and
any with keys.

A peer that connects without a key can use the daemon. So an address that other machines can reach
requires a key, and its traffic is encrypted.
"""

import fcntl
import logging
import os
import re
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

from ipc.errors import AddressError, AddressInUse
from ipc.wire.configured import configured_bind

logger = logging.getLogger(__name__)

CONTROL_SUFFIX = ".control"
LONGEST_PATH = 107 - len(CONTROL_SUFFIX)
"""Bytes of a socket's path: ``sun_path`` less its NUL and the control socket's suffix."""
LAST_PORT = 65534
"""The control socket has the next."""

SERVICE = "ipc:///run/odriver/odriver.sock"
"""Where the service listens that `odriver install-service` makes, for the members of its group."""

_FORMS = "ipc:///path/to.sock or tcp://HOST:PORT"
_TCP = re.compile(r"tcp://(?P<host>\[[^]]+\]|[^:\[\]]+):(?P<port>[0-9]{1,5})")


def default_address() -> str:
    """The address where none is configured: a socket in the user's private directory."""
    return f"ipc://{_private_directory() / 'odriver.sock'}"


def checked_address(address: str | None, *, has_key: bool = False) -> str:
    """The address in full, the default one for None; raises AddressError where it cannot be used.

    With a key it may be one that other machines reach.
    """
    address = default_address() if address is None else address
    if address.startswith("ipc://"):
        path = _checked_path(address)
        if path.parent == _private_directory() and os.path.lexists(path.parent):
            _check_private(path.parent)
        return f"ipc://{path}"
    return _checked_tcp(address, has_key=has_key)


def client_address(address: str | None, *, has_key: bool = False, config: Path | None = None) -> str:
    """As ``checked_address``, for a client: for None it is where ``odriver serve`` would listen, by
    ODRIVER_BIND, the configuration file (``config`` or the usual one) or default.

    Where nothing is configured and the user has no daemon of theirs, it is the service's address;
    the service has to be there, and the user in its group.
    """
    address = address or configured_bind(config)
    checked = checked_address(address, has_key=has_key)
    if address is None and not anyone_listens(checked) and _obstacle(SERVICE) is None:
        logger.info("no daemon of this user listens at %s: the service is asked, at %s", checked, SERVICE)
        return SERVICE
    return checked


def is_local(address: str) -> bool:
    """Whether a checked address can be reached from this machine alone."""
    match = _TCP.fullmatch(address)
    return match is None or is_loopback(match["host"])


def control_address(address: str) -> str:
    """The control address of a daemon: ``.control`` beside its socket file, or the next port."""
    match = _TCP.fullmatch(address)
    return address + CONTROL_SUFFIX if match is None else f"tcp://{match['host']}:{int(match['port']) + 1}"


def host_and_port(address: str) -> tuple[str, int]:
    """Those of a checked ``tcp://`` address."""
    match = _TCP.fullmatch(address)
    assert match is not None, address
    return match["host"].strip("[]"), int(match["port"])


def anyone_listens(address: str) -> bool:
    """Whether any process accepts connections at a checked address."""
    return not isinstance(_obstacle(address), FileNotFoundError | NotADirectoryError | ConnectionRefusedError)


def is_forbidden(address: str) -> bool:
    """Whether file modes forbid our user a checked address."""
    return isinstance(_obstacle(address), PermissionError)


def _obstacle(address: str) -> OSError | None:
    """Why our user cannot be connected to a checked address; None if it can."""
    try:
        connected(address).close()
    except OSError as error:
        return error
    return None


def keep_private(address: str) -> None:
    """Allow only our user, and root, to connect to the bound ``ipc://`` socket."""
    _set_mode(Path(address.removeprefix("ipc://")), 0o600)


def open_to_group(address: str) -> None:
    """Let our group connect, too, to both sockets of a checked address."""
    if address.startswith("ipc://"):
        for path in (address, control_address(address)):
            _set_mode(Path(path.removeprefix("ipc://")), 0o660)


def _set_mode(path: Path, mode: int) -> None:
    """Set the socket's mode; a replacement of the socket by another user is left alone."""
    descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            os.chmod(f"/proc/self/fd/{descriptor}", mode)
    finally:
        os.close(descriptor)


@contextmanager
def reserved(address: str) -> Iterator[None]:
    """Keep other daemons off a checked address; raises AddressError where it is in use or
    unusable.

    libzmq unlinks any file at an ``ipc://`` path before it binds, so a second daemon would
    silently cut off the first; at the end it leaves its own socket behind. A locked file beside
    the socket tells a running daemon from the socket of a dead one. It is never removed: a lock
    that is unlinked can be held twice. Where somebody else has removed it, with the directory
    perhaps, the socket at the path may be another daemon's, and stays. TCP needs none.
    """
    if not address.startswith("ipc://"):
        yield
        return
    path = Path(address.removeprefix("ipc://"))
    if path.parent == _private_directory():
        _make_private(path.parent)
    with _locked(locked := path.with_name(path.name + ".lock"), address) as lock:
        if os.path.lexists(path) and not stat.S_ISSOCK(path.lstat().st_mode):
            raise AddressError(f"{path} exists and is no socket; choose another address or remove it")
        if anyone_listens(address):
            raise AddressInUse(f"address in use: another program listens at {address}")
        try:
            yield
        finally:
            if _is_at(lock, locked):
                path.unlink(missing_ok=True)


def _private_directory() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "odriver" if runtime else Path(f"/tmp/odriver-{os.getuid()}")


def _make_private(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise AddressError(f"cannot make the directory {directory}: {error.strerror}; choose an address") from error
    _check_private(directory)


def _check_private(directory: Path) -> None:
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise AddressError(
            f"{directory} must be a directory of yours that nobody else can enter (mode 0700); "
            "put it right, remove it, or choose another address"
        )


def _checked_path(address: str) -> Path:
    name = address.removeprefix("ipc://")
    if name in ("", "*") or name.startswith("@") or name.endswith("/") or "\0" in name:
        raise AddressError(f"{address!r} names no socket file; write {_FORMS}")
    path = Path(os.path.abspath(name))
    length = len(os.fsencode(path))
    if length > LONGEST_PATH:
        raise AddressError(f"{path} is too long for a socket: {length} bytes, at most {LONGEST_PATH}")
    return path


def _checked_tcp(address: str, *, has_key: bool) -> str:
    match = _TCP.fullmatch(address)
    if match is None or not 1 <= int(match["port"]) <= LAST_PORT:
        raise AddressError(f"{address!r} is no address; write {_FORMS}")
    host = {"localhost": "127.0.0.1", "*": "0.0.0.0"}.get(match["host"], match["host"])
    if not has_key and not is_loopback(host):
        raise AddressError(
            f"{address} is for those who have a key, as other machines may reach it: give yours with --key FILE; on the "
            "daemon's machine `odriver keys new NAME` makes one"
        )
    return f"tcp://{host}:{match['port']}"


def is_loopback(host: str) -> bool:
    """Whether that is an address of this machine alone."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def connected(address: str) -> socket.socket:
    """A plain connection to a checked address; raises OSError after a second."""
    if address.startswith("tcp://"):
        return socket.create_connection(host_and_port(address), timeout=1)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(1)
        connection.connect(address.removeprefix("ipc://"))
    except OSError:
        connection.close()
        raise
    return connection


@contextmanager
def _locked(path: Path, address: str) -> Iterator[int]:
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise AddressError(f"cannot listen at {address}: {error.strerror} ({path})") from error
    try:
        _lock(lock, address)
        yield lock
    finally:
        os.close(lock)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is the one at this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False


def _lock(descriptor: int, address: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise AddressInUse(
            f"address in use: another daemon listens at {address}: `odriver status` shows it, and --bind ADDR starts one beside it"
        ) from error
