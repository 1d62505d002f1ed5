"""How many requests may wait, whose they may be, and when to try again."""

import itertools
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from driver.errors import Overloaded
from driver.open_requests import OpenRequest
from driver.request import ReturnChannel, ReturnSample, TokenizerRequest
from driver.stages.fair_share import Holder, Share, share
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


class TokenizerLimit:
    """Counts those that have had no answer, by whose they are. Any thread may call anything: see OpenRequests."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._serials = itertools.count()
        self._waiting: dict[int, Holder] = {}

    def submit(self, request: TokenizerRequest, submit: Callable[[TokenizerRequest], None]) -> None:
        """Submits the request, which counts until it is answered; raises Overloaded where it is one too many."""
        holder = request.client, request.user
        found = share(self._max_requests, 1, holder, [(other, 1) for other in list(self._waiting.values())])
        if not found.fits:
            raise Overloaded(f"{found.total:,} tokenizer requests wait already, {found.own:,} of them yours: try later")
        serial = next(self._serials)
        self._waiting[serial] = holder
        try:
            submit(replace(request, channel=_Counted(self, serial, request.channel)))
        except BaseException:
            self.end(serial)
            raise

    def end(self, serial: int) -> None:
        """It has been answered, or will not be; a second time changes nothing."""
        self._waiting.pop(serial, None)


class _Counted:
    """The channel of a request that counts."""

    def __init__(self, limit: TokenizerLimit, serial: int, channel: ReturnChannel) -> None:
        self._limit = limit
        self._serial = serial
        self._channel = channel

    def put(self, sample: ReturnSample) -> None:
        self._limit.end(self._serial)
        self._channel.put(sample)
