"""scripts/bench simulate: the device that is a formula, the traces, and the scheduler between them."""

import numpy as np
import pytest

from engine.sampling_params import SamplingParams
from engine.scheduling.plan import NextIterationPlan
from engine.scheduling.sequence import Sequence
from scripts.benchmarks.simulation.accelerator import Accelerator, CostModel, Transformer
from scripts.benchmarks.simulation.plan_cost import measure_plan_cost
from scripts.benchmarks.simulation.policies import POLICIES, SHIPPED
from scripts.benchmarks.simulation.policy_plot import COLUMNS, plot_policies
from scripts.benchmarks.simulation.simulate import measure_policies
from scripts.benchmarks.simulation.simulate_turns import TurnsSimulator, measure_simulated_turns
from scripts.benchmarks.simulation.simulator import Simulator
from scripts.benchmarks.simulation.traces import SHAPES, Trace, draw_trace

pytestmark = pytest.mark.thorough

DEVICE = Accelerator()
MODEL = Transformer()


def build_plan(*, decodes=0, start=0, count=0):
    """Rows that decode behind ``start`` tokens, and a chunk of ``count`` tokens behind as many."""
    plan = NextIterationPlan()
    decoding = [Sequence(str(number), [0] * start, SamplingParams(), frozenset(), 9, 0) for number in range(decodes)]
    for sequence in decoding:
        sequence.num_computed_tokens = start
    plan.add_decodes(decoding)
    if count:
        sequence = Sequence("chunk", [0] * (start + count), SamplingParams(), frozenset(), 9, seed=0)
        sequence.num_computed_tokens = start
        plan.add(sequence, count)
    return plan


def build_trace(*requests):
    """Requests of (arrival, prompt, output)."""
    arrival, prompt, output = (np.array(column) for column in zip(*requests, strict=True))
    return Trace(arrival.astype(float), prompt, output, np.zeros(len(requests), np.int64))


def test_the_model_has_the_parameters_of_llama_3_8b():
    """8.03 billion, 128 KiB of keys and values a token."""
    assert MODEL.layer_parameters + 2 * MODEL.head_parameters == pytest.approx(8.03e9, rel=1e-3)
    assert MODEL.bytes_per_token == 128 * 1024


def test_a_small_step_takes_as_long_as_reading_the_weights():
    """7.5 billion of them in bfloat16, at eight times 819 GB/s, and the overhead."""
    seconds = CostModel(MODEL, DEVICE).seconds(build_plan(decodes=1))

    assert seconds == pytest.approx(7.505e9 * 2 / (8 * 819e9) + DEVICE.overhead, rel=1e-3)


def test_a_large_step_takes_as_long_as_multiplying():
    """Two operations a weight and token, the logits of one row, and four a head dimension and pair of tokens."""
    seconds = CostModel(MODEL, DEVICE).seconds(build_plan(start=1000, count=4096))

    pairs = 4096 * 1000 + 4096 * 4097 / 2
    flop = 2 * 4096 * MODEL.layer_parameters + 2 * MODEL.head_parameters + 4 * 4096 * 32 * pairs
    assert seconds == pytest.approx(flop / (8 * 197e12) + DEVICE.overhead, rel=1e-6)


def test_decoding_reads_every_context():
    """A step of 64 rows behind 2,000 tokens reads 17 GB more than its weights."""
    cost = CostModel(MODEL, DEVICE)

    more = cost.seconds(build_plan(decodes=64, start=2000)) - cost.seconds(build_plan(decodes=64))

    assert more == pytest.approx(64 * 2000 * MODEL.bytes_per_token / DEVICE.bandwidth, rel=1e-2)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_trace_has_its_rate_and_comes_in_bursts(shape):
    """In order, the first client sending most, with a coefficient of variation as asked for of its times between."""
    trace = draw_trace(shape, rate=10, count=20_000)

    gaps = np.diff(trace.arrival[trace.client == 0])
    assert len(trace.arrival) == 20_000 and np.all(np.diff(trace.arrival) >= 0)
    assert trace.arrival[-1] == pytest.approx(2000, rel=0.1)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(shape.variation, rel=0.2)
    assert np.bincount(trace.client).argmax() == 0
    assert trace.prompt.min() >= 1 and trace.output.min() >= 1


def test_a_trace_is_the_same_each_time():
    """And at twice the rate it is the same requests in half the time."""
    first, again, faster = (draw_trace(SHAPES[0], rate, 100) for rate in (10, 10, 20))

    assert np.array_equal(first.arrival, again.arrival) and np.array_equal(first.prompt, again.prompt)
    assert np.allclose(first.arrival, 2 * faster.arrival) and np.array_equal(first.output, faster.output)


def test_simulated_requests_take_the_steps_that_they_need():
    """Steps of a second: the second request comes during the first one's prompt, and joins when the next step is planned."""
    simulator = Simulator(SHIPPED.scheduler(100), lambda plan: 1.0)

    outcome = simulator.run(build_trace((2.0, 5, 3), (2.5, 5, 2), (20.0, 5, 1)))

    assert outcome.first.tolist() == [3.0, 5.0, 21.0]
    assert outcome.last.tolist() == [5.0, 6.0, 21.0]
    assert outcome.preemptions == 0


def test_policies_are_compared_and_drawn(tmp_path):
    """Few requests of each trace, at each of its rates, beside each policy left out."""
    figures = list(measure_policies(len(SHAPES) * 4 * len(POLICIES) * 5))

    assert {figure.benchmark for figure in figures} == {
        f"simulate {shape.name} at {rate:g} req/s" for shape in SHAPES for rate in shape.rates
    }
    assert {figure.name for figure in figures} >= set(COLUMNS)
    assert all(figure.others.keys() == {policy.name for policy in POLICIES if policy != SHIPPED} for figure in figures)
    pytest.importorskip("matplotlib")
    plot_policies(figures, {"commit": "c", "date": "2026-01-01"}, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_the_cost_of_a_step_is_measured_with_requests_that_wait(monkeypatch):
    """A figure for each count of them."""
    monkeypatch.setattr("scripts.benchmarks.simulation.plan_cost.WAITING", (10, 100))
    monkeypatch.setattr("scripts.benchmarks.simulation.plan_cost.STEPS", 20)

    few, many = measure_plan_cost(repeats=1)

    assert (few.name, many.name) == ("10 waiting", "100 waiting") and few.value > 0 and many.value > 0


@pytest.mark.thorough
def test_a_simulated_tier_computes_fewer_prompt_tokens_of_conversations():
    """Of users whose conversations the device has no room for; with room for them all it copies nothing."""
    figures = {figure.name: figure for figure in measure_simulated_turns(users=60, turns=3)}

    assert figures["prompt tokens computed"].ratios["without a tier"] > 2
    assert figures["TTFT p50"].ratios["without a tier"] > 1
    assert TurnsSimulator(128, users=10, turns=3).run().loaded == 0
