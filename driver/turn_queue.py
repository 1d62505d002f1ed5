"""A queue in which clients take turns, so that none waits behind what another has queued."""

import threading
from collections import deque
from queue import Full
from typing import Generic, TypeVar

from driver.bounded_queue import QueueClosed

Item = TypeVar("Item")


class TurnQueue(Generic[Item]):
    """First in, first out for each client, one at a time; of clients, who waited longest since its last turn is next.

    Whoever gets an item says ``done`` when it has been worked on, and only then another thread gets the client's next: so
    a client's items keep their order, and it holds one of the threads at most. Any thread may call any method. After
    ``close()`` both ends raise QueueClosed, waiting or not.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._size = 0
        self._ready: dict[str, deque[Item]] = {}
        """By client, next turn first: what it has queued, which is never nothing."""
        self._busy: dict[str, deque[Item]] = {}
        """The same of those of which an item is being worked on; it may be nothing."""
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return self._size

    def put_nowait(self, client: str, item: Item) -> None:
        """Queues the item behind the client's own, or raises ``queue.Full`` at once."""
        with self._changed:
            if self._closed:
                raise QueueClosed
            if self._size >= self._capacity:
                raise Full
            line = self._busy.get(client)
            if line is None:
                line = self._ready.setdefault(client, deque())
                self._changed.notify()
            line.append(item)
            self._size += 1

    def get(self) -> tuple[str, Item]:
        """The next item and its client, waiting while there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._ready)
            if self._closed:
                raise QueueClosed
            client = next(iter(self._ready))
            line = self._busy[client] = self._ready.pop(client)
            self._size -= 1
            return client, line.popleft()

    def done(self, client: str) -> None:
        """The client may have its next turn, after all who wait for theirs."""
        with self._changed:
            line = self._busy.pop(client, None)
            if line:
                self._ready[client] = line
                self._changed.notify()

    def remove(self, client: str, item: Item) -> bool:
        """Takes an item out that nobody has got; False if it is not there."""
        with self._changed:
            line = self._busy.get(client) or self._ready.get(client)
            if line is None or not any(queued is item for queued in line):
                return False
            line.remove(item)
            self._size -= 1
            if not line:
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
