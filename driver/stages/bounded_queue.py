"""A queue that holds so many and can be closed, which is what makes ``stop()`` under load free of deadlocks.

``queue.Queue.shutdown`` does it from Python 3.13 on; we run on 3.11.
"""

import threading
from collections import deque
from queue import Full
from typing import Generic, TypeVar

Item = TypeVar("Item")


class QueueClosed(Exception):
    """Nothing goes in or comes out any more."""


class BoundedQueue(Generic[Item]):
    """First in, first out, for any number of threads. After ``close()`` both ends raise QueueClosed, waiting or not."""

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
            self._append(item)

    def put_nowait(self, item: Item) -> None:
        """Appends the item or raises ``queue.Full`` at once."""
        with self._changed:
            if not self._closed and len(self._items) >= self._capacity:
                raise Full
            self._append(item)

    def get(self) -> Item:
        """Removes the oldest item, waiting while there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._items)
            self._check_open()
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        """Drops what is queued and wakes everybody; a second time changes nothing."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()

    def _append(self, item: Item) -> None:
        self._check_open()
        self._items.append(item)
        self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise QueueClosed
