"""Keys: who gets in over TCP, what they may, and what anybody else sees of it."""

import os
import re
import select
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import zmq
from fake_driver import PATIENCE, WELCOME, FakeDriver, serving
from free_ports import free_port
from test_client import why_not

from ipc.client import Client
from ipc.commands.cli import main
from ipc.control_client import ControlClient
from ipc.errors import AddressError, ConnectFailed, ConnectionLost, KeyFileError, OdriverError, RequestFailed
from ipc.server.outbox import Outbox
from ipc.server.work.client_table import Clients
from ipc.sockets.auth import Authority
from ipc.sockets.peer_events import Sent
from ipc.sockets.tenants import MINUTE, Quota, Tenant
from ipc.wire import keys
from ipc.wire.addresses import checked_address, control_address
from ipc.wire.bell import Bell
from ipc.wire.codec import encode
from ipc.wire.keys import Limits
from ipc.wire.messages import PROTOCOL_VERSION, Error, Generate, Hello

ROOT = Path(__file__).parent.parent
NOT_THE_DAEMON = "is not the daemon that this key was made for"


@pytest.fixture
def address() -> str:
    """A loopback address whose next port is free too."""
    return f"tcp://127.0.0.1:{free_port(2)}"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The daemon's keys."""
    return tmp_path / "keys"


def new_key(directory: Path, name: str, **limits: int | bool) -> Path:
    """A client's file, beside the daemon's directory."""
    out = directory.parent / f"{name}.key"
    keys.new(directory, name, out, **limits)
    return out


@pytest.fixture
def driver() -> FakeDriver:
    """What is served."""
    return FakeDriver()


@pytest.fixture
def authority(directory: Path) -> Authority:
    """Admits alice, who may control, and bob, who may not."""
    new_key(directory, "alice", control=True)
    new_key(directory, "bob", max_requests=1)
    return Authority(directory)


@pytest.fixture
def alice(address: str, driver: FakeDriver, authority: Authority, directory: Path) -> Iterator[Client]:
    """A client with a key, of a daemon that asks for one."""
    with (
        serving(address, driver, authority=authority),
        Client(address, PATIENCE, key=directory.parent / "alice.key") as client,
    ):
        yield client


def test_a_key_gets_in_and_is_known_by_its_name(alice: Client, driver: FakeDriver) -> None:
    """Work and control; the name is the tenant's, on which fairness, quotas and the prefix cache hang."""
    assert alice.complete("hello there").text == "hellothere"
    assert alice.status()["clients"] == 1
    assert (driver.submitted[0].tenant, driver.submitted[0].client) == ("alice", "alice")


def test_without_a_key_one_gets_nothing(alice: Client, address: str, tmp_path: Path) -> None:
    """Nor with one that is not authorised, or one of another daemon; each is told what is wrong, as far as CURVE tells."""
    stranger = new_key(tmp_path / "elsewhere", "stranger")
    mine, theirs = keys.client_key(stranger), keys.client_key(tmp_path / "alice.key")
    unknown = tmp_path / "unknown.key"
    unknown.write_text(f'public = "{mine.public}"\nsecret = "{mine.secret}"\nserver = "{theirs.server}"\n')
    unknown.chmod(0o600)

    with pytest.raises(ConnectFailed, match="asks for a key"):
        Client(address, PATIENCE)
    with pytest.raises(ConnectFailed, match="does not know this key"):
        Client(address, PATIENCE, key=unknown)
    assert NOT_THE_DAEMON in str(why_not(address, NOT_THE_DAEMON, stranger))
    with pytest.raises(ConnectFailed, match="asks for a key"):
        ControlClient(address, PATIENCE)

    assert alice.complete("x").text == "x"


def test_a_key_where_none_is_asked_for_is_said_to_be_too_much(address: str, driver: FakeDriver, tmp_path: Path) -> None:
    """Rather than sending in the clear what was to be encrypted."""
    key, words = new_key(tmp_path / "keys", "alice"), f"takes no keys|{NOT_THE_DAEMON}"
    with serving(address, driver):
        assert re.search(words, str(why_not(address, words, key)))


@contextmanager
def tapped(address: str) -> Iterator[tuple[str, bytearray]]:
    """Somebody between client and daemon, who passes everything on and keeps it."""
    port = int(address.rpartition(":")[2])
    listener, seen = socket.create_server(("127.0.0.1", 0)), bytearray()
    ended = threading.Event()

    def relay() -> None:
        near = listener.accept()[0]
        far = socket.create_connection(("127.0.0.1", port))
        with near, far:
            while not ended.is_set():
                for end in select.select([near, far], [], [], 0.1)[0]:
                    data = end.recv(65536)
                    seen.extend(data)
                    if not data:
                        return
                    (far if end is near else near).sendall(data)

    thread = threading.Thread(target=relay)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}", seen
    finally:
        ended.set()
        thread.join()
        listener.close()


def test_a_man_in_the_middle_reads_nothing(alice: Client, address: str, tmp_path: Path) -> None:
    """He sees neither what is asked nor what is answered."""
    with tapped(address) as (middle, seen), Client(middle, PATIENCE, key=tmp_path / "alice.key") as client:
        assert client.complete("a great secret").text == "agreatsecret"
        client.close()

    assert len(seen) > 500
    assert b"secret" not in seen
    assert b"generate" not in seen
    assert alice.complete("x").text == "x"


def test_a_man_in_the_middle_cannot_be_the_daemon(address: str, directory: Path) -> None:
    """Whoever answers with another key is not talked to, though he speaks CURVE and admits anybody."""
    key = new_key(directory, "alice")
    _, secret = zmq.curve_keypair()
    context = zmq.Context()
    impostor = context.socket(zmq.ROUTER)
    impostor.curve_server, impostor.curve_secretkey = True, secret
    impostor.bind(address)

    assert NOT_THE_DAEMON in str(why_not(address, NOT_THE_DAEMON, key))

    assert not impostor.poll(0)
    context.destroy(linger=0)


def test_a_key_without_control_cannot_control(alice: Client, address: str, tmp_path: Path) -> None:
    """It is told how to get one that can."""
    with ControlClient(address, PATIENCE, key=tmp_path / "bob.key") as control, pytest.raises(RequestFailed) as refused:
        control.drain()

    assert refused.value.code == "forbidden"
    assert "key bob may not control" in str(refused.value)
    assert alice.complete("x").text == "x"


def test_a_key_has_so_many_requests_at_once(alice: Client, driver: FakeDriver, address: str, tmp_path: Path) -> None:
    """Of all its connections together; others have theirs."""
    bob = tmp_path / "bob.key"
    with Client(address, PATIENCE, key=bob) as one, Client(address, PATIENCE, key=bob) as other:
        held = one.generate([1])
        request = driver.take()
        with pytest.raises(RequestFailed) as refused:
            other.complete("x")
        assert alice.complete("x").text == "x"
        driver.finish(request)
        list(held)

        assert other.complete("x").text == "x"
    assert refused.value.code == "quota_exceeded"
    assert driver.refused == {"quota_exceeded": 1}


def test_a_revoked_key_is_cut_off_and_a_new_one_gets_in(
    alice: Client, driver: FakeDriver, authority: Authority, directory: Path, address: str
) -> None:
    """When the keys are read again, which a mistake in one of them does not keep from serving the others."""
    bob = Client(address, PATIENCE, key=directory.parent / "bob.key")
    stream = bob.generate([1])
    driver.take()
    keys.revoke(directory, "bob")
    carol = new_key(directory, "carol")

    authority.reload()

    with Client(address, PATIENCE, key=carol) as client:
        assert client.complete("x").text == "x"
    with pytest.raises(OdriverError, match=r"not authorised any more|does not know"):
        bob.complete("x")
    with pytest.raises(ConnectionLost):
        list(stream)
    (directory / "clients" / "dave.toml").write_text("nonsense")
    with pytest.raises(KeyFileError, match="dave"):
        authority.reload()
    assert alice.complete("x").text == "x"
    bob.close()


def test_keys_stay_in_force_while_their_directory_is_away(alice: Client, authority: Authority, directory: Path) -> None:
    """As one that is not mounted, or that was removed and made again: all were cut off, operators too, and told nothing
    else."""
    away = directory.rename(directory.with_name("away"))
    with pytest.raises(KeyFileError, match=r"server\.toml: No such file"):
        authority.reload()
    keys.server_key(directory)
    with pytest.raises(KeyFileError, match=r"another server\.toml than at the start: start the daemon again"):
        authority.reload()
    assert alice.complete("x").text == "x"
    (directory / "server.toml").unlink()
    directory.rmdir()
    away.rename(directory)

    authority.reload()

    assert alice.complete("x").text == "x"


def test_the_name_of_a_connection_is_not_a_key() -> None:
    """Who takes the name of somebody's lost connection, with another key, is a stranger."""
    driver, sent = FakeDriver(), []

    def send(_: bytes, message: object) -> Sent:
        sent.append(message)
        return Sent.AWAY

    clients = Clients(driver, WELCOME, Outbox(Bell()), send)
    clients.hear(b"name", [encode(Hello(PROTOCOL_VERSION))], 0.0, Tenant("alice"))
    clients.hear(b"name", [encode(Generate("a", prompt=[1]))], 0.0, Tenant("alice"))
    clients.hear(b"name", [encode(Generate("b", prompt=[1]))], 0.0, Tenant("mallory"))

    assert [request.tenant for request in driver.submitted] == ["alice"]
    assert driver.aborted.get_nowait().endswith(":a")
    assert isinstance(sent[-1], Error)
    assert "say hello first" in sent[-1].message


def test_nobody_goes_before_others_unless_it_may() -> None:
    """A key's holder with leave, one who controls the daemon, and its own user."""
    sent: list[object] = []
    for tenant, least in (
        (Tenant(""), -(2**31) + 1),
        (Tenant("uid 7", user=7), 0),
        (Tenant("bob", Limits("x" * 40)), 0),
        (Tenant("eve", Limits("x" * 40, least_priority=-5)), -5),
        (Tenant("ops", Limits("x" * 40, control=True)), -(2**31) + 1),
    ):
        driver = FakeDriver()
        clients = Clients(driver, WELCOME, Outbox(Bell()), lambda _, message: (sent.append(message), Sent.AWAY)[1])
        clients.hear(b"name", [encode(Hello(PROTOCOL_VERSION))], 0.0, tenant)
        asked = (-(2**31) + 1, -6, -5, -1, 0, 4, 5, "x")
        for number, priority in enumerate(asked):
            request = Generate(str(number), prompt=[1], params={"priority": priority})
            clients.hear(b"name", [encode(request)], 0.0, tenant)
        taken = [request.params["priority"] for request in driver.submitted]
        assert taken == [one for one in asked if isinstance(one, str) or one >= least]
    refused = [one for one in sent if isinstance(one, Error)]
    assert {one.code for one in refused} == {"forbidden"}
    assert refused[0].message.endswith("uid 7 may ask for 0 or more, as it is not the daemon's own user")
    assert refused[4].message.endswith("bob may ask for 0 or more, what its key's `least_priority` allows")


def test_tokens_are_so_many_a_minute() -> None:
    """They may be used at once, and come back as the minute goes; the refusal says when there will be some."""
    quota, tenant = Quota(0.0), Tenant("bob", Limits("x" * 40, tokens_per_minute=600))
    assert quota.refusal(tenant, 0, now=100.0) is None
    quota.spend(700)

    refusal = quota.refusal(tenant, 0, now=100.0)
    assert refusal is not None
    assert refusal[1] == pytest.approx(10.0)
    assert quota.refusal(tenant, 0, now=109.0) is not None
    assert quota.refusal(tenant, 0, now=110.1) is None
    assert quota.refusal(tenant, 0, now=110.1 + MINUTE) is None
    assert Quota(0.0).refusal(Tenant(""), 10**9, now=0.0) is None


# Files.


def test_secrets_are_their_owners_alone(directory: Path) -> None:
    """The daemon's pair, made when it is first needed, and each client's; a file that others can read is refused."""
    key = new_key(directory, "alice")

    for path in (directory / "server.toml", key):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert keys.client_key(key).server == keys.server_key(directory).public
    key.chmod(0o644)
    with pytest.raises(KeyFileError, match="chmod 600"):
        keys.client_key(key)


def test_a_file_that_is_no_key_is_named(directory: Path) -> None:
    """With what is wrong in it."""
    key = new_key(directory, "alice")
    wrong = directory / "clients" / "bob.toml"
    for text, complaint in (
        ("", "missing required field `public`"),
        ('public = "short"', "regex"),
        (f'public = "{keys.client_key(key).public}"\nmax_request = 1', "unknown field `max_request`"),
        (f'public = "{keys.client_key(key).public}"', "alice and bob .* have the same key"),
        ("public = " + "[" * 10_000, "recursion"),
    ):
        wrong.write_text(text)
        with pytest.raises(KeyFileError, match=complaint):
            keys.authorized(directory)
    with pytest.raises(KeyFileError, match="cannot read"):
        keys.client_key(directory / "nothing.key")
    with pytest.raises(KeyFileError, match="cannot be a name"):
        new_key(directory, "../alice")


@pytest.mark.parametrize("name", [b"\xff", b"two words", b"a\nb", b"(gateway)", b""])
def test_a_key_by_a_name_that_nobody_could_be_shown_is_refused(directory: Path, name: bytes) -> None:
    """As where a file was copied there by hand: a name that is no UTF-8 would make every status fail."""
    key = new_key(directory, "alice")
    file = os.fsencode(directory / "clients") + b"/" + name + b".toml"
    Path(os.fsdecode(file)).write_text(f'public = "{keys.client_key(key).server}"')

    with pytest.raises(KeyFileError, match="cannot be a name: use up to 64 letters"):
        keys.authorized(directory)


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:7777", "tcp://*:7777", "tcp://[::]:7777", "tcp://gpu1.example:7777"])
def test_an_address_for_other_machines_takes_a_key(bind: str) -> None:
    """To connect to, and to listen at, where the daemon always has them."""
    with pytest.raises(AddressError, match="odriver keys new"):
        checked_address(bind)

    assert control_address(checked_address(bind, has_key=True)).endswith(":7778")


class Done(NamedTuple):
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str


def test_keys_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are made, listed, used and revoked; the daemon finds them where the command puts them."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def odriver(*arguments: str) -> Done:
        try:
            code = main(arguments)
        except SystemExit as error:  # argparse's
            code = int(error.code or 0)
        return Done(code, *capsys.readouterr())

    made = odriver("keys", "new", "alice", "--max-requests", "4", "--control")
    again = odriver("keys", "new", "alice", "--out", "other.key")
    ahead = odriver("keys", "new", "bob", "--least-priority", "-5")
    behind = odriver("keys", "new", "eve", "--least-priority", "5")
    limits = keys.authorized(tmp_path / "odriver" / "keys")
    odriver("keys", "revoke", "bob")
    listed = odriver("keys", "list")
    revoked = odriver("keys", "revoke", "alice")
    missing = odriver("keys", "revoke", "alice")

    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout.startswith("alice.key is the key of alice")
    assert again.returncode == missing.returncode == os.EX_CONFIG
    assert "clients/alice.toml exists" in again.stderr
    assert (ahead.returncode, limits["bob"].least_priority, limits["alice"].least_priority) == (0, -5, 0)
    assert behind.returncode == 2 and "must be 0, or a number from" in behind.stderr and "eve" not in limits
    assert "there is no key alice" in missing.stderr
    assert keys.client_key(tmp_path / "alice.key").public in listed.stdout
    assert "alice" in listed.stdout
    assert revoked.stdout.startswith("alice may connect no more")
    assert keys.authorized(tmp_path / "odriver" / "keys") == {}
