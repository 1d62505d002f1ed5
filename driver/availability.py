"""Whether the driver takes new requests: an operator may drain it, put it to sleep and wake it."""

from collections.abc import Callable

from driver.errors import Asleep, Draining
from driver.open_requests import OpenRequests
from driver.request import ReturnChannel
from driver.thread_messages import SleepEngine, WakeEngine


class Availability:
    """The refusal of new requests, if any. The control thread and the daemon's write it."""

    def __init__(self, open_requests: OpenRequests, post: Callable[[SleepEngine | WakeEngine], None]) -> None:
        self._open_requests = open_requests
        self._post = post
        self._refusal: Draining | Asleep | None = None
        self._sleep: SleepEngine | None = None

    def check(self) -> None:
        """Raises Draining or Asleep if new requests are refused."""
        if self._refusal is not None:
            raise self._refusal

    def state(self, *, engine_sleeps: bool) -> str:
        """One of STATES (driver/status.py)."""
        match self._refusal:
            case Draining():
                return "draining"
            case Asleep():
                return "asleep" if engine_sleeps else "falling asleep"
        return "serving"

    def drain(self, when_done: Callable[[], None]) -> None:
        """Refuses new requests for good; calls ``when_done``, on any thread, when none is open."""
        self._refusal = Draining("the daemon finishes what it has and ends: try again when it has been started anew")
        self._open_requests.when_none(when_done)

    def sleep(self, request_id: str, channel: ReturnChannel) -> None:
        """Refuses new requests; the engine sleeps once no request is open. Raises Draining."""
        self.check_not_draining()
        self._refusal = Asleep("the daemon is asleep: try again when it has been woken, with `odriver wake`")
        self._sleep = message = SleepEngine(request_id, channel)
        self._open_requests.when_none(lambda: self._post(message))

    def wake(self, request_id: str, channel: ReturnChannel) -> None:
        """Has the engine wake, if it sleeps, and takes new requests. Raises Draining."""
        self.check_not_draining()
        if self._sleep is not None:
            self._sleep.cancelled = True
        self._post(WakeEngine(request_id, channel))
        # at once: every Admit from now on is behind the WakeEngine in the inbox
        self._refusal = None

    def check_not_draining(self) -> None:
        """Raises Draining."""
        if isinstance(self._refusal, Draining):
            raise self._refusal
