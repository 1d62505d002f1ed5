"""Whether the driver takes new requests: an operator may drain it, put it to sleep and wake it."""

import itertools
import threading
from collections.abc import Callable

from driver.errors import Asleep, Draining, InvalidRequest
from driver.open_requests import OpenRequests
from driver.operations.engine_changes import KEEPS
from driver.operations.weight_updates import RereadWeights
from driver.request import Notifying, QueueChannel, ReturnChannel
from driver.thread_messages import PauseEngine, ResumeEngine, SleepEngine, WakeEngine
from engine.metrics.engine_stats import EngineStats


class Availability:
    """The refusal of new requests, if any. Control threads add to it, and the execution thread
    takes a sleep from it when the engine has woken; a driver without weights stays asleep."""

    def __init__(
        self,
        open_requests: OpenRequests,
        post: Callable[[SleepEngine | WakeEngine | PauseEngine | ResumeEngine], None],
        stats: Callable[[], EngineStats],
        is_paused: Callable[[], bool],
        read: Callable[[RereadWeights], None],
    ) -> None:
        self._open_requests = open_requests
        self._post = post
        self._stats = stats
        self._is_paused = is_paused
        self._read = read
        self._deciding = threading.Lock()  # whether it pauses or drains
        self._draining: Draining | None = None
        self._sleeps: dict[int, SleepEngine] = {}
        """By number, those that have not been woken. Each change of it is one atomic operation."""
        self._woken: list[int] = []
        """Those of ``_sleeps`` that end as soon as there are pages and weights."""
        self._serials = itertools.count()

    def check(self) -> None:
        """Raises Draining or Asleep if new requests are refused."""
        self.check_not_draining()
        if self._sleeps and self._stats().awaits_weights:
            raise Asleep(
                "the daemon is asleep, and has no weights until its operator sends all of them: try again then"
            )
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
        """Refuses new requests for good; calls ``when_done``, on any thread, when none is open.

        A paused engine runs on: requests that it keeps would not end before.
        """
        with self._deciding:
            self._draining = Draining(
                "the daemon finishes what it has and ends: try again when it has been started anew"
            )
            self._post(ResumeEngine("drain", QueueChannel()))
        self._open_requests.when_none(when_done)

    def pause(self, message: PauseEngine) -> None:
        """Has the engine pause. Raises Draining."""
        with self._deciding:
            self.check_not_draining()
            self._post(message)

    def sleep(self, request_id: str, channel: ReturnChannel, level: int) -> None:
        """Refuses new requests; the engine sleeps once no request is open. Raises Draining, and
        InvalidRequest if those that are open would never end."""
        self.check_not_draining()
        number, message = next(self._serials), SleepEngine(request_id, channel, level)
        self._sleeps[number] = message  # first: no request is added any more
        if self._is_paused() and len(self._open_requests):
            self._end([number])
            raise InvalidRequest(f"{KEEPS}resume it, or pause it in mode abort, and send it to sleep then")
        self._open_requests.when_none(lambda: self._post(message))

    def wake(self, request_id: str, channel: ReturnChannel, *, weights: bool, pages: bool) -> None:
        """Has the engine wake, if it sleeps, and takes new requests when it has pages and weights.

        Raises Draining.
        """
        self.check_not_draining()
        ended = list(self._sleeps)
        for sleep in list(self._sleeps.values()):
            sleep.cancelled = True

        keeps_weights = self._stats().has_weights and all(sleep.level == 1 for sleep in self._sleeps.values())

        def woken() -> None:
            self._woken = ended
            self.updated()

        self._post(WakeEngine(request_id, Notifying(channel, woken), self._read, weights, pages))
        if keeps_weights and pages:  # nothing can fail, and every Admit is behind the WakeEngine in the inbox
            self._end(ended)

    def updated(self) -> None:
        """Takes new requests if a wake has waited for weights alone, and they are there now."""
        stats = self._stats()
        if stats.has_pages and stats.has_weights:
            self._end(self._woken)

    def check_not_draining(self) -> None:
        """Raises Draining."""
        if self._draining is not None:
            raise self._draining

    def _end(self, sleeps: list[int]) -> None:
        for number in sleeps:
            self._sleeps.pop(number, None)
