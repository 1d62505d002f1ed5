"""Watches that every stage makes progress; notifies systemd, or ends a hung daemon."""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping

from driver.stages.safe_thread import SafeThread
from ipc.process.systemd import notify, watchdog_interval
from ipc.wire.messages import PROGRESS_LIMIT

logger = logging.getLogger(__name__)

PREPARE_LIMIT = 300.0
"""Seconds before the prepare stage is hung: tokenizing a long text may take minutes."""


class Watchdog:
    """Checks twice an interval, on its own thread, from ``start`` to ``stop``.

    ``stages`` returns for how many seconds each stage has been busy with one item. The interval is
    systemd's WatchdogSec, or twice PROGRESS_LIMIT without one. While a stage is busy for longer,
    systemd is not notified, and restarts the daemon an interval later; before that ``on_hang`` is
    called with the stage, once, if it is over PROGRESS_LIMIT as well. ``on_failure`` is called on
    the dying thread, should the thread die. ``look_at_rest`` is called at each look, for what no
    restart is needed for.
    """

    def __init__(
        self,
        stages: Callable[[], Mapping[str, float]],
        on_hang: Callable[[str, float], None],
        on_failure: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        look_at_rest: Callable[[], None] = lambda: None,
    ) -> None:
        self._interval = watchdog_interval() or 2 * PROGRESS_LIMIT
        self._stages = stages
        self._on_hang = on_hang
        self._on_failure = on_failure
        self._clock = clock
        self._look_at_rest = look_at_rest
        self._looked_at = math.inf
        self._thawed_at = -math.inf
        """When this whole process was last found to have been frozen, which is no stage's
        fault."""
        self._stopping = threading.Event()
        self._thread = SafeThread("watchdog", self._run, self._died)

    def start(self) -> None:
        """Begin to look, at once."""
        self._thread.start()

    def stop(self) -> None:
        """Say nothing more."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while self._look() and not self._stopping.wait(self._interval / 2):
            pass

    def _look(self) -> bool:
        """Whether to go on looking."""
        self._look_at_rest()
        now = self._clock()
        if now - self._looked_at > 2 * self._interval:
            self._thawed_at = now
        self._looked_at = now
        over = [(min(busy, now - self._thawed_at), stage) for stage, busy in self._stages().items()]
        over = [(busy, stage) for busy, stage in over if busy >= self._limit(stage)]
        if not over:
            notify("WATCHDOG=1")
            return True
        busy, stage = max(over)
        logger.error("nothing has got done in the %s stage for %.1f s: systemd is not notified", stage, busy)
        if busy < PROGRESS_LIMIT:
            return True
        self._on_hang(stage, busy)
        return False

    def _limit(self, stage: str) -> float:
        return max(self._interval, PREPARE_LIMIT) if stage == "prepare" else self._interval

    def _died(self, name: str, error: BaseException) -> None:
        self._on_failure(f"the {name} thread died of {type(error).__name__}: {error}")
