"""The control socket: commands to a daemon, however much work it has."""

import json
import logging
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import zmq
from fake_driver import PATIENCE, WELCOME, FakeDriver, build_server, serving
from fakes import FakeEngine, FakeTokenizer
from free_ports import free_port
from raw_client import RawClient

from driver.errors import Asleep, Draining, DriverError
from driver.odriver import oDriver
from driver.request import ActiveRequest, QueueChannel
from engine.live.weight_source import SharedArray
from ipc.client import Client
from ipc.commands import cli
from ipc.control_client import ControlClient
from ipc.errors import AddressInUse, ConnectFailed, ConnectionLost, RequestFailed
from ipc.process.logs import OURS
from ipc.server.held_answers import MAX_HELD, HeldAnswers
from ipc.sockets import peers
from ipc.sockets.peer_events import Sent
from ipc.sockets.tenants import EVERYBODY, Tenant
from ipc.wire.addresses import control_address
from ipc.wire.keys import Limits
from ipc.wire.messages import PROTOCOL_VERSION, Error, Generate, Hello, Ok, Ping, Pong, ServerMessage, StatusReply
from ipc.wire.operations import Status

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    """The log is as it was, after each test."""
    before = {name: logging.getLogger(name).level for name in OURS}
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture
def gate() -> threading.Semaphore:
    """A step of the engine for each release."""
    return threading.Semaphore(0)


@pytest.fixture
def driver(gate: threading.Semaphore) -> Iterator[oDriver]:
    """Real threads round an engine that steps when the test lets it."""
    driver = oDriver(FakeEngine(gate=gate), FakeTokenizer())
    driver.start()
    yield driver
    gate.release(10_000)
    driver.stop("the test is over")


@pytest.fixture
def control(address: str, driver: oDriver) -> Iterator[ControlClient]:
    """A connection to the control socket of a daemon that serves this driver."""
    with serving(address, driver), ControlClient(address) as control:
        yield control


def submit(driver: oDriver, request_id: str = "a") -> QueueChannel:
    """One request of three tokens; its channel."""
    channel = QueueChannel()
    driver.submit_request(ActiveRequest(request_id=request_id, channel=channel, prompt="abc", params={"max_tokens": 3}))
    return channel


def whole(channel: QueueChannel) -> str:
    """The text of a request that went well."""
    samples = list(channel)
    assert samples[-1].error is None
    return "".join(sample.text for sample in samples)


def refusal(driver: oDriver) -> DriverError:
    """Why a request is not taken."""
    with pytest.raises(DriverError) as refused:
        submit(driver, "refused")
    return refused.value


def test_status_is_the_drivers_and_the_sockets(address: str) -> None:
    """The reply names its request and holds plain numbers by name."""
    with serving(address, FakeDriver()), RawClient(control_address(address)) as client:
        reply = client.ask(Status("s"))

    assert reply == StatusReply(
        "s",
        {
            "model": "parrot", "clients": 0, "open_requests": 0, "state": "serving", "seconds_since_progress": 0.0, "weight_version": 1,
            "stages": {"prepare": 0.0, "execution": 0.0, "sockets": 0.0, "control": 0.0},
        },
    )  # fmt: skip


def test_a_flood_of_work_delays_no_status(address: str) -> None:
    """While the thread for work is stuck in a message, and hundreds wait behind it, control answers."""
    entered, leave = threading.Event(), threading.Event()

    class BusyDriver(FakeDriver):
        def submit_request(self, request: ActiveRequest) -> None:
            entered.set()
            leave.wait(PATIENCE)
            super().submit_request(request)

    with serving(address, BusyDriver()), RawClient(address) as flooder:
        flooder.greet()
        for number in range(900):
            flooder.say(Generate(str(number), prompt="x"))
        assert entered.wait(PATIENCE)

        with ControlClient(address) as control:
            assert control.status()["clients"] == 1
        leave.set()


def test_no_answer_is_left_out_for_a_client_that_reads_late() -> None:
    """They wait in their order; one that asks for ever more and reads nothing is cut off, and asks for nothing then."""
    sent: list[str | None] = []
    room, closed = 2, []

    def send(identity: bytes, message: ServerMessage) -> Sent:
        assert identity == b"c" and isinstance(message, Ok)
        if len(sent) == room:
            return Sent.FULL
        sent.append(message.request_id)
        return Sent.AWAY

    answers = HeldAnswers(send, closed.append)
    names = [str(number) for number in range(2 + MAX_HELD)]
    for name in names:
        answers.send(b"c", Ok(name, ""))
    assert sent == names[:2]
    room = 10
    answers.has_room(b"c")
    assert sent == names[:10] and not closed
    for name in range(9):
        answers.send(b"c", Ok(str(name), ""))
    assert closed == [b"c"] and answers.has_cut_off(b"c")
    room = 100
    answers.has_room(b"c")
    answers.send(b"c", Ok("late", ""))
    assert len(sent) == 10
    answers.lost(b"c")
    assert not answers.has_cut_off(b"c")


def test_a_client_of_the_control_socket_that_never_reads_is_cut_off(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection ends; others are answered."""
    monkeypatch.setattr(peers, "MAX_ON_THE_WAY", 0)
    with serving(address, FakeDriver()), RawClient(control_address(address)) as client:
        gone = client.monitor(zmq.EVENT_DISCONNECTED)
        for number in range(MAX_HELD + 1):
            client.say(Status(str(number)))
        assert gone.poll(1000 * PATIENCE)
        monkeypatch.undo()
        with ControlClient(address) as control:
            assert control.status()["model"] == "parrot"


def test_what_is_no_command_is_answered_and_harms_nobody(address: str) -> None:
    """Messages of the work socket, rubbish, and versions of the protocol that there are not."""
    with serving(address, FakeDriver()), RawClient(control_address(address)) as client:
        for frames in ([b"\xc1"], [b"", b""]):
            client.send(*frames)
            answer = client.hear()
            assert isinstance(answer, Error)
            assert answer.code == "invalid_request"
        work, version = client.ask(Generate("a", prompt="x")), client.ask(Hello(PROTOCOL_VERSION + 1))

        assert isinstance(work, Error)
        assert (work.request_id, work.code) == ("a", "invalid_request")
        assert isinstance(version, Error)
        assert version.code == "unsupported_version"
        assert client.ask(Ping()) == Pong()
        assert client.greet().model == WELCOME.model


def test_an_operator_aborts_anybodys_request(address: str) -> None:
    """By client id and request id; what is not open is said to be not open."""
    driver = FakeDriver()
    with serving(address, driver), RawClient(address) as client, ControlClient(address) as control:
        client_id = client.greet().client_id
        client.say(Generate("a", prompt=[1]))
        driver.take()

        assert control.abort(f"{client_id}:a") == f"{client_id}:a is aborted"
        with pytest.raises(RequestFailed, match="no request 'b' is open") as missing:
            control.abort("b")

        assert client.hear().finish_reason == "abort"
        assert missing.value.code == "not_found"


COMMANDS: list[Callable[[ControlClient], str]] = [
    lambda control: str(control.requests()),
    lambda control: control.abort("a"),
    lambda control: control.reload(),
    lambda control: control.reset_prefix_cache(),
    lambda control: control.drain(),
    lambda control: control.sleep(),
    lambda control: control.wake(),
    lambda control: control.set_log_level("debug"),
    lambda control: control.start_profile("a"),
    lambda control: control.stop_profile(),
]
"""Whatever changes anything, or tells of other clients."""


@pytest.mark.parametrize("command", COMMANDS)
def test_nobody_steers_a_daemon_over_tcp_without_a_key(command: Callable[[ControlClient], str]) -> None:
    """Any user of the machine could; it is said what to do. What is only looked at is there for all."""
    address = f"tcp://127.0.0.1:{free_port(2)}"
    with serving(address, driver := FakeDriver(), profiles=Path("/nowhere")), ControlClient(address) as control:
        with pytest.raises(RequestFailed, match=r"takes a key.*--keys DIR, or at ipc://") as refused:
            command(control)

        assert refused.value.code == "forbidden"
        assert control.status()["state"] == "serving" and control.metrics() == ""
    assert not driver.submitted


ANOTHER = """
import json, os, sys
from ipc.control_client import ControlClient
from ipc.errors import RequestFailed
said = []
os.setgroups([])
os.setresgid(4321, 4321, 4321)
os.setresuid(4321, 4321, 4321)  # now, as that user may not even read Python
with ControlClient(sys.argv[1]) as control:
    state = control.status()["state"], control.metrics()
    for command, *given in (["requests"], ["abort", "a"], ["reload"], ["reset_prefix_cache"], ["drain"], ["sleep"], ["wake"], ["set_log_level", "debug"],
                            ["start_profile", "a"], ["stop_profile"]):
        try:
            getattr(control, command)(*given)
        except RequestFailed as refused:
            said.append((refused.code, str(refused)))
print(json.dumps([state, said]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_of_the_socket_looks_and_does_not_touch(driver: oDriver) -> None:
    """The kernel says who it is; the daemon's own user and root may do all."""
    with TemporaryDirectory() as directory, serving(address := f"ipc://{directory}/o.sock", driver):
        os.chmod(directory, 0o755)
        for each in (address, control_address(address)):
            os.chmod(each.removeprefix("ipc://"), 0o666)
        another = subprocess.run(
            [sys.executable, "-c", ANOTHER, address],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=PATIENCE,
        )  # fmt: skip
        with ControlClient(address) as control:
            assert control.set_log_level("info") == "logging info and above"

    assert another.returncode == 0, another.stderr
    state, said = json.loads(another.stdout)
    assert state == ["serving", ""] and len(said) == len(COMMANDS)
    for code, message in said:
        assert code == "forbidden" and message.startswith("user 4321 may not control the daemon: its own user may")


@pytest.mark.parametrize(
    ("tenant", "may"),
    [
        (Tenant("", user=0), True), (Tenant("", user=os.geteuid()), True), (Tenant("", user=65534), False),
        (EVERYBODY, False), (Tenant("a", Limits("k")), False), (Tenant("a", Limits("k", control=True)), True),
        (Tenant("a", Limits("k"), user=0), False),
    ],
)  # fmt: skip
def test_control_is_for_the_daemons_user_for_root_and_for_keys_made_for_it(tenant: Tenant, may: bool) -> None:
    """Where keys are asked for, the key alone counts."""
    assert tenant.may_control is may
    assert tenant.may_look is (may or tenant.limits is None)


@pytest.mark.usefixtures("driver")
def test_a_closed_client_says_so(control: ControlClient) -> None:
    """As ``Client`` does, however often it is closed."""
    control.close()
    control.close()

    with pytest.raises(ConnectionLost, match="this client is closed"):
        control.status()


def test_what_no_message_can_hold_is_refused_in_words(address: str) -> None:
    """A shell's argument that is no UTF-8, and a number beyond 64 bits; the connection goes on."""
    with serving(address, FakeDriver()), ControlClient(address) as control:
        with pytest.raises(RequestFailed, match="half a surrogate pair"):
            control.load_adapter("support", "\udcff")
        with pytest.raises(RequestFailed, match=r"arrays\.a\.offset: a number is too large"):
            control.update_shared({"a": SharedArray("object", 2**64, "float32", [1])})

        assert control.status()["state"] == "serving"


def test_the_log_level_is_changed_while_serving(address: str) -> None:
    """For our own packages."""
    with serving(address, FakeDriver()), ControlClient(address) as control:
        assert control.set_log_level("debug") == "logging debug and above"
        assert logging.getLogger("driver").level == logging.DEBUG
        with pytest.raises(RequestFailed, match=r"\$\.level"):
            control.set_log_level("chatty")


def test_open_requests_are_listed_with_their_progress_and_nothing_of_their_content(
    driver: oDriver, gate: threading.Semaphore, address: str
) -> None:
    """What runs, what waits for a slot, whose it is, and by the id that ends it; in the order that is asked for."""
    with serving(address, driver), ControlClient(address) as control, RawClient(address) as client:
        client_id = client.greet().client_id
        for number in range(5):
            client.say(
                Generate(str(number), prompt="secret" * (number + 1), params={"max_tokens": 90}, user=f"u{number}")
            )
        rows, total = control.requests()
        while [row["state"] for row in rows] != ["waiting"] * 5:  # for the first step, which is held
            rows, total = control.requests()
        while [row["completion_tokens"] > 1 for row in rows] != [True] * 4 + [False]:
            steps = driver.status().steps
            gate.release()
            while driver.status().steps == steps:
                pass
            rows, total = control.requests()
        last, _ = control.requests("client", limit=1)
        nobodys = control.requests(client="somebody else")

        assert total == 5 and [row["id"] for row in rows] == [f"{client_id}:{number}" for number in range(5)]
        assert [row["state"] for row in rows] == ["decode"] * 4 + ["waiting"]
        assert [row["prompt_tokens"] for row in rows] == [6, 12, 18, 24, 30]
        assert rows[0]["completion_tokens"] >= rows[3]["completion_tokens"] and rows[4]["completion_tokens"] == 0
        assert {row["model"] for row in rows} == {"parrot"} and rows[4]["user"] == "u4"
        assert [row["age_s"] for row in rows] == sorted((row["age_s"] for row in rows), reverse=True)
        assert [row["id"] for row in last] == [f"{client_id}:0"]
        assert nobodys == ([], 0)
        assert "secret" not in str(rows)
        assert control.abort(rows[4]["id"]) == f"{client_id}:4 is aborted"


def test_thousands_of_requests_stay_readable(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A table has the first fifty and says how many more there are; ids alone are all, for `odriver abort`."""
    driver = FakeDriver()
    for number in range(3000):
        request = ActiveRequest(request_id=f"c:{number}", channel=QueueChannel(), prompt="hold", client="c")
        driver.submit_request(request)
    with serving(address, driver):
        assert cli.main(["requests", "--connect", address]) == 0
        table = capsys.readouterr().out
        assert cli.main(["requests", "-q", "--connect", address]) == 0
        ids = capsys.readouterr().out.split()
        assert cli.main(["abort", *ids[:2], "--connect", address]) == 0

    assert len(table.splitlines()) < 60 and "c:49" in table and "c:50" not in table
    assert table.endswith("3,000 open, of which 2,950 are not shown: --limit\n")
    assert len(ids) == 3000 and len(driver.open) == 2998


def test_an_empty_prefix_cache_costs_no_request_its_pages(
    driver: oDriver, gate: threading.Semaphore, control: ControlClient
) -> None:
    """It is emptied between two steps, and what is open goes on."""
    channel = submit(driver)
    gate.release(100)

    assert control.reset_prefix_cache() == "the prefix cache is empty: 0 pages are forgotten"
    assert whole(channel) == "abc"


# Drain, sleep and wake.


def test_a_driver_that_drains_says_when_it_is_done(driver: oDriver, gate: threading.Semaphore) -> None:
    """What is open is finished, what is new is refused, and nothing is said before the last sample is out."""
    done = threading.Event()
    channel = submit(driver)

    driver.drain(done.set)

    assert isinstance(refusal(driver), Draining)
    assert driver.status().state == "draining"
    assert not done.is_set()
    gate.release(100)
    assert whole(channel) == "abc"
    assert done.wait(PATIENCE)


def test_a_driver_with_nothing_open_has_drained_at_once(driver: oDriver) -> None:
    """Also one that sleeps."""
    done = threading.Event()

    driver.drain(done.set)

    assert done.is_set()


def test_sleep_finishes_what_is_open_and_wake_serves_again(
    driver: oDriver, gate: threading.Semaphore, control: ControlClient, address: str
) -> None:
    """Work is refused from the moment that it is asked to sleep, with what to do about it."""
    channel = submit(driver)
    sleeper = threading.Thread(target=asleep, args=(address,))
    sleeper.start()
    while control.status()["state"] != "falling asleep":
        pass
    assert isinstance(refusal(driver), Asleep)
    assert "odriver wake" in str(refusal(driver))
    gate.release(100)
    sleeper.join()

    assert whole(channel) == "abc"
    assert (control.status()["state"], control.status()["asleep"]) == ("asleep", True)
    assert control.sleep() == "asleep"
    assert control.wake() == control.wake() == "awake"
    assert (control.status()["state"], control.status()["asleep"]) == ("serving", False)
    assert whole(submit(driver)) == "abc"


def asleep(address: str) -> None:
    """Have the daemon sleep; returns when it does."""
    with ControlClient(address) as control:
        assert control.sleep() == "asleep"


def test_a_driver_woken_before_it_sleeps_does_not_sleep_later(
    driver: oDriver, gate: threading.Semaphore, control: ControlClient
) -> None:
    """Whoever asked it to is told; what is open, and what is new, goes on."""
    channel, sleeper = submit(driver), QueueChannel()
    driver.operations.sleep("s", sleeper)

    gate.release(1)
    driver.operations.wake("w", QueueChannel())
    second = submit(driver, "b")
    gate.release(100)

    assert (whole(channel), whole(second)) == ("abc", "abc")
    (answer,) = sleeper
    assert answer.error is not None
    assert "woken before" in answer.error.message
    assert control.status()["state"] == "serving"


def test_a_driver_that_drains_neither_sleeps_nor_wakes(driver: oDriver, control: ControlClient) -> None:
    """It is on its way out."""
    driver.drain(lambda: None)

    for command in (control.sleep, control.wake):
        with pytest.raises(RequestFailed) as refused:
            command()
        assert refused.value.code == "draining"


# On the command line.


def odriver(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, run to its end."""
    code = "import sys; from ipc.commands.cli import main; sys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=PATIENCE
    )


@pytest.mark.usefixtures("control")
def test_every_command_is_there(address: str) -> None:
    """They say in a line what has been done, or why not."""
    said = {
        ("sleep",): (0, "asleep\n", ""),
        ("wake",): (0, "awake\n", ""),
        ("log-level", "info"): (0, "logging info and above\n", ""),
        ("requests",): (0, "0 open\n", ""),
        ("reset-prefix-cache",): (0, "the prefix cache is empty: 0 pages are forgotten\n", ""),
        ("abort", "x", "y"): (
            1,
            "",
            "odriver: no request 'x' is open; `odriver requests` lists those that are\n"
            "odriver: no request 'y' is open; `odriver requests` lists those that are\n",
        ),
    }
    for command, (code, stdout, stderr) in said.items():
        done = odriver(*command, "--connect", address)
        assert (done.returncode, done.stdout, done.stderr) == (code, stdout, stderr)
    with (
        ControlClient(address) as control,
        pytest.raises(RequestFailed, match=r"malformed message: Expected `float` >= 0\.0 - at `\$\.timeout_s`"),
    ):
        control.drain(math.nan)


@pytest.mark.parametrize("connect", [ControlClient, Client])
def test_without_a_daemon_connecting_fails_in_words(address: str, connect: Callable[..., object]) -> None:
    """Rather than waiting for ever."""
    with pytest.raises(ConnectFailed, match="no daemon answers"):
        connect(address, timeout=0.1)


def test_a_control_address_in_use_is_an_error_of_start(tmp_path: Path) -> None:
    """It says which, and the address for work is given back."""
    address = f"ipc://{tmp_path}/o.sock"
    with serving(control_address(address), FakeDriver()):
        server = build_server(address)
        with pytest.raises(AddressInUse, match=r"o\.sock\.control"):
            server.start()

    with serving(address, FakeDriver()), Client(address) as client:
        assert client.complete("x").text == "x"
