"""A bounded queue gives back pressure, and its closing wakes everybody."""

import queue
import threading
from collections.abc import Callable

import pytest
from fake_driver import PATIENCE

from driver.stages.queues import BoundedQueue, QueueClosed


def in_thread(call: Callable[[], object]) -> "queue.SimpleQueue[object]":
    """Calls on another thread; the queue returned gets the result, or the exception."""
    outcome: queue.SimpleQueue[object] = queue.SimpleQueue()

    def target() -> None:
        try:
            outcome.put(call())
        except QueueClosed as closed:
            outcome.put(closed)

    threading.Thread(target=target, daemon=True).start()
    return outcome


def test_items_come_out_in_order() -> None:
    """First in, first out."""
    items: BoundedQueue[int] = BoundedQueue(3)

    for item in (1, 2, 3):
        items.put(item)

    assert [items.get() for _ in range(3)] == [1, 2, 3]


def test_a_put_waits_for_room() -> None:
    """A put into a full queue ends when somebody takes an item."""
    items: BoundedQueue[int] = BoundedQueue(1)
    items.put(1)

    outcome = in_thread(lambda: items.put(2))

    assert [items.get(), items.get()] == [1, 2]
    assert outcome.get(timeout=PATIENCE) is None


def test_a_get_waits_for_an_item() -> None:
    """A get from an empty queue ends when somebody puts an item."""
    items: BoundedQueue[int] = BoundedQueue(1)

    outcome = in_thread(items.get)
    items.put(1)

    assert outcome.get(timeout=PATIENCE) == 1


@pytest.mark.parametrize("full", [False, True], ids=["get", "put"])
def test_closing_ends_every_wait(full: bool) -> None:
    """Whoever waits when the queue is closed hears QueueClosed."""
    items: BoundedQueue[int] = BoundedQueue(1)
    if full:
        items.put(1)
    outcomes = [in_thread((lambda: items.put(2)) if full else items.get) for _ in range(3)]

    items.close()

    assert all(isinstance(outcome.get(timeout=PATIENCE), QueueClosed) for outcome in outcomes)


def test_a_closed_queue_takes_and_gives_nothing() -> None:
    """After close, what was queued is gone and both ends raise; closing again changes nothing."""
    items: BoundedQueue[int] = BoundedQueue(1)
    items.put(1)

    items.close()
    items.close()

    for call in (items.get, lambda: items.put(2)):
        with pytest.raises(QueueClosed):
            call()
    assert len(items) == 0
