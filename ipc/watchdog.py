"""Tells systemd that the daemon is alive, for as long as it is: while what there is to do gets done."""

import logging
import threading
from collections.abc import Callable

from driver.safe_thread import SafeThread
from ipc.systemd import notify, watchdog_interval

logger = logging.getLogger(__name__)

PROGRESS_LIMIT = 60.0
"""Seconds in which nothing gets done, though there is work, after which a daemon is not healthy."""


class Watchdog:
    """Speaks twice an interval on a thread of its own, from ``start`` to ``stop``; does nothing where nobody watches.

    ``seconds_stalled`` has to be below the interval, or it keeps silent, and systemd restarts the daemon once an
    interval has passed so. ``on_failure`` is called, on the dying thread, should the thread die.
    """

    def __init__(self, seconds_stalled: Callable[[], float], on_failure: Callable[[str], None]) -> None:
        self._interval = watchdog_interval()
        self._seconds_stalled = seconds_stalled
        self._on_failure = on_failure
        self._stopping = threading.Event()
        self._thread = SafeThread("watchdog", self._run, self._died)

    def start(self) -> None:
        """Begin to speak, at once."""
        if self._interval is not None:
            self._thread.start()

    def stop(self) -> None:
        """Say nothing more."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        assert self._interval is not None
        while True:
            stalled = self._seconds_stalled()
            if stalled < self._interval:
                notify("WATCHDOG=1")
            else:
                logger.error("nothing has got done for %.1f s: the watchdog is told nothing", stalled)
            if self._stopping.wait(self._interval / 2):
                return

    def _died(self, name: str, error: BaseException) -> None:
        self._on_failure(f"the {name} thread died of {type(error).__name__}: {error}")
