"""Queues of a fixed capacity that can be closed, so that ``stop`` ends all threads that wait.

``queue.Queue.shutdown`` does that from Python 3.13 on; we run on 3.11.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from queue import Full
from typing import Generic, TypeVar

from driver.stages.fair_share import Holder

Item = TypeVar("Item")


class QueueClosed(Exception):
    """The queue takes and gives nothing any more."""


class BoundedQueue(Generic[Item]):
    """First in, first out. After ``close()`` both ends raise QueueClosed. For any threads."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> None:
        """Appends the item, waiting while the queue is full."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._capacity)
            self._check_open()
            self._items.append(item)
            self._changed.notify_all()

    def get(self) -> Item:
        """Removes the oldest item, waiting while there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._items)
            self._check_open()
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        """Drops what is queued and wakes every thread; a second time changes nothing."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise QueueClosed


class TurnQueue(Generic[Item]):
    """A queue in which clients take turns, and so do each client's users; a user's own items are
    first in, first out.

    The next client is the one that has waited longest for its turn. It gets no second turn before
    ``done`` is called for the item of the first: so a user's items keep their order, and a client
    occupies one thread at most, however many users it names. Any thread may call any method. After
    ``close()`` both ends raise QueueClosed, waiting or not. ``holder_of`` gives an item's holder. No
    item is queued twice.
    """

    def __init__(self, capacity: int, holder_of: Callable[[Item], Holder]) -> None:
        self._capacity = capacity
        self._holder_of = holder_of
        self._size = 0
        self._ready: dict[str, _UserItems[Item]] = {}
        """Queued items of each client with any; next turn first."""
        self._busy: dict[str, _UserItems[Item]] = {}
        """The same of clients with an item not done; may be empty."""
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return self._size

    def run(self, work: Callable[[Item], None]) -> None:
        """Works on one item after the other, until the queue is closed.

        An exception of ``work`` passes, and its item's client gets no more turns.
        """
        with suppress(QueueClosed):
            while True:
                item = self.get()
                work(item)
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
                queued = self._ready.setdefault(client, _UserItems())
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
        """Lets the item's client have another turn, behind all clients that wait for theirs."""
        client, _ = self._holder_of(item)
        with self._changed:
            queued = self._busy.pop(client, None)
            if queued:
                self._ready[client] = queued
                self._changed.notify()

    def remove(self, item: Item) -> bool:
        """Removes an item that is still queued; False if it is not."""
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
        """Drops what is queued and wakes every thread; a second time changes nothing."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._busy.clear()
            self._size = 0
            self._changed.notify_all()


class _UserItems(Generic[Item]):
    """The queued items of one client."""

    def __init__(self) -> None:
        self._items: dict[str, OrderedDict[int, Item]] = {}
        """By user, next turn first; never empty. Of a user by id, in order."""

    def __bool__(self) -> bool:
        return bool(self._items)

    def put(self, user: str, item: Item) -> None:
        self._items.setdefault(user, OrderedDict())[id(item)] = item

    def get(self) -> Item:
        user = next(iter(self._items))
        items = self._items.pop(user)
        _, item = items.popitem(last=False)
        if items:
            self._items[user] = items
        return item

    def remove(self, user: str, item: Item) -> bool:
        items = self._items.get(user)
        if items is None or items.pop(id(item), None) is None:
            return False
        if not items:
            del self._items[user]
        return True
