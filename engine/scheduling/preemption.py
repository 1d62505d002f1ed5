"""Preemption: running sequences give slot and pages to others, wait again, and go on later."""

import logging
import math
from collections import Counter, defaultdict
from enum import StrEnum

import msgspec

from engine.scheduling.running_sequences import RunningSequences
from engine.scheduling.sequence import Sequence, SequenceStatus
from engine.scheduling.waiting.waiting_queue import WaitingQueue

logger = logging.getLogger(__name__)

WARNING_INTERVAL = 60.0
"""Seconds between two warnings that pages do not suffice."""


class Cause(StrEnum):
    """What the sequence was preempted for."""

    PAGES = "pages"
    """A more important sequence that found no free page for its next token."""
    PRIORITY = "priority"
    """One of a priority lower by the threshold or more."""
    FAIRNESS = "fairness"
    """A client that had no slot while another had more than its share."""
    CACHE_LOST = "cache_lost"
    """Nobody: the memory behind the pages was lost, or the logits to sample from."""


_CAUSES = {
    Cause.PAGES: "no page was free for a more important one",
    Cause.PRIORITY: "for one of a much lower priority",
    Cause.FAIRNESS: "for a client that had nothing running",
    Cause.CACHE_LOST: "the cache was lost",
}


class Preemption(msgspec.Struct, frozen=True):
    """What a sequence lost."""

    request_id: str
    client: str
    cause: Cause
    num_tokens: int
    """Its known tokens: prefix hits later, or computed again."""
    num_pages: int
    """Pages that it gave up."""
    before_all: bool
    """Whether it waits in front of all others, and not of its client's alone."""


class Preempter:
    """Chooses the sequences that yield to waiting ones, and preempts.

    A sequence yields to one of a ``priority`` lower by ``threshold`` or more. If ``fair``, it also
    yields to one of a client that runs nothing, if its own client has more than an equal
    share.
    """

    def __init__(self, running: RunningSequences, waiting: WaitingQueue, *, threshold: int, fair: bool) -> None:
        self._running = running
        self._waiting = waiting
        self._threshold = threshold
        self._fair = fair
        self.counts: Counter[str] = Counter()
        """Preemptions so far by cause."""
        self.events: list[Preemption] = []
        """Preemptions that have not been taken."""

    def take_events(self) -> list[Preemption]:
        """The preemptions since the last call."""
        events, self.events = self.events, []
        return events

    def least_important(self) -> Sequence:
        """The running sequence that yields first where pages run out."""
        return self._running.least_important(fair=self._fair)

    def victim(self, sequence: Sequence) -> tuple[Sequence, Cause] | None:
        """The running sequence that yields to this waiting one, and why; None if none does."""
        if not self._running:
            return None
        if self._some_yield(sequence):
            return self.least_important(), Cause.PRIORITY
        if self._fair:
            victim = next(self._running.over_their_share(sequence.client, sequence.params.priority), None)
            if victim is not None:
                return victim, Cause.FAIRNESS
        return None

    def victims(self, sequence: Sequence) -> list[Sequence]:
        """All that yield to this one, one after the other, as long as it has not started."""
        found = [one for one in self._running if self._yields(one, sequence)] if self._some_yield(sequence) else []
        if self._fair:
            found += self._running.over_their_share(sequence.client, sequence.params.priority, list(found))
        return found

    def victims_of_adapter(self, sequence: Sequence) -> list[Sequence]:
        """The fewest that have a slot of adapters to themselves and all yield to this one by priority; none if some of
        each slot do not."""
        by_slot: defaultdict[int, list[Sequence]] = defaultdict(list)
        for running in self._running:
            if running.adapter_id:
                by_slot[running.adapter_slot].append(running)
        yielding = [of_slot for of_slot in by_slot.values() if all(self._yields(one, sequence) for one in of_slot)]
        return min(yielding, key=len, default=[])

    def _some_yield(self, sequence: Sequence) -> bool:
        """Whether any running one yields to this one by priority."""
        return bool(self._running) and self._running.highest_priority - sequence.params.priority >= self._threshold

    def _yields(self, running: Sequence, sequence: Sequence) -> bool:
        """Whether it yields to this one by priority."""
        return running.params.priority - sequence.params.priority >= self._threshold

    def preempt(self, sequence: Sequence, cause: Cause, *, before_all: bool = True) -> None:
        """Take slot and pages from a running sequence that is not in the step being planned.

        It waits before all of its priority, or only before its own client's. Tokens that it has in
        flight are kept when they land, unless it has ended by then.
        """
        event = Preemption(
            sequence.request_id, sequence.client, cause, sequence.num_tokens, sequence.num_pages, before_all
        )  # fmt: skip
        self.events.append(event)
        self.counts[cause] += 1
        self._waiting.charge_output(sequence)
        self._running.remove(sequence)
        sequence.status = SequenceStatus.WAITING
        self._waiting.add_preempted(sequence, before_all=before_all)
        if sequence.constraint is not None and not sequence.num_in_flight:
            sequence.constraint.suspend()


class PreemptionLog:
    """Logs each preemption, and at most once a minute what to do where pages do not suffice."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._pool = f"{num_pages:,} pages of {page_size} tokens"
        self._warned_at = -math.inf
        self._shortages = 0

    def tell(self, events: list[Preemption], num_running: int, now: float) -> None:
        """Log these events, at ``now`` in seconds."""
        for event in events:
            logger.info(
                "request %s was preempted (%s): it gives up %d pages, waits in front of %s, and goes on from what the "
                "cache then still has of its %d tokens",
                event.request_id, _CAUSES[event.cause], event.num_pages,
                "the others" if event.before_all else "its client's others", event.num_tokens,
                extra={"request_id": event.request_id, "client": event.client},
            )  # fmt: skip
            self._shortages += event.cause is Cause.PAGES
        if self._shortages and now - self._warned_at >= WARNING_INTERVAL:
            logger.warning(
                "the pages do not suffice: preempted since the last warning: %d, running now: %d, in %s. Nothing is lost, "
                "but work is done twice. Should it go on: more pages (--num-pages, --hbm-utilization), fewer sequences at "
                "once (--max-num-seqs), or a lower max_tokens in requests",
                self._shortages, num_running, self._pool,
            )  # fmt: skip
            self._warned_at, self._shortages = now, 0
