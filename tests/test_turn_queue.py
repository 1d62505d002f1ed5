"""A queue in which clients take turns."""

import queue
import threading

import pytest
from fake_driver import PATIENCE

from driver.stages.queues import QueueClosed, TurnQueue


def build_queue(*queued: str, capacity: int = 8) -> TurnQueue[str]:
    """A queue with these items, of which the first letter is the client and the second the user."""
    items: TurnQueue[str] = TurnQueue(capacity, lambda item: (item[0], item[1]))
    for item in queued:
        items.put_nowait(item)
    return items


def worked_off(items: TurnQueue[str]) -> list[str]:
    """What one thread gets that is done with each at once."""
    order = []
    while len(items):
        order.append(item := items.get())
        items.done(item)
    return order


def test_clients_take_turns() -> None:
    """Whatever one of them has queued, another waits for one of its items at most; each has its own in order."""
    assert worked_off(build_queue("ax1", "ax2", "ax3", "bx1", "bx2", "cx1")) == [
        "ax1",
        "bx1",
        "cx1",
        "ax2",
        "bx2",
        "ax3",
    ]


def test_the_users_of_a_client_take_its_turns() -> None:
    """In turns, too: a client has no more of them for having many users, and a user has its own items in order."""
    assert worked_off(build_queue("ax1", "ax2", "ax3", "ay1", "az1", "bx1", "bx2")) == [
        "ax1",
        "bx1",
        "ay1",
        "bx2",
        "az1",
        "ax2",
        "ax3",
    ]


def test_a_client_has_one_item_worked_on_at_a_time() -> None:
    """Its next waits until that is done, though threads are free; then it comes after those who wait already."""
    items = build_queue("ax1", "ay2", "bx1", "cx1")

    taken = [items.get(), items.get()]
    items.done("ax1")
    taken += [items.get(), items.get()]

    assert taken == ["ax1", "bx1", "cx1", "ay2"]
    items.put_nowait("az3")
    outcome: queue.SimpleQueue[object] = queue.SimpleQueue()
    threading.Thread(target=lambda: outcome.put(items.get()), daemon=True).start()
    assert outcome.empty()
    items.done("ay2")
    assert outcome.get(timeout=PATIENCE) == "az3"


def test_a_full_queue_refuses_at_once() -> None:
    """However many clients share it."""
    items = build_queue("ax1", "bx1", capacity=2)

    with pytest.raises(queue.Full):
        items.put_nowait("cx1")

    assert len(items) == 2


def test_what_nobody_has_got_can_be_removed() -> None:
    """Of a client that waits and of one that is being served; once only, and never what is in a thread's hands."""
    items = build_queue("ax1", "ax2", "ax3", "bx1")
    assert items.get() == "ax1"

    removed = [items.remove(item) for item in ("ax1", "ax2", "ax2", "by1", "bx1", "cx1")]

    assert removed == [False, True, False, False, True, False]
    assert len(items) == 1
    items.done("ax1")
    assert worked_off(items) == ["ax3"]


def test_closing_ends_every_wait_and_drops_what_is_queued() -> None:
    """Both ends raise QueueClosed then; closing again changes nothing."""
    items = build_queue(capacity=2)
    outcome: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def get() -> None:
        try:
            items.get()
        except QueueClosed as closed:
            outcome.put(closed)

    threading.Thread(target=get, daemon=True).start()

    items.close()
    items.close()

    assert isinstance(outcome.get(timeout=PATIENCE), QueueClosed)
    with pytest.raises(QueueClosed):
        items.put_nowait("ax1")
    items.done("ax1")
    assert len(items) == 0
