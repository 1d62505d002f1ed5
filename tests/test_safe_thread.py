"""A thread's death is never silent."""

import logging
import queue
import threading

import pytest
from fake_driver import PATIENCE

from driver.stages.safe_thread import SafeThread


def test_a_death_is_logged_kept_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """What the target raises is in the log with its traceback, in ``error``, and told to ``on_death`` by name."""
    deaths: queue.SimpleQueue[tuple[str, BaseException]] = queue.SimpleQueue()
    fault = RuntimeError("the device is on fire")

    def target() -> None:
        raise fault

    thread = SafeThread("stage", target, on_death=lambda name, error: deaths.put((name, error)))
    thread.start()

    assert deaths.get(timeout=PATIENCE) == ("stage", fault)
    assert thread.join(timeout=PATIENCE)
    assert thread.error is fault
    assert "the device is on fire" in caplog.text and caplog.records[-1].levelno == logging.ERROR


def test_even_an_exit_is_a_death(caplog: pytest.LogCaptureFixture) -> None:
    """SystemExit, which ends an ordinary thread without a word, is told as well."""
    deaths: list[BaseException] = []

    def target() -> None:
        raise SystemExit(1)

    thread = SafeThread("stage", target, on_death=lambda _, error: deaths.append(error))
    thread.start()

    assert thread.join(timeout=PATIENCE)
    assert isinstance(deaths[0], SystemExit) and "stage died" in caplog.text


def test_an_orderly_end_is_no_death() -> None:
    """A target that returns leaves no error and calls nobody."""
    deaths: list[BaseException] = []
    thread = SafeThread("stage", lambda: None, on_death=lambda _, error: deaths.append(error))

    thread.start()

    assert thread.join(timeout=PATIENCE)
    assert thread.error is None and deaths == []


def test_join_says_whether_the_thread_has_ended() -> None:
    """Join gives up after its timeout and says so; before the start there is nothing to wait for."""
    gate = threading.Event()

    def target() -> None:
        gate.wait()

    thread = SafeThread("stage", target, on_death=lambda *_: None)

    assert thread.join(timeout=0)
    thread.start()
    assert not thread.join(timeout=0)
    gate.set()
    assert thread.join(timeout=PATIENCE)


def test_a_thread_that_joins_itself_goes_on() -> None:
    """Join on the thread itself returns at once instead of waiting for its own end."""
    joined: list[bool] = []
    thread = SafeThread("stage", lambda: joined.append(thread.join()), on_death=lambda *_: None)

    thread.start()

    assert thread.join(timeout=PATIENCE)
    assert joined == [True]
