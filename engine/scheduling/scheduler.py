"""Which tokens the next step computes.

``add``, ``finish``, ``plan``, ``update``, ``resume``, ``plans_to_read``, ``plan_late``,
``take_done``, ``forget_all``, ``lose_logits`` and ``lose_cache`` are the only doors, beside those of
``memory`` and ``adapters``, and the scheduler owns every Sequence between them, its slot and its
pages. It is a pure machine: no thread, clock, queue or device array, so that a test is three lines
and any history can be replayed. The rules are in the package's docstring.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from engine.scheduling.adapter_slots import AdapterSlots
from engine.scheduling.admission import Admission
from engine.scheduling.estimates.growth_reserve import GrowthReserve
from engine.scheduling.estimates.prompt_room import PromptRoom
from engine.scheduling.estimates.step_costs import StepCosts, sizes_up_to
from engine.scheduling.landing import Landing
from engine.scheduling.plan import NextIterationPlan, StepResult
from engine.scheduling.preemption import Cause, Preempter, Preemption
from engine.scheduling.rows.decode_rows import DecodeRows
from engine.scheduling.rows.prompt_rows import PromptRows
from engine.scheduling.running_sequences import RunningSequences
from engine.scheduling.sequence import Sequence, SequenceOutput, SequenceStatus
from engine.scheduling.sequence_memory import SequenceMemory
from engine.scheduling.speculation import Speculation, most_samples
from engine.scheduling.waiting.waiting_queue import WaitingQueue


class InferenceScheduler:
    """Continuous batching with chunked prefill (Yu et al. 2022, Agrawal et al. 2023) over pages.

    ``long_prefill_token_threshold`` is what long prompts may take of a step beside others;
    ``inter_token_seconds`` is what a step with decodes and prompts may take, as learned;
    ``client_weights`` are shares of the service; a sequence yields to one whose priority is lower
    by ``priority_preemption_threshold``.
    """

    def __init__(
        self,
        memory: SequenceMemory,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        long_prefill_token_threshold: int | None = None,
        priority_preemption_threshold: int = 10,
        client_weights: Mapping[str, float] | None = None,
        reserve: GrowthReserve | None = None,
        fair: bool = True,
        adapters: AdapterSlots | None = None,
        step_costs: StepCosts | None = None,
        speculation: Speculation | None = None,
        inter_token_seconds: float | None = None,
    ) -> None:
        self.memory = memory
        self.speculation = speculation
        """How many drafts rows have, if any."""
        self.adapters = adapters or AdapterSlots()
        """The adapters of sequences, and their slots on the device."""
        self.step_costs = step_costs or StepCosts(sizes_up_to(max_num_batched_tokens))
        """What steps cost, learned in ``update``."""
        self._reserve = reserve or GrowthReserve(memory.num_pages)
        self._waiting = WaitingQueue(client_weights, fair=fair)
        self._running = RunningSequences(max_num_seqs, self.memory, self._reserve, self.adapters)
        self._preempter = Preempter(self._running, self._waiting, threshold=priority_preemption_threshold, fair=fair)
        self._admission = Admission(
            self._waiting, self._running, self.memory, self._preempter, self.adapters, fair=fair
        )
        samples = most_samples(max_num_seqs, 0 if speculation is None else speculation.num_speculative_tokens)
        self._decode_rows = DecodeRows(
            memory,
            speculation,
            self._waiting,
            self._running,
            self._admission,
            budget=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            most_samples=samples,
        )
        self._prompt_rows = PromptRows(
            memory,
            self._waiting,
            self._running,
            self._admission,
            PromptRoom(self.step_costs, max_num_batched_tokens, inter_token_seconds),
            budget=max_num_batched_tokens,
            most_samples=samples,
            long=long_prefill_token_threshold,
        )
        self._landing = Landing(self._waiting, self._running, speculation, self.finish)
        self._arrivals = 0

    @property
    def preemptions(self) -> Counter[str]:
        """Preemptions so far by cause."""
        return self._preempter.counts

    @property
    def preempted(self) -> list[Preemption]:
        """Preemptions that have not been taken."""
        return self._preempter.events

    def take_preempted(self) -> list[Preemption]:
        """The preemptions since the last call."""
        return self._preempter.take_events()

    @property
    def sequence_ids(self) -> list[str]:
        """Of all sequences."""
        return [sequence.request_id for sequence in (*self._running, *self._waiting)]

    @property
    def has_sequences(self) -> bool:
        """Whether any waits or runs."""
        return bool(self._running or self._waiting)

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
        self._arrivals += 1
        sequence.arrival = self._arrivals
        if not self._running and not self._waiting:
            self._waiting.forget()
        self.adapters.enter(sequence)
        self._landing.note_expected(sequence)
        self._waiting.add(sequence)

    def finish(self, request_id: str) -> bool:
        """End a sequence now, in whatever state, and free what it holds; False if it has ended."""
        sequence = self._running.get(request_id) or self._waiting.remove(request_id)
        if sequence is None:
            return False
        if sequence.has_begun:
            self._reserve.learn(len(sequence.output_token_ids))
            self._waiting.charge_output(sequence)
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
        self.memory.earlier.end(sequence)
        self.adapters.leave(sequence)
        sequence.status = SequenceStatus.FINISHED
        if sequence.constraint is not None:
            sequence.constraint.close()
        return True

    def plan(self, now: float = 0.0) -> NextIterationPlan | None:
        """The next step, or None when nothing can be computed before a step in flight has landed.

        Where nothing can be computed but pages are to be copied, it is a plan without rows.
        ``now``, in seconds, tells how old kept pages are, and nothing else.
        """
        self.memory.begin_plan(now)
        plan = NextIterationPlan()
        decoding = self._running.decoding()
        pages_suffice = self._grow(plan, decoding)
        if pages_suffice:
            self._admission.settle_claim(plan)
        self._decode_rows.add(plan, decoding)
        self._prompt_rows.add(plan, may_admit=pages_suffice)
        self.memory.end_plan(plan)
        self._running.late.begin(plan)
        if plan.num_tokens:
            self._reserve.relax()
            plan.admitted = self._running.take_admitted()
            self.adapters.plan(plan)
            plan.looks_up = self.speculation is not None and (
                self.speculation.looks_up or any(plan.samples[plan.num_decodes :])
            )
        return plan if plan.num_tokens or plan.copies else None

    def update(self, plan: NextIterationPlan, result: StepResult, seconds: float | None = None) -> list[SequenceOutput]:
        """Land a step, which took the device so long. Plans land in the order they were made."""
        if seconds is not None:
            has_prompts = plan.num_rows > plan.num_decodes
            self.step_costs.learn(plan.num_tokens, seconds, plan.num_passes, has_prompts=has_prompts)
        self.adapters.landed(plan)
        return self._landing.land(plan, result)

    def resume(self, sequence: Sequence) -> SequenceOutput | None:
        """The constraint has answered: the sequence goes on, or has ended with this output.

        The output has no tokens.
        """
        assert sequence.constraint is not None
        sequence.awaits_mask = False
        self._landing.note_expected(sequence)
        if sequence.awaits_sample:
            self._running.late.answered(sequence)
        reason, error = None, sequence.constraint.error
        if error is not None:
            reason = "error"
        elif sequence.constraint.complete:
            reason = "stop"
        if reason is None or not self.finish(sequence.request_id):
            return None
        internal = sequence.constraint.internal
        return SequenceOutput(sequence.request_id, [], reason, error=error, internal=internal)

    def plans_to_read(self, plan: NextIterationPlan) -> list[NextIterationPlan]:
        """Plans in flight in which a draft model writes drafts for rows that follow the tokens of
        this one: their ``guesses`` have to be there when it lands."""
        if self.speculation is None or not self.speculation.has_model:
            return []
        return self._running.late.with_guesses(plan.sequences[row] for row in plan.constrained)

    def plan_late(self) -> list[NextIterationPlan]:
        """Plans that sample for those sequences, resumed since the last call, whose logits are
        kept. They land as steps do."""
        return self._running.late.plan()

    def take_done(self) -> list[NextIterationPlan]:
        """Plans whose kept logits nobody reads any more, once ``plan_late``'s plans are dispatched."""
        return self._running.late.take_done()

    def forget_all(self) -> int:
        """Empty the prefix cache; returns how many pages it had. Running sequences keep theirs to
        themselves."""
        return self.memory.forget_all(self._running)

    def lose_logits(self) -> None:
        """Kept logits are not to be sampled from any more: compute them again."""
        for sequence in sorted(self._running, key=lambda sequence: -sequence.arrival):
            if sequence.awaits_sample:
                self._preempter.preempt(sequence, Cause.CACHE_LOST)

    def lose_cache(self, *, keep_host: bool = False) -> None:
        """The cache is lost, and so are the steps in flight: compute everything again.

        Adapters are written to their slots again.

        ``keep_host`` keeps the tier in the host's memory: it and the copies to it are sound.
        """
        for sequence in (*self._running, *self._waiting):
            self._running.late.drop(sequence)
            sequence.num_in_flight = 0
        for sequence in sorted(self._running, key=lambda sequence: -sequence.arrival):
            self._preempter.preempt(sequence, Cause.CACHE_LOST)
        self.memory.lose_pages(keep_host=keep_host)
        self.adapters.lose()

    def stats(self) -> dict[str, Any]:
        """The part of EngineStats that is about sequences."""
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "waiting_tokens": self._waiting.num_tokens,
            "preemptions": self.preemptions.total(),
            "preemptions_by_cause": dict(self.preemptions),
            **self.memory.stats(),
            **self.adapters.stats(),
            **({} if self.speculation is None else self.speculation.stats()),
        }

    def check_integrity(self) -> None:
        """Assert that every page and every slot has exactly the owners that it should."""
        self.memory.check_integrity(list(self._running))
        self.adapters.check_integrity(list(self._running))
        self._running.check_integrity()
        self._running.late.check_integrity(list(self._running))
        self._waiting.check_integrity()

    def _grow(self, plan: NextIterationPlan, decoding: list[Sequence]) -> bool:
        """Give sequences whose pages are full one more; False if others were preempted for it."""
        pages_suffice, some_end = True, False
        full = [s for s in decoding if s.num_computed_tokens == s.num_paged_tokens]
        for sequence in full:
            while sequence.slot >= 0:
                if self.memory.grow(sequence):
                    plan.grown.append(sequence)
                    break
                some_end = some_end or bool(self._running.will_end())
                if some_end:
                    break
                victim = self._preempter.least_important()
                self._preempter.preempt(victim, Cause.PAGES)
                self._reserve.tighten()
                plan.drop(victim)
                pages_suffice = some_end = False
        return pages_suffice
