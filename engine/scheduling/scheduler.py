"""Which tokens the next step computes.

The rules, all of them in this file and in the owners it is made of (who waits: ``waiting_queue``, who runs:
``running_sequences``, what is kept free: ``growth_reserve``, who goes first for once: ``backfill``): ``add``, ``finish``, ``plan``, ``update``, ``resume`` and
``lose_cache`` are the only doors, and the scheduler owns every Sequence between them, its slot and its pages. It is a
pure machine: no thread, clock, queue or device array, so that a test is three lines and any history can be replayed.

- A step has one budget of tokens. Decoding sequences come first, one token each; what is left goes to chunks of
  prompts, those begun before those waiting, so that a stream of prompts never starves a decode. Long prompts get no more
  than a part of the step, one after the other, as long as somebody else has a use for it: decodes, which then wait less
  for their next token, or shorter prompts.
- ``plan`` may be called again before the step before it has landed. A sequence counts its tokens in flight, so that one
  that will end by length is not planned again; one that ended otherwise has its late tokens dropped in ``update``.
- A sequence with a constraint is planned again only when its last token has landed and the constraint has answered what
  may come next (``resume``); its neighbours don't wait for it. Preempted, it keeps its constraint, which follows the
  tokens that have landed.
- A sequence is admitted when pages for all it has to prefill are free beside what those who run are expected to grow: a
  prompt once begun never waits for pages in the middle. What outputs that ended came to is what is expected of others.
- A sequence whose turn it is and that cannot start now is passed by those that can, up to ``LOOKED_AT`` in a plan: its
  mask is late, another computes its beginning, long prompts' part of the step is used up, or there are no pages. Its turn
  comes again in the next plan. Those that pass leave what preempted ones and the first long prompt need, or are counted:
  one that was passed by ``MOST_PASSED`` who took what it needs, always its equals in priority, is not passed any more.
- A full page is kept for whoever begins with the same tokens, from the plan on that computes it: steps run in order, and
  a step writes before it reads. The last known token is always computed, as a step samples from it. Who begins with a page
  that another is computing still waits for that. A sequence without a salt shares no pages, and is not hashed.
- A decoding sequence that finds no page waits for somebody whose last token is in flight. If there is nobody, it takes
  the pages of the least important one, which waits again in front of the others and later goes on, from the pages that
  are kept still. Other reasons to be preempted are in ``preemption``. While such a victim has a token in flight it cannot
  go: it is held out of further steps until the token has landed. Then the next plan looks again, and lets it stay if
  nobody is short any more. The most important sequence is never a victim, so something always advances.
"""

from collections import Counter
from collections.abc import Mapping

from caching.metadata import pages_for
from caching.page_manager import Found, HBMPageManager
from engine.scheduling.backfill import Backfill
from engine.scheduling.chunks import Chunks
from engine.scheduling.growth_reserve import GrowthReserve
from engine.scheduling.plan import NextIterationPlan, StepResult
from engine.scheduling.preemption import Cause, Preemption
from engine.scheduling.running_sequences import RunningSequences
from engine.scheduling.sequence import Sequence, SequenceOutput, SequenceStatus, TokenLogprobs
from engine.scheduling.shared_prefixes import SharedPrefixes
from engine.scheduling.waiting_queue import OUTPUT_WEIGHT, WaitingQueue

CHARGED_AT_ONCE = 16
"""Generated tokens after which a client is charged for them: seldom, as each charge has a price, and long before the end."""


LOOKED_AT = 128
"""Sequences that may be passed by in one plan, each for some microseconds: one request may have half as many samples."""


class InferenceScheduler:
    """Continuous batching with chunked prefill (Yu et al. 2022, Agrawal et al. 2023) over paged memory.

    ``long_prefill_token_threshold`` is what long prompts may take of a step; ``client_weights`` are shares of the service;
    a sequence yields to one whose priority is lower by ``priority_preemption_threshold``.
    """

    def __init__(
        self,
        pages: HBMPageManager,
        *,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        long_prefill_token_threshold: int | None = None,
        priority_preemption_threshold: int = 10,
        client_weights: Mapping[str, float] | None = None,
        reserve: GrowthReserve | None = None,
        fair: bool = True,
    ) -> None:
        self._pages = pages
        self.page_size = page_size
        self._budget = max_num_batched_tokens
        self._long = long_prefill_token_threshold or max(1, max_num_batched_tokens // 2)
        self._threshold = priority_preemption_threshold
        self._reserve = reserve or GrowthReserve(pages.num_total)
        self._fair = fair
        self._waiting = WaitingQueue(client_weights, fair=fair)
        self._running = RunningSequences(max_num_seqs)
        self.prefixes = SharedPrefixes(pages, page_size)
        self._released: list[Sequence] = []
        self._victim: Sequence | None = None
        self._cause = Cause.PAGES
        self._arrivals = 0
        self.preemptions: Counter[str] = Counter()
        """How many, by cause."""
        self.preempted: list[Preemption] = []
        """Those that nobody has taken."""

    def take_preempted(self) -> list[Preemption]:
        """The preemptions since the last call."""
        taken, self.preempted = self.preempted, []
        return taken

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Their known tokens."""
        return self._waiting.num_tokens

    @property
    def num_running(self) -> int:
        """Sequences with a slot."""
        return len(self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. The caller has checked that it fits the pool alone."""
        self._arrivals += 1
        sequence.arrival = self._arrivals
        sequence.num_charged_tokens = len(sequence.output_token_ids)
        if not self._running and not self._waiting:
            self._waiting.forget()
        self._waiting.add(sequence)

    def finish(self, request_id: str) -> bool:
        """End a sequence now, in whatever state, and free what it holds; False if it is not here (any more)."""
        sequence = self._running.get(request_id)
        if sequence is not None:
            self._reserve.learn(len(sequence.output_token_ids))
            self._release(sequence)
        else:
            sequence = self._waiting.remove(request_id)
        if sequence is None:
            return False
        sequence.status = SequenceStatus.FINISHED
        if sequence.constraint is not None:
            sequence.constraint.close()
        return True

    def plan(self, now: float = 0.0) -> NextIterationPlan | None:
        """The next step, or None when nothing can be computed before a step in flight has landed.

        ``now``, in seconds, tells how old kept pages are, and nothing else.
        """
        self._pages.now = now
        plan = NextIterationPlan()
        preempted = self.preemptions.total()
        self._settle_victim()
        held = self._victim
        self._plan_decodes(plan)
        self._plan_prompts(plan, may_admit=self.preemptions.total() == preempted and not self._awaits_victim)
        stays = held is not None and held is self._victim and not held.num_in_flight
        if stays:
            self._victim = None
        if not plan.num_tokens:
            return self.plan(now) if stays else None
        self._reserve.relax()
        plan.released, self._released = self._released, []
        return plan

    def update(self, plan: NextIterationPlan, result: StepResult) -> list[SequenceOutput]:
        """Land a step. Plans land in the order they were made."""
        outputs = []
        for row, (sequence, samples) in enumerate(zip(plan.sequences, plan.samples, strict=True)):
            sequence.num_in_flight -= samples
            if sequence.status is SequenceStatus.FINISHED:
                continue
            prompt_logprobs = _not_seen(sequence, *result.prompt_logprobs.get(row, (0, [])))
            if samples:
                reason = self._land(sequence, result.token_ids[row])
                logprobs = [result.logprobs[row]] if row in result.logprobs else []
                output = SequenceOutput(
                    sequence.request_id, [result.token_ids[row]], reason, logprobs, prompt_logprobs
                )  # fmt: skip
                outputs.append(output)
            elif prompt_logprobs:
                outputs.append(SequenceOutput(sequence.request_id, [], prompt_logprobs=prompt_logprobs))
        return outputs

    def resume(self, sequence: Sequence) -> SequenceOutput | None:
        """The constraint has answered: the sequence goes on, or has ended with this output, which has no more tokens."""
        assert sequence.constraint is not None
        sequence.awaits_mask = False
        reason, error = None, sequence.constraint.error
        if error is not None:
            reason = "error"
        elif sequence.constraint.complete:
            reason = "stop"
        if reason is None or not self.finish(sequence.request_id):
            return None
        internal = sequence.constraint.internal
        return SequenceOutput(sequence.request_id, [], reason, error=error, internal=internal)

    def lose_cache(self) -> None:
        """The memory behind the pages is lost, and no step is in flight: everything is computed anew."""
        for sequence in sorted(self._running, key=lambda sequence: -sequence.arrival):
            sequence.num_in_flight = 0
            self._preempt(sequence, Cause.CACHE_LOST)
        self._pages.forget_all()

    def check_integrity(self) -> None:
        """Assert that every page and every slot has exactly the owners that it should."""
        self._pages.check_integrity(page for sequence in self._running for page in sequence.pages)
        self._running.check_integrity()
        assert all(not s.pages and s.slot < 0 for s in self._waiting), "a waiting sequence holds something"
        assert not self._waiting.num_passed_by, "somebody who was passed by has not come back"
        assert self._waiting.num_tokens == sum(s.num_tokens for s in self._waiting), "waiting tokens are miscounted"
        assert self._victim is None or self._running.get(self._victim.request_id), "the victim has gone"
        self.prefixes.check_integrity({sequence.request_id for sequence in self._running})

    def _plan_decodes(self, plan: NextIterationPlan) -> None:
        page_size = self.page_size
        for sequence in list(self._running):
            computed = sequence.num_computed_tokens
            if not sequence.num_prefill_tokens <= computed < sequence.max_computed_tokens or sequence is self._victim:
                continue  # it computes its prompt, again if it was preempted just now; or it ends by length
            if sequence.constraint is not None and not sequence.may_sample:
                continue
            if computed < len(sequence.pages) * page_size or self._take_page(plan, sequence):
                plan.add_decode(sequence)
        plan.end_decodes()

    def _plan_prompts(self, plan: NextIterationPlan, *, may_admit: bool) -> None:
        """Long prompts up to their part, the shorter ones, those that wait; then long ones again, if nobody decodes."""
        begun = [s for s in self._running if s.prefilling and s is not self._victim]
        chunks = Chunks(self._budget - plan.num_tokens)
        long = [sequence for sequence in begun if chunks.left(sequence) > self._long]
        left_for_long = self._long
        for sequence in long:
            left_for_long -= self._grant(chunks, sequence, left_for_long)
        for sequence in begun:
            if sequence not in long:
                self._grant(chunks, sequence, self._long)
        if may_admit:
            self._admit(plan, chunks, left_for_long)
        if not plan.num_decodes:
            for sequence in [*chunks.counts, *(s for s in long if s.slot >= 0)]:  # who yielded meanwhile has none
                self._grant(chunks, sequence, self._budget)
        chunks.add_to(plan)

    def _grant(self, chunks: Chunks, sequence: Sequence, most: int) -> int:
        """Let the step compute more of a prompt, and keep the pages that this fills; how many tokens."""
        start = chunks.end(sequence)
        granted = chunks.grant(sequence, most)
        self.prefixes.keep(sequence, start, chunks.end(sequence))
        return granted

    def _admit(self, plan: NextIterationPlan, chunks: Chunks, left_for_long: int) -> None:
        """Start those whose turn it is, and pass by those who cannot start in this step."""
        backfill = Backfill()
        while chunks.room > 0 or plan.num_decodes == self._budget:  # whoever decodes may have to yield
            sequence = self._waiting.head()
            if sequence is None or self._waiting.num_passed_by == LOOKED_AT or not backfill.may_start(sequence):
                break
            found = self.prefixes.look(sequence) if sequence.may_sample else None
            is_long = found is not None and sequence.num_tokens - found.held * self.page_size > self._long
            if found is None:
                self._waiting.pass_by(sequence)
            elif is_long and left_for_long <= 0:
                backfill.pass_for_step(sequence, self._needed(sequence, found))
                self._waiting.pass_by(sequence)
            elif self._running.num_free > backfill.slots and self._take_pages(sequence, found, backfill.pages):
                backfill.started()
                self._start(plan, sequence)
                granted = self._grant(chunks, sequence, left_for_long if is_long else self._budget)
                left_for_long -= granted if is_long else 0
            elif not backfill.give_up_reservation() and (backfill.lacks_pages or not self._make_room(sequence, chunks)):
                if self._fair and sequence.has_begun and self._let_pass(plan, chunks, sequence, backfill):
                    break
                if not self._running.num_free or self._awaits_victim:
                    break
                backfill.pass_for_pages(sequence)
                self._waiting.pass_by(sequence)
        self._waiting.come_back()

    def _let_pass(self, plan: NextIterationPlan, chunks: Chunks, head: Sequence, backfill: Backfill) -> bool:
        """A preempted head has no room: one of a client that runs nothing goes before it, where head's runs too much.

        The one that yields to it does so only if that is enough: otherwise both would come back, time and again. Whether
        one has been chosen to yield.
        """
        newcomer = self._waiting.newcomer()
        if backfill.lacks_pages or newcomer is None or newcomer.has_begun or not newcomer.may_sample:
            return False
        victim = self._running.over_its_share(newcomer.client)
        if victim is None or victim.client != head.client or victim.params.priority < newcomer.params.priority:
            return False
        found = self.prefixes.look(newcomer)
        if found is None or not self._fits(newcomer, found, self._pages.num_exclusive(victim.pages)):
            return False
        gone = self._preempt_once_landed(victim, Cause.FAIRNESS, planned=victim in chunks.counts)
        if gone and self._take_pages(newcomer, newcomer.found):
            self._start(plan, newcomer)
            self._grant(chunks, newcomer, self._long)
        return True

    def _fits(self, sequence: Sequence, found: Found, freed: int = 0) -> bool:
        """Whether there are pages for all it has to prefill beside those found, and a reserve, once so many more are freed."""
        reserve = 0
        if self._running:
            growth = self._running.growth + self._growth(sequence)
            reserve = self._reserve.pages(growth, len(self._running) + 1, self.page_size)
        return self._pages.can_alloc(self._needed(sequence, found) + reserve - freed)

    def _needed(self, sequence: Sequence, found: Found) -> int:
        """Pages that nobody owns and that it takes to begin, those found among them."""
        return pages_for(sequence.num_tokens, self.page_size) - found.owned

    def _take_pages(self, sequence: Sequence, found: Found, left: int = 0) -> bool:
        """Whether it now has pages for all it has to prefill, those that hold its beginning among them, and has left so many."""
        if not self._fits(sequence, found, -left):
            return False
        shared = self.prefixes.find(sequence)
        if shared is None or not self._fits(sequence, sequence.found, -left):
            return False
        self._pages.share(shared)
        sequence.pages = shared + self._pages.alloc(pages_for(sequence.num_tokens, self.page_size) - len(shared))
        return True

    def _growth(self, sequence: Sequence) -> int:
        return self._reserve.growth(len(sequence.output_token_ids), sequence.max_tokens)

    def _start(self, plan: NextIterationPlan, sequence: Sequence) -> None:
        """A waiting sequence has its pages: give it a slot."""
        num_shared = sequence.found.held
        self._waiting.take(sequence)
        sequence.expected_growth = self._growth(sequence)
        self._running.add(sequence)
        sequence.status = SequenceStatus.RUNNING
        sequence.num_computed_tokens = num_shared * self.page_size
        if sequence.scheduled_at is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        sequence.num_prefill_tokens = sequence.num_tokens
        self._waiting.charge(sequence, sequence.num_tokens - sequence.num_computed_tokens)
        self.prefixes.begin(sequence, num_shared)
        plan.admitted.append(sequence)

    def _make_room(self, head: Sequence, chunks: Chunks) -> bool:
        """Nothing is left for the one whose turn it is: whether somebody has yielded to it who is in no step."""
        assert self._running, "a sequence alone finds room, or was refused"
        if self._running.highest_priority - head.params.priority >= self._threshold:
            victim, cause = self._running.least_important(), Cause.PRIORITY
        else:
            largest = self._running.over_its_share(head.client) if self._fair and not head.has_begun else None
            if largest is None or largest.params.priority < head.params.priority:
                return False
            victim, cause = largest, Cause.FAIRNESS
        return self._preempt_once_landed(victim, cause, planned=victim in chunks.counts)

    def _take_page(self, plan: NextIterationPlan, sequence: Sequence) -> bool:
        """Whether there is a page, be it another's, for the next token, which begins one."""
        while not self._pages.can_alloc(1):
            # Where somebody's last token is in flight, pages come free without that.
            if self._awaits_victim or any(other.ends_by_length for other in self._running):
                return False
            victim = self._running.least_important()
            if not self._preempt_once_landed(victim, Cause.PAGES) or victim is sequence:
                return False
        sequence.pages += self._pages.alloc(1)
        plan.grown.append(sequence)
        return True

    def _preempt_once_landed(self, victim: Sequence, cause: Cause, *, planned: bool = False) -> bool:
        """Whether it is gone; otherwise it is held out of the next steps until its token has landed."""
        if victim.num_in_flight or planned:
            self._victim, self._cause = victim, cause
            return False
        self._preempt(victim, cause)
        return True

    @property
    def _awaits_victim(self) -> bool:
        return self._victim is not None and self._victim.num_in_flight > 0

    def _settle_victim(self) -> None:
        """Where pages were short and the victim's token has landed, it goes now, or stays if there is a page.

        Where it was to make room for another, it is held until ``_admit`` has seen whether there is room by now.
        """
        if self._victim is not None and not self._awaits_victim and self._cause is Cause.PAGES:
            victim, self._victim = self._victim, None
            if not self._pages.can_alloc(1):
                self._preempt(victim, Cause.PAGES)

    def _preempt(self, sequence: Sequence, cause: Cause) -> None:
        event = Preemption(
            sequence.request_id, sequence.client, cause, sequence.num_tokens, len(sequence.pages)
        )  # fmt: skip
        self._release(sequence)
        if sequence.constraint is not None:
            sequence.constraint.suspend()
        sequence.status = SequenceStatus.WAITING
        sequence.num_computed_tokens = 0
        # What yields to its equal is not to come before it; nor before whom that one passes, which is older.
        head = self._waiting.head() if cause is Cause.FAIRNESS else None
        self._waiting.come_back()
        to_equal = head is not None and not head.has_begun and head.params.priority == sequence.params.priority
        self._waiting.add_preempted(sequence, before_all=not to_equal)
        if cause is Cause.PAGES:
            self._reserve.tighten()
        self.preempted.append(event)
        self.preemptions[cause] += 1

    def _land(self, sequence: Sequence, token_id: int) -> str | None:
        """Add a token; the reason if it is the last."""
        sequence.output_token_ids.append(token_id)
        if len(sequence.output_token_ids) - sequence.num_charged_tokens >= CHARGED_AT_ONCE:
            self._charge_output(sequence)
            self._running.expect(sequence, self._growth(sequence))
        reason = None
        if token_id in sequence.stop_token_ids:
            reason = "stop"
        elif len(sequence.output_token_ids) >= sequence.max_tokens:
            reason = "length"
        if reason is not None:
            self.finish(sequence.request_id)
        elif sequence.constraint is not None:
            sequence.constraint.advance(token_id)
            sequence.awaits_mask = True
        return reason

    def _charge_output(self, sequence: Sequence) -> None:
        self._waiting.charge(sequence, OUTPUT_WEIGHT * (len(sequence.output_token_ids) - sequence.num_charged_tokens))
        sequence.num_charged_tokens = len(sequence.output_token_ids)

    def _release(self, sequence: Sequence) -> None:
        """Take back slot and pages. Steps in flight may still write to the pages, but run before any new owner's."""
        self.prefixes.end(sequence)
        self._charge_output(sequence)
        self._running.remove(sequence)
        self._pages.free(reversed(sequence.pages))
        sequence.pages = []
        self._released.append(sequence)
        if self._victim is sequence:
            self._victim = None


def _not_seen(sequence: Sequence, first: int, logprobs: list[TokenLogprobs]) -> list[TokenLogprobs]:
    """Those, of the prompt's tokens from ``first`` on, that no step has given yet: after preemption they come again."""
    if not logprobs:
        return logprobs
    known = sequence.num_prompt_logprobs
    sequence.num_prompt_logprobs = max(known, first + len(logprobs))
    return logprobs[max(0, known - first) :]
