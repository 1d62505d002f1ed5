"""Where the daemon may listen."""

import os
import re
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from ipc.errors import AddressError, AddressInUse
from ipc.wire import addresses, configured
from ipc.wire.addresses import (
    anyone_listens,
    checked_address,
    client_address,
    control_address,
    default_address,
    keep_private,
    open_to_group,
    reserved,
)


@contextmanager
def listening(address: str) -> Iterator[None]:
    """Somebody who accepts connections there."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address.removeprefix("ipc://"))
        listener.listen()
        yield


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private XDG_RUNTIME_DIR."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_the_default_lies_in_the_runtime_directory(runtime: Path) -> None:
    """Daemon and client agree on $XDG_RUNTIME_DIR/odriver/odriver.sock."""
    assert checked_address(None) == default_address() == f"ipc://{runtime}/odriver/odriver.sock"


def test_without_a_runtime_directory_the_default_bears_the_users_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two users of one machine have different default addresses."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)

    assert default_address() == f"ipc:///tmp/odriver-{os.getuid()}/odriver.sock"


def test_the_default_directory_is_made_private(runtime: Path) -> None:
    """Nobody but the owner can enter it."""
    with reserved(checked_address(None)):
        assert stat.S_IMODE((runtime / "odriver").stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("address", "control"),
    [
        ("ipc:///run/o.sock", "ipc:///run/o.sock.control"),
        ("tcp://127.0.0.1:65534", "tcp://127.0.0.1:65535"),
        ("tcp://[::1]:7000", "tcp://[::1]:7001"),
    ],
)
def test_the_control_address_follows_from_the_main_one(address: str, control: str) -> None:
    """A file beside the file, or the next port, which there always is."""
    assert control_address(checked_address(address)) == control


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_default_directory_that_others_can_enter_is_refused(runtime: Path, mode: int) -> None:
    """Neither daemon nor client trusts a directory that somebody else may have filled."""
    (runtime / "odriver").mkdir()
    (runtime / "odriver").chmod(mode)

    with pytest.raises(AddressError, match="0700"):
        checked_address(None)


def test_a_default_directory_that_is_a_link_is_refused(runtime: Path) -> None:
    """A link may lead to somebody else's directory."""
    (runtime / "elsewhere").mkdir(mode=0o700)
    (runtime / "odriver").symlink_to(runtime / "elsewhere")

    with pytest.raises(AddressError, match="0700"):
        checked_address(None)


def test_a_runtime_directory_that_does_not_exist_is_an_address_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says which directory cannot be made."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nonexistent")

    with pytest.raises(AddressError, match="/nonexistent/odriver"), reserved(checked_address(None)):
        pass


@pytest.mark.parametrize(
    "address",
    [
        "",
        "odriver.sock",
        "ipc://",
        "ipc://*",
        "ipc://@abstract",
        "ipc:///tmp/",
        "ipc:///tmp/a\0b",
        "inproc://odriver",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:65535",
        "tcp://127.0.0.1:*",
        "tcp://:5555",
        "http://127.0.0.1:5555",
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    """The message shows what an address looks like."""
    with pytest.raises(AddressError, match=re.escape("ipc:///path/to.sock or tcp://HOST:PORT")):
        checked_address(address)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://192.168.0.7:5555", "tcp://[::]:5555"])
def test_an_address_that_other_machines_reach_is_refused(address: str) -> None:
    """Without a key, and the message says where to get one."""
    with pytest.raises(AddressError, match="odriver keys new"):
        checked_address(address)


@pytest.mark.parametrize(
    ("address", "full"),
    [
        ("tcp://127.0.0.1:5555", "tcp://127.0.0.1:5555"),
        ("tcp://localhost:5555", "tcp://127.0.0.1:5555"),
        ("tcp://127.8.0.1:5555", "tcp://127.8.0.1:5555"),
        ("tcp://[::1]:5555", "tcp://[::1]:5555"),
        ("ipc:///run/../run/o.sock", "ipc:///run/o.sock"),
    ],
)
def test_addresses_of_this_machine_are_taken(address: str, full: str) -> None:
    """Loopback in both families, and files by their full path."""
    assert checked_address(address) == full


def test_a_path_too_long_for_a_socket_is_refused() -> None:
    """107 bytes fit into a Unix socket's address, of which the control socket's needs 8 more; one more is an error."""
    assert checked_address("ipc:///" + "x" * 98) == "ipc:///" + "x" * 98
    with pytest.raises(AddressError, match="100 bytes, at most 99"):
        checked_address("ipc:///" + "x" * 99)


def test_an_address_is_reserved_once(tmp_path: Path) -> None:
    """A second daemon is told that the address is in use, as long as the first has it."""
    address = f"ipc://{tmp_path}/o.sock"

    with reserved(address), pytest.raises(AddressInUse, match="in use"), reserved(address):
        pass
    with reserved(address):
        pass


def test_a_socket_that_nobody_locked_but_somebody_uses_is_in_use(tmp_path: Path) -> None:
    """Another program's socket is not taken away from it."""
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "o.sock"))
        other.listen()

        with pytest.raises(AddressInUse, match="in use"), reserved(f"ipc://{tmp_path}/o.sock"):
            pass


def test_the_socket_of_a_dead_daemon_is_no_obstacle(tmp_path: Path) -> None:
    """A socket file on which nobody listens is left over, and may be replaced."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "o.sock"))

    assert not anyone_listens(f"ipc://{tmp_path}/o.sock")
    with reserved(f"ipc://{tmp_path}/o.sock"):
        pass


def test_a_daemon_whose_directory_was_removed_leaves_its_successors_socket_alone(tmp_path: Path) -> None:
    """Whoever starts another daemon there, as nobody reaches the first one, and ends that one then, is served on."""
    directory = tmp_path / "run"
    address = f"ipc://{directory}/o.sock"
    directory.mkdir()

    with reserved(address):
        shutil.rmtree(directory)
        directory.mkdir()
        second = reserved(address)
        second.__enter__()
        (directory / "o.sock").touch()
    assert (directory / "o.sock").exists()
    second.__exit__(None, None, None)
    assert not (directory / "o.sock").exists()


def test_a_file_that_is_no_socket_is_not_replaced(tmp_path: Path) -> None:
    """libzmq would unlink it; we say what is in the way."""
    (tmp_path / "thesis.txt").write_text("precious")

    with pytest.raises(AddressError, match="no socket"), reserved(f"ipc://{tmp_path}/thesis.txt"):
        pass

    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_a_directory_that_does_not_exist_is_an_address_error(tmp_path: Path) -> None:
    """A directory that the operator named is not made up."""
    with pytest.raises(AddressError, match="No such file"), reserved(f"ipc://{tmp_path}/missing/o.sock"):
        pass


@pytest.fixture
def service(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where a service would listen."""
    address = f"ipc://{tmp_path_factory.mktemp('service')}/o.sock"
    monkeypatch.setattr(addresses, "SERVICE", address)
    return address


def test_who_has_no_daemon_asks_the_service(runtime: Path, service: str) -> None:
    """If it is there; their own comes first, and so does what they name."""
    assert client_address(None) == default_address()
    with listening(service):
        assert client_address(None) == service
        assert client_address(default_address()) == default_address()
        assert checked_address(None) == default_address()
        (runtime / "odriver").mkdir(mode=0o700)
        with listening(default_address()):
            assert client_address(None) == default_address()


@pytest.mark.usefixtures("runtime")
def test_a_client_asks_where_the_daemon_is_configured_to_listen(
    service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By variable or file, as ``odriver serve``; a file that cannot be read is an error, and the address that is named counts first."""
    named, other = tmp_path / "o.toml", tmp_path / "p.toml"
    named.write_text("bind = 'tcp://127.0.0.1:5557'\nnum_pages = 8")
    other.write_text("num_pages = 8")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    with listening(service):
        assert client_address(None, config=named) == "tcp://127.0.0.1:5557"
        monkeypatch.setenv("ODRIVER_CONFIG", str(named))
        assert client_address(None) == "tcp://127.0.0.1:5557"
        assert client_address(None, config=other) == service
        monkeypatch.setenv("ODRIVER_BIND", f"ipc://{tmp_path}/o.sock")
        assert client_address(None) == client_address(None, config=named) == f"ipc://{tmp_path}/o.sock"
        assert client_address("tcp://127.0.0.1:5558") == "tcp://127.0.0.1:5558"
        monkeypatch.setenv("ODRIVER_BIND", "")
    for written, words in (("bind = 5", "bind must be a string, not 5"), ("bind", "is not TOML")):
        named.write_text(written)
        with pytest.raises(AddressError, match=words):
            client_address(None)
    monkeypatch.setenv("ODRIVER_CONFIG", str(tmp_path / "none.toml"))
    with pytest.raises(AddressError, match=r"cannot read the configuration .*none\.toml: No such file"):
        client_address(None)


def test_a_user_without_a_home_has_the_machines_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run as any number."""
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("could not determine home directory")))

    assert configured.files() == [Path("/etc/odriver/config.toml")]


@pytest.mark.usefixtures("runtime")
def test_a_service_that_is_not_for_us_is_not_asked(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is not in its group cannot connect."""

    def refuse(address: str) -> socket.socket:
        raise PermissionError if address == service else FileNotFoundError

    monkeypatch.setattr(addresses, "connected", refuse)

    assert client_address(None) == default_address()


def test_sockets_are_opened_to_their_group(tmp_path: Path) -> None:
    """Those of work and control; what lies there that is none, or leads elsewhere, is left as it is."""
    address, file = f"ipc://{tmp_path}/o.sock", tmp_path / "file"
    file.touch(mode=0o600)
    with listening(address), listening(control_address(address)):
        open_to_group(address)
        assert [path.stat().st_mode & 0o777 for path in tmp_path.glob("o.sock*")] == [0o660] * 2
        keep_private(address)
        assert (tmp_path / "o.sock").stat().st_mode & 0o777 == 0o600
    (tmp_path / "o.sock").unlink()
    (tmp_path / "o.sock").symlink_to(file)

    open_to_group(address)
    open_to_group("tcp://127.0.0.1:5555")

    assert file.stat().st_mode & 0o777 == 0o600
