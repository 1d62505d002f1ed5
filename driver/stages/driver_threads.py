"""The driver's threads, which end together, once: by an operator, by a fault, or as one of them dies."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from driver.errors import DriverError, DriverStopped, InternalError
from driver.stages.safe_thread import SafeThread

logger = logging.getLogger(__name__)

DEATH_PATIENCE = 10.0
"""Seconds that the others have to end when one has died."""


class DriverThreads:
    """Of all that end the threads, the first does it, with ``close``, which has each of them end,
    and ``answer_all``, which answers whoever waits and is told whether they have all ended.

    ``runs`` are what the threads do, by name. One that dies calls ``on_failure`` after the end.
    """

    def __init__(
        self,
        runs: Mapping[str, Sequence[Callable[[], None]]],
        close: Callable[[DriverError], None],
        answer_all: Callable[[DriverError, bool], None],
        on_failure: Callable[[str], None] | None,
    ) -> None:
        self.why_ended: DriverError = DriverStopped("the driver is stopped")
        """For whoever comes later."""
        self._threads = [SafeThread(name, run, self._died) for name, each in runs.items() for run in each]
        self._close = close
        self._answer_all = answer_all
        self._on_failure = on_failure
        # taken once, never given back: the first to end the threads has it
        self._right_to_end = threading.Lock()
        self._ended = threading.Event()

    def __iter__(self) -> Iterator[SafeThread]:
        return iter(self._threads)

    def start(self) -> None:
        """Starts them; once only."""
        for thread in self._threads:
            thread.start()

    def end(self, why: DriverError, timeout: float) -> None:
        """Returns when they have ended, by this call or another, or after ``timeout`` seconds: a
        thread that hangs by then is logged and left behind."""
        if not self._end(why, timeout):
            self._ended.wait(timeout)

    def _died(self, name: str, error: BaseException) -> None:
        reason = f"the {name} thread died of {type(error).__name__}: {error}"
        if self._end(InternalError(reason), DEATH_PATIENCE) and self._on_failure is not None:
            self._on_failure(reason)

    def _end(self, why: DriverError, timeout: float) -> bool:
        """Ends them, if nobody else has begun to."""
        if not self._right_to_end.acquire(blocking=False):
            return False
        self.why_ended = why
        self._close(why)
        self._answer_all(why, self._join(timeout))
        self._ended.set()
        return True

    def _join(self, timeout: float) -> bool:
        """Whether all have ended in time."""
        deadline = time.monotonic() + timeout
        left = [thread for thread in self._threads if not thread.join(max(0.0, deadline - time.monotonic()))]
        for thread in left:
            logger.error("thread %s still runs %g seconds after it was told to stop", thread.name, timeout)
        return not left
