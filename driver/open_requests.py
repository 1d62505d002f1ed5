"""The requests that are owed a last sample.

Every submitted request gets exactly one last sample, whatever happens. Several threads may want to give it: prepare
inputs (a refusal), the summary thread (the end), whoever stops the driver. So the last sample has one door,
``OpenRequests.close``, and a single atomic ``dict.pop`` behind it decides who passes. There is no lock: each line
that more than one thread may race on is one dict operation.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from driver.errors import DriverError, DuplicateRequest
from driver.request import ActiveRequest, RequestError, ReturnSample
from driver.stages.fair_share import Holder

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class OpenRequest:
    """A request from ``submit_request`` to its last sample.

    ``sequence_id`` is its first sequence's name inside the engine, never used twice, so that nothing late can be taken for a newer
    request under the same ``request_id``. ``aborted`` is set once, by ``abort``, *before* it posts AbortSequences: whoever
    admits the request after that AbortSequences went by sees the flag.
    """

    request: ActiveRequest
    sequence_id: str
    aborted: bool = False
    num_prompt_tokens: int = 0
    """About, before it is tokenised."""
    num_samples: int = 1
    """How many sequences it is served by; prepare inputs says so before they are admitted."""
    received_at: float = field(default_factory=time.monotonic)
    scheduled_at: float | None = None
    """When a step was first planned with it; this and the next the summary thread writes, with the first token."""
    first_token_at: float | None = None

    @property
    def request_id(self) -> str:
        """The id that the client knows."""
        return self.request.request_id

    @property
    def holder(self) -> Holder:
        """Whose it is: its client, and that client's user."""
        return self.request.client, self.request.user

    @property
    def source(self) -> tuple[str, str]:
        """Whose it is, and its id."""
        return self.request.client, self.request.request_id

    @property
    def sequence_ids(self) -> list[str]:
        """The names of its sequences inside the engine, by sample."""
        return [self.sequence_id, *(f"{self.sequence_id}/{index}" for index in range(1, self.num_samples))]


class OpenRequests:
    """The table of open requests; any thread may call anything.

    ``on_end`` hears of every last sample, before it is delivered and on the thread that delivers it.
    """

    def __init__(self, on_end: Callable[[OpenRequest, ReturnSample], None] | None = None) -> None:
        self._on_end = on_end
        self._serials = itertools.count()
        self._by_request_id: dict[str, OpenRequest] = {}
        self._owed: dict[str, OpenRequest] = {}
        self._when_none: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._owed)

    def by_client(self) -> dict[str, tuple[int, int]]:
        """Of each client that has any: its open requests, and those of them that have no token yet."""
        counts: dict[str, tuple[int, int]] = {}
        for request in list(self._owed.values()):
            client = request.request.client
            num_open, num_waiting = counts.get(client, (0, 0))
            counts[client] = num_open + 1, num_waiting + (request.first_token_at is None)
        return counts

    def waiting(self) -> list[OpenRequest]:
        """Those that have no token yet."""
        return [request for request in list(self._owed.values()) if request.first_token_at is None]

    def find(self, request_id: str) -> OpenRequest | None:
        """The open request of that id, if there is one."""
        return self._by_request_id.get(request_id)

    def add(self, request: ActiveRequest) -> OpenRequest:
        """Opens the request; raises DuplicateRequest if its id is in use."""
        added = OpenRequest(
            request, f"{request.request_id}#{next(self._serials)}", num_prompt_tokens=request.estimated_tokens
        )
        if self._by_request_id.setdefault(request.request_id, added) is not added:
            raise DuplicateRequest(f"request id {request.request_id!r} is in use until its last sample")
        self._owed[added.sequence_id] = added
        return added

    def when_none(self, tell: Callable[[], None]) -> None:
        """Calls this once, on whatever thread, when every open request has had its last sample. Nothing may open then."""
        self._when_none.append(tell)
        self._tell()

    def withdraw(self, request: OpenRequest) -> bool:
        """Takes back what was just added. False if it has had its last sample meanwhile."""
        removed = self._remove(request)
        self._tell()
        return removed

    def close(self, request: OpenRequest, last: ReturnSample) -> None:
        """Delivers the last sample, unless somebody else has."""
        if not self._remove(request):
            return
        try:
            if self._on_end is not None:
                self._on_end(request, last)
        finally:  # whatever it raises, and the channel: nobody else will tell the client, or those who wait for the last
            try:
                request.request.channel.put(last)
            finally:
                self._tell()

    def fail(self, request: OpenRequest, error: DriverError) -> None:
        """Closes the request with an error."""
        why = RequestError(error.code, str(error))
        self.close(request, ReturnSample(request_id=request.request_id, error=why))

    def fail_all(self, error: DriverError) -> None:
        """Closes every open request with the same error."""
        for request in list(self._owed.values()):
            try:
                self.fail(request, error)
            except Exception:
                logger.exception("request %r could not be told its end", request.request_id)

    def _remove(self, request: OpenRequest) -> bool:
        """Frees the request's id. True for one caller only: the one who now owes the client its end."""
        if self._owed.pop(request.sequence_id, None) is None:
            return False
        del self._by_request_id[request.request_id]
        return True

    def _tell(self) -> None:
        with suppress(IndexError):
            while not self._owed:
                self._when_none.popleft()()
