"""The limit of waiting requests, each client's share of it, and the retry delay."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from driver.errors import Overloaded
from driver.open_requests import OpenRequest
from driver.request import ReturnSample, TokenizerRequest
from driver.stages.fair_share import Holdings, Share
from engine.metrics.engine_stats import EngineStats

RATE_WINDOW = 5.0
"""Seconds over which the rate of computed tokens is measured, and up to as many before them."""
LEAST_DELAY, MOST_DELAY = 0.5, 60.0
"""Seconds; no longer, as the rate may change."""


class LoadLimit:
    """Refuses requests while ``max_requests`` wait, or ``max_tokens`` of their prompts. For any thread.

    A request waits until its first token; one with several samples counts once. A client with more
    than its part of what waits is refused first (driver/stages/fair_share.py). What a request takes
    does not grow with the number of those that wait: else many of one client would take the time
    of others. ``stats`` gives the engine's latest snapshot.
    """

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        stats: Callable[[], EngineStats],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._stats = stats
        self._clock = clock
        self._seen_at, self._seen = clock(), 0
        """When it last changed who waits, and the tokens computed by then."""
        self._seconds, self._computed = 0.0, 0
        """In which requests waited, and the tokens computed in them: an engine that idles, or
        decodes a few sequences, says nothing about how fast it is."""
        self._now = self._before = (0.0, 0)
        """Both at the start of this window and the one before."""
        self._counting = threading.Lock()
        self._waiting: set[OpenRequest] = set()
        self._requests = Holdings()
        self._tokens = Holdings()
        """Of the prompts of those that wait."""

    def enter(self, new: OpenRequest) -> None:
        """Counts the new request until ``leave``; raises Overloaded if it is one too many.

        If nothing waits a request may have any length; the first one of a client may fill the
        rest.
        """
        with self._counting:
            self._measure()
            self._check(new)
            self._waiting.add(new)
            self._requests.take(1, new.holder)
            self._tokens.take(new.num_prompt_tokens, new.holder)

    def leave(self, request: OpenRequest) -> None:
        """The request waits no longer; one that is not counted changes nothing."""
        with self._counting:
            if request in self._waiting:
                self._measure()
                self._waiting.remove(request)
                self._requests.give_back(1, request.holder)
                self._tokens.give_back(request.num_prompt_tokens, request.holder)

    def _check(self, new: OpenRequest) -> None:
        tokens, requests = self._tokens.total, self._requests.share(self._max_requests, 1, new.holder)
        if not requests.fits:
            raise self._overloaded(_too_many(requests), tokens)
        prompts = self._tokens.share(self._max_tokens, new.num_prompt_tokens, new.holder)
        has_room = tokens + new.num_prompt_tokens <= self._max_tokens
        if not self._waiting or prompts.fits or (not prompts.own and has_room):
            return
        why = f"prompts of {tokens:,} tokens wait already, and {self._max_tokens:,} may"
        if has_room:
            why = f"your prompts of {prompts.own:,} tokens wait already, and others' too: {prompts.part:,} is your part"
        raise self._overloaded(why, tokens)

    def _overloaded(self, why: str, tokens: int) -> Overloaded:
        delay = self._delay(tokens)
        return Overloaded(f"{why}: try again in {delay:.1f} s", retry_after_s=delay)

    def _measure(self) -> None:
        """To be called before it changes who waits."""
        now, computed = self._clock(), self._stats().tokens
        seconds, tokens = now - self._seen_at, computed - self._seen
        is_paused = not tokens and seconds >= RATE_WINDOW  # by an operator: that is no slow engine
        if self._waiting and not is_paused:
            self._seconds += seconds
            self._computed += tokens
        self._seen_at, self._seen = now, computed
        if self._seconds - self._now[0] >= RATE_WINDOW:
            self._before, self._now = self._now, (self._seconds, self._computed)

    def _delay(self, tokens: int) -> float:
        """Seconds until about half of the waiting prompts are computed, at the recent rate; as few
        as may be before there is one."""
        seconds, computed = self._seconds - self._before[0], self._computed - self._before[1]
        if seconds < LEAST_DELAY:
            return LEAST_DELAY
        rate = max(computed / seconds, 1.0)
        return round(min(MOST_DELAY, max(LEAST_DELAY, tokens / 2 / rate)), 1)


def _too_many(requests: Share) -> str:
    if requests.own == requests.total or requests.own < requests.part:
        return f"{requests.total:,} requests wait already"
    return f"{requests.own:,} requests of yours wait already, and others' too: {requests.part:,} is your part"


class TokenizerLimit:
    """Limits tokenizer requests without an answer, by fair shares. For any thread."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._counting = threading.Lock()
        self._waiting: set[_Counted] = set()
        self._holdings = Holdings()

    def submit(self, request: TokenizerRequest, submit: Callable[[TokenizerRequest], None]) -> None:
        """Submits the request, which counts until it is answered; raises Overloaded."""
        counted = _Counted(self, request)
        with self._counting:
            requests = self._holdings.share(self._max_requests, 1, request.holder)
            if not requests.fits:
                raise Overloaded(
                    f"{requests.total:,} tokenizer requests wait already, {requests.own:,} of them yours: try later"
                )
            self._waiting.add(counted)
            self._holdings.take(1, request.holder)
        try:
            submit(replace(request, channel=counted))
        except BaseException:
            self.end(counted)
            raise

    def end(self, counted: "_Counted") -> None:
        """The request counts no longer; a second time changes nothing."""
        with self._counting:
            if counted in self._waiting:
                self._waiting.remove(counted)
                self._holdings.give_back(1, counted.request.holder)


class _Counted:
    """The channel of a counted request, which counts until it is first put into."""

    def __init__(self, limit: TokenizerLimit, request: TokenizerRequest) -> None:
        self.request = request
        self._limit = limit

    def put(self, sample: ReturnSample) -> None:
        self._limit.end(self)
        self.request.channel.put(sample)
