"""One stage of the driver: an item's fault is its own end, a fault of the stage is everybody's."""

import logging
import queue
import threading
from contextlib import suppress

import pytest
from fake_driver import PATIENCE

from driver.errors import InternalError
from driver.stages.queues import BoundedQueue, QueueClosed
from driver.stages.stage import MAX_FAILURES, MIN_CLIENTS, Stage

Item = tuple[str, str]


class Recorder:
    """A stage whose items are (client, request id): those whose id begins with ``bad`` raise."""

    def __init__(self):
        self.done: list[str] = []
        self.failed: list[tuple[str, str]] = []
        self.now = 100.0
        self.stage: Stage[Item] = Stage("test", self.handle, self.fail, lambda item: item, lambda: self.now)

    def handle(self, item: Item) -> None:
        self.now += 5
        assert not item[1].startswith("bad"), f"cannot do {item[1]}"
        self.done.append(item[1])

    def fail(self, item: Item, error: InternalError) -> None:
        self.failed.append((item[1], str(error)))


def run(stage: Stage[Item], *items: Item) -> None:
    """Has the stage work on these."""
    with suppress(QueueClosed):
        for item in items:
            stage.work(item)


def test_an_items_exception_is_its_own_end(caplog):
    """It is failed with "internal", the traceback is logged with its id, and those before and after it are done."""
    recorder = Recorder()

    with caplog.at_level(logging.ERROR):
        run(recorder.stage, ("a", "one"), ("a", "bad"), ("b", "two"))

    assert recorder.done == ["one", "two"]
    [(request_id, why)] = recorder.failed
    assert request_id == "bad"
    assert "cannot do" not in why
    [record] = caplog.records
    assert record.request_id == "bad"
    assert "cannot do bad" in caplog.text


def test_what_cannot_even_be_failed_is_logged(caplog):
    """An exception while the client is told ends nothing else either."""
    recorder = Recorder()
    stage = Stage("test", recorder.handle, lambda item, error: 1 / 0, lambda item: item)

    run(stage, ("a", "bad"), ("a", "one"))

    assert recorder.done == ["one"]
    assert "ZeroDivisionError" in caplog.text


def test_one_client_cannot_break_the_stage():
    """However often one client's items fail, or two clients', the stage goes on."""
    recorder = Recorder()
    bad = [(f"client {i % (MIN_CLIENTS - 1)}", "bad") for i in range(10 * MAX_FAILURES)]

    run(recorder.stage, *bad, ("a", "one"))

    assert recorder.done == ["one"]


def test_failures_of_several_clients_in_a_row_are_the_stages_own():
    """The last of so many goes through, after its own client was told."""
    recorder = Recorder()
    bad = [(f"client {i % MIN_CLIENTS}", "bad") for i in range(2 * MAX_FAILURES)]

    with pytest.raises(AssertionError):
        run(recorder.stage, *bad)

    assert len(recorder.failed) == MAX_FAILURES


def test_a_success_between_forgives_the_failures():
    """Then the stage can do its work, and it was the items."""
    recorder = Recorder()
    bad = [(f"client {i % MIN_CLIENTS}", "bad") for i in range(MAX_FAILURES - 1)]

    run(recorder.stage, *bad, ("a", "one"), *bad, ("a", "two"))

    assert recorder.done == ["one", "two"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_is_no_exception_passes(error):
    """Nobody's request raised it."""

    def handle(_: Item) -> None:
        raise error

    recorder = Recorder()
    stage = Stage("test", handle, recorder.fail, lambda item: item)

    with pytest.raises(error):
        stage.work(("a", "one"))

    assert not recorder.failed


def test_a_closed_queue_ends_the_loop_from_within_too():
    """An item whose result has nowhere to go any more is the end of the driver, and no fault of the item."""

    def handle(_: Item) -> None:
        raise QueueClosed

    recorder = Recorder()
    stage = Stage("test", handle, recorder.fail, lambda item: item)

    run(stage, ("a", "one"), ("a", "two"))

    assert not recorder.failed


def test_any_thread_sees_for_how_long_it_is_busy():
    """With the oldest item that is in a thread's hands; 0 while all of its threads wait."""
    items: BoundedQueue[Item] = BoundedQueue(8)
    begun: queue.SimpleQueue[Item] = queue.SimpleQueue()
    release = {"one": threading.Event(), "two": threading.Event()}
    now = 100.0

    def handle(item: Item) -> None:
        begun.put(item)
        release[item[1]].wait(PATIENCE)

    def work() -> None:
        with suppress(QueueClosed):
            while True:
                stage.work(items.get())

    stage = Stage("test", handle, Recorder().fail, lambda item: item, lambda: now)
    threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert stage.seconds_busy == 0

    items.put(("a", "one"))
    begun.get(timeout=PATIENCE)
    now = 107.0
    items.put(("a", "two"))
    begun.get(timeout=PATIENCE)
    now = 110.0
    assert stage.seconds_busy == 10
    assert stage.stuck(5) == ["one"]
    assert sorted(stage.stuck(1)) == ["one", "two"]

    for event in release.values():
        event.set()
    items.close()
    for thread in threads:
        thread.join(PATIENCE)
    assert stage.seconds_busy == 0
