"""Steps between their dispatch and the reading of their tokens, and the rows that wait for masks meanwhile."""

import math
import time
from collections import deque
from functools import partial

from engine.devices.device_errors import DeviceError
from engine.live.residence import Residence
from engine.metrics.step_log import StepLog
from engine.scheduling.constraints.awaited_masks import AwaitedMasks
from engine.scheduling.plan import NextIterationPlan
from engine.scheduling.scheduler import InferenceScheduler
from engine.scheduling.sequence import Sequence, SequenceOutput
from engine.step.failures import Failures
from engine.step.host_cache.host_link import HostLink
from engine.step.pending_step import PendingStep
from engine.step.runner import eSurgeRunner
from engine.step.timing.step_times import StepSeconds

AHEAD, LEAST_AHEAD, HOST_TIMES = 1 / 3, 0.01, 3
"""How long before the end of the step in flight the next one is planned, at least: a part of what that takes, seconds, and
so many times as long as the host took for any of the last STEPS, as one that has other work takes many times as long."""
STEPS = 16


class StepsInFlight:
    """Dispatches steps, and lands them in that order. An engine's thread owns it."""

    def __init__(
        self,
        scheduler: InferenceScheduler,
        runner: eSurgeRunner,
        residence: Residence,
        failures: Failures,
        log: StepLog,
        host: HostLink | None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._residence = residence
        self._failures = failures
        self._log = log
        self._host = host
        self._steps: deque[PendingStep] = deque()
        self._masks = AwaitedMasks()
        self._begun_at = 0.0
        """When the device began the first of the steps in flight, in seconds of ``time.monotonic``."""
        self._seconds = StepSeconds()
        self._due_at = math.inf
        """When it is time to plan the next step, if it is known."""
        self._host_seconds: deque[float] = deque(maxlen=STEPS)
        """From the beginning of a step's plan, or from when it was time for that, until it was dispatched."""

    def __bool__(self) -> bool:
        return bool(self._steps)

    @property
    def num_steps(self) -> int:
        """Steps in flight; rows that sample late are none."""
        return sum(step.is_step for step in self._steps)

    @property
    def last_has_failed(self) -> bool:
        """Whether the last one is known to have failed."""
        return bool(self._steps) and self._steps[-1].failure is not None

    @property
    def seconds_to_spare(self) -> float:
        """For how long the next step need not be planned, as the device has one to do: who comes until then is in it,
        and who comes later waits for it. 0 with several in flight, and while nobody knows what that one costs."""
        costs = self._costs()
        if len(costs) != 1 or costs[0] is None or self._steps[-1].is_done:
            return 0.0
        ahead = max(AHEAD * costs[0], LEAST_AHEAD, HOST_TIMES * max(self._host_seconds))
        due_at, now = self._begun_at + costs[0] - ahead, time.monotonic()
        if due_at <= now:
            return 0.0
        self._due_at = due_at
        return due_at - now

    def await_mask(self, sequence: Sequence) -> None:
        """Hear of the sequence's constraint when it answers."""
        self._masks.add(sequence)

    def dispatch(self, plan: NextIterationPlan, planning: float) -> None:
        """``planning`` are the seconds that it took to plan. A plan without rows is no step."""
        _stamp(plan.admitted)
        now = time.monotonic()
        if not self._steps:
            self._begun_at = now
        step = self._runner.dispatch(plan)
        self._host_seconds.append(time.monotonic() - min(now - planning, self._due_at))
        self._due_at = math.inf
        step.times.seconds["plan"] = planning
        if plan.num_rows or step.failure is not None:
            self._steps.append(step)

    def resume(self) -> list[SequenceOutput]:
        """Resume the sequences whose masks are ready; returns the outputs of those that end."""
        answered = self._masks.hear(self._seconds_left()) if self._masks else []
        ended = [self._scheduler.resume(sequence) for sequence in answered]
        return [output for output in ended if output is not None]

    def sample_late(self) -> bool:
        """Let rows sample whose masks have come, after a step that kept their logits; whether that
        fails."""
        for plan in self._scheduler.plan_late():
            self._steps.append(self._runner.sample(plan))
            if self.last_has_failed:
                return True
        self.forget_logits()
        return False

    def forget_logits(self) -> None:
        """Free logits from which no row will sample."""
        for plan in self._scheduler.take_done():
            self._runner.forget_logits(plan)

    def land(self) -> list[SequenceOutput]:
        """Collect the oldest step, and the tokens that rows have sampled late right after it.

        Without a step, wait for what is on its way from the host, or for a mask. Raises DeviceError
        if too many steps in a row have failed.
        """
        outputs = self._land_first()
        while self._steps and not self._steps[0].is_step:
            outputs += self._land_first()
        return outputs

    def finish_copies(self) -> None:
        """Wait for all copies, and place what has come though nobody waits for it any more."""
        while self._host is not None and self._host.is_copying:
            self._host.wait()
            self._host.land()
            plan = self._scheduler.plan(time.monotonic())
            if plan is not None:
                self.dispatch(plan, 0.0)
            while self._steps:
                self.land()

    def _costs(self) -> list[float | None]:
        """What each of the steps in flight takes the device; None where nobody knows."""
        plans = [step.plan for step in self._steps if step.is_step]
        return [self._scheduler.step_costs.seconds(plan.num_tokens, plan.num_passes) for plan in plans]

    def _seconds_left(self) -> float | None:
        """What the steps in flight will take the device yet; None if there are none, or nobody
        knows."""
        costs = self._costs()
        known = [cost for cost in costs if cost is not None]
        if not known or len(known) < len(costs):
            return None
        return max(0.0, self._begun_at + sum(known) - time.monotonic())

    def _land_first(self) -> list[SequenceOutput]:
        if not self._steps:
            self._wait()
            return []
        step = self._steps.popleft()
        awaited = step.plan
        try:
            result = self._runner.collect(step)
            for later in self._steps_to_read(step.plan):
                awaited = later.plan
                self._runner.read_guesses(later)
        except DeviceError as failure:
            return self._recover(awaited, failure)
        seconds = self._seconds.landed(step.times) if step.is_step else None
        self._begun_at, self._due_at = time.monotonic(), math.inf
        if seconds is not None and self._host is not None:
            self._host.learn(step.plan, seconds)
        land = partial(self._scheduler.update, step.plan, result, seconds)
        outputs = self._failures.end_rows(step.plan, result, land)
        for sequence in map(step.plan.sequences.__getitem__, step.plan.constrained):
            if sequence.awaits_mask:
                self._masks.add(sequence)
        if step.is_step:
            self._log.landed(step.plan, step.times)
        self._log.generated(outputs)
        return outputs

    def _wait(self) -> None:
        """Nothing can be planned, and nothing will land: wait for what somebody waits for."""
        if self._host is not None and self._host.is_loading:
            self._host.wait()
        elif self._scheduler.has_sequences:
            assert self._masks, "work is left, but nothing can be planned and nothing will land"
            self._masks.wait()

    def _steps_to_read(self, plan: NextIterationPlan) -> list[PendingStep]:
        """Steps in flight whose drafts have to be known before this plan lands."""
        plans = self._scheduler.plans_to_read(plan)
        return [step for step in self._steps if step.plan in plans and step.failure is None]

    def _recover(self, plan: NextIterationPlan, failure: DeviceError) -> list[SequenceOutput]:
        """End the sequences of a failed step and recompute all other running ones."""
        outputs = self._failures.end_step(plan, failure)
        self._steps.clear()
        self._residence.forget_cache()
        return outputs


def _stamp(admitted: list[Sequence]) -> None:
    """Record when sequences were first admitted; preemption does not change that."""
    for sequence in admitted:
        if sequence.scheduled_at is None:
            sequence.scheduled_at = time.monotonic()
