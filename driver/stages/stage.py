"""One stage on a request's way through the driver: work on one item after another, where an item's fault is its own end."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from driver.errors import InternalError
from driver.stages.queues import QueueClosed

logger = logging.getLogger(__name__)

MAX_FAILURES, MIN_CLIENTS = 8, 3
"""So many failures in a row, of items of so many clients, are no longer the fault of the items but of the stage."""

Item = TypeVar("Item")


class Stage(Generic[Item]):
    """Calls ``handle`` for one item after another, on any number of threads.

    Whatever Exception ``handle`` raises for an item is logged with the request's id and told to ``fail``, and the thread
    goes on. ``source`` names the client and the request of an item. QueueClosed and what is no Exception pass through.
    So does the last failure of MAX_FAILURES in a row, of MIN_CLIENTS clients at least, with no success between: then it
    is the stage that is broken, and its thread has to die of it.
    """

    def __init__(
        self,
        name: str,
        handle: Callable[[Item], None],
        fail: Callable[[Item, InternalError], None],
        source: Callable[[Item], tuple[str, str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._handle = handle
        self._fail = fail
        self._source = source
        self._clock = clock
        self._in_hand: dict[int, tuple[float, Item]] = {}
        """By thread: what it works on, and since when."""
        self._counting = threading.Lock()
        self._failures = 0
        self._failed_clients: set[str] = set()

    @property
    def seconds_busy(self) -> float:
        """For how long the oldest item that is in a thread's hands has been there; 0 while all wait. Any thread may ask."""
        since = min((since for since, _ in list(self._in_hand.values())), default=None)
        return 0.0 if since is None else max(0.0, self._clock() - since)

    def stuck(self, limit: float) -> list[str]:
        """The requests whose items have been in a thread's hands for more than ``limit`` seconds, by id."""
        now = self._clock()
        return [self._source(item)[1] for since, item in list(self._in_hand.values()) if now - since > limit]

    def run(self, take: Callable[[], Item]) -> None:
        """Works on what ``take`` returns, until that raises QueueClosed."""
        with suppress(QueueClosed):
            while True:
                self.work(take())

    def work(self, item: Item) -> None:
        """Handles one item, or fails it."""
        thread = threading.get_ident()
        self._in_hand[thread] = self._clock(), item
        try:
            self._handle(item)
        except QueueClosed:
            raise
        except Exception:
            client, request_id = self._source(item)
            about = {"request_id": request_id, "client": client}
            logger.exception("%s failed for request %r of client %r", self.name, request_id, client, extra=about)
            self._end(item)
            if self._is_broken(client):
                raise
        else:
            if self._failures:
                self._forget_failures()
        finally:
            del self._in_hand[thread]

    def _end(self, item: Item) -> None:
        why = f"a fault of the daemon ended this request ({self.name}): the daemon's log has the details"
        try:
            self._fail(item, InternalError(why))
        except QueueClosed:
            raise
        except Exception:
            logger.exception("%s could not even fail request %r", self.name, self._source(item)[1])

    def _is_broken(self, client: str) -> bool:
        """Whether one more failure, of this client, makes it the stage's own."""
        with self._counting:
            self._failures += 1
            self._failed_clients.add(client)
            return self._failures >= MAX_FAILURES and len(self._failed_clients) >= MIN_CLIENTS

    def _forget_failures(self) -> None:
        with self._counting:
            self._failures = 0
            self._failed_clients.clear()
