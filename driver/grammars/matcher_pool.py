"""The workers that advance the matchers of running sequences, and what a request may use of them.

A worker has the matchers of many sequences and answers one frame after the other, so one grammar
could delay or end the others. A request whose grammar is slow or large moves to a worker for heavy
grammars. When a worker ends, which the daemon learns from its socket, the oldest frame without an
answer is what it was working on: the request of that frame is heavy from then on, and fails if it
happens again, unless a SIGKILL shows that something else ended the worker. It looks ahead no more,
as it may have broken where its text never comes. All other matchers start again in another worker,
from the tokens of their constraints; only their masks are late.
"""

import itertools
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol

from driver.grammars.protocol import ADVANCE, BEGIN, END, MEMORY_BYTES, WorkerLimits
from driver.grammars.workers import Answer, Worker, WorkerLost, Workers

logger = logging.getLogger(__name__)

FREE_SECONDS = 0.002
"""Processor time that a token may take: more adds to the request's debt, less reduces it."""
HEAVY_DEBT = 0.1
"""Seconds of debt with which a request becomes heavy."""
MAX_DEBT = 60.0
"""The same with which it fails."""
HEAVY_KIBIBYTES = 128 << 10
MAX_CRASHES, MAX_KILLS = 2, 8
"""Workers that may end while they work for a request: by themselves, and by SIGKILL, which
somebody else sends, but perhaps the kernel for want of memory."""
TOKEN_SECONDS = 1.0
"""Processor time for one token."""
TOO_HARD = (
    f"it takes more than {TOKEN_SECONDS:g} second a token, {MAX_DEBT:g} seconds or {MEMORY_BYTES >> 30} GiB "
    "to tell what may come next: make it simpler"
)
NUM_WORKERS = {False: 2, True: 1}
"""By whether they are for heavy requests."""
LIMITS = {False: WorkerLimits(0.3, 0.3), True: WorkerLimits(6.0, TOKEN_SECONDS)}
"""Likewise; a slow grammar must not delay the quick ones for long before it is found out."""
ENDING_TIMEOUT = 1.0
"""Seconds in which the fork server should report how a worker has ended."""
SUSPECT_LIFETIME = 60.0
"""Seconds after which a suspected request that has not asked again must have ended."""


class Allowance:
    """Worker time used by all samples of one request. One thread writes it."""

    def __init__(self, *, heavy: bool) -> None:
        self.heavy = heavy
        """Whether its matchers run among heavy ones; never unset."""
        self._debt = 0.0
        self._kibibytes = 0
        self._crashes = self._kills = 0

    @property
    def spent(self) -> bool:
        """Whether the request must fail."""
        return self._debt > MAX_DEBT or self._crashes >= MAX_CRASHES or self._kills >= MAX_KILLS

    @property
    def ended_workers(self) -> bool:
        """Whether a worker ended while it worked for the request. Its next matchers look ahead no more: that
        may be why, and its text can do without."""
        return self._crashes + self._kills > 0

    def charge(self, seconds: float, kibibytes: int) -> None:
        """Counts the cost of one answer: processor time, and growth of the worker's peak size."""
        self._debt = max(0.0, self._debt + seconds - FREE_SECONDS)
        self._kibibytes += kibibytes
        if self._debt > HEAVY_DEBT or self._kibibytes > HEAVY_KIBIBYTES:
            self.heavy = True

    def charge_worker(self, *, killed: bool) -> None:
        """Counts a worker that ended while it worked for the request; ``killed`` if by SIGKILL."""
        if killed:
            self._kills += 1
        else:
            self._crashes += 1


class _Ending(NamedTuple):
    process_id: int
    at: float


class MatcherOwner(Protocol):
    """The constraint that a matcher belongs to."""

    allowance: Allowance

    def answered(self, answer: Answer) -> None:
        """Takes the answer to its one frame that had none."""

    def suspend(self) -> None:
        """Ends the matcher; ``allowance`` decides where the next one begins."""

    def lost(self) -> None:
        """The matcher's worker has ended."""


class MatcherPool:
    """Chooses a worker for each matcher. One thread uses it; any thread may ``prepare``."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._shared: dict[bool, list[SharedWorker]] = {False: [], True: []}
        self._preparing = threading.Lock()
        self._prepared: dict[bool, deque[Worker]] = {False: deque(), True: deque()}
        self._numbers = itertools.count(1)
        self._suspects: dict[Allowance, list[_Ending]] = {}
        self._never_readable = os.eventfd(0, os.EFD_CLOEXEC)

    def prepare(self, *, heavy: bool) -> None:
        """Waits for a worker of that kind; raises a DriverError where none can be had."""
        with self._preparing:
            if not self._shared[heavy] and not self._prepared[heavy]:
                self._prepared[heavy].append(self._workers.start(LIMITS[heavy]))

    def suspect(self, allowance: Allowance, process_id: int) -> None:
        """Notes that the worker ended while it worked for this request."""
        allowance.heavy, now = True, time.monotonic()
        forgotten = [suspect for suspect, (*_, last) in self._suspects.items() if now - last.at > SUSPECT_LIFETIME]
        for suspect in forgotten:
            del self._suspects[suspect]
        self._suspects.setdefault(allowance, []).append(_Ending(process_id, now))

    def is_judged(self, allowance: Allowance) -> bool:
        """Whether it is known how each worker ended that the request is suspected of."""
        for ending in self._suspects.pop(allowance, []):
            by = self._workers.signal_of(ending.process_id)
            if by is None and time.monotonic() - ending.at < ENDING_TIMEOUT:
                self._suspects.setdefault(allowance, []).append(ending)
            else:
                allowance.charge_worker(killed=by in (None, signal.SIGKILL))
        return allowance not in self._suspects

    def begin(self, owner: MatcherOwner, beginning: bytes) -> "SharedWorker | None":
        """Starts a matcher, ready with the next answer; None while there is no worker."""
        worker = self._choose(heavy=owner.allowance.heavy)
        if worker is not None:
            worker.begin(next(self._numbers) & 0xFFFFFFFF, owner, beginning)
        return worker

    def fileno(self) -> int:
        """A descriptor that is never readable, for a constraint that has no worker."""
        return self._never_readable

    def close(self) -> None:
        """Closes the descriptor; the workers belong to their starter."""
        os.close(self._never_readable)

    def _choose(self, *, heavy: bool) -> "SharedWorker | None":
        shared = self._shared[heavy]
        with suppress(IndexError):
            while True:
                shared.append(SharedWorker(self._prepared[heavy].popleft(), shared, self.suspect, heavy=heavy))
        if len(shared) < NUM_WORKERS[heavy] and all(map(len, shared)):
            worker = self._workers.start_at_once(LIMITS[heavy])
            if worker is not None:
                shared.append(SharedWorker(worker, shared, self.suspect, heavy=heavy))
        return min(shared, key=len, default=None)


class SharedWorker:
    """One worker of the pool, and the matchers that it has."""

    def __init__(
        self, worker: Worker, siblings: "list[SharedWorker]", suspect: Callable[[Allowance, int], None], *, heavy: bool
    ) -> None:
        self._worker = worker
        self._siblings = siblings
        self._suspect = suspect
        self._heavy = heavy
        self._numbers: dict[MatcherOwner, int] = {}
        self._owners: dict[int, MatcherOwner] = {}
        self._unanswered: dict[int, tuple[int, Allowance]] = {}
        """Frames without an answer, in order: kind and payer by number of the matcher."""

    def __len__(self) -> int:
        return len(self._owners)

    def begin(self, number: int, owner: MatcherOwner, beginning: bytes) -> None:
        """Starts one more matcher, at ``beginning``, the body of BEGIN."""
        self._numbers[owner] = number
        self._owners[number] = owner
        self.send(owner, BEGIN, beginning)

    def send(self, owner: MatcherOwner, kind: int, body: bytes) -> None:
        """Sends a frame that gets an answer; returns at once."""
        number = self._numbers[owner]
        if self._worker.send(number, kind, body):
            self._unanswered[number] = kind, owner.allowance

    def end(self, owner: MatcherOwner) -> None:
        """Drops its matcher."""
        number = self._numbers.pop(owner)
        del self._owners[number]
        self._worker.send(number, END)

    def receive(self) -> None:
        """Delivers the answers that have come, to all owners."""
        try:
            answers = self._worker.receive()
        except WorkerLost:
            self._lose()
            return
        for answer in answers:
            kind, allowance = self._unanswered.pop(answer.number)
            # A matcher that starts again because another's worker ended does not pay for that.
            allowance.charge(answer.seconds if kind == ADVANCE else 0.0, answer.grown)
            owner = self._owners.get(answer.number)
            if owner is not None:
                owner.answered(answer)
                if allowance.spent or allowance.heavy > self._heavy:
                    owner.suspend()

    def fileno(self) -> int:
        """Readable when an answer has come."""
        return self._worker.fileno()

    @property
    def process_id(self) -> int | None:
        """The worker's, if it is ready."""
        return self._worker.process_id

    def _lose(self) -> None:
        self._siblings.remove(self)
        process_id = self._worker.process_id
        if process_id is not None:
            logger.warning(
                "worker process %d has ended; its %d sequences with a grammar continue in another",
                process_id,
                len(self),
            )
            for _, allowance in itertools.islice(self._unanswered.values(), 1):
                self._suspect(allowance, process_id)
        self._worker.close()
        for owner in list(self._owners.values()):
            owner.lost()
