"""How many drafts rows are granted, by what came of those that they had."""

import itertools

import pytest

from caching.cache_groups import CacheGroups
from caching.page_manager import HBMPageManager
from engine.sampling_params import SamplingParams
from engine.scheduling.plan import StepResult
from engine.scheduling.rows.draft_rest import FIRST_REST, LONGEST_REST, PATIENCE, PATIENCE_RESTED
from engine.scheduling.scheduler import InferenceScheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_memory import SequenceMemory
from engine.scheduling.speculation import LEAST_TRIED, Speculation

MOST, ROOM = 4, 100


def decoding(name: str = "a", num_drafts: int = MOST) -> Sequence:
    """A sequence that decodes and for which the device has drafts."""
    sequence = Sequence(name, [1] * 10, SamplingParams(max_tokens=10**6), frozenset(), 10**6, seed=0)
    sequence.num_computed_tokens, sequence.num_drafts = 10, num_drafts
    return sequence


def costing(each: float) -> Speculation:
    """Steps take 1, and ``each`` for every further token."""
    return Speculation(MOST, lambda num_tokens, _: 1 + each * num_tokens)


def granted(speculation: Speculation, *sequences: Sequence) -> list[int]:
    """Drafts of each in the next plan."""
    drafts = speculation.drafts(list(sequences), ROOM, ROOM)
    return [drafts.get(sequence, 0) for sequence in sequences]


def test_a_row_whose_drafts_are_right_gets_all_and_one_whose_are_wrong_none():
    """They share steps, and each is judged by its own."""
    speculation, right, wrong = costing(0.2), decoding("right"), decoding("wrong")

    for _ in range(10):
        for sequence, count in zip((right, wrong), granted(speculation, right, wrong), strict=True):
            speculation.land(sequence, 1 + count, 1 + (count if sequence is right else 0), MOST)

    assert granted(speculation, right, wrong) == [MOST, 0]


@pytest.mark.parametrize("seconds", [0.0, 1e-310])
def test_steps_that_a_clock_sees_no_time_of_have_all_drafts(seconds):
    """As those have whose costs nobody knows: tokens a second would be no number. Nor are they of hardly any time."""
    speculation = Speculation(MOST, lambda _tokens, _passes: seconds)

    assert granted(speculation, decoding("a")) == [MOST]


def test_drafts_that_are_granted_and_not_there_are_granted_no_more():
    """A plan is made before the step before it has landed, which may find none; nothing was wrong, and none is counted."""
    speculation, sequence = costing(0.2), decoding()

    sequence.num_in_flight = 1
    for _ in range(10):
        (count,) = granted(speculation, sequence)
        speculation.land(sequence, 1, 1, 0)
        speculation.land(sequence, 1 + count, 1, MOST)

    assert granted(speculation, sequence) == [0]
    assert speculation.num_draft_tokens == 0


@pytest.mark.parametrize("turns", [True, False])
def test_rows_are_tried_again_all_at_once_and_go_on_if_that_is_right(turns):
    """By one draft each, now and then, as any more tokens make a step longer; until the text turns to what repeats."""
    speculation, sequences = costing(0.2), [decoding(str(number)) for number in range(3)]
    for sequence in sequences:
        for _ in range(20):
            speculation.land(sequence, 1 + MOST, 1, MOST)

    plans = []
    for _ in range(400):
        plans.append(granted(speculation, *sequences))
        for sequence, count in zip(sequences, plans[-1], strict=True):
            speculation.land(sequence, 1 + count, 1 + (count if turns else 0), MOST)

    tried = [number for number, plan in enumerate(plans) if any(plan)]
    assert plans[tried[0]] == [1, 1, 1] and PATIENCE < tried[0] <= PATIENCE + 2 * FIRST_REST
    if turns:
        assert plans[-1] == [MOST] * 3 and len(tried) == len(plans) - tried[0]
    else:
        rests = [after - before for before, after in itertools.pairwise(tried)]
        assert all(plans[number] == [1, 1, 1] for number in tried)
        assert rests and all(LEAST_TRIED <= rest <= 2 * LEAST_TRIED for rest in rests)  # such steps take long


def test_rows_rest_for_long_though_their_wrong_drafts_are_not_there_in_each_plan():
    """In a text of which two words of three are found, and go on with another: a try costs a longer step each time."""
    speculation, sequence = costing(0.2), decoding()

    tried = []
    for number in range(600):
        (count,) = granted(speculation, sequence)
        tried += [number] if count else []
        speculation.land(sequence, 1 + count, 1, MOST if number % 3 else 0)

    rests = [after - before for before, after in itertools.pairwise(tried)]
    assert len(rests) > 5 and min(rests[3:]) > LEAST_TRIED - 3


@pytest.mark.parametrize("seconds", [0.0002, 0.001, 0.01, None])
@pytest.mark.parametrize("num_drafts", [0, MOST])
def test_what_does_not_repeat_costs_cheap_steps_next_to_nothing(seconds, num_drafts):
    """Drafts are looked for in few of them, whether some are found and wrong or none is; where a step takes long, looking
    costs nothing, and rows hardly rest from drafts that are not there."""
    cost = None if seconds is None else lambda tokens, _: seconds * (1 + 0.3 * tokens)
    speculation = Speculation(MOST, cost) if cost else Speculation(MOST)
    sequence = decoding(num_drafts=num_drafts)

    looked, tried = [], []
    for _ in range(3000):
        (count,) = granted(speculation, sequence)
        looked.append(speculation.looks_up)
        tried.append(count)
        if looked[-1]:
            speculation.land(sequence, 1 + count, 1, num_drafts)
        else:
            sequence.num_drafts = 0

    late = looked[1000:]
    if seconds is None:
        assert all(late)
    elif seconds < 0.001:
        assert 0 < sum(late) <= len(late) * 2 * PATIENCE_RESTED / LONGEST_REST + PATIENCE_RESTED
    elif seconds == 0.001 or num_drafts:
        assert 0 < sum(late) < 0.25 * len(late)
    else:
        assert sum(late) > 0.5 * len(late)
    assert (sum(tried[1000:]) > 0) == (num_drafts > 0)


def test_rows_that_rest_are_looked_at_in_the_same_steps():
    """Though they began to rest at different times."""
    speculation = Speculation(MOST, lambda _tokens, _passes: 0.0002)
    sequences, looked = [decoding(str(number), 0) for number in range(8)], []

    for number in range(2000):
        granted(speculation, *sequences[: 1 + number // 50])
        looked.append(speculation.looks_up)

    assert sum(looked[1000:]) < 1000 * 3 * PATIENCE_RESTED / LONGEST_REST


def test_nothing_is_looked_for_where_there_is_no_room_for_drafts():
    """The rows go on being thought of when there is some."""
    speculation, sequence = costing(0.0), decoding()

    assert speculation.drafts([sequence], 0, ROOM) == {} and not speculation.looks_up
    assert granted(speculation, sequence) == [MOST] and speculation.looks_up


def test_what_costs_nothing_is_verified_as_long_as_it_was_ever_right():
    """And as many as there is room for, the likeliest first."""
    speculation, likely, unlikely = costing(0.0), decoding("likely"), decoding("unlikely")
    speculation.land(likely, 1 + MOST, 1 + MOST, MOST)
    speculation.land(unlikely, 1 + MOST, 1, MOST)

    assert granted(speculation, likely, unlikely) == [MOST, MOST]
    drafts = speculation.drafts([unlikely, likely], 5, ROOM)
    assert drafts[likely] == MOST and drafts[unlikely] == 1


@pytest.mark.parametrize("each", [0.01, 0.05, 0.3])
def test_only_numbers_that_fill_a_step_are_weighed(each):
    """As steps are padded to sizes: what is granted is what is granted where all numbers are."""
    sizes, plans = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32], []
    for given in (sizes, ()):
        speculation = Speculation(MOST, lambda tokens, _: 1 + each * next(s for s in sizes if s >= tokens), given)
        rows = [decoding(str(number)) for number in range(6)]
        for number, row in enumerate(rows):
            for _ in range(5):
                speculation.land(row, 1 + MOST, 1 + number % (1 + MOST), MOST)
        plans.append([granted(speculation, *rows[:count]) for count in range(1, 7)])

    assert plans[0] == plans[1] and sum(map(sum, plans[0])) > 10


def test_rows_share_the_passes_of_a_draft_model():
    """For what is seldom right alone none is made; beside a row that has as many it costs nothing more."""
    speculation = Speculation(MOST, lambda _, passes: 1 + 0.3 * passes, has_model=True)
    right, wrong = decoding("right"), decoding("wrong")
    for _ in range(10):
        speculation.land(right, 1 + MOST, 1 + MOST, MOST)
        speculation.land(wrong, 1 + MOST, 1, MOST)

    assert granted(speculation, wrong) == [0]
    assert granted(speculation, right, wrong) == [MOST, MOST]
    assert [speculation.passes(count) for count in (0, MOST)] == [0, MOST] and costing(0.1).passes(MOST) == 0


def test_a_draft_model_drafts_nothing_behind_its_own_context():
    """It is fed the token before each draft, of which a sequence of 10 has the next; what a constraint forces is none of its."""
    for context, drafts in {9: 0, 10: 0, 11: 1, 13: 3, 99: MOST}.items():
        speculation, forced = Speculation(MOST, has_model=True, draft_context=context), decoding("forced")
        forced.expected = [5] * MOST

        assert granted(speculation, decoding(), forced) == [drafts, MOST]


@pytest.mark.parametrize("num_waiting", [10, 100])
def test_who_waits_for_pages_takes_no_drafts_from_those_who_run(num_waiting):
    """A prompt that would be one row too many waits for the next step."""
    speculation = Speculation(4)
    pages = HBMPageManager(1 + 8 * 80 + 30)
    memory = SequenceMemory(pages, CacheGroups(16, (None,), 512))
    scheduler = InferenceScheduler(memory, max_num_seqs=64, max_num_batched_tokens=512, speculation=speculation)

    def step():
        plan = scheduler.plan()
        assert sum(plan.counts[: plan.num_decodes]) + plan.num_rows - plan.num_decodes <= 64
        scheduler.update(plan, StepResult([[5] * count for count in plan.samples], drafts=[4] * plan.num_rows))
        return plan

    for number in range(8 + num_waiting):
        params = SamplingParams(temperature=0)
        scheduler.add(Sequence(str(number), [number + 2] * 1000, params, frozenset({0}), 280, 0, client="c"))
    for _ in range(40):
        step()
    plans = [step() for _ in range(10)]

    assert scheduler.num_waiting >= num_waiting - 2
    assert sum(sum(plan.counts[: plan.num_decodes]) - plan.num_decodes for plan in plans) > 200


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_drafts_of_a_row_fill_as_many_pages_as_they_need(page_size):
    """With small pages a row has as many drafts as with large ones."""
    pages = HBMPageManager(1 + 64 // page_size)
    memory = SequenceMemory(pages, CacheGroups(page_size, (None,), 32))
    scheduler = InferenceScheduler(memory, max_num_seqs=1, max_num_batched_tokens=32, speculation=Speculation(12))
    scheduler.add(Sequence("a", [1] * 3, SamplingParams(temperature=0), frozenset({0}), 60, 0))
    samples = []
    while (plan := scheduler.plan()) is not None:
        samples += plan.samples
        scheduler.update(plan, StepResult([[5] * count for count in plan.samples], drafts=[12] * plan.num_rows))
        scheduler.check_integrity()

    assert samples == [1, 13, 13, 13, 13, 7]


def test_a_prompt_does_not_wait_for_rows_whose_drafts_are_all_right():
    """Drafts that could fill each step leave a prompt that has begun half of it, and have the rest again behind it."""
    memory = SequenceMemory(HBMPageManager(1000), CacheGroups(16, (None,), 64))
    scheduler = InferenceScheduler(memory, max_num_seqs=64, max_num_batched_tokens=64, speculation=Speculation(8))
    for number in range(8):
        scheduler.add(Sequence(str(number), [number] * 8, SamplingParams(temperature=0), frozenset(), 1000, 0))

    def step():
        plan = scheduler.plan()
        result = StepResult([[5] * count for count in plan.samples], drafts=[8 * (count > 0) for count in plan.samples])
        scheduler.update(plan, result)
        return plan

    assert sum(step().num_tokens for _ in range(3)) > 64 + 8
    scheduler.add(Sequence("prompt", [9] * 600, SamplingParams(temperature=0), frozenset(), 1, 0))
    plans = [step() for _ in range(26)]

    assert scheduler.num_running == 8
    assert min(sum(plan.samples) for plan in plans) > 8
    assert sum(plans[-1].samples) > 50
