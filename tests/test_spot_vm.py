"""A VM that is preempted, or stopped for maintenance: the daemon drains in the time that is left, and streams go on elsewhere."""

import math
import multiprocessing
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest
from daemons import News, build_daemon
from fake_driver import PATIENCE, FakeDriver
from fake_metadata import FakeMetadata, metadata_server
from rich.console import Console
from test_daemon import assert_drains, send_signal
from test_structured_outputs import write_model

from driver.odriver import oDriver
from driver.text.tokenizer import HuggingFaceTokenizer
from engine.build import build_engine
from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.exit_codes import STOPPED
from engine.hosts.processes import Leader, Member
from engine.oengine import oEngine
from engine.step.commands import AskToStop, Leave, Left
from ipc.client import Client
from ipc.errors import RequestFailed
from ipc.service import vm_notices
from ipc.service.configuration import DaemonConfig, LiveConfiguration
from ipc.service.daemon import SHUTDOWN_TIMEOUT, Daemon
from ipc.service.http_config import HttpConfig
from ipc.service.start_up import Loaded, _left_by
from ipc.service.vm_notices import VMNotices

TERMINATE = "TERMINATE_ON_HOST_MAINTENANCE"


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMetadata]:
    """This machine's metadata server."""
    with metadata_server() as fake:
        monkeypatch.delenv("NO_GCE_CHECK", raising=False)
        monkeypatch.setenv("GCE_METADATA_HOST", fake.host)
        monkeypatch.setattr(vm_notices, "PACE", 0.01)
        yield fake


@pytest.fixture
def heard(metadata: FakeMetadata) -> "Iterator[SimpleQueue[tuple[str, float]]]":
    """What a watch of it hears."""
    heard: SimpleQueue[tuple[str, float]] = SimpleQueue()
    notices = VMNotices(lambda *notice: heard.put(notice), metadata.host)
    notices.start()
    yield heard
    notices.stop()


@pytest.mark.parametrize(
    ("key", "value", "why", "seconds"),
    [
        ("preempted", "TRUE", "this Spot VM is preempted", 30),
        ("maintenance-event", TERMINATE, "this VM is stopped for maintenance of its host", 60),
        ("upcoming-maintenance", '{"maintenanceStatus": "ONGOING"}', "maintenance of this VM's host has begun", 60),
    ],
)
def test_the_end_of_a_vm_is_heard_when_it_is_announced(
    metadata: FakeMetadata, heard: Any, monkeypatch: pytest.MonkeyPatch, key: str, value: str, why: str, seconds: float
) -> None:
    """With the reason and the time that is left."""
    monkeypatch.setattr(vm_notices, "RETRY_INTERVAL", 0.01)
    metadata.until_asked(3)

    metadata.set(key, value)

    assert heard.get(timeout=PATIENCE) == (why, seconds)
    assert heard.empty()


def test_what_does_not_end_a_vm_is_not_heard(
    metadata: FakeMetadata, heard: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A live migration; planned maintenance is logged, with its window."""
    caplog.set_level("WARNING")
    metadata.set("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE")
    metadata.set("upcoming-maintenance", '{"maintenanceStatus": "PENDING", "windowStartTime": "2026-12-01T04:00:00Z"}')
    metadata.set("preempted", "TRUE")

    assert heard.get(timeout=PATIENCE)[0] == "this Spot VM is preempted"
    assert heard.empty()


def test_planned_maintenance_is_logged_with_its_window(
    metadata: FakeMetadata, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, days ahead; the daemon serves until then."""
    metadata.values["upcoming-maintenance"] = '{"maintenanceStatus": "PENDING", "windowStartTime": "2026-12-01"}'
    notices = VMNotices(lambda *notice: pytest.fail(str(notice)), metadata.host)

    notices.start()
    metadata.until_asked(2, "upcoming-maintenance")
    notices.stop()

    assert caplog.text.count('is planned: {"maintenanceStatus": "PENDING", "windowStartTime": "2026-12-01"}') == 1


@pytest.mark.parametrize("fault", ["status", "flavor"])
def test_a_server_that_fails_is_asked_again(
    metadata: FakeMetadata, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """As it does during a migration; each key is warned of once. So is one that is none of Google's."""
    monkeypatch.setattr(vm_notices, "RETRY_INTERVAL", 0.01)
    if fault == "status":
        metadata.broken = 503
    else:
        metadata.flavor = "Hotel"
    heard: SimpleQueue[tuple[str, float]] = SimpleQueue()
    notices = VMNotices(lambda *notice: heard.put(notice), metadata.host)

    notices.start()
    metadata.until_asked(4, "preempted")
    metadata.flavor = "Google"
    metadata.heal()
    metadata.set("preempted", "TRUE")

    assert heard.get(timeout=PATIENCE)[1] == 30
    notices.stop()
    assert caplog.text.count("does not say preempted") == 1


def test_only_a_vm_of_google_has_a_metadata_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which its firmware says, or a variable; no name is looked up and nothing is connected to."""
    for variable in ("GCE_METADATA_HOST", "GCE_METADATA_IP", "NO_GCE_CHECK"):
        monkeypatch.delenv(variable, raising=False)
    google, other = tmp_path / "google", tmp_path / "other"
    google.write_text("Google Compute Engine\n")
    other.write_text("Standard PC\n")

    assert vm_notices.metadata_server(google) == "169.254.169.254"
    assert vm_notices.metadata_server(other) is vm_notices.metadata_server(tmp_path / "none") is None
    monkeypatch.setenv("GCE_METADATA_HOST", "here:80")
    assert vm_notices.metadata_server(other) == "here:80"
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    assert vm_notices.metadata_server(google) is None


def test_without_a_metadata_server_nothing_is_watched() -> None:
    """No thread, no request."""
    before = set(threading.enumerate())

    VMNotices(lambda *notice: pytest.fail(str(notice)), None).start()

    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(("key", "value"), [("preempted", "TRUE"), ("maintenance-event", TERMINATE)])
def test_a_daemon_whose_vm_ends_finishes_what_is_open(
    address: str, news: News, metadata: FakeMetadata, monkeypatch: pytest.MonkeyPatch, key: str, value: str
) -> None:
    """What is new is refused meanwhile; the exit is in order."""
    for seconds in ("PREEMPTION_SECONDS", "MAINTENANCE_SECONDS"):
        monkeypatch.setattr(vm_notices, seconds, 2 * SHUTDOWN_TIMEOUT)

    def end_vm() -> None:
        metadata.set(key, value)
        news.until("STATUS=finishing what is open")

    assert_drains(address, news, end_vm)


def test_what_is_not_done_when_the_vm_ends_can_be_resumed(
    address: str, news: News, metadata: FakeMetadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the operator would wait longer: its error is one that clients resume after."""
    monkeypatch.setattr(vm_notices, "PREEMPTION_SECONDS", SHUTDOWN_TIMEOUT + 0.01)
    driver = FakeDriver()

    def talk() -> RequestFailed:
        news.until("READY=1")
        with Client(address) as client, pytest.raises(RequestFailed) as failure:
            stream = client.generate([1])
            driver.take()
            metadata.set("preempted", "TRUE")
            next(stream)
        return failure.value

    with ThreadPoolExecutor(1) as thread:
        told = thread.submit(talk)
        assert build_daemon(address, driver, drain_timeout=PATIENCE).run() == STOPPED

    assert (told.result().code, told.result().message) == ("stopped", "this Spot VM is preempted")


def test_a_vm_that_ends_during_the_start_is_not_started_on(address: str, metadata: FakeMetadata) -> None:
    """A service that systemd starts again on a preempted VM ends at once."""
    metadata.set("preempted", "TRUE")
    never = threading.Event()

    assert build_daemon(address, during_load=lambda report: never.wait(PATIENCE) and None).run() == STOPPED


class CutDriver(oDriver):
    """Whose engine gets no further than ``steps`` until the daemon ends; ``reached`` is called there."""

    def __init__(self, engine: oEngine, tokenizer: HuggingFaceTokenizer, steps: int, reached: Any) -> None:
        super().__init__(engine, tokenizer)
        self._ending = threading.Event()
        step, left = engine.step, iter(range(steps, -1, -1))

        def cut() -> Any:
            if next(left, -1) == 0:
                reached()
                assert self._ending.wait(PATIENCE)
            return step()

        engine.step = cut  # type: ignore[method-assign]

    def stop(self, reason: str, timeout: float = 10.0) -> None:
        self._ending.set()
        super().stop(reason, timeout)


@pytest.mark.thorough
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 5}])
def test_a_stream_goes_on_on_the_next_vm(
    tmp_path: Path, address: str, news: News, metadata: FakeMetadata, monkeypatch: pytest.MonkeyPatch, sampling: Any
) -> None:
    """With the same text as on one that nobody took away: another daemon with the same model, at the same address."""
    monkeypatch.setattr(vm_notices, "PREEMPTION_SECONDS", SHUTDOWN_TIMEOUT)
    model = write_model(tmp_path / "model")
    config = EngineConfig(model=model, max_num_seqs=2, max_num_batched_tokens=2, num_pages=60, staged_readiness=True)
    tokenizer = HuggingFaceTokenizer(model)
    asked = {"max_tokens": 60, "ignore_eos": True, **sampling}

    engines = [build_engine(config, lambda progress: None) for _ in range(2)]

    def vm(engine: oEngine, steps: int) -> int:
        driver = CutDriver(engine, tokenizer, steps, lambda: metadata.set("preempted", "TRUE"))
        read = EngineConfig(), DaemonConfig(bind=address), HttpConfig()
        configuration = LiveConfiguration(lambda: read, Console(stderr=True))
        return Daemon(configuration, Console(stderr=True), lambda *_: Loaded(driver, "m", engine.limits, {})).run()

    def talk() -> tuple[str, str]:
        news.until("READY=1")
        monkeypatch.delenv("NOTIFY_SOCKET")
        try:
            with Client(address, timeout=PATIENCE, resume=True, resume_timeout=PATIENCE) as client:
                text = "".join(piece.text for piece in client.generate("the fox", **asked))
                return text, client.complete("the fox", **asked).text
        finally:
            send_signal()

    with ThreadPoolExecutor(1) as thread:
        texts = thread.submit(talk)
        assert vm(engines[0], steps=20) == STOPPED
        metadata.set("preempted", "FALSE")
        assert vm(engines[1], steps=10_000) == STOPPED

    text, undisturbed = texts.result()
    assert text == undisturbed and text


def test_another_host_s_notice_reaches_process_0_with_the_seconds_that_are_left() -> None:
    """Whose daemon then drains in that time."""
    asked: SimpleQueue[tuple[str, float]] = SimpleQueue()
    ours, theirs = multiprocessing.Pipe()
    leader = Leader({1: ours}, {}, lambda code, why: None, lambda *stop: asked.put(stop))

    Member(theirs, theirs).say(AskToStop("this Spot VM is preempted", 30.0))
    Member(theirs, theirs).say(AskToStop("it was stopped by SIGTERM"))

    assert asked.get(timeout=PATIENCE) == ("process 1: this Spot VM is preempted", 30.0)
    assert asked.get(timeout=PATIENCE) == ("process 1: it was stopped by SIGTERM", math.inf)
    leader.leave(0, "the test is over")
    theirs.close()


def test_whoever_cannot_start_ends_all_others_as_it_ends() -> None:
    """Process 0, which is stopped by that in its start, passes on the exit code and the reason to the third."""
    lost: SimpleQueue[tuple[int, str]] = SimpleQueue()
    pipes = [multiprocessing.Pipe() for _ in range(2)]
    others = [Member(theirs, theirs) for _, theirs in pipes]
    leader = Leader(
        {number: ours for number, (ours, _) in enumerate(pipes, start=1)},
        {},
        lambda *end: lost.put(end),
        lambda why, seconds: None,
    )

    others[0].say(Left(78, "it has no such file"))
    assert lost.get(timeout=PATIENCE) == (78, "process 1 has gone: it has no such file")
    with pytest.raises(KeyboardInterrupt), _left_by(leader):
        raise KeyboardInterrupt

    assert others[1].listen() == Leave(78, "process 1 has gone: it has no such file")
    for _, theirs in pipes:
        theirs.close()


@pytest.mark.parametrize(
    ("failure", "code", "why"),
    [
        (ConfigurationError("no such adapter"), 78, "no such adapter"),
        (RuntimeError("broken"), 1, "process 0 could not start: broken"),
        (KeyboardInterrupt(), 0, "process 0 was stopped while it started"),
    ],
)
def test_who_waits_for_a_start_that_fails_hears_why(failure: BaseException, code: int, why: str) -> None:
    """With the exit code that systemd is to see on all hosts."""
    told: list[tuple[int, str]] = []
    leader = cast("Leader", SimpleNamespace(leave=lambda *words: told.append(words)))

    with pytest.raises(type(failure)), _left_by(leader):
        raise failure

    assert told == [(code, why)]
