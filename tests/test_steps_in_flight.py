"""When the step after one that is in flight is to be planned."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from engine.devices.device_errors import DeviceError
from engine.scheduling.estimates.step_costs import StepCosts
from engine.scheduling.plan import NextIterationPlan
from engine.step import steps_in_flight
from engine.step.pending_step import PendingStep
from engine.step.steps_in_flight import AHEAD, HOST_TIMES, LEAST_AHEAD, STEPS, StepsInFlight

COST = 0.1
"""Seconds of a step of 8 tokens."""


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The one that steps in flight are timed by."""
    clock = Clock()
    monkeypatch.setattr(steps_in_flight, "time", clock)
    return clock


class Device:
    """Steps of it take what they take; ``host`` is what a dispatch takes the host."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.host, self.is_done, self.failure = clock, 0.0, False, None
        self.costs = StepCosts([8, 512])
        scheduler: Any = SimpleNamespace(step_costs=self.costs, update=lambda *_: [], plans_to_read=lambda _: [])
        runner: Any = SimpleNamespace(dispatch=self.dispatch, collect=lambda _: None)
        log: Any = SimpleNamespace(landed=lambda *_: None, generated=lambda _: None)
        failures: Any = SimpleNamespace(end_rows=lambda *_: [])
        self.steps = StepsInFlight(scheduler, runner, SimpleNamespace(), failures, log, None)  # type: ignore[arg-type]

    def dispatch(self, plan: NextIterationPlan) -> PendingStep:
        self.clock.now += self.host
        tokens: Any = SimpleNamespace(is_ready=lambda: self.is_done)
        executed: Any = SimpleNamespace(token_ids=tokens)
        return PendingStep(plan, None if self.failure else executed, failure=self.failure)

    def give(self, num_tokens: int = 8) -> None:
        plan: Any = SimpleNamespace(
            num_tokens=num_tokens, num_passes=0, num_rows=1, samples_of=None, admitted=[], sequences=[], constrained=[]
        )
        self.steps.dispatch(plan, planning=0.0)


@pytest.fixture
def device(clock: Clock) -> Device:
    """Of which the cost of 8 tokens is known."""
    device = Device(clock)
    device.costs.learn(8, COST)
    return device


def test_a_long_step_leaves_two_thirds_of_its_time_for_others_to_come(clock: Clock, device: Device) -> None:
    """Less and less, and none once it is time; the same for the step that begins when that one has landed."""
    device.give()

    assert device.steps.seconds_to_spare == pytest.approx((1 - AHEAD) * COST)
    clock.now += COST / 2
    assert device.steps.seconds_to_spare == pytest.approx((1 / 2 - AHEAD) * COST)
    clock.now += COST / 4
    assert device.steps.seconds_to_spare == 0
    device.give()
    clock.now += COST / 4
    device.steps.land()
    assert device.steps.seconds_to_spare == pytest.approx((1 - AHEAD) * COST)


@pytest.mark.parametrize(
    "change",
    [
        lambda device: device.give(),
        lambda device: setattr(device, "is_done", True),
        lambda device: device.costs.learn(8, LEAST_AHEAD) or device.costs.learn(8, LEAST_AHEAD),
    ],
    ids=["two are in flight", "it is over", "it is short"],
)
def test_there_is_no_time_to_spare(device: Device, change: Callable[[Device], None]) -> None:
    """With another step behind it, after its end, and where it takes no longer than a host may be late."""
    device.give()
    assert device.steps.seconds_to_spare > 0

    change(device)

    assert device.steps.seconds_to_spare == 0


def test_a_step_of_unknown_cost_or_that_failed_is_not_waited_for(device: Device) -> None:
    """Nobody knows how long there is time, or there is none."""
    device.give(512)
    assert device.steps.seconds_to_spare == 0
    device.steps.land()

    device.failure = DeviceError("INTERNAL: a wire has come loose")  # type: ignore[assignment]
    device.give()
    assert device.steps.seconds_to_spare == 0


def test_a_host_that_was_late_begins_earlier_for_a_while(clock: Clock, device: Device) -> None:
    """By as many times what it took, from when it was time, for any of the last steps."""
    device.host = COST / 8
    device.give()
    assert device.steps.seconds_to_spare == pytest.approx(COST - HOST_TIMES * COST / 8 - COST / 8)
    late = COST / 16
    clock.now += device.steps.seconds_to_spare + late
    device.give()
    device.host = 0.0
    device.steps.land()
    assert device.steps.seconds_to_spare == pytest.approx(COST - HOST_TIMES * (COST / 8 + late))

    for _ in range(STEPS):
        device.give()
        device.steps.land()

    assert device.steps.seconds_to_spare == pytest.approx((1 - AHEAD) * COST)
