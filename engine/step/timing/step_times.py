"""How long the host takes for each phase of a step.

``plan`` is the scheduler's, ``prepare`` the arrays of the step, ``dispatch`` the calls that give it
to the device, ``wait`` the time until its tokens are there, and ``land`` the scheduler's update.
With run-ahead the device computes during all of them but the end of ``wait``: a step that is
bound by the device has a long ``wait``, and one that is bound by the host has none.
"""

import time
from collections.abc import Callable, Mapping

from engine.metrics.histogram import Histogram

PHASES = ("plan", "prepare", "dispatch", "wait", "land")

_SECONDS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10)  # fmt: skip


class StepTimes:
    """The seconds of one step by phase. A new one is in its first phase."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.was_ready = False
        """Whether the tokens were there before anybody waited for them, since whenever."""
        self._clock = clock
        self.begun_at = self.ended_at = self._since = clock()

    def resume(self, *, was_ready: bool = False) -> None:
        """Begin a phase now: the step has waited for its turn, maybe for longer than it took."""
        self.was_ready = was_ready
        self._since = self._clock()

    def end(self, phase: str) -> None:
        """End a phase; the next one begins."""
        now = self._clock()
        self.seconds[phase] = now - self._since
        if phase == "wait":
            self.ended_at = now
        self._since = now

    def __str__(self) -> str:
        return ", ".join(f"{phase} {1000 * seconds:.2f} ms" for phase, seconds in self.seconds.items())


class StepSeconds:
    """How long each step took the device, or longer: from the end of the one before.

    From its own beginning instead if it was prepared after that, or if nobody saw that end: the
    tokens were there before anybody waited for them. Idle time of the device is so no part of it,
    but for the time in which the host prepares a step. A step that nobody waited for counts until
    it is asked for: it took as long for those who decode.
    """

    def __init__(self) -> None:
        self._ended_at = 0.0

    def landed(self, times: StepTimes) -> float:
        """The seconds of the step whose tokens have come just now. Steps land in order."""
        seconds = times.ended_at - max(times.begun_at, self._ended_at)
        self._ended_at = 0.0 if times.was_ready else times.ended_at
        return seconds


def step_histograms() -> Mapping[str, Histogram]:
    """Empty ones, by phase, of seconds."""
    return {phase: Histogram(_SECONDS) for phase in PHASES}
