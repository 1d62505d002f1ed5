"""A queue in which clients take turns."""

import queue
import threading

import pytest

from driver.bounded_queue import QueueClosed
from driver.turn_queue import TurnQueue


def build_queue(*queued: str, capacity: int = 8) -> TurnQueue[str]:
    """A queue with these items, of which the first letter is the client; each weighs ten."""
    items: TurnQueue[str] = TurnQueue(capacity)
    for item in queued:
        items.put_nowait(item[0], item)
    return items


def worked_off(items: TurnQueue[str]) -> list[str]:
    """What one thread gets that is done with each at once."""
    order = []
    while len(items):
        client, item = items.get()
        order.append(item)
        items.done(client)
    return order


def test_clients_take_turns() -> None:
    """Whatever one of them has queued, another waits for one of its items at most; each has its own in order."""
    assert worked_off(build_queue("a1", "a2", "a3", "b1", "b2", "c1")) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_client_has_one_item_worked_on_at_a_time() -> None:
    """Its next waits until that is done, though threads are free; then it comes after those who wait already."""
    items = build_queue("a1", "a2", "b1", "c1")

    taken = [items.get(), items.get()]
    items.done("a")
    taken += [items.get(), items.get()]

    assert taken == [("a", "a1"), ("b", "b1"), ("c", "c1"), ("a", "a2")]
    items.put_nowait("a", "a3")
    outcome: queue.SimpleQueue[object] = queue.SimpleQueue()
    threading.Thread(target=lambda: outcome.put(items.get()), daemon=True).start()
    assert outcome.empty()
    items.done("a")
    assert outcome.get(timeout=30) == ("a", "a3")


def test_a_full_queue_refuses_at_once() -> None:
    """However many clients share it."""
    items = build_queue("a1", "b1", capacity=2)

    with pytest.raises(queue.Full):
        items.put_nowait("c", "c1")

    assert len(items) == 2


def test_what_nobody_has_got_can_be_removed() -> None:
    """Of a client that waits and of one that is being served; once only, and never what is in a thread's hands."""
    items = build_queue("a1", "a2", "a3", "b1")
    assert items.get() == ("a", "a1")

    removed = [items.remove("a", item) for item in ("a1", "a2", "a2")] + [items.remove("b", "b1")]

    assert removed == [False, True, False, True]
    assert (len(items), items.weight) == (1)
    items.done("a")
    assert worked_off(items) == ["a3"]


def test_closing_ends_every_wait_and_drops_what_is_queued() -> None:
    """Both ends raise QueueClosed then; closing again changes nothing."""
    items: TurnQueue[str] = TurnQueue(2)
    outcome: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def get() -> None:
        try:
            items.get()
        except QueueClosed as closed:
            outcome.put(closed)

    threading.Thread(target=get, daemon=True).start()

    items.close()
    items.close()

    assert isinstance(outcome.get(timeout=30), QueueClosed)
    with pytest.raises(QueueClosed):
        items.put_nowait("a", "a1")
    items.done("a")
    assert len(items) == 0
