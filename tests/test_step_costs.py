"""StepCosts: what is learned of the seconds of steps, and what is believed of sizes that were not used."""

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling_params import SamplingParams
from engine.scheduling.estimates.step_costs import FORGOTTEN_AFTER, GROWTH, REMEMBERED, StepCosts, sizes_up_to
from engine.scheduling.sequence import Sequence
from engine.step.timing.step_times import StepSeconds, StepTimes
from scripts.benchmarks.processes.null_model import TOKEN, null_engine

SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)


def build_costs(steps, sizes=SIZES):
    """Costs learned from steps of (tokens, seconds)."""
    costs = StepCosts(sizes)
    for num_tokens, seconds in steps:
        costs.learn(num_tokens, seconds)
    return costs


def test_nothing_is_believed_before_the_first_step():
    """There is no cost and nothing fits."""
    costs = build_costs([])

    assert costs.seconds(1) is None and costs.most_tokens(9.0) == 0


def test_a_step_costs_what_those_padded_to_the_same_size_cost():
    """A step of 65 tokens is one of 96 on the device."""
    costs = build_costs([(96, 2.0)])

    assert costs.seconds(65) == costs.seconds(80) == costs.seconds(96) == 2.0
    assert costs.seconds(97) != 2.0


def test_costs_between_two_sizes_and_beyond_them_are_on_their_line():
    """A fixed part of 1 second and 0.1 for each token, beyond the largest up to GROWTH times its tokens."""
    costs = build_costs([(16, 2.6), (64, 7.4)])

    assert costs.seconds(32) == pytest.approx(4.2)
    assert costs.seconds(1) == pytest.approx(1.1)
    assert costs.seconds(GROWTH * 64) == pytest.approx(13.8)
    assert costs.seconds(GROWTH * 64 + 1) is None


def test_one_size_says_that_others_cost_in_proportion():
    """That is the most that a larger one, and the least that a smaller one may cost."""
    costs = build_costs([(32, 4.0)])

    assert costs.seconds(64) == 8.0 and costs.seconds(8) == 1.0


def test_passes_of_a_draft_model_cost_what_steps_with_such_took_beyond_others():
    """They teach nothing of steps without, and are forgotten like a size that is not used any more."""
    costs = build_costs([(1, 1.0), (8, 2.0)])
    assert costs.seconds(8, 2) is None

    for passes in (2, 4, 1):
        costs.learn(8, 2.0 + 0.5 * passes, passes)

    assert costs.seconds(8, 3) == 3.5 and costs.seconds(1, 4) == 3.0 and costs.seconds(8) == 2.0
    costs.learn(16, 5.0, 4, has_prompts=True)
    assert costs.seconds(16) == 3.0 and costs.drafting_seconds(1) == 0.5
    for _ in range(FORGOTTEN_AFTER):
        costs.learn(1, 1.0)
    assert costs.seconds(1, 4) is None


def test_a_step_of_an_unknown_size_with_passes_costs_what_reading_the_weights_does_and_they():
    """A lone row that always has drafts: sizes between are never used, and what is learned of its steps is true of them."""
    costs = build_costs([(1, 1.0)])

    costs.learn(5, 3.0, 4)

    assert costs.seconds(5, 4) == 3.0 and costs.seconds(3, 2) == 2.0


def test_passes_that_stalled_make_no_step_cost_less_than_nothing():
    """A step with prompts that is shorter than its passes are believed to be corrects what is believed of these."""
    costs = build_costs([(4, 1.0), (8, 2.0)])
    costs.learn(4, 41.0, 2)

    for _ in range(2):
        costs.learn(8, 3.0, 2, has_prompts=True)

    assert costs.seconds(8) == 2.0 and costs.drafting_seconds(2) == 1.0


def test_the_first_run_and_a_stalled_machine_are_not_believed():
    """A first step that takes 50 times as long is forgiven by the second, and of many the median counts."""
    costs = build_costs([(8, 50.0), (8, 1.0)])
    assert costs.seconds(8) == 1.0

    for seconds in (1.1, 1.2, 30.0, 30.0, 30.0, 1.0, 1.0):
        costs.learn(8, seconds)
    assert costs.seconds(8) == 1.2


def test_a_machine_that_has_become_slower_is_believed_after_some_steps():
    """More than half of those remembered."""
    costs = build_costs([(8, 1.0)] * REMEMBERED + [(8, 3.0)] * (REMEMBERED // 2 + 1))

    assert costs.seconds(8) == 3.0


def test_the_size_that_was_used_last_corrects_what_contradicts_it():
    """A larger step costs no less, and no more in proportion: others are remembered from another time."""
    costs = build_costs([*[(8, 9.0)] * 3, *[(32, 90.0)] * 3, *[(16, 2.0)] * 3])
    assert (costs.seconds(8), costs.seconds(32)) == (2.0, 4.0)

    costs = build_costs([*[(8, 0.1)] * 3, *[(32, 0.1)] * 3, *[(16, 2.0)] * 3])
    assert (costs.seconds(8), costs.seconds(32)) == (1.0, 2.0)


def test_a_single_step_corrects_no_other_size():
    """It may have been a first one, or a stalled one."""
    costs = build_costs([*[(8, 1.0)] * 3, (16, 70.0)])

    assert (costs.seconds(8), costs.seconds(16)) == (1.0, 2.0)


def test_a_size_that_was_not_used_for_long_is_forgotten():
    """Then its cost is what others tell of it; but the smallest is remembered."""
    costs = build_costs([(2, 3.0), (64, 5.0), *[(16, 4.0)] * (FORGOTTEN_AFTER - 1)])
    assert costs.seconds(64) == 5.0

    costs.learn(16, 4.0)
    assert costs.seconds(64) is None and costs.seconds(2) == 3.0
    assert costs.seconds(32) == pytest.approx(4.0 + 16 / 14)


def test_most_tokens_fills_the_largest_size_that_costs_no_more():
    """Padding is of no use to anybody, and a size of unknown cost is not tried."""
    costs = build_costs([(16, 2.6), (64, 7.4)])

    assert costs.most_tokens(7.5) == 64
    assert costs.most_tokens(10.7) == 96
    assert costs.most_tokens(1000.0) == 128
    assert costs.most_tokens(1.0) == 0


def test_the_least_tokens_are_of_the_smallest_size_whose_tokens_cost_little_more():
    """A token costs 1.5 at 128 tokens, 2 at 64, 3 at 32."""
    costs = build_costs([(64, 128.0), (128, 192.0)])

    assert costs.least_tokens(128, loss=0.1) == 128
    assert costs.least_tokens(128, loss=0.34) == 64
    assert costs.least_tokens(128, loss=1.0) == 32
    assert costs.least_tokens(512, loss=1.0) == 512, "nobody knows what that costs"


@given(st.lists(st.tuples(st.integers(1, 512), st.floats(1e-6, 1e3))), st.floats(1e-6, 1e3))
def test_costs_grow_with_tokens_and_never_faster(steps, limit):
    """Whatever was learned: each is above 0, none below a smaller one's, a token costs no more in a larger step."""
    costs = build_costs(steps)

    known = [(size, cost) for size in SIZES if (cost := costs.seconds(size)) is not None]
    assert bool(known) == bool(steps)
    for (size, cost), (larger, more) in itertools.pairwise(known):
        assert 0 < cost <= more * (1 + 1e-9) and more / larger <= cost / size * (1 + 1e-9)
    most = costs.most_tokens(limit)
    assert most == max((size for size, cost in known if cost <= limit), default=0)


@given(st.lists(st.tuples(st.sampled_from(SIZES), st.floats(1e-6, 1e3)), min_size=1))
def test_a_trusted_size_costs_what_its_steps_took(steps):
    """To the last bit, and whether or not the other sizes have been asked for: a step of it fits what it costs."""
    num_tokens, _ = steps[-1]
    costs, asked = build_costs([*steps, *[steps[-1]] * 3]), build_costs(steps)
    for _ in range(3):
        asked.learn(*steps[-1])
        asked.most_tokens(1.0)

    assert (
        costs.seconds(num_tokens)
        == asked.seconds(num_tokens)
        == statistics.median_low(
            [seconds for size, seconds in [*steps, *[steps[-1]] * 3] if size == num_tokens][-REMEMBERED:]
        )
    )
    assert costs.most_tokens(costs.seconds(num_tokens)) >= num_tokens


def test_sizes_end_with_the_most():
    """Each once."""
    assert sizes_up_to(1) == [1]
    assert sizes_up_to(10) == [1, 2, 3, 4, 6, 8, 10]
    assert sizes_up_to(16) == [1, 2, 3, 4, 6, 8, 12, 16]


def build_times(begun, waited, ended, *, was_ready=False):
    """Of a step that was prepared, awaited and there at these moments."""
    moments = iter([begun, waited, ended])
    times = StepTimes(lambda: next(moments))
    times.resume(was_ready=was_ready)
    times.end("wait")
    return times


def test_a_step_takes_from_the_end_of_the_one_before():
    """Or from its own preparation, where the device was idle before that."""
    seconds = StepSeconds()

    assert seconds.landed(build_times(10.0, 10.5, 12.0)) == 2.0
    assert seconds.landed(build_times(11.0, 12.5, 15.0)) == 3.0
    assert seconds.landed(build_times(90.0, 90.5, 91.0)) == 1.0


def test_a_step_behind_one_whose_end_nobody_saw_is_not_too_short():
    """The host stalled until 20, when both were there: neither has taken no time at all."""
    seconds = StepSeconds()
    seconds.landed(build_times(10.0, 10.5, 12.0))

    assert seconds.landed(build_times(11.0, 20.0, 20.0, was_ready=True)) == 8.0
    assert seconds.landed(build_times(12.0, 20.1, 20.1, was_ready=True)) == pytest.approx(8.1)


def test_the_engine_learns_what_its_steps_cost():
    """Each step that lands, by its size, through the real engine and runner."""
    engine = null_engine(4)
    engine.add(Sequence("a", [TOKEN] * 3, SamplingParams(), frozenset(), max_tokens=5, seed=0))
    while engine.has_work:
        engine.step()

    costs = engine._scheduler.step_costs
    assert costs.seconds(1) > 0 and costs.seconds(4) > 0
