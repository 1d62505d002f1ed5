"""The limit of waiting requests, each client's share of it, and the retry delay."""

import itertools
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from driver.errors import Overloaded
from driver.open_requests import OpenRequest
from driver.request import ReturnChannel, ReturnSample, TokenizerRequest
from driver.stages.fair_share import Holder, Share, share
from engine.metrics.engine_stats import EngineStats

RATE_WINDOW = 5.0
"""Seconds over which the rate of computed tokens is measured."""
LEAST_DELAY, MOST_DELAY = 0.5, 60.0
"""Seconds; no longer, as the rate may change."""


class LoadLimit:
    """Refuses requests while ``max_requests`` wait, or ``max_tokens`` of their prompts; the
    caller's thread uses it.

    A request waits until its first token; one with several samples counts once. A client with more
    than its part of what waits is refused first (driver/stages/fair_share.py).
    """

    def __init__(self, max_requests: int, max_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._clock = clock
        self._now = self._before = (clock(), 0)
        """Time and number of computed tokens at the start of this window and the one before."""

    def check(self, new: OpenRequest, waiting: Collection[OpenRequest], stats: EngineStats) -> None:
        """Raises Overloaded if the new request is one too many.

        If nothing waits a request may have any length; the first one of a client may fill the
        rest.
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
        """Seconds until about half of the waiting prompts are computed, at the recent rate."""
        now, computed = self._clock(), stats.tokens
        if now - self._now[0] >= RATE_WINDOW:
            self._before, self._now = self._now, (now, computed)
        rate = (computed - self._before[1]) / max(now - self._before[0], 1e-3)
        return round(min(MOST_DELAY, max(LEAST_DELAY, tokens / 2 / max(rate, 1.0))), 1)


def _too_many(requests: Share, what: str) -> str:
    if requests.own == requests.total or requests.own < requests.part:
        return f"{requests.total:,} {what} wait already"
    return f"{requests.own:,} {what} of yours wait already, and others' too: {requests.part:,} is your part"


class TokenizerLimit:
    """Limits tokenizer requests without an answer, by fair shares. For any thread."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._serials = itertools.count()
        self._waiting: dict[int, Holder] = {}

    def submit(self, request: TokenizerRequest, submit: Callable[[TokenizerRequest], None]) -> None:
        """Submits the request, which counts until it is answered; raises Overloaded."""
        requests = share(self._max_requests, 1, request.holder, [(other, 1) for other in list(self._waiting.values())])
        if not requests.fits:
            raise Overloaded(
                f"{requests.total:,} tokenizer requests wait already, {requests.own:,} of them yours: try later"
            )
        serial = next(self._serials)
        self._waiting[serial] = request.holder
        try:
            submit(replace(request, channel=_Counted(self, serial, request.channel)))
        except BaseException:
            self.end(serial)
            raise

    def end(self, serial: int) -> None:
        """Counts the request no longer; a second time changes nothing."""
        self._waiting.pop(serial, None)


class _Counted:
    """The channel of a counted request."""

    def __init__(self, limit: TokenizerLimit, serial: int, channel: ReturnChannel) -> None:
        self._limit = limit
        self._serial = serial
        self._channel = channel

    def put(self, sample: ReturnSample) -> None:
        self._limit.end(self._serial)
        self._channel.put(sample)
