"""The real scheduler on a device that is a formula, in a time that is a number: no thread, clock or array.

As in oEngine.step, a step is planned and dispatched before the one before it is read.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.sampling_params import SamplingParams
from engine.scheduling.plan import NextIterationPlan, StepResult
from engine.scheduling.scheduler import InferenceScheduler
from engine.scheduling.sequence import Sequence
from scripts.benchmarks.simulation.traces import Trace

RUN_AHEAD = 1
PARAMS = SamplingParams(temperature=0)
NO_STOPS: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Outcome:
    """When each request of a trace had its first token and its last, in seconds of the simulated clock."""

    first: NDArray[np.float64]
    last: NDArray[np.float64]
    gaps: NDArray[np.float64]
    """Seconds from each landed step with decoding rows back to the one before, once for each row."""
    preemptions: int

    def ttft(self, trace: Trace) -> NDArray[np.float64]:
        """Seconds from its arrival to its first token, of each request."""
        return self.first - trace.arrival

    def tpot(self, trace: Trace) -> NDArray[np.float64]:
        """Seconds for each further token on average, of each request; 0 where there is but one."""
        return (self.last - self.first) / np.maximum(1, trace.output - 1)


class Simulator:
    """Drives one scheduler through one trace. ``seconds`` is what the device takes for a plan.

    Unless ``timed`` the scheduler is not told of it, and so does not bound steps in time.
    """

    def __init__(
        self, scheduler: InferenceScheduler, seconds: Callable[[NextIterationPlan], float], *, timed: bool = True
    ) -> None:
        self._scheduler = scheduler
        self._timed = timed
        self._seconds = seconds
        self._in_flight: deque[tuple[NextIterationPlan, float, float]] = deque()
        """Plans, what each takes, and when it is done."""
        self._now = self._device_free = 0.0
        self._gaps: list[tuple[float, int]] = []

    def run(self, trace: Trace) -> Outcome:
        """Until every request has ended."""
        arrivals, count = trace.arrival.tolist(), len(trace.arrival)
        first, last = np.zeros(count), np.zeros(count)
        arrived = left = 0
        while left < count:
            if not self._in_flight and not self._scheduler.num_running and not self._scheduler.num_waiting:
                self._now = max(self._now, arrivals[arrived])
            while arrived < count and arrivals[arrived] <= self._now:
                self._scheduler.add(self._sequence(trace, arrived))
                arrived += 1
            left += self._step(first, last)
        gaps, rows = zip(*self._gaps, strict=True) if self._gaps else ((), ())
        return Outcome(first, last, np.repeat(gaps, rows), self._scheduler.preemptions.total())

    def _sequence(self, trace: Trace, number: int) -> Sequence:
        return Sequence(
            str(number),
            [0] * int(trace.prompt[number]),
            PARAMS,
            NO_STOPS,
            int(trace.output[number]),
            seed=0,
            client=str(trace.client[number]),
            salt=number.to_bytes(8),  # traces do not say what prompts have in common
        )

    def _step(self, first: NDArray[np.float64], last: NDArray[np.float64]) -> int:
        """Plan, and land what is due; the number of requests that have ended."""
        plan = self._scheduler.plan(self._now)
        if plan is not None:
            seconds = self._seconds(plan)
            self._device_free = max(self._now, self._device_free) + seconds
            self._in_flight.append((plan, seconds, self._device_free))
        if plan is None or len(self._in_flight) > RUN_AHEAD:
            return self._land(first, last)
        return 0

    def _land(self, first: NDArray[np.float64], last: NDArray[np.float64]) -> int:
        plan, seconds, done = self._in_flight.popleft()
        if plan.num_decodes:
            self._gaps.append((done - self._now, plan.num_decodes))
        self._now = max(self._now, done)
        result = StepResult([[0] * samples for samples in plan.samples])
        outputs = self._scheduler.update(plan, result, seconds if self._timed else None)
        for sequence, samples in zip(plan.sequences[plan.num_decodes :], plan.samples[plan.num_decodes :], strict=True):
            if samples and len(sequence.output_token_ids) == 1:
                first[int(sequence.request_id)] = self._now
        ended = [int(output.request_id) for output in outputs if output.finish_reason is not None]
        last[ended] = self._now
        return len(ended)
