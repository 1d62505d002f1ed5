"""A stage of the driver's pipeline: an item that fails ends only its own request."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from driver.errors import InternalError
from driver.stages.queues import QueueClosed

logger = logging.getLogger(__name__)

MAX_FAILURES, MIN_CLIENTS = 8, 3
"""So many failures in a row, of so many clients, are a fault of the stage."""

Item = TypeVar("Item")


class Stage(Generic[Item]):
    """Calls ``handle`` for one item after another, on any number of threads.

    An Exception that ``handle`` raises for an item is logged with the request's id and given to
    ``fail``, and the thread continues. ``source`` gives client and request id of an item.
    QueueClosed passes through, and so does what is not an Exception. After MAX_FAILURES in a row,
    of at least MIN_CLIENTS clients and with no success between, the exception passes too: the
    stage itself is broken, and its thread ends.
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
        """By thread: when its item came, and the item."""
        self._counting = threading.Lock()
        self._failures = 0
        self._failed_clients: set[str] = set()

    @property
    def seconds_busy(self) -> float:
        """For how long a thread has been at its item, the longest of all; 0 while all wait."""
        since = min((since for since, _ in list(self._in_hand.values())), default=None)
        return 0.0 if since is None else max(0.0, self._clock() - since)

    def stuck(self, limit: float) -> list[str]:
        """The ids of the requests whose items have been in work for over ``limit`` seconds."""
        now = self._clock()
        return [self._source(item)[1] for since, item in list(self._in_hand.values()) if now - since > limit]

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
        """Counts a failure of this client's item; whether it is a fault of the stage by now."""
        with self._counting:
            self._failures += 1
            self._failed_clients.add(client)
            return self._failures >= MAX_FAILURES and len(self._failed_clients) >= MIN_CLIENTS

    def _forget_failures(self) -> None:
        with self._counting:
            self._failures = 0
            self._failed_clients.clear()
