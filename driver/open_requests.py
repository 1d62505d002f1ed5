"""The requests that have not had their last sample.

Every submitted request gets exactly one last sample, whatever happens. Several threads may deliver
it: a prepare thread (a refusal), the summary thread (the end), the thread that stops the driver.
All of them call ``OpenRequests.close``, where a single atomic ``dict.pop`` decides which one
delivers. There is no lock: wherever threads may race, the line is one dict operation.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from driver.adapters.registry import LoadedAdapter
from driver.errors import DriverError, DuplicateRequest
from driver.request import ActiveRequest, ReturnSample, error_sample
from driver.stages.fair_share import Holder
from engine.scheduling.sequence import Sequence

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class OpenRequest:
    """A request from ``submit_request`` to its last sample.

    ``sequence_id`` is its first sequence's name inside the engine. It is never used twice, so a
    late output cannot belong to a newer request with the same ``request_id``. ``abort`` sets
    ``aborted`` *before* it posts AbortSequences: a thread that admits the request after that
    message sees the flag.
    """

    request: ActiveRequest
    sequence_id: str
    aborted: bool = False
    adapter: LoadedAdapter | None = None
    """Its adapter, which it has until its last sample; ``submit_request`` sets it."""
    num_prompt_tokens: int = 0
    """An estimate: the prompt is not tokenised yet."""
    num_samples: int = 1
    """The number of its sequences; a prepare thread sets it before it admits them."""
    sequences: list[Sequence] = field(default_factory=list)
    """Its sequences, once a prepare thread has made them; only the execution thread writes them."""
    received_at: float = field(default_factory=time.monotonic)
    scheduled_at: float | None = None
    """When it was first part of a step; the summary thread writes this and what follows."""
    first_token_at: float | None = None
    last_token_at: float | None = None
    is_counted: bool = False
    """Whether the summary thread counts its samples as they end."""
    num_new_tokens: int = 0
    """Tokens that it has generated, without those that it resumes."""

    @property
    def request_id(self) -> str:
        """The id that the client knows."""
        return self.request.request_id

    @property
    def holder(self) -> Holder:
        """Its client, and that client's user."""
        return self.request.client, self.request.user

    @property
    def source(self) -> tuple[str, str]:
        """Its client, and its id."""
        return self.request.client, self.request.request_id

    @property
    def sequence_ids(self) -> list[str]:
        """The names of its sequences inside the engine, by sample."""
        return [self.sequence_id, *(f"{self.sequence_id}/{index}" for index in range(1, self.num_samples))]


class OpenRequests:
    """The table of open requests; any thread may call any method.

    ``on_end`` is called with every last sample, before its delivery and on the same thread, and
    ``release`` with each request that is open no more.
    """

    def __init__(
        self, on_end: Callable[[OpenRequest, ReturnSample], None], release: Callable[[OpenRequest], None]
    ) -> None:
        self._on_end = on_end
        self._release = release
        self._serials = itertools.count()
        self._by_request_id: dict[str, OpenRequest] = {}
        self._bearers: dict[str, OpenRequest] = {}
        """The same by sequence id: who removes a request here frees its id."""
        self._owed: dict[str, OpenRequest] = {}
        self._when_none: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._owed)

    def by_client(self) -> dict[str, tuple[int, int]]:
        """By client: the number of its open requests, and of those that have no token yet."""
        counts: dict[str, tuple[int, int]] = {}
        for request in list(self._owed.values()):
            client = request.request.client
            num_open, num_waiting = counts.get(client, (0, 0))
            counts[client] = num_open + 1, num_waiting + (request.first_token_at is None)
        return counts

    def all(self) -> list[OpenRequest]:
        """The open requests, oldest first."""
        return list(self._owed.values())

    def find(self, request_id: str) -> OpenRequest | None:
        """The open request of that id, if there is one: the last, if others of it are aborted."""
        return self._by_request_id.get(request_id)

    def add(self, request: ActiveRequest) -> OpenRequest:
        """Opens the request; raises DuplicateRequest if its id is in use.

        That of an aborted request is not: a client may have been told of its end already, or has
        begun anew, and is to hear of the new one alone.
        """
        added = OpenRequest(
            request, f"{request.request_id}#{next(self._serials)}", num_prompt_tokens=request.estimated_tokens
        )
        while (bearer := self._by_request_id.setdefault(request.request_id, added)) is not added:
            if not bearer.aborted:
                raise DuplicateRequest(f"request id {request.request_id!r} is in use until its last sample")
            self._free_id(bearer)
        self._bearers[added.sequence_id] = added
        self._owed[added.sequence_id] = added
        return added

    def when_none(self, call: Callable[[], None]) -> None:
        """Calls ``call`` once, on any thread, when no request is open. None may be added now."""
        self._when_none.append(call)
        self._call_when_none()

    def withdraw(self, request: OpenRequest) -> bool:
        """Removes a request that was just added. False if it has had its last sample meanwhile."""
        removed = self._remove(request)
        self._call_when_none()
        return removed

    def close(self, request: OpenRequest, last: ReturnSample) -> None:
        """Delivers the last sample, unless another thread has delivered one."""
        if not self._remove(request):
            return
        try:
            self._on_end(request, last)
        finally:  # even if on_end or the channel raises: no other thread will do this
            try:
                request.request.channel.put(last)
            finally:
                self._call_when_none()

    def fail(self, request: OpenRequest, error: DriverError) -> None:
        """Closes the request with an error."""
        self.close(request, error_sample(request.request_id, error))

    def fail_all(self, error: DriverError) -> None:
        """Closes every open request with the same error."""
        for request in list(self._owed.values()):
            try:
                self.fail(request, error)
            except Exception:
                logger.exception("the last sample of request %r could not be delivered", request.request_id)

    def _remove(self, request: OpenRequest) -> bool:
        """Frees the request's id. True for one caller only, who must deliver the last sample."""
        if self._owed.pop(request.sequence_id, None) is None:
            return False
        self._free_id(request)
        self._release(request)
        return True

    def _free_id(self, request: OpenRequest) -> None:
        """A second time changes nothing: another request may have the id by then."""
        if self._bearers.pop(request.sequence_id, None) is not None:
            del self._by_request_id[request.request_id]

    def _call_when_none(self) -> None:
        with suppress(IndexError):
            while not self._owed:
                self._when_none.popleft()()
