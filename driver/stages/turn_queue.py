"""A queue in which clients take turns, and each client's users, so that none waits behind what another has queued."""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Full
from typing import Generic, TypeVar

from driver.stages.bounded_queue import QueueClosed
from driver.stages.fair_share import Holder

Item = TypeVar("Item")


class TurnQueue(Generic[Item]):
    """First in, first out for each user; of clients, and of a client's users, who waited longest for a turn is next.

    Whoever gets an item says ``done`` when it has been worked on, and only then another thread gets the client's next: so
    a user's items keep their order, and a client holds one of the threads at most, however many users it names. Any thread
    may call any method. After ``close()`` both ends raise QueueClosed, waiting or not. ``holder_of`` says whose an item is.
    """

    def __init__(self, capacity: int, holder_of: Callable[[Item], Holder]) -> None:
        self._capacity = capacity
        self._holder_of = holder_of
        self._size = 0
        self._ready: dict[str, _Users[Item]] = {}
        """By client, next turn first: what it has queued, which is never nothing."""
        self._busy: dict[str, _Users[Item]] = {}
        """The same of those of which an item is being worked on; it may be nothing."""
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return self._size

    def run(self, work: Callable[[Item], None]) -> None:
        """Works on one item after the other, as their turns come, until the queue is closed."""
        with suppress(QueueClosed):
            while True:
                item = self.get()
                try:
                    work(item)
                finally:
                    self.done(item)

    def put_nowait(self, item: Item) -> None:
        """Queues the item behind its holder's own, or raises ``queue.Full`` at once."""
        client, user = self._holder_of(item)
        with self._changed:
            if self._closed:
                raise QueueClosed
            if self._size >= self._capacity:
                raise Full
            queued = self._busy.get(client)
            if queued is None:
                queued = self._ready.setdefault(client, _Users())
                self._changed.notify()
            queued.put(user, item)
            self._size += 1

    def get(self) -> Item:
        """The next item, waiting while there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._ready)
            if self._closed:
                raise QueueClosed
            client = next(iter(self._ready))
            queued = self._busy[client] = self._ready.pop(client)
            self._size -= 1
            return queued.get()

    def done(self, item: Item) -> None:
        """Its client may have the next turn, after all who wait for theirs."""
        client, _ = self._holder_of(item)
        with self._changed:
            queued = self._busy.pop(client, None)
            if queued:
                self._ready[client] = queued
                self._changed.notify()

    def remove(self, item: Item) -> bool:
        """Takes an item out that nobody has got; False if it is not there."""
        client, user = self._holder_of(item)
        with self._changed:
            queued = self._busy.get(client) or self._ready.get(client)
            if not queued or not queued.remove(user, item):
                return False
            self._size -= 1
            if not queued:
                self._ready.pop(client, None)
            return True

    def close(self) -> None:
        """Drops what is queued and wakes everybody; a second time changes nothing."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._busy.clear()
            self._size = 0
            self._changed.notify_all()


class _Users(Generic[Item]):
    """What one client has queued."""

    def __init__(self) -> None:
        self._items: dict[str, deque[Item]] = {}
        """By user, next turn first; nobody has nothing."""

    def __bool__(self) -> bool:
        return bool(self._items)

    def put(self, user: str, item: Item) -> None:
        self._items.setdefault(user, deque()).append(item)

    def get(self) -> Item:
        user = next(iter(self._items))
        items = self._items.pop(user)
        item = items.popleft()
        if items:
            self._items[user] = items
        return item

    def remove(self, user: str, item: Item) -> bool:
        items = self._items.get(user, deque())
        if item not in items:
            return False
        items.remove(item)
        if not items:
            del self._items[user]
        return True
