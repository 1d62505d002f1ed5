"""Which tokens the next step computes.

The rules, all of them in this file: ``add``, ``finish``, ``plan``, ``update``, ``resume`` and ``lose_cache`` are the only doors, and the
scheduler owns every Sequence between them, its slot and its pages. It is a pure machine: no thread, clock, queue or
device array, so that a test is three lines and any history can be replayed.

- A step has one budget of tokens. Decoding sequences come first, one token each; what is left goes to chunks of
  prompts, those begun before those waiting, so that a stream of prompts never starves a decode.
- ``plan`` may be called again before the step before it has landed. A sequence counts its tokens in flight, so that one
  that will end by length is not planned again; one that ended otherwise has its late tokens dropped in ``update``.
- A sequence with a constraint is planned again only when its last token has landed and the constraint has answered what
  may come next (``resume``); its neighbours don't wait for it. Preempted, it keeps its constraint, which follows the
  tokens that have landed.
- A sequence is admitted when pages for all it has to prefill are free above the watermark: a prompt once begun never
  waits for pages in the middle.
- Samples of one prompt (``siblings``) share its pages: one that is admitted while another holds them has its own from
  the page on that holds the prompt's last token, which each computes for itself. The pages may be written in the same
  step, as a step writes before it reads.
- A decoding sequence that finds no page waits for somebody whose last token is in flight. If there is nobody, it takes
  the pages of the newest one, which waits again in front of the others and later recomputes its tokens. While that
  victim has a token in flight it cannot go: it is held out of further steps until the token has landed. Then the next
  plan looks again, and lets it stay if others have freed pages. The oldest sequence is never a victim of another, so
  something always advances.
"""

from collections import OrderedDict

from caching.metadata import pages_for
from caching.page_manager import HBMPageManager
from engine.plan import NextIterationPlan, StepResult
from engine.sequence import Sequence, SequenceOutput, SequenceStatus, TokenLogprobs


class InferenceScheduler:
    """Continuous batching with chunked prefill (Yu et al. 2022, Agrawal et al. 2023) over paged memory."""

    def __init__(
        self, pages: HBMPageManager, *, page_size: int, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self._pages = pages
        self._page_size = page_size
        self._budget = max_num_batched_tokens
        # Pages kept free at admission, so that those who run can grow a little before somebody must yield.
        self._watermark = max(1, pages.num_total // 100)
        self._slots = list(range(max_num_seqs - 1, -1, -1))
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()
        self._running: dict[str, Sequence] = {}
        self._released: list[Sequence] = []
        self._victim: Sequence | None = None
        self.preemptions = 0

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences with a slot."""
        return len(self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. The caller has checked that it fits the pool alone."""
        self._waiting[sequence.request_id] = sequence

    def finish(self, request_id: str) -> bool:
        """End a sequence now, in whatever state, and free what it holds; False if it is not here (any more)."""
        sequence = self._running.get(request_id)
        if sequence is not None:
            self._release(sequence)
        else:
            sequence = self._waiting.pop(request_id, None)
        if sequence is None:
            return False
        sequence.status = SequenceStatus.FINISHED
        if sequence.constraint is not None:
            sequence.constraint.close()
        return True

    def plan(self) -> NextIterationPlan | None:
        """The next step, or None when nothing can be computed before a step in flight has landed."""
        plan = NextIterationPlan()
        preemptions = self.preemptions
        self._plan_decodes(plan)
        self._plan_begun_prompts(plan)
        if self.preemptions == preemptions and self._victim is None:
            self._admit(plan)
        if not plan.num_tokens:
            return None
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
        if self._victim is not None and not self._victim.num_in_flight:
            self._victim = None
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
        return SequenceOutput(sequence.request_id, [], reason, error=error)

    def lose_cache(self) -> None:
        """The memory behind the pages is lost, and no step is in flight: everything is computed anew."""
        for sequence in reversed(list(self._running.values())):
            sequence.num_in_flight = 0
            self._preempt(sequence)

    def check_integrity(self) -> None:
        """Assert that every page and every slot has exactly the owners that it should."""
        running = list(self._running.values())
        self._pages.check_integrity(page for sequence in running for page in sequence.pages)
        taken = [sequence.slot for sequence in running]
        assert len({*taken, *self._slots}) == len(taken) + len(self._slots), "a slot has two owners"
        assert all(not s.pages and s.slot < 0 for s in self._waiting.values()), "a waiting sequence holds something"
        assert self._victim is None or self._victim.request_id in self._running, "the victim has gone"

    def _plan_decodes(self, plan: NextIterationPlan) -> None:
        page_size = self._page_size
        for sequence in list(self._running.values()):
            computed = sequence.num_computed_tokens
            if not sequence.num_prefill_tokens <= computed < sequence.max_computed_tokens or sequence is self._victim:
                continue  # it computes its prompt, again if it was preempted just now; or it ends by length
            if sequence.constraint is not None and not sequence.may_sample:
                continue
            if computed < len(sequence.pages) * page_size or self._take_page(plan, sequence):
                plan.add_decode(sequence)
        plan.end_decodes()

    def _plan_begun_prompts(self, plan: NextIterationPlan) -> None:
        for sequence in self._running.values():
            if plan.num_tokens == self._budget:
                return
            if sequence.prefilling and sequence is not self._victim:
                self._plan_chunk(plan, sequence)

    def _plan_chunk(self, plan: NextIterationPlan, sequence: Sequence) -> None:
        left = sequence.num_prefill_tokens - sequence.num_computed_tokens
        plan.add(sequence, min(left, self._budget - plan.num_tokens))

    def _admit(self, plan: NextIterationPlan) -> None:
        while self._waiting and self._slots and plan.num_tokens < self._budget:
            sequence = next(iter(self._waiting.values()))
            if not sequence.may_sample:
                return
            shared = self._shared_pages(sequence)
            needed = pages_for(sequence.num_tokens, self._page_size) - len(shared)
            reserve = self._watermark if self._running else 0
            if not self._pages.can_alloc(needed + reserve):
                return
            del self._waiting[sequence.request_id]
            sequence.status = SequenceStatus.RUNNING
            sequence.slot = self._slots.pop()
            self._pages.share(shared)
            sequence.pages = shared + self._pages.alloc(needed)
            sequence.num_computed_tokens = len(shared) * self._page_size
            sequence.num_prefill_tokens = sequence.num_tokens
            self._running[sequence.request_id] = sequence
            plan.admitted.append(sequence)
            self._plan_chunk(plan, sequence)

    def _shared_pages(self, sequence: Sequence) -> list[int]:
        """Pages of the prompt that a sibling holds and has computed; none where log-probabilities are to be computed."""
        count = (len(sequence.prompt_token_ids) - 1) // self._page_size
        if sequence.params.prompt_logprobs is None or sequence.num_prompt_logprobs == len(sequence.prompt_token_ids):
            for sibling in sequence.siblings:
                if sibling.slot >= 0 and sibling.num_computed_tokens >= count * self._page_size:
                    return sibling.pages[:count]
        return []

    def _take_page(self, plan: NextIterationPlan, sequence: Sequence) -> bool:
        """Whether there is a page, be it another's, for the next token, which begins one."""
        while not self._pages.can_alloc(1):
            if not self._yield_pages(sequence):
                return False
        sequence.pages += self._pages.alloc(1)
        plan.grown.append(sequence)
        return True

    def _yield_pages(self, sequence: Sequence) -> bool:
        """Make the newest sequence give up its pages to ``sequence``; False when it cannot yet, or is ``sequence``.

        Where somebody's last token is in flight, pages come free without that.
        """
        if self._victim is not None or any(other.ends_by_length for other in self._running.values()):
            return False
        victim = next(reversed(self._running.values()))
        if victim.num_in_flight:
            self._victim = victim
            return False
        self._preempt(victim)
        return victim is not sequence

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_computed_tokens = 0
        self._waiting[sequence.request_id] = sequence
        self._waiting.move_to_end(sequence.request_id, last=False)
        self.preemptions += 1

    def _land(self, sequence: Sequence, token_id: int) -> str | None:
        """Add a token; the reason if it is the last."""
        sequence.output_token_ids.append(token_id)
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

    def _release(self, sequence: Sequence) -> None:
        """Take back slot and pages. Steps in flight may still write to the pages, but run before any new owner's."""
        del self._running[sequence.request_id]
        self._pages.free(sequence.pages)
        self._slots.append(sequence.slot)
        sequence.pages, sequence.slot = [], -1
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
