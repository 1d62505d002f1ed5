"""A queue in which clients take turns, so that nobody waits for all that another has asked for."""

import threading
from collections import deque
from typing import Generic, TypeVar

from driver.bounded_queue import QueueClosed

Item = TypeVar("Item")


class Turns(Generic[Item]):
    """First in, first out for each client, one of each after the other; for any number of threads.

    After ``close()`` both ends raise QueueClosed, waiting or not.
    """

    def __init__(self) -> None:
        self._items: dict[str, deque[Item]] = {}
        """By client, whose turn it is first; none is empty."""
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        with self._changed:
            return sum(map(len, self._items.values()))

    def put(self, client: str, item: Item) -> None:
        """Appends the item to those of its client."""
        with self._changed:
            if self._closed:
                raise QueueClosed
            self._items.setdefault(client, deque()).append(item)
            self._changed.notify()

    def get(self) -> Item:
        """Removes the oldest item of the client whose turn it is, waiting while there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._items)
            if self._closed:
                raise QueueClosed
            client = next(iter(self._items))
            items = self._items.pop(client)
            item = items.popleft()
            if items:
                self._items[client] = items  # behind the others
            return item

    def close(self) -> None:
        """Drops what is queued and wakes everybody; a second time changes nothing."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
