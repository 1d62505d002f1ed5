"""A queue in which clients take turns."""

import threading

import pytest

from driver.bounded_queue import QueueClosed
from driver.turns import Turns


def test_each_client_has_its_turn_and_its_own_order():
    """Whoever has asked for much comes again behind whoever has not had anything."""
    turns = Turns()
    for item in ("a1", "a2", "a3", "b1", "c1", "c2"):
        turns.put(item[0], item)

    got = [turns.get() for _ in range(4)]
    turns.put("d", "d1")

    assert got == ["a1", "b1", "c1", "a2"] and len(turns) == 3
    assert [turns.get() for _ in range(3)] == ["c2", "a3", "d1"]


def test_who_waits_gets_what_comes_and_hears_of_the_end():
    """On whatever thread; nothing goes in or comes out after it."""
    turns, got = Turns(), []

    def take() -> None:
        with pytest.raises(QueueClosed):
            while True:
                got.append(turns.get())
                taken.set()

    taken = threading.Event()
    thread = threading.Thread(target=take)
    thread.start()
    turns.put("a", 1)
    assert taken.wait(30)
    turns.close()
    thread.join(30)

    assert got == [1] and not thread.is_alive()
    with pytest.raises(QueueClosed):
        turns.put("a", 2)
