"""Staged readiness: what an engine can do without at first is compiled while it serves."""

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue

from engine.step.compilations import counted_apart

logger = logging.getLogger(__name__)


class StagedCompilation:
    """Jobs that compile a function each, done in order by workers once ``begin`` is called.

    The thread that steps the engine owns this. ``publish`` is called on it when there is something new to be used;
    what a worker raises comes out of ``adopt``, on it too.
    """

    def __init__(self, jobs: Sequence[Callable[[], None]], publish: Callable[[], None]) -> None:
        self.num_done = 0
        self.num_left = len(jobs)
        self._jobs = jobs
        self._publish = publish
        self._ended: SimpleQueue[Future[None]] = SimpleQueue()
        # Half the cores: where the device is a CPU, steps need the rest, and tracing holds the GIL.
        self._pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2), "staged compilation")

    def begin(self, notify: Callable[[], None]) -> None:
        """Start the workers; ``notify`` is called on one of them when it is time to ``adopt``."""
        for job in self._jobs:
            self._pool.submit(_run_apart, job).add_done_callback(partial(self._end, notify))

    def adopt(self) -> None:
        """Put to use what has been compiled; raises what went wrong with it."""
        while not self._ended.empty():
            self._ended.get().result()
            self.num_done += 1
            self.num_left -= 1
            self._publish()
            if not self.num_left:
                logger.info("everything is compiled: the last %d functions while serving", self.num_done)

    def close(self) -> None:
        """Begin no further job; those under way end by themselves, and to no effect."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _end(self, notify: Callable[[], None], job: Future[None]) -> None:
        if not job.cancelled():
            self._ended.put(job)
            notify()


def _run_apart(job: Callable[[], None]) -> None:
    with counted_apart():
        job()
