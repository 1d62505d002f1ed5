"""The engine: sequences in, token ids out, a step at a time. One thread owns it."""

import time
from collections import deque
from collections.abc import Callable

from caching.page_manager import HBMPageManager
from engine.awaited_masks import AwaitedMasks
from engine.compilations import counted_apart, num_compilations
from engine.config import EngineStats, ServingLimits
from engine.preemption import PreemptionLog
from engine.runner import PendingStep, eSurgeRunner
from engine.scheduler import InferenceScheduler
from engine.sequence import Sequence, SequenceOutput
from engine.staged_compilation import StagedCompilation


class oEngine:
    """Joins scheduler and runner, and keeps up to ``run_ahead`` steps on the device beyond the one being read."""

    def __init__(
        self,
        scheduler: InferenceScheduler,
        runner: eSurgeRunner,
        pages: HBMPageManager,
        limits: ServingLimits,
        *,
        run_ahead: int,
        staged: StagedCompilation | None = None,
    ) -> None:
        self.limits = limits
        self._scheduler = scheduler
        self._runner = runner
        self._pages = pages
        self._run_ahead = run_ahead
        self._staged = staged or StagedCompilation([], publish=lambda: None)
        self._in_flight: deque[PendingStep] = deque()
        self._masks = AwaitedMasks()
        self._asleep = False
        self._preemption_log = PreemptionLog(pages.num_total, scheduler.page_size)
        self.start_counting()

    def start_counting(self) -> None:
        """Begin the counts of ``stats`` anew; from here on a compilation is one too many."""
        self._compilations_at_ready = num_compilations()
        self._runner.gaps.start_counting()
        self._steps = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0

    def compile_staged(self, notify: Callable[[], None]) -> None:
        """Begin to compile what readiness did not wait for; at each ``notify``, on another thread, ``adopt`` has to follow."""
        self._staged.begin(notify)

    def adopt(self) -> None:
        """Use what has been compiled meanwhile; raises what went wrong with it."""
        self._staged.adopt()

    def sleep(self) -> None:
        """Give the pages' memory back; weights and compiled functions stay. Nothing may be waiting or running."""
        while self._in_flight:
            self._land()
        assert not self.has_work, "a sequence waits or runs"
        self._scheduler.lose_cache()
        self._runner.drop_cache()
        self._asleep = True

    def wake(self) -> None:
        """Take the pages' memory again, if it was given back. Raises jax.errors.JaxRuntimeError where others have it."""
        with counted_apart():
            self._runner.allocate_cache()
        self._asleep = False

    def close(self) -> None:
        """Compile nothing more."""
        self._staged.close()

    @property
    def has_work(self) -> bool:
        """Whether anything is waiting, running or on the device."""
        return bool(self._in_flight or self._scheduler.num_running or self._scheduler.num_waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that ``limits`` allow."""
        if not self.has_work:
            self._runner.gaps.rest()
        self._scheduler.add(sequence)
        if sequence.awaits_mask:
            self._masks.add(sequence)

    def finish(self, request_id: str) -> bool:
        """End a sequence now and free what it holds; False if it has ended already."""
        return self._scheduler.finish(request_id)

    def step(self) -> list[SequenceOutput]:
        """Plan and dispatch the next step, then land the oldest one when enough are in flight or none could be planned."""
        outputs = self._resume()
        now = time.monotonic()
        plan = self._scheduler.plan(now)
        if self._scheduler.preempted:
            self._preemption_log.tell(self._scheduler.take_preempted(), self._scheduler.num_running, now)
        if plan is not None:
            _stamp(plan.admitted)
            self._in_flight.append(self._runner.dispatch(plan))
        if plan is None or len(self._in_flight) > self._run_ahead:
            outputs += self._land()
        return outputs

    def check_integrity(self) -> None:
        """Assert that no page or slot is lost or owned twice."""
        self._scheduler.check_integrity()

    def stats(self) -> EngineStats:
        """Where things stand."""
        return EngineStats(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            pages_total=self._pages.num_total,
            pages_free=self._pages.num_free,
            pages_cached=self._pages.num_cached,
            pages_owned=self._pages.num_owned,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._scheduler.preemptions.total(),
            preemptions_by_cause=dict(self._scheduler.preemptions),
            waiting_tokens=self._scheduler.num_waiting_tokens,
            prefix_cache_queries=self._scheduler.tokens_looked_up,
            prefix_cache_hits=self._scheduler.tokens_found,
            page_evictions=self._pages.cache.evictions,
            page_lifetime_seconds_sum=self._pages.cache.lifetime_seconds,
            page_idle_seconds_sum=self._pages.cache.idle_seconds,
            step_gap_seconds_sum=self._runner.gaps.seconds,
            step_gap_seconds_count=self._runner.gaps.count,
            compilations_after_ready=num_compilations() - self._compilations_at_ready,
            staged_compilations=self._staged.num_done,
            staged_compilations_left=self._staged.num_left,
            asleep=self._asleep,
        )

    def _resume(self) -> list[SequenceOutput]:
        """Let sequences go on whose constraints have answered; the outputs of those that end."""
        ended = [self._scheduler.resume(sequence) for sequence in self._masks.hear()]
        return [output for output in ended if output is not None]

    def _land(self) -> list[SequenceOutput]:
        if not self._in_flight:
            if self.has_work:
                assert self._masks, "work is left, but nothing can be planned and nothing will land"
                self._masks.wait()
            return []
        step = self._in_flight.popleft()
        outputs = self._scheduler.update(step.plan, self._runner.collect(step))
        for sequence in map(step.plan.sequences.__getitem__, step.plan.constrained):
            if sequence.awaits_mask:
                self._masks.add(sequence)
        self._steps += 1
        self._prompt_tokens += step.plan.num_tokens - step.plan.num_decodes
        self._generated_tokens += sum(len(output.token_ids) for output in outputs)
        return outputs


def _stamp(admitted: list[Sequence]) -> None:
    """Note when they were first planned; after preemption that stays."""
    for sequence in admitted:
        if sequence.scheduled_at is None:
            sequence.scheduled_at = time.monotonic()
