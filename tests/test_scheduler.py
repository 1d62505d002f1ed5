"""InferenceScheduler: a pure machine, driven here with token ids that a test chooses."""

from collections import deque

import pytest

from caching.cache_groups import CacheGroups
from caching.page_manager import HBMPageManager
from engine.sampling_params import SamplingParams
from engine.scheduling.adapter_slots import AdapterSlots
from engine.scheduling.admission import LOOKED_AT
from engine.scheduling.backfill import MOST_PASSED
from engine.scheduling.estimates.growth_reserve import GrowthReserve
from engine.scheduling.estimates.step_costs import StepCosts
from engine.scheduling.plan import StepResult
from engine.scheduling.preemption import Cause, Preemption, PreemptionLog
from engine.scheduling.scheduler import InferenceScheduler
from engine.scheduling.sequence import Sequence, SequenceStatus
from engine.scheduling.sequence_memory import SequenceMemory

EOS = 0


def build_scheduler(*, num_pages=100, page_size=4, max_num_seqs=8, budget=16, reserve=None, **settings):
    """A scheduler over a pool of its own, which keeps a page free at admission and expects nobody to grow."""
    pages = HBMPageManager(num_pages)
    scheduler = InferenceScheduler(
        SequenceMemory(pages, CacheGroups(page_size)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        reserve=reserve or GrowthReserve(num_pages, least=0.0),
        **settings,
    )
    return scheduler, pages


def build_sequence(request_id="a", prompt=3, max_tokens=4, salt=None, client="", **params):
    """A sequence whose prompt has this many tokens; it shares no pages, unless it is given a salt."""
    return Sequence(
        request_id,
        [1] * prompt,
        SamplingParams(**params),
        frozenset({EOS}),
        max_tokens,
        seed=0,
        client=client,
        salt=request_id.encode() if salt is None else salt,
    )


def land(scheduler, plan, token=7):
    """Let every row of a plan sample the same token."""
    return scheduler.update(plan, StepResult([[token] if samples else [] for samples in plan.samples]))


def run_to_end(scheduler, *, run_ahead=0, token=7):
    """Plan and land until nothing is left; the outputs by request id."""
    outputs, in_flight = {}, deque()
    while scheduler.num_running or scheduler.num_waiting or in_flight:
        plan = scheduler.plan()
        if plan is not None:
            in_flight.append(plan)
        if plan is None or len(in_flight) > run_ahead:
            assert in_flight, "nothing planned, nothing in flight, but work is left"
            for output in land(scheduler, in_flight.popleft(), token):
                outputs.setdefault(output.request_id, []).append(output)
        scheduler.check_integrity()
    return outputs


@pytest.mark.parametrize("run_ahead", [0, 1, 3])
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_max_tokens_gives_exactly_that_many(max_tokens, run_ahead):
    """A sequence that meets no stop token gives max_tokens tokens, the last with reason length."""
    scheduler, _ = build_scheduler()
    scheduler.add(build_sequence(max_tokens=max_tokens))

    outputs = run_to_end(scheduler, run_ahead=run_ahead)["a"]

    assert [output.token_ids for output in outputs] == [[7]] * max_tokens
    assert [output.finish_reason for output in outputs] == [None] * (max_tokens - 1) + ["length"]


def test_a_sequence_that_will_end_by_length_is_not_planned_again():
    """With its last token in flight there is nothing to plan for it."""
    scheduler, _ = build_scheduler()
    scheduler.add(build_sequence(max_tokens=1))

    assert scheduler.plan() is not None
    assert scheduler.plan() is None


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_a_first_token_that_is_a_stop_token_ends_it(run_ahead):
    """EOS right after the prompt gives one token and reason stop; late tokens of run-ahead are dropped."""
    scheduler, pages = build_scheduler()
    scheduler.add(build_sequence(max_tokens=9))

    outputs = run_to_end(scheduler, run_ahead=run_ahead, token=EOS)["a"]

    assert [(output.token_ids, output.finish_reason) for output in outputs] == [([EOS], "stop")]
    assert pages.num_owned == 0


def test_decodes_come_first_and_prompts_share_what_is_left():
    """A step holds a token for each decoding sequence, then chunks of several prompts up to the budget."""
    scheduler, _ = build_scheduler(budget=8)
    scheduler.add(build_sequence("decoding", prompt=2))
    land(scheduler, scheduler.plan())
    scheduler.add(build_sequence("short", prompt=3))
    scheduler.add(build_sequence("long", prompt=20))

    plan = scheduler.plan()

    assert [sequence.request_id for sequence in plan.sequences] == ["decoding", "short", "long"]
    assert (plan.counts, plan.num_decodes, plan.num_tokens) == ([1, 3, 4], 1, 8)
    assert plan.samples == [True, True, False]


def test_the_second_chunk_goes_on_where_the_first_ended():
    """Chunks of one prompt cover it without gap or overlap, and only the last samples (an ancestor restarted at 0)."""
    scheduler, _ = build_scheduler(budget=8)
    scheduler.add(build_sequence(prompt=19))

    plans = [scheduler.plan() for _ in range(3)]

    assert [(plan.starts, plan.counts, plan.samples) for plan in plans] == [
        ([0], [8], [False]),
        ([8], [8], [False]),
        ([16], [3], [True]),
    ]


def test_a_stream_of_prompts_never_starves_a_decode():
    """While prompts keep the budget full, every step still holds the decoding sequence's token."""
    scheduler, _ = build_scheduler(budget=8, num_pages=400)
    scheduler.add(build_sequence("decoding", prompt=2, max_tokens=30))
    land(scheduler, scheduler.plan())

    for step in range(29):
        scheduler.add(build_sequence(f"prompt {step}", prompt=4, max_tokens=1))
        scheduler.add(build_sequence(f"another {step}", prompt=4, max_tokens=1))
        plan = scheduler.plan()
        assert plan.sequences[0].request_id == "decoding" and plan.num_tokens == 8
        land(scheduler, plan)


def test_a_decode_asks_for_a_page_only_when_it_begins_one():
    """Steps inside a page take no page (an ancestor took one per slot and step)."""
    scheduler, pages = build_scheduler(page_size=4)
    scheduler.add(build_sequence(prompt=3, max_tokens=9))
    owned = []

    for _ in range(6):
        land(scheduler, scheduler.plan())
        owned.append(pages.num_owned)

    assert owned == [1, 1, 2, 2, 2, 2]


def test_admission_waits_for_pages_above_the_watermark():
    """With others running, a prompt is admitted only when it leaves a page free for them to grow into."""
    scheduler, _ = build_scheduler(num_pages=4, page_size=4)
    scheduler.add(build_sequence("first", prompt=4))
    scheduler.add(build_sequence("second", prompt=8))

    plan = scheduler.plan()

    assert [sequence.request_id for sequence in plan.sequences] == ["first"]
    assert scheduler.num_waiting == 1


def test_a_lone_sequence_may_take_the_whole_pool():
    """The watermark holds nobody back who runs alone."""
    scheduler, pages = build_scheduler(num_pages=4, page_size=4)
    scheduler.add(build_sequence(prompt=12, max_tokens=1))

    assert run_to_end(scheduler)["a"][-1].finish_reason == "length"
    assert pages.num_cached == 3


def test_shortage_preempts_the_newest_which_resumes_first():
    """The oldest keeps its pages; the newest goes back to the head of the queue and later recomputes all it had."""
    scheduler, _ = build_scheduler(num_pages=5, page_size=2, budget=16)
    old, new = build_sequence("old", prompt=2, max_tokens=6), build_sequence("new", prompt=2, max_tokens=6)
    scheduler.add(old)
    scheduler.add(new)
    scheduler.add(build_sequence("waiting", prompt=2, max_tokens=1))
    while not scheduler.preemptions:
        land(scheduler, scheduler.plan())

    assert (old.status, new.status) == (SequenceStatus.RUNNING, SequenceStatus.WAITING)
    assert not new.pages and new.num_computed_tokens == 0
    known = len(new.output_token_ids)
    resumed = scheduler.plan()
    while new not in resumed.sequences:
        land(scheduler, resumed)
        resumed = scheduler.plan()
    land(scheduler, resumed)
    row = resumed.sequences.index(new)
    assert resumed.starts[row] == 0
    assert resumed.counts[row] == 2 + known
    run_to_end(scheduler)
    assert len(new.output_token_ids) == 6


def preempt_with_tokens_in_flight(**settings):
    """A scheduler, the sequence that keeps its pages, the one that has just lost them, and the plans in flight."""
    scheduler, _ = build_scheduler(num_pages=5, page_size=2)
    old, new = build_sequence("old", prompt=2, max_tokens=6), build_sequence("new", prompt=2, **settings)
    scheduler.add(old)
    scheduler.add(new)
    in_flight = deque([scheduler.plan(), scheduler.plan(), scheduler.plan()])
    in_flight.append(scheduler.plan())
    assert new.status is SequenceStatus.WAITING and new.num_in_flight == 3 and scheduler.preemptions.total() == 1
    return scheduler, old, new, in_flight


def test_a_victim_gives_its_pages_at_once_and_its_late_tokens_are_kept():
    """It is in no further step until they have landed, and then computes them with the rest."""
    scheduler, old, new, in_flight = preempt_with_tokens_in_flight(max_tokens=6)

    assert new not in in_flight[-1].sequences and in_flight[-1].grown == [old]
    assert not new.pages and new.slot < 0
    late = [output for plan in in_flight for output in land(scheduler, plan) if output.request_id == "new"]
    assert [output.token_ids for output in late] == [[7]] * 3 and new.output_token_ids == [7] * 3
    assert new.status is SequenceStatus.WAITING and scheduler.stats()["waiting_tokens"] == 5
    scheduler.check_integrity()
    assert len(run_to_end(scheduler, run_ahead=2)["new"]) == 3


def test_a_victim_is_not_admitted_before_its_late_tokens_have_landed():
    """There is room for it at once, but what it has to compute is not known yet; nothing behind it passes it."""
    scheduler, _, new, in_flight = preempt_with_tokens_in_flight(max_tokens=9)
    scheduler.finish("old")
    scheduler.add(build_sequence("behind", prompt=1, max_tokens=1))

    planned = []
    for _ in range(3):
        planned.append(scheduler.plan())
        land(scheduler, in_flight.popleft())

    assert planned == [None] * 3
    resumed = scheduler.plan()
    assert resumed.sequences[0] is new and resumed.starts[0] + resumed.counts[0] == 5


def test_a_late_stop_token_ends_a_victim_where_it_waits():
    """What is in flight behind the stop token is dropped."""
    scheduler, _, new, in_flight = preempt_with_tokens_in_flight(max_tokens=9)

    outputs = []
    for token, plan in zip((7, EOS, 7, 7), in_flight, strict=True):
        ids = [[token if sequence is new else 7] for sequence in plan.sequences]
        outputs += [output for output in scheduler.update(plan, StepResult(ids)) if output.request_id == "new"]

    assert [(output.token_ids, output.finish_reason) for output in outputs] == [([7], None), ([EOS], "stop")]
    assert new.status is SequenceStatus.FINISHED and scheduler.num_waiting == scheduler.stats()["waiting_tokens"] == 0
    assert list(run_to_end(scheduler)) == ["old"]


def test_late_tokens_of_a_victim_that_was_aborted_are_dropped():
    """It waits, ends there, and nothing more is said of it."""
    scheduler, _, new, in_flight = preempt_with_tokens_in_flight(max_tokens=9)

    assert scheduler.finish("new")

    late = [output for plan in in_flight for output in land(scheduler, plan)]
    assert {output.request_id for output in late} == {"old"} and new.output_token_ids == []
    scheduler.check_integrity()


def test_late_tokens_of_a_victim_are_sampled_again_where_their_steps_are_lost():
    """After a failed step nothing in flight lands: it goes on from the tokens that have."""
    scheduler, _, new, in_flight = preempt_with_tokens_in_flight(max_tokens=6)
    land(scheduler, in_flight.popleft())

    scheduler.lose_cache()

    assert new.num_in_flight == 0
    assert len(run_to_end(scheduler, run_ahead=1)["new"]) == 5 and len(new.output_token_ids) == 6


def test_a_sequence_without_a_page_stays_when_a_neighbour_ends_in_time():
    """A sequence that ends while the victim's tokens land gives the page that was short: nobody is preempted."""
    scheduler, _ = build_scheduler(num_pages=5, page_size=2)
    ending, victim = build_sequence("ending", prompt=1, max_tokens=2), build_sequence("victim", prompt=1)
    for sequence in (build_sequence("old", prompt=2, max_tokens=3), ending, victim):
        scheduler.add(sequence)
    in_flight = deque([scheduler.plan(), scheduler.plan(), scheduler.plan()])
    assert victim not in in_flight[-1].sequences and victim.num_in_flight

    land(scheduler, in_flight.popleft())
    land(scheduler, in_flight.popleft())

    assert ending.status is SequenceStatus.FINISHED
    assert victim in scheduler.plan().sequences and scheduler.preemptions.total() == 0


def test_nobody_is_preempted_while_another_is_about_to_end():
    """A page that is short comes from the sequence whose last token is in flight: its neighbour waits a step for it."""
    scheduler, _ = build_scheduler(num_pages=4, page_size=2)
    scheduler.add(build_sequence("ending", prompt=2, max_tokens=3))
    scheduler.add(build_sequence("going on", prompt=1, max_tokens=5))

    outputs = run_to_end(scheduler)

    assert len(outputs["going on"]) == 5 and scheduler.preemptions.total() == 0


def test_a_late_token_does_not_reach_the_slots_next_owner():
    """A sequence ended with a step in flight; the one that takes its slot gets only its own tokens and pages."""
    scheduler, _ = build_scheduler(max_num_seqs=1)
    scheduler.add(build_sequence("gone", max_tokens=9))
    late = scheduler.plan()
    assert scheduler.finish("gone")
    successor = build_sequence("successor")
    scheduler.add(successor)
    plan = scheduler.plan()

    assert scheduler.update(late, StepResult([[5]])) == []
    assert successor.output_token_ids == [] and successor.pages
    assert [output.token_ids for output in scheduler.update(plan, StepResult([[6]]))] == [[6]]
    assert plan.admitted == [successor]


def test_finishing_twice_or_what_is_unknown_changes_nothing():
    """finish answers False for a sequence that is not here."""
    scheduler, _ = build_scheduler()
    scheduler.add(build_sequence())

    assert [scheduler.finish("a"), scheduler.finish("a"), scheduler.finish("b")] == [True, False, False]
    assert scheduler.plan() is None


def build_siblings(count, prompt=9, max_tokens=4, **params):
    """Sequences of one prompt and one salt."""
    return [build_sequence(f"s{index}", prompt, max_tokens, salt=b"", **params) for index in range(count)]


def test_siblings_share_the_pages_that_one_has_computed():
    """Nine tokens in pages of four: two full pages are shared, in the same step already, the ninth token is each one's own."""
    scheduler, pages = build_scheduler(budget=16)
    for sibling in build_siblings(3):
        scheduler.add(sibling)

    plan = scheduler.plan()

    assert (plan.starts, plan.counts, plan.samples) == ([0, 8, 8], [9, 1, 1], [True] * 3)
    first, second, third = (sequence.pages[0] for sequence in plan.sequences)
    assert first[:2] == second[:2] == third[:2] and len({first[2], second[2], third[2]}) == 3
    assert pages.num_owned == 5
    scheduler.check_integrity()


def test_the_last_token_of_a_prompt_is_never_shared():
    """Eight tokens fill two pages, of which one is shared: who samples must compute the last token."""
    scheduler, _ = build_scheduler(budget=16)
    for sibling in build_siblings(2, prompt=8):
        scheduler.add(sibling)

    assert scheduler.plan().starts == [0, 4]


def test_shared_pages_outlive_the_sibling_that_computed_them():
    """The first one ends at once; the other's pages stay its own until it ends."""
    scheduler, pages = build_scheduler()
    first, second = build_siblings(2)
    scheduler.add(first)
    scheduler.add(second)
    land(scheduler, scheduler.plan())

    scheduler.finish(first.request_id)
    scheduler.check_integrity()

    assert pages.num_owned == 3
    assert len(run_to_end(scheduler)["s1"]) == 3 and pages.num_owned == 0


def test_pages_are_found_after_their_owner_has_ended():
    """With one slot, the first has given its pages back before the second begins, which computes only the last token."""
    scheduler, pages = build_scheduler(max_num_seqs=1)
    for sibling in build_siblings(2, max_tokens=1):
        scheduler.add(sibling)

    land(scheduler, scheduler.plan())
    second = scheduler.plan()

    assert (second.starts, second.counts) == ([8], [1]) and pages.num_cached == 0


def test_what_is_to_tell_of_its_prompt_computes_all_of_it():
    """Log-probabilities of prompt tokens need their hidden states, which pages do not hold."""
    scheduler, _ = build_scheduler(budget=32)
    for sibling in build_siblings(2, prompt_logprobs=0):
        scheduler.add(sibling)

    assert scheduler.plan().starts == [0, 0]


def test_a_full_page_is_kept_only_for_sequences_of_the_same_salt():
    """The same tokens of another tenant are computed again."""
    scheduler, _ = build_scheduler(budget=32)
    for name, salt in (("a", b"one"), ("b", b"other"), ("c", b"one")):
        scheduler.add(build_sequence(name, prompt=9, salt=salt))

    assert scheduler.plan().starts == [0, 0, 8]


def test_who_begins_with_a_page_that_another_is_computing_waits_for_it():
    """Two prompts of 20 tokens at 8 a step: the second begins when the first has filled the pages that both need."""
    scheduler, _ = build_scheduler(budget=8)
    first, second = build_siblings(2, prompt=20)
    scheduler.add(first)
    scheduler.add(second)

    plans = [scheduler.plan() for _ in range(3)]

    assert [plan.sequences for plan in plans] == [[first], [first], [first, second]]
    assert plans[2].starts == [16, 16] and plans[2].counts == [4, 4]


def test_what_a_preempted_sequence_has_computed_is_found_again():
    """Seven tokens were computed, of which one page is kept and one was full; the next plan goes on behind them."""
    scheduler, pages = build_scheduler(num_pages=6)
    sequence = build_sequence(prompt=6, max_tokens=9)
    scheduler.add(sequence)
    for _ in range(4):
        land(scheduler, scheduler.plan())

    scheduler.lose_cache()
    first = scheduler.plan()
    land(scheduler, first)
    scheduler.finish("a")

    assert first.starts == [0] and first.counts == [10]  # nothing is found after the memory was lost
    assert pages.num_cached == 2  # the third page is not full
    scheduler.add(build_sequence("b", prompt=9, salt=b"a"))
    assert scheduler.plan().starts == [4]  # the prompt of b has 1s where a generated 7s


def test_a_long_prompt_leaves_half_of_the_step_to_others():
    """Beside a decode it gets half of the budget; a short prompt behind it is computed in the same step."""
    scheduler, _ = build_scheduler(budget=16)
    scheduler.add(build_sequence("decoding", max_tokens=30))
    land(scheduler, scheduler.plan())

    scheduler.add(build_sequence("long", prompt=40))
    scheduler.add(build_sequence("long too", prompt=40))
    alone = scheduler.plan()
    scheduler.finish("long too")
    scheduler.add(build_sequence("short", prompt=5))
    beside = scheduler.plan()

    assert [sequence.request_id for sequence in alone.sequences] == ["decoding", "long"] and alone.counts == [1, 8]
    assert [sequence.request_id for sequence in beside.sequences] == ["decoding", "long", "short"]
    assert beside.counts == [1, 8, 5]


def test_without_decodes_a_long_prompt_gets_all_that_nobody_needs():
    """Half for the long one, four for the short one, and the rest for the long one after all."""
    scheduler, _ = build_scheduler(budget=16)
    scheduler.add(build_sequence("long", prompt=40))
    assert scheduler.plan().counts == [16]

    scheduler.add(build_sequence("short", prompt=4))

    assert scheduler.plan().counts == [12, 4]


def timed_scheduler(*, decodes=4, **settings):
    """Steps take 6 seconds and 1 for each token; ``decodes`` sequences decode, and have generated a token."""
    costs = StepCosts((1, 2, 4, 8, 16, 24, 32, 48, 64))
    for size in (1, 16, 64) * 3:
        costs.learn(size, 6.0 + size)
    scheduler, pages = build_scheduler(budget=64, step_costs=costs, **settings)
    for number in range(decodes):
        scheduler.add(build_sequence(f"decoding {number}", prompt=2, max_tokens=9))
    if decodes:
        land(scheduler, scheduler.plan())
    return scheduler, pages


def test_beside_decodes_a_prompt_gets_what_keeps_the_step_below_three_without():
    """Four decodes take 10 seconds, a step of 24 tokens 30: 20 for the prompt, which fill the step's size."""
    scheduler, _ = timed_scheduler()
    scheduler.add(build_sequence("long", prompt=60))

    plan = scheduler.plan()

    assert (plan.num_decodes, plan.num_tokens, plan.counts[4:]) == (4, 24, [20])


def test_what_a_step_may_take_is_the_operators_if_they_say_so():
    """40 seconds are enough for 32 tokens."""
    scheduler, _ = timed_scheduler(inter_token_seconds=40.0)
    scheduler.add(build_sequence("long", prompt=60))

    assert scheduler.plan().num_tokens == 32


def test_a_prompt_is_computed_whatever_the_target():
    """Where even decodes alone take longer, each step has a thirty-second of its budget for prompts."""
    scheduler, _ = timed_scheduler(inter_token_seconds=1.0)
    scheduler.add(build_sequence("long", prompt=60))

    assert scheduler.plan().counts == [1, 1, 1, 1, 2]


def test_without_decodes_no_step_is_bounded_in_time():
    """Nobody waits for its end."""
    scheduler, _ = timed_scheduler(decodes=0, inter_token_seconds=1.0)
    scheduler.add(build_sequence("long", prompt=60))

    assert scheduler.plan().counts == [60]


def test_a_step_without_decodes_is_no_longer_than_pays_where_a_flood_waits():
    """A token costs 1 + 1 / 256 at 512 tokens, and at 64 less than a twentieth more. Eight full steps are no flood."""
    costs = StepCosts((32, 64, 128, 256, 512))
    for size in (64, 512) * 3:
        costs.learn(size, 2.0 + size)
    scheduler, _ = build_scheduler(budget=512, num_pages=1600, step_costs=costs)
    for number in range(6):
        scheduler.add(build_sequence(f"long {number}", prompt=600))
    assert scheduler.plan().num_tokens == 512

    for number in range(4):
        scheduler.add(build_sequence(f"another {number}", prompt=600))
    assert scheduler.plan().counts == [64]
    scheduler.add(build_sequence("short", prompt=10, client="another"))

    plan = scheduler.plan()

    assert plan.num_tokens == 64 and 10 in plan.counts


def test_of_what_time_leaves_shorter_prompts_get_half_and_long_ones_the_rest():
    """Of 20 tokens: a prompt of more than 10 is long and leaves the others what they have a use for."""
    scheduler, _ = timed_scheduler()
    scheduler.add(build_sequence("long", prompt=60))
    scheduler.add(build_sequence("as long", prompt=60))
    scheduler.add(build_sequence("short", prompt=7))

    plan = scheduler.plan()

    assert {s.request_id: count for s, count in zip(plan.sequences[4:], plan.counts[4:], strict=True)} == {
        "long": 13,
        "short": 7,
    }


def test_a_short_prompt_of_who_runs_nothing_does_not_wait_for_those_that_have_begun():
    """However few tokens a step has for prompts: 8 of a full step's 64 are short, and a client's first comes first."""
    scheduler, _ = timed_scheduler(inter_token_seconds=1.0, max_num_seqs=16)
    for name, prompt in (("long", 60), ("short", 9)):
        scheduler.add(build_sequence(name, prompt=prompt, client="flood"))
    for _ in range(2):
        land(scheduler, scheduler.plan())
    scheduler.add(build_sequence("late", prompt=60, client="flood"))
    scheduler.add(build_sequence("other", prompt=8, client="other"))

    plan = scheduler.plan()

    rows = zip([s.request_id for s in plan.sequences], plan.counts, strict=True)
    assert dict(list(rows)[plan.num_decodes :]) == {"long": 1, "other": 1}


def test_newcomers_do_not_keep_a_begun_prompt_from_its_end():
    """However many come, who has begun is first in every second plan."""
    scheduler, _ = build_scheduler(num_pages=4000, max_num_seqs=32, budget=64)
    scheduler.add(build_sequence("begun", prompt=70, max_tokens=1, client="begun"))
    ended = []
    for number in range(10):
        for name in (f"{number} a", f"{number} b"):
            scheduler.add(build_sequence(name, prompt=32, max_tokens=1, client=name))
        ended += [output.request_id for output in land(scheduler, scheduler.plan()) if output.finish_reason]

    assert "begun" in ended[:6]


def test_of_equals_the_same_client_yields_whoever_is_asked():
    """Four of a client that is more important run beside four of one that is not: one of these yields."""
    scheduler, _ = build_scheduler(num_pages=400, max_num_seqs=8, budget=64)
    for client, priority in (("b", 5), ("a", 0)):
        for number in range(4):
            scheduler.add(build_sequence(f"{client} {number}", max_tokens=50, client=client, priority=priority))
        land(scheduler, scheduler.plan())
    scheduler.add(build_sequence("new", client="c", priority=5))
    for _ in range(3):
        land(scheduler, scheduler.plan())

    assert [event.request_id for event in scheduler.preempted] == ["b 3"]


def test_the_operators_part_for_long_prompts_holds_beside_decodes():
    """Time leaves 20 tokens, and they get no more than 5 of them."""
    scheduler, _ = timed_scheduler(long_prefill_token_threshold=5)
    scheduler.add(build_sequence("long", prompt=60))

    assert scheduler.plan().counts[4:] == [5]


def test_those_who_wait_for_their_mask_do_not_wait_for_a_whole_step_of_prompts():
    """Its token is sampled late, so it is not in the step, which has a size of 8 less its own token all the same."""
    scheduler, _ = timed_scheduler(decodes=0)
    constrained = build_sequence("constrained", prompt=2)
    constrained.constraint, constrained.awaits_mask = Unanswered(), True
    scheduler.add(constrained)
    constrained.awaits_mask = False
    land(scheduler, scheduler.plan())
    assert scheduler.plan().late == [0]
    scheduler.add(build_sequence("long", prompt=60))

    plan = scheduler.plan()

    assert (plan.num_decodes, plan.num_tokens) == (0, 7)


def test_what_steps_take_is_learned_as_they_land():
    """A step of 24 tokens takes longer than it did before: prompts get what fills the next smaller one."""
    scheduler, _ = timed_scheduler()
    scheduler.add(build_sequence("long", prompt=60))
    plan = scheduler.plan()
    assert plan.num_tokens == 24

    scheduler.update(plan, StepResult([[7] if samples else [] for samples in plan.samples]), 31.0)

    assert scheduler.plan().num_tokens == 16


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_a_much_lower_priority_takes_the_slot_of_a_running_sequence(run_ahead):
    """Ten lower is enough by default, nine is not; the one that yielded goes on afterwards, with all its tokens."""
    scheduler, _ = build_scheduler(max_num_seqs=1)
    scheduler.add(build_sequence("patient", max_tokens=6))
    land(scheduler, scheduler.plan())
    scheduler.add(build_sequence("equal", max_tokens=2, priority=-9))
    scheduler.add(build_sequence("urgent", max_tokens=2, priority=-10))

    outputs = run_to_end(scheduler, run_ahead=run_ahead)

    assert {name: len(tokens) for name, tokens in outputs.items()} == {"patient": 5, "urgent": 2, "equal": 2}
    assert list(outputs) == ["patient", "urgent", "equal"]
    assert [event.cause for event in scheduler.preempted] == ["priority"]


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_a_much_lower_priority_takes_the_slot_of_an_adapter(run_ahead):
    """From the fewest that have one to themselves, all of a priority higher by ten; who has another or none goes on."""
    adapters = AdapterSlots(2)
    for uid in (1, 2, 3, 4):
        adapters.add(uid)
    scheduler, _ = build_scheduler(max_num_seqs=8, budget=16, adapters=adapters)

    def add(name, adapter_id, **options):
        sequence = build_sequence(name, prompt=1, **options)
        sequence.adapter_id = adapter_id
        scheduler.add(sequence)

    for name, adapter_id in (("of 1", 1), ("also of 1", 1), ("of 2", 2), ("of none", 0)):
        add(name, adapter_id, max_tokens=9)
    land(scheduler, scheduler.plan())
    add("equal", 4, max_tokens=2, priority=-9)
    add("urgent", 3, max_tokens=2, priority=-10)

    outputs = run_to_end(scheduler, run_ahead=run_ahead)

    assert [(event.request_id, event.cause) for event in scheduler.preempted] == [("of 2", "priority")]
    assert list(outputs).index("urgent") < list(outputs).index("equal")
    assert {name: len(tokens) for name, tokens in outputs.items()} == {
        "of 1": 8, "also of 1": 8, "of 2": 8, "of none": 8, "urgent": 2, "equal": 2,
    }  # fmt: skip


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_who_decodes_yields_though_decodes_fill_the_whole_step(run_ahead):
    """With as many slots as a step has tokens, all of them decoding, a much lower priority gets one all the same."""
    scheduler, _ = build_scheduler(max_num_seqs=2, budget=2)
    for name in ("first", "second"):
        scheduler.add(build_sequence(name, prompt=1, max_tokens=9))
    land(scheduler, scheduler.plan())
    scheduler.add(build_sequence("urgent", prompt=1, max_tokens=1, priority=-10))

    outputs = run_to_end(scheduler, run_ahead=run_ahead)

    assert list(outputs) == ["first", "second", "urgent"]
    assert [event.request_id for event in scheduler.preempted] == ["second"]
    assert len(outputs["first"]) == len(outputs["second"]) == 8


def test_a_client_without_a_slot_takes_one_from_the_client_that_has_most():
    """The newest of the flood yields, and comes before the rest of its client's, but not before the other client's."""
    scheduler, _ = build_scheduler(max_num_seqs=4, budget=64)
    for number in range(8):
        scheduler.add(build_sequence(f"flood {number}", client="flood", max_tokens=9))
    land(scheduler, scheduler.plan())

    for number in range(3):
        scheduler.add(build_sequence(f"other {number}", client="other", prompt=12, max_tokens=2))
    land(scheduler, scheduler.plan())
    plan = scheduler.plan()

    assert [sequence.request_id for sequence in plan.sequences if sequence.client == "other"] == ["other 0"]
    assert [event.request_id for event in scheduler.preempted] == ["flood 3"]
    assert [event.cause for event in scheduler.preempted] == ["fairness"]
    land(scheduler, plan)
    assert all(outputs[-1].finish_reason == "length" for outputs in run_to_end(scheduler).values())


@pytest.mark.parametrize(
    ("mine", "theirs", "first"),
    [({"client": "a", "priority": 0}, {"client": "b", "priority": 20}, 35), ({"client": "d"}, {"client": "b"}, 30)],
)
def test_nobody_yields_where_that_would_not_be_enough(mine, theirs, first):
    """A large prompt waits for one that does not yield: the small ones, which would, run on."""
    scheduler, _ = build_scheduler(num_pages=61, page_size=16, max_num_seqs=16, budget=512)
    scheduler.add(build_sequence("large", prompt=16 * first, max_tokens=60, client="e"))
    for _ in range(2):
        land(scheduler, scheduler.plan())
    for number in range(8):
        scheduler.add(build_sequence(f"small {number}", prompt=32, max_tokens=50, **theirs))
    for _ in range(3):
        land(scheduler, scheduler.plan())
    scheduler.add(build_sequence("larger", prompt=16 * 44, max_tokens=5, **mine))

    for _ in range(10):
        plan = scheduler.plan()
        assert plan.num_decodes == 9
        land(scheduler, plan)

    assert not scheduler.preempted
    outputs = run_to_end(scheduler)
    assert all(tokens[-1].finish_reason == "length" for tokens in outputs.values())


def test_the_log_says_before_whom_the_preempted_wait(caplog):
    """Who yields to another client waits before its own client's others, and in a famine before all."""
    events = [
        Preemption(cause, "flood", cause, num_tokens=9, num_pages=3, before_all=cause is Cause.PAGES)
        for cause in (Cause.FAIRNESS, Cause.PAGES)
    ]

    with caplog.at_level("INFO", "engine.scheduling.preemption"):
        PreemptionLog(39, 4).tell(events, num_running=1, now=0.0)

    assert "waits in front of its client's others" in caplog.messages[0]
    assert "waits in front of the others" in caplog.messages[1]


def test_what_a_flood_generates_counts_before_it_ends():
    """A client with one short request after the other is served all along, however long the outputs of a flood are."""
    scheduler, _ = build_scheduler(num_pages=2000, max_num_seqs=4, budget=64)
    for number in range(8):
        scheduler.add(build_sequence(f"flood {number}", client="flood", prompt=8, max_tokens=900))
    land(scheduler, scheduler.plan())
    scheduler.add(build_sequence("other 0", client="other", prompt=12, max_tokens=2))
    served = 0

    for _ in range(600):
        ended = [output for output in land(scheduler, scheduler.plan()) if output.finish_reason]
        if ended:
            served += 1
            scheduler.add(build_sequence(f"other {served}", client="other", prompt=12, max_tokens=2))

    assert served > 100


def test_a_preempted_head_without_room_lets_a_client_pass_that_runs_nothing():
    """Two of a flood fill the pool and one of them had to yield to the other's growth; a newcomer takes the other's place."""
    scheduler, pages = build_scheduler(num_pages=12, page_size=4, max_num_seqs=4, budget=64)
    for number in range(2):
        scheduler.add(build_sequence(f"flood {number}", prompt=16, max_tokens=28, client="flood"))
    scheduler.add(build_sequence("flood 2", prompt=4, max_tokens=28, client="flood"))
    while not scheduler.preempted:
        land(scheduler, scheduler.plan())

    scheduler.add(build_sequence("new", prompt=4, max_tokens=2, client="other"))
    outputs = run_to_end(scheduler)

    assert list(outputs).index("new") < 3 and [event.cause for event in scheduler.preempted][:2] == [
        "pages",
        "fairness",
    ]
    assert pages.num_owned == 0 and all(tokens[-1].finish_reason == "length" for tokens in outputs.values())


def flooded_scheduler(*, num_pages=200, streams=30, **settings):
    """A pool of a fifth of the pages that the streams of one client need, who have preempted each other for some time."""
    scheduler, _ = build_scheduler(
        num_pages=num_pages, max_num_seqs=streams + 8, budget=64, reserve=GrowthReserve(num_pages), **settings
    )
    for number in range(streams):
        scheduler.add(build_sequence(f"flood {number}", prompt=4, max_tokens=150, client="flood"))
    while scheduler.preemptions["pages"] < 5:
        land(scheduler, scheduler.plan())
    return scheduler


@pytest.mark.parametrize("prompt", [8, 60])
def test_who_runs_nothing_does_not_wait_for_the_growth_of_a_flood(prompt):
    """Pages that are kept for it are not kept from others, nor does a prompt wait that takes the place of several."""
    scheduler = flooded_scheduler()
    waits = []
    for number in range(10):
        scheduler.add(build_sequence(f"other {number}", prompt=prompt, max_tokens=3, client="other"))
        outputs, steps = [], 0
        while not any(output.finish_reason and output.request_id.startswith("other") for output in outputs):
            outputs, steps = land(scheduler, scheduler.plan()), steps + 1
        waits.append(steps)
        for _ in range(15):
            land(scheduler, scheduler.plan())

    assert max(waits) < 10
    assert all(event.client == "flood" for event in scheduler.preempted)
    run_to_end(scheduler)


def test_a_flood_that_grows_takes_no_pages_from_those_who_have_one():
    """However late they came: its own newest yield, and nobody else waits for a token."""
    scheduler = flooded_scheduler()
    for number in range(4):
        scheduler.add(build_sequence(f"other {number}", prompt=8, max_tokens=60, client=f"other {number}"))

    ended, steps = set(), 0
    while len(ended) < 4:
        outputs, steps = land(scheduler, scheduler.plan()), steps + 1
        ended |= {one.request_id for one in outputs if one.finish_reason and one.request_id.startswith("other")}

    assert steps < 80 and {event.client for event in scheduler.preempted} == {"flood"}
    run_to_end(scheduler)


def test_of_clients_with_several_the_one_that_holds_most_pages_yields():
    """Not who came last, be it that the other has more sequences."""
    scheduler, _ = build_scheduler(num_pages=64, page_size=4, budget=64)
    for client, prompt, count in (("many", 4, 4), ("large", 80, 2), ("late", 4, 2)):
        for number in range(count):
            scheduler.add(build_sequence(f"{client} {number}", prompt=prompt, max_tokens=60, client=client))
        for _ in range(3):
            land(scheduler, scheduler.plan())
    while not scheduler.preempted:
        land(scheduler, scheduler.plan())

    assert [event.request_id for event in scheduler.preempted] == ["large 1"]
    run_to_end(scheduler)


def test_who_was_preempted_and_runs_nothing_any_more_takes_the_place_of_a_flood():
    """It held most pages; when its client's other one has ended, it goes on at once and not when the flood has."""
    scheduler, _ = build_scheduler(num_pages=100, max_num_seqs=40, budget=64, reserve=GrowthReserve(100))
    for name, max_tokens in (("first", 60), ("second", 90)):
        scheduler.add(build_sequence(name, prompt=120, max_tokens=max_tokens, client="large"))
    for _ in range(5):
        land(scheduler, scheduler.plan())
    for number in range(30):
        scheduler.add(build_sequence(f"flood {number}", prompt=4, max_tokens=250, client="flood"))
    ended = list(run_to_end(scheduler))

    assert "second" in [event.request_id for event in scheduler.preempted]
    assert scheduler.preemptions["fairness"] and len(ended) == 32


def test_admission_keeps_pages_for_what_those_who_run_may_generate():
    """A burst of short prompts with long outputs is let in as far as their outputs fit: nobody is preempted."""
    reserve = GrowthReserve(40, least=1.0)
    careful, _ = build_scheduler(num_pages=40, max_num_seqs=16, budget=64, reserve=reserve)
    careless, _ = build_scheduler(num_pages=40, max_num_seqs=16, budget=64)
    for scheduler in (careful, careless):
        for number in range(16):
            scheduler.add(build_sequence(str(number), max_tokens=30))
        run_to_end(scheduler)

    assert careful.preemptions.total() == 0 and careless.preemptions.total() > 5


class Unanswered:
    """A constraint that has been told a token and has not answered."""

    error, complete = None, False

    def advance(self, token_id, guess=()): ...

    def close(self): ...


def build_late(request_id, **settings):
    """A sequence that was cut off behind its first token and goes on, as soon as its constraint says how."""
    sequence = build_sequence(request_id, **settings)
    sequence.constraint, sequence.awaits_mask, sequence.output_token_ids = Unanswered(), True, [5]
    return sequence


def names(plan):
    """Who is in a step, and begins in it."""
    return [sequence.request_id for sequence in plan.admitted]


def test_a_sequence_whose_mask_is_late_is_passed_and_comes_first_once_it_is_there():
    """Those behind it start at once; when there is room again it is its turn."""
    scheduler, _ = build_scheduler(max_num_seqs=3)
    late = build_late("late")
    scheduler.add(late)
    for number in range(4):
        scheduler.add(build_sequence(f"other {number}", max_tokens=2))

    plan = scheduler.plan()
    assert names(plan) == ["other 0", "other 1", "other 2"]
    land(scheduler, plan)
    land(scheduler, scheduler.plan())
    scheduler.resume(late)

    assert names(scheduler.plan()) == ["late", "other 3"]


@pytest.mark.parametrize("siblings", [2, 64])
def test_short_prompts_pass_those_that_wait_for_a_prefix(siblings):
    """Samples of one long prompt wait for the first to compute it; what comes behind them starts in the next step."""
    scheduler, _ = build_scheduler(num_pages=400, max_num_seqs=64, budget=64)
    for sibling in build_siblings(siblings, prompt=640):
        scheduler.add(sibling)
    first = scheduler.plan()
    scheduler.add(build_sequence("short"))

    assert names(first) == ["s0"] and names(scheduler.plan()) == ["short"]


def test_short_prompts_pass_a_long_one_for_which_the_step_has_no_part():
    """The second long prompt waits for the first; short ones get what is left of the step."""
    scheduler, _ = build_scheduler(budget=16)
    scheduler.add(build_sequence("decoding", max_tokens=30))
    land(scheduler, scheduler.plan())
    for name, prompt in (("long", 40), ("long too", 40), ("short", 3), ("short too", 3)):
        scheduler.add(build_sequence(name, prompt=prompt))

    plan = scheduler.plan()

    assert names(plan) == ["long", "short", "short too"] and plan.counts == [1, 8, 3, 3]


def test_those_who_pass_a_long_prompt_leave_it_a_slot():
    """While one long prompt is computed short ones take the slots; the next long one begins when that one is done."""
    scheduler, _ = build_scheduler(num_pages=2000, max_num_seqs=8, budget=64)
    scheduler.add(build_sequence("decoding", max_tokens=400))
    land(scheduler, scheduler.plan())
    for name in ("long", "long too"):
        scheduler.add(build_sequence(name, prompt=3200))
    for number in range(400):
        scheduler.add(build_sequence(f"short {number}", max_tokens=3 + number % 5))

    started = []
    for _ in range(3200 // 32):
        plan = scheduler.plan()
        started += names(plan)
        land(scheduler, plan)

    assert started[0] == "long" and names(plan)[0] == "long too" and len(started) > 60


def test_a_large_prompt_is_passed_for_want_of_pages_only_so_often():
    """A stream of small ones takes what is free for a while; then it ebbs until the large one has started."""
    scheduler, _ = build_scheduler(num_pages=20, max_num_seqs=8, budget=64)
    scheduler.add(build_sequence("there", prompt=20, max_tokens=50))
    land(scheduler, scheduler.plan())
    scheduler.add(build_sequence("large", prompt=52))

    started = []
    for number in range(200):
        scheduler.add(build_sequence(f"small {number}", max_tokens=3))
        plan = scheduler.plan()
        started += names(plan)
        land(scheduler, plan)

    assert started[MOST_PASSED] == "large" and len(started) > 2 * MOST_PASSED


def test_nobody_takes_the_pages_that_a_more_important_one_waits_for():
    """One of a lower priority is passed by its equals, not by others."""
    scheduler, _ = build_scheduler(num_pages=20, max_num_seqs=8, budget=64)
    scheduler.add(build_sequence("there", prompt=20, max_tokens=50, priority=-5))
    land(scheduler, scheduler.plan())
    scheduler.add(build_sequence("large", prompt=52, priority=-5))
    scheduler.add(build_sequence("small", priority=-5))
    scheduler.add(build_sequence("another", priority=0))

    assert names(scheduler.plan()) == ["small"]


def test_no_more_than_some_are_looked_at_in_one_plan():
    """However many masks are late, a plan stays cheap."""
    scheduler, _ = build_scheduler()
    for number in range(LOOKED_AT):
        scheduler.add(build_late(f"late {number}"))
    scheduler.add(build_sequence("behind"))

    assert scheduler.plan() is None
    scheduler.finish("late 7")
    assert names(scheduler.plan()) == ["behind"]


@pytest.mark.parametrize("prompt", [3, 700])
def test_one_clients_sequences_that_cannot_start_do_not_hide_others(prompt):
    """However many masks of it are late, or long prompts of it have no part of the step."""
    scheduler, _ = build_scheduler(num_pages=30_000, budget=64, max_num_seqs=256)
    if prompt > 64:
        scheduler.add(build_sequence("first", prompt=700, client="flood"))
    for number in range(2 * LOOKED_AT):
        scheduler.add(build_late(f"late {number}", client="flood"))
        scheduler.add(build_sequence(f"long {number}", prompt=prompt, client="flood", max_tokens=9))
    scheduler.add(build_sequence("other", client="other"))

    plans = [scheduler.plan() for _ in range(2)]
    for plan in plans:
        land(scheduler, plan)

    assert any("other" in names(plan) for plan in plans)
    order = [scheduler._waiting.head().request_id]
    assert order[0].startswith("late 0")


def test_a_sequence_without_a_salt_is_not_hashed_and_shares_nothing():
    """Neither its twin nor another finds its pages, and none are kept."""
    scheduler, pages = build_scheduler(budget=32)
    for name in ("a", "b"):
        sequence = build_sequence(name, prompt=9)
        sequence.salt = None
        scheduler.add(sequence)

    plan = scheduler.plan()
    land(scheduler, plan)
    run_to_end(scheduler)

    assert plan.starts == [0, 0] and pages.num_cached == 0
    assert not any(sequence.page_keys for sequence in plan.sequences)


def test_what_was_found_of_a_waiting_prompt_is_remembered(monkeypatch):
    """A prompt of 200 pages that has no room is looked up once; then each plan looks at what has changed, which is little."""
    scheduler, pages = build_scheduler(num_pages=210, budget=1000)
    scheduler.add(build_sequence("first", prompt=801, max_tokens=1, salt=b"same"))
    land(scheduler, scheduler.plan())
    scheduler.add(build_sequence("decoding", max_tokens=600))
    for _ in range(40):
        land(scheduler, scheduler.plan())
    scheduler.add(build_sequence("waiting", prompt=801, salt=b"same"))
    lookups = []
    monkeypatch.setattr(
        pages.cache, "holder", lambda *key, holder=pages.cache.holder: lookups.append(key) or holder(*key)
    )

    counts = []
    for _ in range(20):
        land(scheduler, scheduler.plan())
        counts.append(len(lookups))
        lookups.clear()

    assert scheduler.num_waiting == 1 and counts[0] > 190 and max(counts[1:]) < 20


def test_a_long_prompt_that_has_just_yielded_is_not_in_the_step():
    """Two long prompts run, of which one was held for a while; the other, which has no part of the step, yields its slot.

    As nobody decodes, long prompts get what is left of the step, but not the one that has no pages any more."""
    scheduler, _ = build_scheduler(max_num_seqs=2, budget=8)
    scheduler.add(build_sequence("ending", prompt=1, max_tokens=2, client="flood"))
    scheduler.add(build_sequence("held", prompt=16, client="flood"))
    land(scheduler, scheduler.plan())
    scheduler.add(build_sequence("short", client="other"))
    land(scheduler, scheduler.plan())  # "held" is to make room for it when its chunk has landed
    scheduler.finish("short")
    yields = build_sequence("yields", prompt=24, client="other")
    scheduler.add(yields)
    land(scheduler, scheduler.plan())
    scheduler.add(build_sequence("urgent", prompt=1, priority=-10))

    plan = scheduler.plan()

    scheduler.check_integrity()
    assert yields.status is SequenceStatus.WAITING and yields not in plan.sequences
    assert [sequence.request_id for sequence in plan.sequences] == ["held", "urgent"]
