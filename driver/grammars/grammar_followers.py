"""The workers that follow the tokens of running sequences, and which of them follows which.

Each has the matchers of many sequences, and answers one after the other. What one grammar can do to the others is
bounded: one that is measured slow, or large, is followed among its like; and where a worker ends, which can only be known
by its socket, the oldest frame without an answer is what it was at. The request of that frame is heavy from then on, and
ends if it happens again, unless a SIGKILL shows that it was another's doing. The matchers of all others begin anew in another worker, from the tokens that their constraints
know, and nobody is told but by a mask that is late.
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

from driver.grammars.grammar_allowance import TOKEN_SECONDS, Allowance
from driver.grammars.grammar_protocol import ADVANCE, BEGIN, END, WorkerLimits
from driver.grammars.grammar_worker import Answer, Worker, WorkerLost
from driver.grammars.grammar_worker_source import WorkerSource

logger = logging.getLogger(__name__)

NUM_WORKERS = {False: 2, True: 1}
"""By whether they are for the heavy ones."""
LIMITS = {False: WorkerLimits(0.3, 0.3), True: WorkerLimits(6.0, TOKEN_SECONDS)}
"""Likewise: a quick worker must not be held up for long by what turns out not to be quick."""


VERDICT_PATIENCE = 1.0
"""Seconds in which it should be known what has ended a worker."""

CASE_LIFETIME = 60.0
"""Seconds after which a request that does not ask has ended."""


class _Death(NamedTuple):
    process_id: int
    at: float


class Followed(Protocol):
    """What a worker's answers are for."""

    allowance: Allowance

    def answered(self, answer: Answer) -> None:
        """To the one frame that is without an answer."""

    def suspend(self) -> None:
        """Give the matcher up; the next one begins where the allowance says."""

    def lost(self) -> None:
        """Its matcher is gone."""


class Followers:
    """Finds each matcher a place. One thread uses it; another may ``prepare``."""

    def __init__(self, source: WorkerSource) -> None:
        self._source = source
        self._followers: dict[bool, list[Follower]] = {False: [], True: []}
        self._preparing = threading.Lock()
        self._prepared: dict[bool, deque[Worker]] = {False: deque(), True: deque()}
        self._numbers = itertools.count(1)
        self._suspects: dict[Allowance, list[_Death]] = {}
        self._nothing = os.eventfd(0, os.EFD_CLOEXEC)

    def prepare(self, *, heavy: bool) -> None:
        """See to it that there is a worker of that kind; waits, and raises a DriverError where none can be had."""
        with self._preparing:
            if not self._followers[heavy] and not self._prepared[heavy]:
                self._prepared[heavy].append(self._source.worker(LIMITS[heavy]))

    def suspect(self, allowance: Allowance, process_id: int) -> None:
        """That worker has ended while it worked for this one."""
        allowance.heavy, now = True, time.monotonic()
        forgotten = [suspect for suspect, (*_, last) in self._suspects.items() if now - last.at > CASE_LIFETIME]
        for suspect in forgotten:  # nobody follows it any more
            del self._suspects[suspect]
        self._suspects.setdefault(allowance, []).append(_Death(process_id, now))

    def is_judged(self, allowance: Allowance) -> bool:
        """Whether it has been found out of all workers that ended under it what ended them, or that nobody will know."""
        for death in self._suspects.pop(allowance, []):
            by = self._source.ended_by(death.process_id)
            if by is None and time.monotonic() - death.at < VERDICT_PATIENCE:
                self._suspects.setdefault(allowance, []).append(death)
            else:
                allowance.blame(accident=by in (None, signal.SIGKILL))
        return allowance not in self._suspects

    def begin(self, followed: Followed, beginning: bytes) -> "Follower | None":
        """Where a matcher begins, by the next answer; None where there is no worker at the moment."""
        follower = self._place(heavy=followed.allowance.heavy)
        if follower is not None:
            follower.begin(next(self._numbers) & 0xFFFFFFFF, followed, beginning)
        return follower

    def fileno(self) -> int:
        """Never readable: for who waits for a worker."""
        return self._nothing

    def close(self) -> None:
        """Of the workers themselves the source knows."""
        os.close(self._nothing)

    def _place(self, *, heavy: bool) -> "Follower | None":
        followers = self._followers[heavy]
        with suppress(IndexError):
            while True:
                followers.append(Follower(self._prepared[heavy].popleft(), followers, self.suspect, heavy=heavy))
        if len(followers) < NUM_WORKERS[heavy] and all(map(len, followers)):
            worker = self._source.worker_at_once(LIMITS[heavy])
            if worker is not None:
                followers.append(Follower(worker, followers, self.suspect, heavy=heavy))
        return min(followers, key=len, default=None)


class Follower:
    """One of the workers, and whose matchers it has."""

    def __init__(
        self, worker: Worker, registry: "list[Follower]", suspect: Callable[[Allowance, int], None], *, heavy: bool
    ) -> None:
        self._worker = worker
        self._heavy = heavy
        self._registry = registry
        self._suspect = suspect
        self._numbers: dict[Followed, int] = {}
        self._followed: dict[int, Followed] = {}
        self._asked: dict[int, tuple[int, Allowance]] = {}
        """Frames without an answer, by the number of a matcher, in the worker's order: kind, and who pays."""

    def __len__(self) -> int:
        return len(self._followed)

    def begin(self, number: int, followed: Followed, beginning: bytes) -> None:
        """Have one more matcher, at the start that BEGIN describes."""
        self._numbers[followed] = number
        self._followed[number] = followed
        self.ask(followed, BEGIN, beginning)

    def ask(self, followed: Followed, kind: int, body: bytes) -> None:
        """Send a frame that has an answer; returns at once."""
        number = self._numbers[followed]
        if self._worker.send(number, kind, body):
            self._asked[number] = kind, followed.allowance

    def end(self, followed: Followed) -> None:
        """Its matcher is needed no more."""
        number = self._numbers.pop(followed)
        del self._followed[number]
        self._worker.send(number, END)

    def hear(self) -> None:
        """Hand on the answers that are there, whosever they are."""
        try:
            answers = self._worker.receive()
        except WorkerLost:
            self._lose()
            return
        for answer in answers:
            kind, allowance = self._asked.pop(answer.number)
            # Who begins anew, for another's fault, is not to pay for that.
            allowance.charge(answer.seconds if kind == ADVANCE else 0.0, answer.grown)
            followed = self._followed.get(answer.number)
            if followed is not None:
                followed.answered(answer)
                if allowance.spent or allowance.heavy > self._heavy:
                    followed.suspend()

    def fileno(self) -> int:
        """Readable when an answer is there."""
        return self._worker.fileno()

    @property
    def process_id(self) -> int | None:
        """Of the worker, if it is ready."""
        return self._worker.process_id

    def _lose(self) -> None:
        self._registry.remove(self)
        if self._worker.process_id is not None:
            logger.warning(
                "process %d, which followed %d texts with a grammar, has ended: they go on in another",
                self._worker.process_id, len(self),
            )  # fmt: skip
            for _, allowance in itertools.islice(self._asked.values(), 1):
                self._suspect(allowance, self._worker.process_id)
        self._worker.close()
        for followed in list(self._followed.values()):
            followed.lost()
