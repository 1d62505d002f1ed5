"""Whether the driver takes new requests: an operator may drain it, put it to sleep and wake it."""

import itertools
from collections.abc import Callable

from driver.errors import Asleep, Draining
from driver.open_requests import OpenRequests
from driver.request import ReturnChannel, ReturnSample
from driver.thread_messages import SleepEngine, WakeEngine


class Availability:
    """The refusal of new requests, if any. Control threads add to it, and the execution thread
    takes a sleep from it when the engine has woken; a driver without weights stays asleep."""

    def __init__(
        self,
        open_requests: OpenRequests,
        post: Callable[[SleepEngine | WakeEngine], None],
        has_weights: Callable[[], bool],
    ) -> None:
        self._open_requests = open_requests
        self._post = post
        self._has_weights = has_weights
        self._draining: Draining | None = None
        self._sleeps: dict[int, SleepEngine] = {}
        """By number, those that have not been woken. Each change of it is one atomic operation."""
        self._serials = itertools.count()
        self._has_pages = True

    def check(self) -> None:
        """Raises Draining or Asleep if new requests are refused."""
        self.check_not_draining()
        if self._sleeps:
            raise Asleep("the daemon is asleep: try again when it has been woken, with `odriver wake`")

    def state(self, engine_state: str, *, engine_sleeps: bool) -> str:
        """One of STATES (driver/status.py); ``engine_state`` is one while nothing is refused."""
        if self._draining is not None:
            return "draining"
        if self._sleeps:
            return "asleep" if engine_sleeps else "falling asleep"
        return engine_state

    def drain(self, when_done: Callable[[], None]) -> None:
        """Refuses new requests for good; calls ``when_done``, on any thread, when none is open."""
        self._draining = Draining("the daemon finishes what it has and ends: try again when it has been started anew")
        self._open_requests.when_none(when_done)

    def sleep(self, request_id: str, channel: ReturnChannel, level: int = 1) -> None:
        """Refuses new requests; the engine sleeps once no request is open. Raises Draining."""
        self.check_not_draining()
        self._has_pages = False
        self._sleeps[next(self._serials)] = message = SleepEngine(request_id, channel, level)
        self._open_requests.when_none(lambda: self._post(message))

    def wake(self, request_id: str, channel: ReturnChannel, *, weights: bool = True, pages: bool = True) -> None:
        """Has the engine wake, if it sleeps, and takes new requests when it has pages and weights.

        Raises Draining.
        """
        self.check_not_draining()
        self._has_pages = self._has_pages or pages
        ended = list(self._sleeps)
        for sleep in list(self._sleeps.values()):
            sleep.cancelled = True

        keeps_weights = self._has_weights() and all(sleep.level == 1 for sleep in self._sleeps.values())

        def woken() -> None:
            if self._has_pages and self._has_weights():
                for number in ended:
                    self._sleeps.pop(number, None)

        self._post(WakeEngine(request_id, _Woken(channel, woken), weights, pages))
        if keeps_weights:  # at once: nothing can fail, and every Admit is behind the WakeEngine in the inbox
            woken()

    def check_not_draining(self) -> None:
        """Raises Draining."""
        if self._draining is not None:
            raise self._draining


class _Woken:
    """A channel that calls ``woken`` before an answer that is no error."""

    def __init__(self, channel: ReturnChannel, woken: Callable[[], None]) -> None:
        self._channel = channel
        self._woken = woken

    def put(self, sample: ReturnSample) -> None:
        """See ReturnChannel."""
        if sample.error is None:
            self._woken()
        self._channel.put(sample)
