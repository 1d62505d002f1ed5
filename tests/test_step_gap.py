"""The gap between steps: on a made-up clock to exact numbers, and through the real engine and runner."""

from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence
from engine.step.timing.step_gap import StepGaps
from scripts.benchmarks.processes.null_model import TOKEN, null_engine


class Clock:
    """Shows the seconds that it is set to."""

    now = 0.0

    def __call__(self):
        return self.now


class Step:
    """A step on a device, done when it is told to be."""

    def __init__(self, ready=False):
        self.ready = ready

    def is_ready(self):
        return self.ready


def build_gaps():
    """Gaps on a clock at 0, and that clock."""
    clock = Clock()
    return StepGaps(clock), clock


def test_a_gap_lasts_from_noticing_that_the_device_is_idle_to_the_next_step():
    """Later looks at the same idle device change nothing."""
    gaps, clock = build_gaps()
    gaps.dispatched(Step(ready=True))

    clock.now = 2.0
    gaps.look()
    clock.now = 2.5
    gaps.look()
    clock.now = 3.0
    gaps.dispatched(Step())

    assert (gaps.seconds, gaps.count) == (1.0, 1)


def test_rows_that_sample_late_end_an_idle_time_and_are_no_step():
    """What the device does then is not idle time, and the mean is that of steps."""
    gaps, clock = build_gaps()
    gaps.dispatched(Step(ready=True))

    gaps.look()
    clock.now = 1.0
    gaps.sampling(Step(ready=True))
    clock.now = 2.0
    gaps.look()
    clock.now = 2.5
    gaps.dispatched(Step())

    assert (gaps.seconds, gaps.count) == (1.5, 1)


def test_a_step_given_while_the_last_one_runs_has_a_gap_of_nothing():
    """It counts, so that the sum over the count is the mean gap of a step."""
    gaps, clock = build_gaps()
    gaps.dispatched(Step())

    gaps.look()
    clock.now = 1.0
    gaps.dispatched(Step())

    assert (gaps.seconds, gaps.count) == (0.0, 1)


def test_what_was_not_noticed_is_not_claimed():
    """A step that ended after the last look is no gap: the host can't know since when."""
    gaps, clock = build_gaps()
    step = Step()
    gaps.dispatched(step)

    gaps.look()
    step.ready, clock.now = True, 5.0
    gaps.dispatched(Step())

    assert gaps.seconds == 0.0


def test_the_device_waits_for_its_last_step_only():
    """An earlier one that is done says nothing while a later one is under way."""
    gaps, clock = build_gaps()
    gaps.dispatched(Step(ready=True))
    gaps.dispatched(Step())

    gaps.look()
    clock.now = 1.0
    gaps.dispatched(Step())

    assert (gaps.seconds, gaps.count) == (0.0, 2)


def test_time_without_work_is_no_gap():
    """Nor does the step after it count."""
    gaps, clock = build_gaps()
    gaps.dispatched(Step(ready=True))
    gaps.look()

    gaps.rest()
    clock.now = 60.0
    gaps.look()
    gaps.dispatched(Step())

    assert (gaps.seconds, gaps.count) == (0.0, 0)


def test_the_engine_counts_a_gap_between_each_step_and_the_next_of_one_spell_of_work():
    """Two spells of work with nothing between them have two gaps less than steps."""
    engine = null_engine(2)

    for spell in range(2):
        engine.add(Sequence(str(spell), [TOKEN] * 20, SamplingParams(), frozenset(), 5, seed=0))
        while engine.has_work:
            engine.step()

    stats = engine.stats()
    assert stats.steps == 10
    assert stats.step_gap_seconds_count == 8


def test_counting_anew_forgets_the_gaps():
    """What warming up took is not service."""
    engine = null_engine(1)
    engine.add(Sequence("a", [TOKEN], SamplingParams(), frozenset(), 5, seed=0))
    while engine.has_work:
        engine.step()

    engine.start_counting()

    assert (engine.stats().step_gap_seconds_count, engine.stats().step_gap_seconds_sum) == (0, 0)
