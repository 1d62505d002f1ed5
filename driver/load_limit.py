"""How much may wait, and when to come again where it is too much."""

import time
from collections.abc import Callable

from driver.errors import Overloaded
from engine.config import EngineStats

RATE_WINDOW = 5.0
"""Seconds over which the rate is taken by which what waits becomes less."""
LEAST_DELAY, MOST_DELAY = 0.5, 60.0
"""Seconds; the rate may change, so nobody is told to stay away for long."""


class LoadLimit:
    """Refuses requests while ``max_requests`` wait, or ``max_tokens`` of their prompts; the caller's thread uses it."""

    def __init__(self, max_requests: int, max_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._clock = clock
        self._now = self._before = (clock(), 0)
        """When we looked, and how many tokens had been computed by then: lately, and a window before that."""

    def check(self, weight: int, waiting: int, tokens: int, stats: EngineStats) -> None:
        """Raises Overloaded where so many requests with so many tokens wait that one of ``weight`` more is too many.

        Alone, a request may be as long as it likes.
        """
        if waiting >= self._max_requests:
            why = f"{self._max_requests:,} requests wait already"
        elif waiting and tokens + weight > self._max_tokens:
            why = f"prompts of {tokens:,} tokens wait already, and {self._max_tokens:,} may"
        else:
            return
        delay = self._delay(tokens, stats)
        raise Overloaded(f"{why}: try again in {delay:.1f} s", retry_after_s=delay)

    def _delay(self, tokens: int, stats: EngineStats) -> float:
        """Until about half of the prompts that wait have been read, at the rate of the last seconds."""
        now, computed = self._clock(), stats.tokens
        if now - self._now[0] >= RATE_WINDOW:
            self._before, self._now = self._now, (now, computed)
        rate = (computed - self._before[1]) / max(now - self._before[0], 1e-3)
        return round(min(MOST_DELAY, max(LEAST_DELAY, tokens / 2 / max(rate, 1.0))), 1)
