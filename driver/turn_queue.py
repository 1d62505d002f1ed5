"""A queue in which clients take turns, so that none waits behind what another has queued."""

import threading
from collections import deque
from queue import Full
from typing import Generic, NamedTuple, TypeVar

from driver.bounded_queue import QueueClosed

Item = TypeVar("Item")


class _Queued(NamedTuple, Generic[Item]):
    item: Item
    weight: int


class TurnQueue(Generic[Item]):
    """First in, first out for each client, one at a time; of clients, who waited longest since its last turn is next.

    Whoever gets an item says ``done`` when it has been worked on, and only then another thread gets the client's next: so
    a client's items keep their order, and it holds one of the threads at most. Any thread may call any method. After
    ``close()`` both ends raise QueueClosed, waiting or not.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.weight = 0
        """Of all that is queued."""
        self._size = 0
        self._ready: dict[str, deque[_Queued[Item]]] = {}
        """By client, next turn first: what it has queued, which is never nothing."""
        self._busy: dict[str, deque[_Queued[Item]]] = {}
        """The same of those of which an item is being worked on; it may be nothing."""
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return self._size

    def put_nowait(self, client: str, item: Item, weight: int) -> None:
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
            line.append(_Queued(item, weight))
            self._count(1, weight)

    def get(self) -> tuple[str, Item]:
        """The next item and its client, waiting while there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._ready)
            if self._closed:
                raise QueueClosed
            client = next(iter(self._ready))
            line = self._busy[client] = self._ready.pop(client)
            item, weight = line.popleft()
            self._count(-1, -weight)
            return client, item

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
            line = self._busy.get(client) or self._ready.get(client) or ()
            queued = next((queued for queued in line if queued.item is item), None)
            if not line or queued is None:
                return False
            line.remove(queued)
            self._count(-1, -queued.weight)
            if not line:
                self._ready.pop(client, None)
            return True

    def close(self) -> None:
        """Drops what is queued and wakes everybody; a second time changes nothing."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._busy.clear()
            self._count(-self._size, -self.weight)
            self._changed.notify_all()

    def _count(self, items: int, weight: int) -> None:
        self._size += items
        self.weight += weight
