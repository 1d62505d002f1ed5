"""Device idle time between two steps while there was work, as seen from the host.

The device runs asynchronously and does not say when it becomes idle. The host checks if its last
step is done: after it collects a step (without run-ahead the moment when that step is done),
before it prepares the next one, and right before it dispatches that. A gap lasts from the first
check that finds the device idle until the dispatch. It is never overestimated, underestimated by
at most the host's work between two checks, and 0 if the dispatch precedes the last step's end.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol


class Result(Protocol):
    """The future result of a step: a ``jax.Array``."""

    def is_ready(self) -> bool:
        """Whether it has been computed."""


class StepGaps:
    """Counts the gaps between consecutive steps and sums their seconds. One thread uses it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._latest: Result | None = None
        self._idle_since: float | None = None
        self.start_counting()

    def start_counting(self) -> None:
        """Reset the counts."""
        self.seconds = 0.0
        self.count = 0
        self.rest()

    def stats(self) -> dict[str, Any]:
        """Fields of EngineStats."""
        return {"step_gap_seconds_sum": self.seconds, "step_gap_seconds_count": self.count}

    def look(self) -> None:
        """Check whether the device has finished all its steps."""
        if self._latest is not None and self._idle_since is None and self._latest.is_ready():
            self._idle_since = self._clock()

    def dispatched(self, result: Result) -> None:
        """Record that a step was dispatched, which will produce ``result``."""
        if self._latest is not None:
            self.count += 1
        self.sampling(result)

    def sampling(self, result: Result) -> None:
        """Record that rows of an earlier step sample, which will produce ``result``: no step."""
        if self._idle_since is not None:
            self.seconds += self._clock() - self._idle_since
        self._latest, self._idle_since = result, None

    def rest(self) -> None:
        """Record that there is no work: the time until the next step is no gap."""
        self._latest = self._idle_since = None
