"""Where the time of a step goes: on a made-up clock to exact numbers, and through the real engine and runner."""

import logging

import pytest

from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence
from engine.step.timing.step_times import PHASES, StepTimes
from scripts.benchmarks.processes.null_model import TOKEN, null_engine


def test_each_phase_lasts_from_the_end_of_the_one_before() -> None:
    """But for the pause between dispatch and wait, in which the step waits for its turn."""
    moments = iter([10.0, 10.5, 12.5, 100.0, 104.0, 104.25])
    times = StepTimes(lambda: next(moments))

    times.end("prepare")
    times.end("dispatch")
    times.resume()
    times.end("wait")
    times.end("land")

    assert times.seconds == {"plan": 0.0, "prepare": 0.5, "dispatch": 2.0, "wait": 4.0, "land": 0.25}
    assert str(times).endswith("wait 4000.00 ms, land 250.00 ms")


def test_every_step_that_lands_is_counted_in_each_phase_and_logged_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    """With its size, so that a slow one can be found; sums are in the status, and nothing is logged above debug."""
    caplog.set_level(logging.DEBUG)
    engine = null_engine(4)
    engine.add(Sequence("a", [TOKEN] * 3, SamplingParams(), frozenset(), max_tokens=5, seed=0))
    while engine.has_work:
        engine.step()

    stats = engine.stats()
    counts = {phase: engine.step_seconds[phase].cumulative()[-1][1] for phase in PHASES}
    assert counts == dict.fromkeys(PHASES, stats.steps) and stats.steps == 5
    assert stats.step_seconds == {phase: engine.step_seconds[phase].sum for phase in PHASES}
    assert all(seconds > 0 for seconds in stats.step_seconds.values())
    lines = [record for record in caplog.records if record.name == "engine.metrics.step_log"]
    assert [vars(line)["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[0].getMessage().startswith("step 1: 3 tokens in 1 rows, 0 of them decode; plan ")
    assert lines[4].levelno == logging.DEBUG and vars(lines[4])["wait"] > 0
