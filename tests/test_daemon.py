"""How the daemon starts and ends, in this process and with a fake driver."""

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from daemons import DESCRIPTION, Fail, News, Report, build_daemon
from fake_driver import PATIENCE, FakeDriver, serving
from test_client import why_not

from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.exit_codes import FAULT, STOPPED
from engine.progress import Progress
from ipc.client import Client
from ipc.control_client import ControlClient
from ipc.errors import AddressInUse, ConnectFailed, DaemonStarting, RequestFailed
from ipc.service import reloads
from ipc.service.configuration import DaemonConfig
from ipc.service.daemon import LONGEST_DRAIN, SHUTDOWN_TIMEOUT
from ipc.service.http_config import HttpConfig
from ipc.wire import keys

ROOT = Path(__file__).parent.parent


def send_signal(number: int = signal.SIGTERM) -> None:
    """What `kill` would do."""
    os.kill(os.getpid(), number)


def ask_to_drain(how: int | str, address: str) -> None:
    """By a signal of that number, or over the control socket."""
    if isinstance(how, int):
        send_signal(how)
    else:
        with ControlClient(address) as control:
            assert control.drain().startswith("draining")


def until_refused(client: Client) -> str:
    """Wait until the daemon takes nothing new; the code with which it refuses."""
    with pytest.raises(RequestFailed) as refused:
        while True:
            client.complete("early enough")
    return refused.value.code


def assert_drains(address: str, news: News, ask: Callable[[], Any]) -> None:
    """A daemon that is asked to drain finishes what is open, refuses what is new, and exits in order."""
    driver = FakeDriver()

    def talk() -> str:
        news.until("READY=1")
        with Client(address) as client:
            stream = client.generate([1])
            request = driver.take()
            ask()
            code = until_refused(client)
            driver.say(request, "done", [4])
            driver.finish(request)
            assert "".join(piece.text for piece in stream) == "done"
            return code

    with ThreadPoolExecutor(1) as thread:
        refused = thread.submit(talk)
        code = build_daemon(address, driver).run()

    assert code == STOPPED == 0
    assert refused.result() == "draining"


def test_the_status_has_what_the_start_said_of_the_numbers_and_the_operations(address: str, news: News) -> None:
    """Who asks later has not the start's table; the model is called as requests call it."""

    def talk() -> dict[str, Any]:
        news.until("READY=1")
        with ControlClient(address) as control:
            status = control.status()
            control.drain()
            return status

    with ThreadPoolExecutor(1) as thread:
        status = thread.submit(talk)
        assert build_daemon(address, FakeDriver()).run() == STOPPED

    assert status.result().items() >= ({"model": "parrot"} | DESCRIPTION).items()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, "control"])
def test_a_daemon_that_drains_finishes_what_is_open(address: str, news: News, how: int | str) -> None:
    """What is new is refused meanwhile; then the exit code is 0, and the handlers are what they were."""
    handlers = [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)]

    assert_drains(address, news, lambda: ask_to_drain(how, address))

    assert news.until("STOPPING=1")[-2:] == ["STATUS=finishing what is open", "STOPPING=1"]
    assert [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)] == handlers


@pytest.mark.parametrize(("drain_timeout", "signals"), [(PATIENCE, 2), (0, 1)])
def test_what_is_not_done_in_time_is_told_why(address: str, news: News, drain_timeout: float, signals: int) -> None:
    """The time is over when the timeout is, or when a second signal comes; the exit code is 0 all the same."""
    driver = FakeDriver()

    def talk() -> RequestFailed:
        news.until("READY=1")
        with Client(address) as client, pytest.raises(RequestFailed) as failure:
            stream = client.generate([1])
            driver.take()
            send_signal()
            if signals == 2:
                until_refused(client)
                send_signal()
            next(stream)
        return failure.value

    with ThreadPoolExecutor(1) as thread:
        told = thread.submit(talk)
        code = build_daemon(address, driver, drain_timeout=drain_timeout).run()

    assert code == STOPPED
    assert (told.result().code, told.result().message) == ("stopped", "the daemon was stopped by SIGTERM")


@pytest.mark.parametrize(
    ("asked", "configured", "seconds"),
    [(math.inf, 30.0, LONGEST_DRAIN), (1e305, 30.0, LONGEST_DRAIN), (None, math.inf, LONGEST_DRAIN), (5.5, 1e305, 5.5)],
)
def test_a_drain_however_long_lets_what_is_open_finish(
    address: str, news: News, asked: float | None, configured: float, seconds: float
) -> None:
    """The exit code is 0, as it is an operator's will, and systemd is told of a number of microseconds."""
    driver = FakeDriver()

    def talk() -> list[str]:
        news.until("READY=1")
        with Client(address) as client, ControlClient(address) as control:
            stream = client.generate([1])
            request = driver.take()
            with pytest.raises(RequestFailed, match="timeout_s"):
                control.drain(math.nan)
            control.drain(asked)
            heard = news.until("STATUS=finishing what is open")
            driver.say(request, "done", [4])
            driver.finish(request)
            assert "".join(piece.text for piece in stream) == "done"
            return heard

    with ThreadPoolExecutor(1) as thread:
        heard = thread.submit(talk)
        code = build_daemon(address, driver, drain_timeout=configured).run()

    assert code == STOPPED
    assert f"EXTEND_TIMEOUT_USEC={round((seconds + SHUTDOWN_TIMEOUT) * 1e6)}" in heard.result()


def test_requests_are_not_told_of_a_start_when_it_is_over(
    address: str, news: News, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should the main thread fail, whose fault it is; the exit is one that asks for a restart."""
    driver = FakeDriver()
    daemon = build_daemon(address, driver)
    monkeypatch.setattr(reloads, "notify_reloading", lambda: 1 / 0)

    def talk() -> str:
        news.until("READY=1")
        with Client(address) as client, pytest.raises(RequestFailed) as failure:
            stream = client.generate([1])
            driver.take()
            send_signal(signal.SIGHUP)
            next(stream)
        return failure.value.message

    with ThreadPoolExecutor(1) as thread:
        told = thread.submit(talk)
        with pytest.raises(ZeroDivisionError):
            daemon.run()

    assert told.result() == "the daemon failed"


def test_a_reload_reads_the_keys_again(address: str, news: News, tmp_path: Path) -> None:
    """A key made while the daemon runs gets in after SIGHUP, and not before."""
    directory, key = tmp_path / "keys", tmp_path / "late.key"

    def talk() -> str:
        news.until("READY=1")
        keys.new(directory, "late", key)
        with pytest.raises(ConnectFailed, match="does not know this key"):
            Client(address, key=key)
        send_signal(signal.SIGHUP)
        news.until("READY=1")
        with Client(address, key=key) as client:
            text = client.complete("let in").text
        send_signal()
        return text

    with ThreadPoolExecutor(1) as thread:
        text = thread.submit(talk)
        settings = DaemonConfig(bind=address, keys=directory)
        assert build_daemon(address, read=lambda: (EngineConfig(), settings, HttpConfig())).run() == STOPPED

    assert text.result() == "letin"


def test_an_operator_has_a_daemon_reload_without_a_signal(address: str, news: News, tmp_path: Path) -> None:
    """Who asks is told what was taken over, what has to wait, and what is wrong; keys are read beside wrong settings."""
    directory, key = tmp_path / "keys", tmp_path / "operator.key"
    keys.new(directory, "operator", key, control=True)
    settings = DaemonConfig(bind=address, keys=directory)
    read: list[tuple[EngineConfig, DaemonConfig, HttpConfig] | ConfigurationError] = [
        ConfigurationError("unknown setting 'max_seqs'"),
        (
            EngineConfig(page_size=32),
            DaemonConfig(bind=address, keys=directory, drain_timeout=7),
            HttpConfig(api_key="x"),
        ),
        (EngineConfig(), settings, HttpConfig()),
    ]

    def configuration() -> tuple[EngineConfig, DaemonConfig, HttpConfig]:
        found = read.pop()
        if isinstance(found, ConfigurationError):
            raise found
        return found

    def talk() -> tuple[str, str]:
        news.until("READY=1")
        with ControlClient(address, key=key) as control:
            said = control.reload()
            keys.new(directory, "alice", tmp_path / "alice.key")
            with pytest.raises(RequestFailed) as refused:
                control.reload()
        with Client(address, key=tmp_path / "alice.key") as client:
            assert client.complete("let in").text == "letin"
        send_signal()
        return said, refused.value.message

    with ThreadPoolExecutor(1) as thread:
        told = thread.submit(talk)
        assert build_daemon(address, read=configuration).run() == STOPPED

    assert told.result() == (
        "reloaded: drain_timeout; what has changed of page_size, api_key holds after a restart; 1 keys may connect",
        "not reloaded: unknown setting 'max_seqs'; reloaded: 2 keys may connect",
    )


def test_who_comes_while_a_daemon_starts_hears_how_far_it_is(address: str) -> None:
    """A client that waits too short a time, and a command, which does not wait at all; one that waits is answered."""
    said: list[str] = []

    def wait() -> dict[str, Any]:
        with ControlClient(address, PATIENCE) as control:
            status = control.status()
        send_signal()
        return status

    def come(report: Report) -> None:
        report(Progress("compiling", 9, 19, "functions"))
        with pytest.raises(DaemonStarting) as starting:
            ControlClient(address, wait=False)
        said.extend([str(starting.value), str(why_not(address, "is starting"))])
        waiting.append(thread.submit(wait))

    waiting: list[Future[dict[str, Any]]] = []
    with ThreadPoolExecutor(1) as thread:
        build_daemon(address, during_load=come).run()

    assert waiting[0].result()["state"] == "serving"
    assert [words.partition(" is starting: ")[2] for words in said] == ["compiling: 9 of 19 functions"] * 2


def test_systemd_hears_of_every_step_of_the_start(address: str, news: News) -> None:
    """READY comes last, when clients are being answered."""

    def load_slowly(report: Report) -> None:
        report(Progress("loading weights", 500_000, 8_000_000, "bytes"))
        report(Progress("compiling", 3, 31, "functions"))

    def talk() -> list[str]:
        heard = news.until("READY=1")
        with Client(address) as client:
            assert client.complete("x").text == "x"
        send_signal()
        return heard

    with ThreadPoolExecutor(1) as thread:
        heard = thread.submit(talk)
        build_daemon(address, during_load=load_slowly).run()

    assert heard.result() == [
        "EXTEND_TIMEOUT_USEC=600000000",
        "STATUS=loading weights: 500.0 kB of 8.0 MB",
        "EXTEND_TIMEOUT_USEC=600000000",
        "STATUS=compiling: 3 of 31 functions",
        "STATUS=serving",
        "READY=1",
    ]


def test_a_client_that_comes_while_the_model_loads_waits(address: str) -> None:
    """It is answered when the daemon is ready."""
    with ThreadPoolExecutor(1) as thread:

        def talk() -> str:
            with Client(address, timeout=PATIENCE) as client:
                text = client.complete("patience").text
            send_signal()
            return text

        text = []
        build_daemon(address, during_load=lambda report: text.append(thread.submit(talk))).run()

        assert text[0].result() == "patience"


def test_a_signal_while_the_model_loads_ends_the_start(address: str, news: News) -> None:
    """Exit code 0, no READY, and the address is free again."""
    assert build_daemon(address, during_load=lambda report: send_signal()).run() == STOPPED

    assert news.until("STOPPING=1") == ["STOPPING=1"]
    with serving(address, FakeDriver()):
        pass


def test_a_daemon_that_cannot_load_gives_its_address_back(address: str, news: News) -> None:
    """The error goes to whoever runs it, and READY is never said."""

    def find_no_model(report: Report) -> None:
        del report
        raise ConfigurationError("no model here")

    with pytest.raises(ConfigurationError, match="no model here"):
        build_daemon(address, during_load=find_no_model).run()

    assert news.until("STOPPING=1") == ["STOPPING=1"]
    with serving(address, FakeDriver()):
        pass


def test_an_address_in_use_is_found_before_anything_is_loaded(address: str) -> None:
    """A second daemon does not take minutes to find out."""
    loads: list[Report] = []

    with serving(address, FakeDriver()), pytest.raises(AddressInUse, match="in use"):
        build_daemon(address, during_load=loads.append).run()

    assert loads == []


def test_a_driver_that_fails_ends_the_daemon_with_a_fault(address: str, news: News) -> None:
    """systemd may start another."""
    failures: list[Fail] = []

    def fail() -> None:
        news.until("READY=1")
        failures[0]("the execution loop thread died")

    with ThreadPoolExecutor(1) as thread:
        thread.submit(fail)

        assert build_daemon(address, failures=failures).run() == FAULT == 1


def run_stuck(news: News, address: str, shutdown_timeout: float, again: bool) -> tuple[int, str]:
    """A daemon whose driver does not stop, told to; exit code and stderr."""
    code = f"""
import sys, threading
sys.path.insert(0, "tests")
from fake_driver import FakeDriver
from ipc.service import daemon
from daemons import build_daemon
class StuckDriver(FakeDriver):
    def stop(self, why, timeout):
        while True:
            threading.Event().wait(0.1)
daemon.SHUTDOWN_TIMEOUT = {shutdown_timeout}
build_daemon(sys.argv[1], StuckDriver()).run()
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, address]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        news.until("READY=1")
        process.terminate()
        if again:
            news.until("STOPPING=1")
            process.terminate()
        stderr = process.communicate(timeout=PATIENCE)[1]
    return process.returncode, stderr


def test_a_second_signal_ends_the_daemon_on_the_spot(address: str, news: News) -> None:
    """Whatever it is waiting for."""
    assert run_stuck(news, address, shutdown_timeout=PATIENCE, again=True)[0] == 128 + signal.SIGTERM


def test_a_shutdown_that_hangs_is_ended_and_shows_where(address: str, news: News) -> None:
    """The exit code says that something was wrong, the log what."""
    code, stderr = run_stuck(news, address, shutdown_timeout=0.2, again=False)

    assert code == FAULT
    assert "in shutdown" in stderr


HANGING = """
import sys, threading
sys.path.insert(0, "tests")
from fakes import FakeEngine, FakeTokenizer
from driver.odriver import oDriver
from ipc.service import daemon
from ipc.service.monitoring import watchdog
from daemons import build_daemon
limit = watchdog.PROGRESS_LIMIT = float(sys.argv[2])
watchdog.Watchdog._limit = lambda self, stage: limit if stage == "prepare" else 3600.0
daemon.DRIVER_TIMEOUT, daemon.SHUTDOWN_TIMEOUT = 0.1, 3600.0
class HangingTokenizer(FakeTokenizer):
    def encode(self, text):
        if text == "hang":
            print("hangs", flush=True)
            threading.Event().wait()
        return super().encode(text)
sys.exit(build_daemon(sys.argv[1], oDriver(FakeEngine(max_model_len=10**9), HangingTokenizer())).run())
"""


@contextmanager
def hanging(address: str, news: News, limit: float) -> Iterator[subprocess.Popen[str]]:
    """A daemon that hangs at a word, and notices after so many seconds."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HANGING, address, str(limit)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:
        news.until("READY=1")
        yield process


def test_a_stage_that_hangs_ends_the_daemon(address: str, news: News) -> None:
    """With tracebacks of all threads, an exit code that asks for a restart, and a word to every open request."""
    with hanging(address, news, 1.0) as process, Client(address) as client:
        running, stuck = client.generate("abc"), client.generate("hang")
        next(running)
        for stream in (running, stuck):
            with pytest.raises(RequestFailed, match="nothing has got done in the prepare stage") as failed:
                list(stream)
            assert failed.value.code == "internal"
        stderr = process.communicate(timeout=PATIENCE)[1]

    assert process.returncode == FAULT
    assert "in encode" in stderr and "requests in the hands of a stage: [" in stderr


def test_a_daemon_with_a_stage_that_hangs_can_be_told_to_stop(address: str, news: News) -> None:
    """Before anybody knows that it hangs: it drains, at a second signal ends, tells who is open, and exits in order."""
    with hanging(address, news, 3600.0) as process, Client(address) as client:
        stuck = client.generate("hang")
        assert process.stdout is not None and process.stdout.readline() == "hangs\n"
        process.terminate()
        news.until("STATUS=finishing what is open")
        process.terminate()
        with pytest.raises(RequestFailed) as failed:
            list(stuck)
        process.communicate(timeout=PATIENCE)

    assert (failed.value.code, process.returncode) == ("stopped", STOPPED)


def test_a_daemon_that_is_stalled_does_not_drain(address: str, news: News) -> None:
    """What hangs would not finish."""
    driver = FakeDriver()

    def stall() -> None:
        news.until("READY=1")
        with Client(address) as client:
            stream = client.generate("hold")
            driver.take()
            driver.seconds_since_progress = 61.0
            send_signal()
            with pytest.raises(RequestFailed) as told:
                list(stream)
            assert told.value.code == "stopped"

    with ThreadPoolExecutor(1) as thread:
        stalled = thread.submit(stall)
        assert build_daemon(address, driver, drain_timeout=3600).run() == STOPPED
        stalled.result()


def test_a_busy_tpu_is_named_with_who_has_it(tmp_path: Path, address: str) -> None:
    """Instead of a traceback; the exit code lets systemd try again, as whoever has it may end."""
    device = tmp_path / "accel0"
    device.touch()
    code = """
import sys
from functools import partial
from pathlib import Path
import jax
from ipc.service import accelerators, serve
def devices():
    raise RuntimeError("Unable to initialize backend 'tpu': ABORTED: in use. (set JAX_PLATFORMS='' to choose another)")
jax.devices = devices
accelerators.devices = lambda: [Path(sys.argv[2])]
accelerators.refusal = partial(accelerators.refusal, lock=Path(sys.argv[2] + ".lock"))
serve.serve({"bind": sys.argv[1]})
"""
    command = [sys.executable, "-c", code, address, str(device)]

    with device.open():
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)

    assert ended.returncode == FAULT
    said = " ".join(ended.stderr.split())
    assert f"the TPU is in use by process {os.getpid()} of " in said and f"kill {os.getpid()}" in said
    assert "Traceback" not in said
