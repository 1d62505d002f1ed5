"""Which waiting sequences are given a slot and pages, and begin in a step."""

from typing import NamedTuple

from caching.page_manager import Found
from engine.scheduling.adapter_slots import AdapterSlots
from engine.scheduling.backfill import Backfill
from engine.scheduling.plan import NextIterationPlan
from engine.scheduling.preemption import Cause, Preempter
from engine.scheduling.rows.prompt_chunks import PromptChunks
from engine.scheduling.running_sequences import RunningSequences
from engine.scheduling.sequence import Sequence, SequenceStatus
from engine.scheduling.sequence_memory import SequenceMemory
from engine.scheduling.waiting.waiting_queue import WaitingQueue

LOOKED_AT = 128
"""Sequences that may be passed by in one plan, each for some microseconds: half of them may be the
samples of one request."""

MOST_DEFERRED = 16
"""Long prompts among them for which the step has no part: another client's short ones have begun before."""


class Claim(NamedTuple):
    """A waiting sequence that found no room, and may start in the place of running ones."""

    sequence: Sequence
    passes: bool = False
    """Whether it passes a preempted sequence that is before it in the queue."""


class Admission:
    """Admits waiting sequences in their order, as far as slots, pages and the step suffice."""

    def __init__(
        self,
        waiting: WaitingQueue,
        running: RunningSequences,
        memory: SequenceMemory,
        preempter: Preempter,
        adapters: AdapterSlots,
        *,
        fair: bool,
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._memory = memory
        self._preempter = preempter
        self._adapters = adapters
        self._fair = fair
        self.num_started = 0
        """Sequences that were started in the last plan."""
        self._begun_are_first = False
        """Before newcomers, in the next plan."""
        self._claim: Claim | None = None
        self._lacks_adapter: Sequence | None = None
        """The first sequence of the last plan whose adapter had no slot."""

    def settle_claim(self, plan: NextIterationPlan) -> None:
        """Start the sequence that claimed room in the last plan, in the place of others.

        It has to come before the rows of the plan, as a sequence in the step cannot yield its
        pages.
        """
        claim, self._claim = self._claim, None
        self._free_adapter_slot(plan)
        if claim is None or claim.sequence.status is not SequenceStatus.WAITING:
            return
        sequence = claim.sequence
        if not self._adapters.has_room(sequence):
            return
        found, yielding = self._memory.find(sequence), self._preempter.victims(sequence)
        ending = self._running.will_end()
        if found is not None and ending and self._fits(sequence, found, ending, yielding):
            return  # it can start as soon as the last tokens in flight have landed
        while found is not None:
            spare = self._running.pages_to_spare(sequence, without=yielding)
            if self._running.num_free > 0 and self._memory.begin(sequence, found, spare):
                self._start(sequence)
                return
            first = self._preempter.victim(sequence)
            if first is None or not self._fits(sequence, found, yielding, yielding):
                return
            victim, cause = first
            equals = cause is Cause.FAIRNESS and victim.params.priority == sequence.params.priority
            # A victim waits behind the equal that it yields to; a claim that passes is behind it.
            self._preempter.preempt(victim, cause, before_all=not equals or claim.passes)
            plan.drop(victim)
            found, yielding = self._memory.find(sequence), self._preempter.victims(sequence)

    def admit_newcomers(self, chunks: PromptChunks, *, others_begun: bool) -> None:
        """Start short prompts whose turn it is, of clients that run nothing, before short ones that have begun go on.

        Where there are such, it is theirs to be first in the next plan.
        """
        self.num_started = 0
        if self._begun_are_first and others_begun:
            self._begun_are_first = False
            return
        while self._fair and chunks.room > 0 and self._running.num_free:
            sequence = self._waiting.head()
            if sequence is None or sequence.has_begun or self._running.runs(sequence.client) or sequence.awaits_mask:
                break
            found = self._memory.find(sequence) if self._adapters.has_room(sequence) else None
            if found is None or chunks.is_long_with(self._memory.num_left(sequence, found)):
                break
            if not self._begin(sequence, found):
                break
            self._start(sequence)
            self.num_started += 1
            if not sequence.num_loading:
                chunks.grant(sequence)
        self._begun_are_first = self.num_started > 0

    def admit(self, chunks: PromptChunks) -> None:
        """Start sequences whose turn it is, and pass by those that cannot start in this step."""
        backfill, num_running = Backfill(), len(self._running)
        while chunks.room > 0 or not chunks.counts:  # a row of a step full of decodes may yield
            sequence = self._waiting.head()
            looked_at_enough = self._waiting.num_passed_by == LOOKED_AT or backfill.num_deferred == MOST_DEFERRED
            if sequence is None or looked_at_enough or not backfill.may_start(sequence):
                break
            if sequence.num_in_flight:
                break  # it was preempted just now: nothing passes it until its tokens have landed
            is_ready = not sequence.awaits_mask and self._may_have_adapter(sequence, backfill)
            found = self._memory.find(sequence) if is_ready else None
            if found is None:
                self._waiting.pass_by(sequence)
            elif chunks.defers(self._memory.num_left(sequence, found)):
                backfill.pass_for_step(sequence, self._memory.needed(sequence, found))
                self._waiting.pass_by(sequence)
            elif self._running.num_free > backfill.slots and self._begin(sequence, found, backfill.pages):
                backfill.started(sequence)
                self._start(sequence)
                if not sequence.num_loading:
                    chunks.grant(sequence)
            elif not backfill.give_up_reservation():
                self._claim = None if backfill.lacks_pages else self._claim_of(sequence)
                if self._claim is not None or not self._running.num_free:
                    break
                backfill.pass_for_pages(sequence)
                self._waiting.pass_by(sequence)
        self._waiting.come_back()
        self.num_started += len(self._running) - num_running

    def _may_have_adapter(self, sequence: Sequence, backfill: Backfill) -> bool:
        """Whether it has no adapter, or there is a slot that is not for one passed by."""
        if not self._adapters.has_room(sequence):
            self._lacks_adapter = self._lacks_adapter or sequence
            backfill.pass_for_adapter(sequence)
            return False
        return backfill.may_have_adapter(sequence)

    def _free_adapter_slot(self, plan: NextIterationPlan) -> None:
        """Preempt the sequences of an adapter's slot if all of them yield to one whose adapter has none.

        That starts when the steps have landed that read the slot. Until then no other slot is freed.
        """
        sequence, self._lacks_adapter = self._lacks_adapter, None
        if sequence is None or sequence.status is not SequenceStatus.WAITING or self._adapters.has_unpinned:
            return
        for victim in self._preempter.victims_of_adapter(sequence):
            self._preempter.preempt(victim, Cause.PRIORITY)
            plan.drop(victim)

    def _start(self, sequence: Sequence) -> None:
        """Give a waiting sequence that has its pages a slot."""
        self._waiting.take(sequence)
        self._running.add(sequence)
        sequence.num_prefill_tokens = sequence.num_tokens
        if sequence.scheduled_at is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        self._waiting.charge(sequence, sequence.num_tokens - sequence.num_computed_tokens)

    def _begin(self, sequence: Sequence, found: Found, spare: int = 0) -> bool:
        """Give it pages, if it can have a slot, and leave so many and what others need."""
        spare += self._running.pages_to_spare(sequence)
        return self._running.num_free > 0 and self._memory.begin(sequence, found, spare)

    def _fits(self, sequence: Sequence, found: Found, released: list[Sequence], yielding: list[Sequence]) -> bool:
        """Whether it could start if some running sequences were released.

        Those that yield to it keep no pages from it that they may yet grow by.
        """
        if self._running.num_free + len(released) == 0:
            return False
        spare = self._running.pages_to_spare(sequence, without=list(dict.fromkeys([*released, *yielding])))
        most = sum(one.num_pages for one in released)
        if not self._memory.fits(sequence, found, spare - most):
            return False
        return self._memory.fits(sequence, found, spare - self._memory.num_exclusive(released))

    def _claim_of(self, sequence: Sequence) -> Claim | None:
        """A claim of the sequence whose turn it is, or of one that may pass it: it was preempted and has no claim, and
        the other's client runs nothing."""
        if self._may_claim(sequence):
            return Claim(sequence)
        newcomer = self._waiting.newcomer() if self._fair and sequence.has_begun else None
        if newcomer is None or newcomer.awaits_mask or not self._adapters.has_room(newcomer):
            return None
        return Claim(newcomer, passes=True) if self._may_claim(newcomer) else None

    def _may_claim(self, sequence: Sequence) -> bool:
        """Whether others would yield to it, and that would be enough: otherwise none does, as it would be in vain."""
        yielding = self._preempter.victims(sequence)
        found = self._memory.find(sequence) if yielding else None
        return found is not None and self._fits(sequence, found, yielding, yielding)
