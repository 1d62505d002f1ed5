"""Recurrent states of sequences: where rows end so that a state is kept, and who reads it later."""

import pytest

from caching.cache_groups import CacheGroups
from caching.page_manager import SINK_SLOT, HBMPageManager
from engine.sampling_params import SamplingParams
from engine.scheduling.plan import StepResult
from engine.scheduling.prefixes.sequence_states import SequenceStates
from engine.scheduling.scheduler import InferenceScheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_memory import SequenceMemory
from engine.scheduling.speculation import Speculation

PAGE_SIZE, STEP, MAX_NUM_SEQS = 4, 32, 3


class Served:
    """A scheduler over pages and slots, and the steps that it has planned."""

    def __init__(self, kept=6, windows=(None,), num_pages=100, drafts=0):
        self.slots = HBMPageManager(1 + MAX_NUM_SEQS + kept)
        states = SequenceStates(self.slots, PAGE_SIZE, MAX_NUM_SEQS)
        pages = HBMPageManager(num_pages)
        memory = SequenceMemory(pages, CacheGroups(PAGE_SIZE, windows, STEP), states)
        self.drafts, speculation = drafts, Speculation(drafts) if drafts else None
        self.scheduler = InferenceScheduler(
            memory, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=STEP, speculation=speculation
        )

    def add(self, request_id, prompt, max_tokens=1, salt=b""):
        """Queue a greedy request."""
        sequence = Sequence(request_id, prompt, SamplingParams(), frozenset(), max_tokens, seed=0, salt=salt)
        self.scheduler.add(sequence)
        return sequence

    def step(self, accepted=0):
        """Plan a step, and land it with so many drafts right: by request the tokens of its row, its source and its slot."""
        plan = self.scheduler.plan()
        ids = [sequence.request_id for sequence in plan.sequences]
        rows = zip(plan.starts, plan.counts, plan.state_sources, plan.state_slots, strict=True)
        tokens = [[7] * min(samples, 1 + accepted) for samples in plan.samples]
        self.scheduler.update(plan, StepResult(tokens, drafts=[self.drafts] * plan.num_rows))
        self.scheduler.check_integrity()
        return {
            each: (start, start + count, source, slot)
            for each, (start, count, source, slot) in zip(ids, rows, strict=True)
        }

    def run(self):
        """All steps until nothing is left."""
        steps = []
        while self.scheduler.num_running or self.scheduler.num_waiting:
            steps.append(self.step())
        return steps

    def spans(self, request_id):
        """The first and last token of each of its rows, until nothing is left."""
        return [step[request_id][:2] for step in self.run() if request_id in step]


@pytest.mark.parametrize(
    ("length", "spans"),
    [
        (3, [(0, 3)]),
        (4, [(0, 4)]),
        (16, [(0, 16)]),
        (17, [(0, 16), (16, 17)]),
        (30, [(0, 28), (28, 30)]),
        (38, [(0, 32), (32, 38)]),
        (70, [(0, 32), (32, 64), (64, 70)]),
    ],
)
def test_chunks_end_where_pages_do(length, spans):
    """The last page that is full before a prompt's last token ends a chunk, if that saves four pages."""
    served = Served()
    served.add("a", list(range(length)))

    assert served.spans("a") == spans


@pytest.mark.parametrize(("start", "end", "row_end"), [(0, 31, 28), (0, 7, 7), (10, 17, 16), (12, 15, 15), (0, 8, 8)])
def test_a_chunk_ends_with_a_page_where_it_loses_little_by_it(start, end, row_end):
    """No more than a quarter of its tokens are left to the next one."""
    states = SequenceStates(HBMPageManager(9), PAGE_SIZE, MAX_NUM_SEQS)
    sequence = Sequence("a", list(range(60)), SamplingParams(), frozenset(), 1, seed=0)
    sequence.num_computed_tokens, sequence.num_prefill_tokens = start, 60

    assert states.row_end(sequence, end) == row_end


def test_a_sequence_without_a_salt_is_cut_nowhere():
    """Nobody will find its states."""
    served = Served()
    served.add("a", list(range(38)), salt=None)

    assert served.spans("a") == [(0, 32), (32, 38)]
    assert served.slots.num_cached == 0


def test_samples_of_a_prompt_read_the_state_that_the_first_one_writes():
    """The others wait for the step behind it, and compute what is left of the prompt."""
    served = Served()
    for request_id in "abc":
        served.add(request_id, list(range(22)), max_tokens=2)

    first, second = served.step(), served.step()

    (_, _, begins, kept), sources = first["a"], {row[2] for row in second.values()}
    assert list(first) == ["a"] and first["a"][:2] == (0, 20) and begins == SINK_SLOT
    assert sources == {kept} and {row[:2] for row in second.values()} == {(20, 22)}
    assert kept not in {row[3] for row in second.values()}


def test_a_next_turn_goes_on_behind_the_last_full_page():
    """Of the first turn's prompt and output, all but the last token is computed."""
    served = Served()
    first = served.add("a", list(range(6)), max_tokens=8)
    served.run()
    known = len(first.prompt_token_ids) + len(first.output_token_ids) - 1

    served.add("b", [*range(6), *first.output_token_ids, 50, 51])

    assert known == 13 and served.spans("b")[0][0] == 12


def test_a_preempted_sequence_goes_on_from_its_last_state():
    """It computes again no more than a page."""
    served = Served()
    served.add("a", list(range(6)), max_tokens=20)
    for _ in range(9):
        served.step()

    served.scheduler._preempter.preempt(next(iter(served.scheduler._running)), "priority")

    assert served.step()["a"][:2] == (12, 15)


def test_others_may_branch_off_where_two_prompts_part():
    """The second prompt leaves a state where its known pages end, and the third begins there."""
    served = Served()
    system = list(range(100, 108))
    served.add("a", system + [1] * 6)

    assert served.spans("a") == [(0, 14)]
    served.add("b", system + [2] * 6)
    assert served.spans("b") == [(0, 8), (8, 14)]
    served.add("c", system + [3] * 6)
    assert served.spans("c") == [(8, 14)]


def test_a_state_that_its_own_sequence_has_passed_is_evicted_first():
    """So a long output does not evict what others have kept."""
    served = Served(kept=3)
    served.add("a", list(range(21)))
    served.run()
    served.add("b", [60, 61, 62], max_tokens=60)
    served.run()

    served.add("c", [*range(21), 9])

    assert served.spans("c") == [(20, 22)]
    assert served.slots.cache.evictions


def test_without_a_slot_to_spare_a_sequence_writes_where_it_reads():
    """A sequence never waits for a slot that a kept state has."""
    served = Served(kept=0)
    served.add("a", list(range(7)), max_tokens=2)
    served.run()

    served.add("b", [*range(7), 7, 9])
    start, _, source, slot = served.step()["b"]

    assert start == 8 and source == slot != SINK_SLOT
    assert served.slots.num_owned == 0


def test_a_state_among_drafts_is_kept_if_those_before_it_were_right():
    """The slot of a row in which a page ends; of the first such row here the tokens of the page were wrong."""
    served = Served(drafts=3)
    first = served.add("a", [0, 1], max_tokens=30)
    served.step()

    wrong, right = served.step(accepted=0)["a"], served.step(accepted=2)["a"]
    assert wrong[:2] == (2, 6) and right[:2] == (3, 7)
    served.scheduler.finish("a")

    served.add("b", [0, 1, *first.output_token_ids, 9])
    start, _, source, _ = served.step()["b"]
    assert (start, source) == (4, right[3])


def test_a_state_behind_a_wrong_draft_is_never_found():
    """Its slot comes free with the sequence."""
    served = Served(drafts=3)
    first = served.add("a", [0, 1], max_tokens=30)
    served.step()
    assert served.step(accepted=0)["a"][:2] == (2, 6)
    served.scheduler.finish("a")

    served.add("b", [0, 1, *first.output_token_ids, 7, 7, 7])

    assert served.step()["b"][2] == SINK_SLOT
    assert served.slots.num_cached == 0
