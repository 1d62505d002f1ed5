"""GrowthReserve: what is expected of outputs, and what admission makes of it."""

import pytest

from caching.cache_groups import CacheGroups
from caching.page_manager import HBMPageManager
from engine.sampling_params import SamplingParams
from engine.scheduling.estimates.growth_reserve import LONGEST, PRIOR, REMEMBERED, GrowthReserve
from engine.scheduling.plan import StepResult
from engine.scheduling.scheduler import InferenceScheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_memory import SequenceMemory

CONTEXT, PAGE_SIZE, PROMPT, ROWS = 131_072, 128, 100, 64
EOS, TOKEN = 0, 1


def build_reserve(*lengths: int) -> GrowthReserve:
    """One that has forgotten what it began with, over these lengths, again and again."""
    reserve = GrowthReserve(1000)
    for number in range(REMEMBERED):
        reserve.learn(lengths[number % len(lengths)])
    return reserve


def serve(lengths: list[int], pool: int, *, known: bool) -> tuple[InferenceScheduler, int, int]:
    """Requests with outputs of these lengths, all there at once; the scheduler, the steps, and how many ran at once."""
    scheduler = InferenceScheduler(
        SequenceMemory(HBMPageManager(pool // PAGE_SIZE + 1), CacheGroups(PAGE_SIZE)),
        max_num_seqs=ROWS,
        max_num_batched_tokens=512,
    )
    for number, length in enumerate(lengths):
        max_tokens = length + 100 if known else CONTEXT - PROMPT
        scheduler.add(Sequence(str(number), [number] * PROMPT, SamplingParams(), frozenset({EOS}), max_tokens, 0))
    steps = most = 0
    while plan := scheduler.plan():
        ids = [
            [EOS if len(sequence.output_token_ids) == lengths[int(sequence.request_id)] - 1 else TOKEN] * samples
            for sequence, samples in zip(plan.sequences, plan.samples, strict=True)
        ]
        steps, most = steps + 1, max(most, scheduler.num_running)
        scheduler.update(plan, StepResult(ids))
    assert not scheduler.num_running and not scheduler.num_waiting
    return scheduler, steps, most


def test_a_sequence_is_expected_to_end_where_those_did_that_got_as_far() -> None:
    """Two thirds ended after 20 tokens and one after 3,000; whoever is beyond 20 is one of the long ones."""
    reserve = build_reserve(20, 20, 3000)

    assert reserve.growth(0, CONTEXT) == pytest.approx(1013, abs=10)
    assert (reserve.growth(20, CONTEXT), reserve.growth(2900, CONTEXT)) == (2980, 100)


def test_a_sequence_that_has_outgrown_all_others_is_expected_to_double() -> None:
    """What was seen says nothing of it any more."""
    reserve = build_reserve(10)

    assert [reserve.growth(length, CONTEXT) for length in (10, 500, 60_000)] == [10, 500, LONGEST]


def test_nothing_is_expected_beyond_max_tokens() -> None:
    """Nor more than LONGEST of anybody."""
    reserve = build_reserve(3000)

    assert reserve.growth(90, 100) == 10
    assert build_reserve(100_000).growth(0, CONTEXT) == LONGEST


def test_what_was_seen_last_counts() -> None:
    """At first any order of magnitude is as likely as the next, and old lengths are forgotten."""
    reserve = GrowthReserve(1000)
    first = reserve.growth(0, CONTEXT)
    for _ in range(REMEMBERED):
        reserve.learn(7)

    assert first == sum(PRIOR) // len(PRIOR) and reserve.growth(0, CONTEXT) == 7


@pytest.mark.parametrize("pool", [64_000, 140_000, 400_000])
def test_requests_without_max_tokens_run_as_many_at_once_as_with(pool: int) -> None:
    """64 of 64, and not the ten whose whole context a tenth of the pool would hold."""
    _, steps, most = serve([300] * ROWS, pool, known=False)
    _, with_max_tokens, _ = serve([300] * ROWS, pool, known=True)

    assert most == ROWS and steps <= 1.1 * with_max_tokens


MIXES = {
    "long": [1000] * 96,
    "bimodal": [20, 20, 20, 2000] * 40,
    "short ones, then long ones": [10] * 300 + [2000] * 64,
    "in turns": ([5] * 100 + [1500] * 40) * 2,
}


@pytest.mark.parametrize(
    "mix", [pytest.param(mix, marks=() if mix == "bimodal" else pytest.mark.thorough) for mix in MIXES]
)
def test_a_pool_that_is_too_small_does_not_thrash(mix: str) -> None:
    """Whatever was seen before, requests without max_tokens take about the steps of known ones, and few are preempted."""
    lengths = MIXES[mix]

    scheduler, steps, _ = serve(lengths, 40_000, known=False)
    _, with_max_tokens, _ = serve(lengths, 40_000, known=True)

    long = sum(length >= 1000 for length in lengths)
    assert steps <= 1.1 * with_max_tokens and scheduler.preemptions.total() <= 1.5 * long
