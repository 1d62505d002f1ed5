"""Resetting the prefix cache while requests run: nobody finds what was computed before."""

import pytest

from caching.cache_groups import CacheGroups
from caching.host_tier import HostTier
from caching.page_manager import HBMPageManager
from engine.sampling_params import SamplingParams
from engine.scheduling.host_cache.copy_cost import CopyCost
from engine.scheduling.plan import StepResult
from engine.scheduling.scheduler import InferenceScheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_memory import SequenceMemory

PAGE_SIZE, TOKEN = 4, 7
PROMPT = list(range(1, 30))


def build_scheduler(num_pages: int = 64, tier: HostTier | None = None, budget: int = 64) -> InferenceScheduler:
    """A scheduler over so many pages."""
    memory = SequenceMemory(HBMPageManager(num_pages, tier), CacheGroups(PAGE_SIZE), cost=CopyCost(0.0, 1))
    return InferenceScheduler(memory, max_num_seqs=4, max_num_batched_tokens=budget)


def ask(name: str, prompt: list[int], tokens: int = 1) -> Sequence:
    """A greedy sequence."""
    return Sequence(name, prompt, SamplingParams(temperature=0), frozenset(), tokens, seed=0, salt=b"")


def run(scheduler: InferenceScheduler, *sequences: Sequence, steps: int = 1000) -> None:
    """Steps, and each plan's copies arrive before the next one."""
    for sequence in sequences:
        scheduler.add(sequence)
    while steps and (scheduler.num_running or scheduler.num_waiting):
        steps -= 1
        plan = scheduler.plan()
        assert plan is not None
        for copies in plan.copies:
            assert scheduler.memory.host is not None
            scheduler.memory.host.landed([(bool(copies.stores), bool(copies.fetches))])
        if plan.num_tokens:
            scheduler.update(plan, StepResult([[TOKEN] if samples else [] for samples in plan.samples]))
    scheduler.check_integrity()


def test_what_ran_during_a_reset_leaves_no_output_to_be_found() -> None:
    """Its pages held the keys and values of the former weights."""
    scheduler = build_scheduler()
    first = ask("first", PROMPT[:9], 12)
    run(scheduler, first, steps=11)
    scheduler.forget_all()
    run(scheduler)

    run(scheduler, ask("again", PROMPT[:9]))
    run(scheduler, follower := ask("follower", first.prompt_token_ids + first.output_token_ids))
    assert follower.num_cached_tokens == 8  # what was computed again


def test_a_prompt_read_during_a_reset_is_not_found() -> None:
    """Nor does anybody wait for the rest of it."""
    scheduler = build_scheduler(budget=8)
    run(scheduler, ask("first", PROMPT), steps=1)
    scheduler.forget_all()
    run(scheduler, second := ask("second", PROMPT))

    assert second.num_cached_tokens == 0
    run(scheduler, third := ask("third", PROMPT))
    assert third.num_cached_tokens == 28  # the second's


def test_what_was_on_its_way_from_the_host_during_a_reset_is_not_found() -> None:
    """Who waits for it has it, and nobody else."""
    tier = HostTier(64, 8)
    scheduler = build_scheduler(12, tier)
    run(scheduler, ask("first", PROMPT))
    run(scheduler, ask("other", [100 + token for token in PROMPT]))
    scheduler.add(loading := ask("loading", PROMPT))
    plan = scheduler.plan()
    assert plan is not None and loading.num_loading
    scheduler.forget_all()
    for copies in plan.copies:
        assert scheduler.memory.host is not None
        scheduler.memory.host.landed([(bool(copies.stores), bool(copies.fetches))])
    run(scheduler)

    run(scheduler, last := ask("last", PROMPT))
    assert loading.num_cached_tokens > 0 and last.num_cached_tokens == 0


@pytest.mark.parametrize(("theirs", "found"), [(PROMPT, 0), ([200 + token for token in PROMPT], 28)])
def test_what_is_on_its_way_from_the_host_is_not_found_if_it_is_forgotten(theirs: list[int], found: int) -> None:
    """As it is where the logits of a sequence of the same prefix were not finite; others are found as ever."""
    scheduler = build_scheduler(12, HostTier(64, 8))
    run(scheduler, ask("first", PROMPT))
    run(scheduler, ask("other", [100 + token for token in PROMPT]))
    scheduler.add(ask("loading", PROMPT))
    plan = scheduler.plan()
    assert plan is not None
    spoilt = ask("spoilt", theirs)
    spoilt.page_keys_to(7, PAGE_SIZE)
    scheduler.memory.forget([spoilt])
    for copies in plan.copies:
        assert scheduler.memory.host is not None
        scheduler.memory.host.landed([(bool(copies.stores), bool(copies.fetches))])
    run(scheduler)

    run(scheduler, last := ask("last", PROMPT))
    assert last.num_cached_tokens == found


@pytest.mark.parametrize("reset", [False, True])
def test_who_is_preempted_after_a_reset_can_be_found_again(reset: bool) -> None:
    """It computes all that it has again."""
    scheduler = build_scheduler()
    sequence = ask("first", PROMPT[:9], 12)
    run(scheduler, sequence, steps=5)
    if reset:
        scheduler.forget_all()
    scheduler.lose_cache()
    assert not sequence.keeps_to_itself
    run(scheduler)

    run(scheduler, follower := ask("follower", sequence.prompt_token_ids + sequence.output_token_ids))
    assert follower.num_cached_tokens == 20
