"""What systemd hears of a daemon, from its start to its end, with a listener in systemd's place."""

import io
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest
from daemons import build_daemon
from fake_driver import PATIENCE, FakeDriver, FakeStatus, serving
from rich.console import Console
from test_daemon import send_signal

from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.progress import Progress
from ipc.client import Client
from ipc.control_client import ControlClient
from ipc.process.systemd import watchdog_interval
from ipc.service.configuration import DaemonConfig, LiveConfiguration
from ipc.service.daemon import SHUTDOWN_TIMEOUT
from ipc.service.http_config import HttpConfig
from ipc.service.monitoring.watchdog import Watchdog

INTERVAL = 0.02
"""Seconds in which the watchdog wants to hear something."""


class Notices:
    """What came to $NOTIFY_SOCKET, a message after the other."""

    def __init__(self, name: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(name.replace("@", "\0", 1))
        self._socket.settimeout(PATIENCE)

    def until(self, last: str) -> list[str]:
        """Everything up to one that begins so."""
        heard = [self.next()]
        while not heard[-1].startswith(last):
            heard.append(self.next())
        return heard

    def next(self) -> str:
        return self._socket.recv(4096).decode()

    def waiting(self) -> list[str]:
        """Those that have come and have not been heard."""
        self._socket.setblocking(False)
        heard = []
        while True:
            try:
                heard.append(self.next())
            except BlockingIOError:
                return heard

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["a file", "an abstract name"])
def notices(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notices]:
    """The listener, at either kind of socket."""
    name = str(tmp_path / "notify") if request.param == "a file" else f"@odriver-test-{os.getpid()}"
    monkeypatch.setenv("NOTIFY_SOCKET", name)
    notices = Notices(name)
    yield notices
    notices.close()


def test_a_whole_life_is_told(notices: Notices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start with its progress, READY, the watchdog, a reload with its time, and the end; the watchdog only in between."""
    monkeypatch.setenv("WATCHDOG_USEC", str(round(INTERVAL * 1e6)))
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000

    def follow() -> list[list[str]]:
        life = [notices.until("READY=1"), notices.until("WATCHDOG=1"), notices.until("WATCHDOG=1")]
        send_signal(signal.SIGHUP)
        life += [notices.until("RELOADING=1"), notices.until("READY=1"), notices.until("WATCHDOG=1")]
        send_signal(signal.SIGTERM)
        return [*life, notices.until("STOPPING=1")]

    with ThreadPoolExecutor(1) as thread:
        told = thread.submit(follow)
        daemon = build_daemon(
            f"ipc://{tmp_path}/o.sock", during_load=lambda report: report(Progress("compiling", 3, 31, "functions"))
        )
        assert daemon.run() == 0

    start, first, second, reload, ready, third, end = told.result()
    assert start == [
        "EXTEND_TIMEOUT_USEC=600000000",
        "STATUS=compiling: 3 of 31 functions",
        "STATUS=serving",
        "READY=1",
    ]
    assert first == second == ["WATCHDOG=1"]
    begun = int(reload[-1].removeprefix("RELOADING=1\nMONOTONIC_USEC="))
    assert before < begun <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    between = {*reload[:-1], *ready[:-1], *third, *end[:-1]}
    extended = f"EXTEND_TIMEOUT_USEC={round((PATIENCE + SHUTDOWN_TIMEOUT) * 1e6)}"
    assert between == {"WATCHDOG=1", extended, "STATUS=finishing what is open"}
    assert notices.waiting() == []


@pytest.mark.parametrize("notices", ["a file"], indirect=True)
def test_the_watchdog_hears_nothing_while_nothing_gets_done(notices: Notices, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that still runs is not enough; when steps land again, it is told again."""
    monkeypatch.setenv("WATCHDOG_USEC", str(round(INTERVAL * 1e6)))
    stalled = iter([0.0, INTERVAL, 50.0, 0.0])
    failures: list[str] = []
    watchdog = Watchdog(lambda: {"control": 0.0, "summary": next(stalled)}, pytest.fail, failures.append, Ticks())

    watchdog.start()
    notices.until("WATCHDOG=1")
    notices.until("WATCHDOG=1")
    while not failures:  # the fifth question has no answer, and ends the thread
        time.sleep(INTERVAL)
    watchdog.stop()

    assert notices.waiting() == []
    assert failures == ["the watchdog thread died of StopIteration: "]


class Ticks:
    """A clock by which every look is in time, but those after which the whole process was ``frozen`` for a while."""

    def __init__(self, frozen_after: int = 0, frozen: float = 0.0) -> None:
        self._now, self._count, self._frozen_after, self._frozen = 100.0, 0, frozen_after, frozen

    def __call__(self) -> float:
        self._count += 1
        self._now += INTERVAL / 2 + (self._frozen if self._count == self._frozen_after + 1 else 0.0)
        return self._now


@pytest.mark.parametrize(
    ("busy", "hung"),
    [
        ([{"summary": 59.0}, {"summary": 60.0}], ("summary", 60.0)),
        ([{"prepare": 299.0, "summary": 59.0}, {"prepare": 300.0}], ("prepare", 300.0)),
        ([{"control": 1.0}, {"execution": 61.0, "prepare": 200.0}], ("execution", 61.0)),
    ],
)
def test_a_stage_that_hangs_is_told_once(
    monkeypatch: pytest.MonkeyPatch, busy: list[dict[str, float]], hung: tuple[str, float]
) -> None:
    """Of a minute with one thing, or of five where a long text may be all that is the matter; then nobody looks on."""
    monkeypatch.setenv("WATCHDOG_USEC", str(round(INTERVAL * 1e6)))
    told: SimpleQueue[tuple[str, float]] = SimpleQueue()
    looks = iter(busy)
    watchdog = Watchdog(lambda: next(looks), lambda *what: told.put(what), pytest.fail, Ticks())

    watchdog.start()

    assert told.get(timeout=PATIENCE) == hung
    watchdog.stop()
    assert told.empty() and next(looks, None) is None


def test_a_freeze_of_the_whole_process_is_no_stages_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was in its hands all the while counts from the thaw."""
    monkeypatch.setenv("WATCHDOG_USEC", str(round(INTERVAL * 1e6)))
    looks = iter([{"summary": 0.0}, {"summary": 1000.0}, {"summary": 1000.0 + INTERVAL}])
    failures: SimpleQueue[str] = SimpleQueue()
    watchdog = Watchdog(lambda: next(looks), pytest.fail, failures.put, Ticks(frozen_after=1, frozen=1000.0))

    watchdog.start()

    assert failures.get(timeout=PATIENCE) == "the watchdog thread died of StopIteration: "
    watchdog.stop()


@pytest.mark.parametrize(
    ("environment", "interval"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
    ],
)
def test_whether_somebody_watches(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], interval: float | None
) -> None:
    """As the environment has it, where that is about this process."""
    for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert watchdog_interval() == interval


def test_a_reload_takes_over_what_needs_no_restart() -> None:
    """The level and the form of the log; what else has changed is named, and a wrong configuration changes nothing."""
    out = io.StringIO()
    configured = [(EngineConfig(), DaemonConfig(), HttpConfig())]

    def read() -> tuple[EngineConfig, DaemonConfig, HttpConfig]:
        if not configured:
            raise ConfigurationError("unknown setting 'max_seqs'")
        return configured.pop()

    configuration = LiveConfiguration(read, Console(file=out))
    configuration.apply()

    with pytest.raises(ConfigurationError, match="unknown setting 'max_seqs'"):
        configuration.reload()
    assert configuration.engine == EngineConfig()

    configured.append((EngineConfig(page_size=32), DaemonConfig(log_level="debug"), HttpConfig()))
    assert configuration.reload() == "log_level; what has changed of page_size holds after a restart"
    assert logging.getLogger("engine.x").isEnabledFor(logging.DEBUG)
    logging.getLogger("engine").setLevel(logging.WARNING)  # as `odriver log-level` does
    configured.append((EngineConfig(), DaemonConfig(log_level="debug", drain_timeout=5), HttpConfig()))
    assert configuration.reload() == "drain_timeout"
    assert configuration.daemon.drain_timeout == 5
    assert not logging.getLogger("engine.x").isEnabledFor(logging.INFO)
    assert configuration.engine.page_size is None and configuration.daemon.log_level == "debug"


def test_a_daemon_without_progress_is_not_healthy(tmp_path: Path) -> None:
    """It says for how long; while it starts it is not either."""
    driver = FakeDriver()
    heard: list[str | None] = []
    daemon = build_daemon(f"ipc://{tmp_path}/o.sock", driver, during_load=lambda report: heard.append(daemon.health()))

    with ThreadPoolExecutor(1) as thread:

        def look() -> None:
            while daemon.health() == "starting":
                time.sleep(INTERVAL)
            heard.append(daemon.health())
            driver.seconds_since_progress = 61.0
            heard.append(daemon.health())
            send_signal()

        thread.submit(look)
        daemon.run()

    assert heard == ["starting", None, "nothing has got done in the execution stage for 61 s"]


@pytest.mark.parametrize("name", ["o.sock", "o.sock.control"])
def test_a_socket_that_somebody_removes_is_noticed(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Health says it, and the log once, also where another socket is at the path by then. Who is connected is served on."""
    monkeypatch.setenv("WATCHDOG_USEC", str(round(INTERVAL * 1e6)))
    heard: list[str | None] = []
    address, path = f"ipc://{tmp_path}/o.sock", tmp_path / name
    daemon = build_daemon(address, FakeDriver())

    def look() -> None:
        while daemon.health() == "starting":
            time.sleep(INTERVAL)
        with Client(address, PATIENCE) as client:
            client.complete("x")
            path.unlink()
            heard.append(daemon.health())
            path.touch()
            until = time.monotonic() + PATIENCE
            while "somebody has removed" not in caplog.text and time.monotonic() < until:
                time.sleep(INTERVAL)
            time.sleep(2 * INTERVAL)
            heard.extend([daemon.health(), client.complete("still").text])
        send_signal()

    with ThreadPoolExecutor(1) as thread:
        looked = thread.submit(look)
        daemon.run()
        looked.result()

    lost = f"ipc://{path}: somebody has removed the socket, and nobody new can connect: start the daemon anew"
    assert heard == [lost, lost, "still"]
    assert caplog.text.count("somebody has removed") == 1


def test_a_socket_thread_that_hangs_is_noticed(tmp_path: Path) -> None:
    """Though there is nothing to do: the thread is called, and should have come by at the next call."""
    hanging, released = threading.Event(), threading.Event()

    class HangingDriver(FakeDriver):
        def status(self) -> FakeStatus:
            hanging.set()
            released.wait(PATIENCE)
            return super().status()

    address = f"ipc://{tmp_path}/o.sock"
    with serving(address, HangingDriver()) as server, ThreadPoolExecutor(1) as thread:
        with ControlClient(address) as control:
            asked = thread.submit(control.status)
            assert hanging.wait(PATIENCE)
            server.stages()
            silences = [server.stages()["control"] for _ in range(3)]
            released.set()
            asked.result()
        while server.stages()["control"] > 0:
            time.sleep(INTERVAL)

    assert silences == sorted(silences) and silences[0] > 0
