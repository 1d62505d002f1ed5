"""How long the device stood idle between two steps though there was work, as far as the host can know.

A device that runs behind the host's back does not say when it became idle; the host sees that its last step is done
when it looks. It looks when a step has been collected (with no run-ahead the very moment at which that step is done),
before it prepares the next one, and once more right before that is given to the device. A gap lasts from the first
look that finds the device idle until it has been given a step, so it is never longer than in truth, and shorter by
at most the host's work between two looks. Where a step was given before the last one was done, it is 0.
"""

import time
from collections.abc import Callable
from typing import Protocol


class Result(Protocol):
    """What the device makes of a step, sooner or later: a ``jax.Array``."""

    def is_ready(self) -> bool:
        """Whether it is there."""


class StepGaps:
    """Counts the gaps between steps that follow each other, and sums their seconds. One thread uses it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._latest: Result | None = None
        self._idle_since: float | None = None
        self.start_counting()

    def start_counting(self) -> None:
        """Begin anew."""
        self.seconds = 0.0
        self.count = 0
        self.rest()

    def look(self) -> None:
        """Notice if all that the device was given is done."""
        if self._latest is not None and self._idle_since is None and self._latest.is_ready():
            self._idle_since = self._clock()

    def dispatched(self, result: Result) -> None:
        """The device has just been given a step, after which it has ``result``."""
        if self._latest is not None:
            self.count += 1
            if self._idle_since is not None:
                self.seconds += self._clock() - self._idle_since
        self._latest, self._idle_since = result, None

    def rest(self) -> None:
        """There was nothing to do: the time until the next step is no gap."""
        self._latest = self._idle_since = None
