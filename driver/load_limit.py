"""How much may wait, whose it may be, and when to come again where it is too much."""

import time
from collections.abc import Callable, Collection

from driver.errors import Overloaded
from driver.open_requests import OpenRequest
from driver.stages.fair_share import Share, share
from engine.config import EngineStats

RATE_WINDOW = 5.0
"""Seconds over which the rate is taken by which what waits becomes less."""
LEAST_DELAY, MOST_DELAY = 0.5, 60.0
"""Seconds; the rate may change, so nobody is told to stay away for long."""


class LoadLimit:
    """Refuses requests while ``max_requests`` wait, or ``max_tokens`` of their prompts; the caller's thread uses it.

    A request waits until its first token; one with several samples counts once. Who has more than their part of what
    waits is refused before the others (driver/stages/fair_share.py).
    """

    def __init__(self, max_requests: int, max_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._clock = clock
        self._now = self._before = (clock(), 0)
        """When we looked, and how many tokens had been computed by then: lately, and a window before that."""

    def check(self, new: OpenRequest, waiting: Collection[OpenRequest], stats: EngineStats) -> None:
        """Raises Overloaded where those wait already and this one is one too many.

        Where nothing else waits a request may be as long as it likes, and the first of a client as long as there is room.
        """
        tokens = sum([request.num_prompt_tokens for request in waiting])
        requests = share(self._max_requests, 1, new.holder, [(request.holder, 1) for request in waiting])
        if not requests.fits:
            raise self._overloaded(_too_many(requests, "requests"), tokens, stats)
        if not waiting:
            return
        held = [(request.holder, request.num_prompt_tokens) for request in waiting]
        prompts = share(self._max_tokens, new.num_prompt_tokens, new.holder, held)
        is_first_with_room = not prompts.own and tokens + new.num_prompt_tokens <= self._max_tokens
        if not (prompts.fits or is_first_with_room):
            why = f"prompts of {tokens:,} tokens wait already, and {self._max_tokens:,} may"
            if tokens + new.num_prompt_tokens <= self._max_tokens:
                why = f"your prompts of {prompts.own:,} tokens wait already, and others' too: {prompts.part:,} is your part"
            raise self._overloaded(why, tokens, stats)

    def _overloaded(self, why: str, tokens: int, stats: EngineStats) -> Overloaded:
        delay = self._delay(tokens, stats)
        return Overloaded(f"{why}: try again in {delay:.1f} s", retry_after_s=delay)

    def _delay(self, tokens: int, stats: EngineStats) -> float:
        """Until about half of the prompts that wait have been read, at the rate of the last seconds."""
        now, computed = self._clock(), stats.tokens
        if now - self._now[0] >= RATE_WINDOW:
            self._before, self._now = self._now, (now, computed)
        rate = (computed - self._before[1]) / max(now - self._before[0], 1e-3)
        return round(min(MOST_DELAY, max(LEAST_DELAY, tokens / 2 / max(rate, 1.0))), 1)


def _too_many(requests: Share, what: str) -> str:
    if requests.own == requests.total or requests.own < requests.part:
        return f"{requests.total:,} {what} wait already"
    return f"{requests.own:,} {what} of yours wait already, and others' too: {requests.part:,} is your part"
