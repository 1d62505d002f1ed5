"""oEngine and scheduler with constraints whose answers come when a test says, over pipes."""

import os
from collections import deque
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_oengine import LateRunner, SomeTokens, completion, next_token
from test_oengine import build_engine as late_engine
from test_oengine import build_sequence as late_sequence
from test_scheduler import build_scheduler, build_sequence, land

from caching.cache_groups import CacheGroups
from caching.page_manager import HBMPageManager
from engine.oengine import oEngine
from engine.request_limits import ServingLimits
from engine.scheduling.constraints import awaited_masks
from engine.scheduling.constraints.awaited_masks import AwaitedMasks
from engine.scheduling.constraints.late_samples import MOST_KEPT
from engine.scheduling.scheduler import InferenceScheduler
from engine.scheduling.sequence import SequenceStatus
from engine.scheduling.sequence_memory import SequenceMemory


class Constraint:
    """Follows tokens and answers each when ``answer`` is called, or at once; ends after ``length`` tokens."""

    def __init__(self, *, length=99, fails_at=None, at_once=False):
        self.mask = np.full(1, -1, np.int32)
        self.complete, self.error, self.closed = False, None, False
        self.internal, self.suspended = False, False
        self.expected = self.expected_masks = ()
        self.num_forced, self.guess_acceptance = 0, 0.5
        self.tokens = []
        self._length, self._fails_at, self._at_once = length, fails_at, at_once
        self._answers, self._line = os.pipe()

    def advance(self, *token_ids, guess=()):  # noqa: ARG002
        self.suspended = False
        self.tokens += token_ids
        if self._at_once:
            self.answer()

    def answer(self):
        os.write(self._line, b"!")

    def hear(self, received):  # noqa: ARG002
        if not awaited_masks.select.select([self._answers], [], [], 0)[0]:
            return False
        os.read(self._answers, 1)
        self.complete = len(self.tokens) >= self._length
        if len(self.tokens) == self._fails_at:
            self.error = "too hard"
        return True

    def fileno(self):
        return self._answers

    def suspend(self):
        self.suspended = True

    def close(self):
        if not self.closed:
            os.close(self._answers)
            os.close(self._line)
        self.closed = True


def constrained(request_id="a", *, prompt=3, max_tokens=9, **options):
    """A sequence with a constraint."""
    sequence = build_sequence(request_id, prompt, max_tokens)
    sequence.constraint = Constraint(**options)
    return sequence


def answer(scheduler, sequence):
    """Its constraint answers; the plan that samples late for it, if its logits are kept."""
    sequence.constraint.answer()
    assert sequence.constraint.hear(set()) and scheduler.resume(sequence) is None
    return scheduler.plan_late()


def test_a_constrained_row_is_in_every_step_and_samples_as_soon_as_its_mask_is_there():
    """Its forward pass is planned while its token is in flight; it samples in a plan of its own, and nobody waits."""
    scheduler, _ = build_scheduler()
    row, neighbour = constrained("row"), build_sequence("neighbour", 3, 9)
    scheduler.add(row)
    scheduler.add(neighbour)

    first, second = scheduler.plan(), scheduler.plan()
    land(scheduler, first)
    (late,) = answer(scheduler, row)
    third = scheduler.plan()

    assert [plan.sequences for plan in (first, second, third)] == [[row, neighbour]] * 3
    assert (first.constrained, first.late) == ([0], []) and row.constraint.tokens == [7]
    assert (second.constrained, second.late, second.samples) == ([], [0], [False, True]) and third.late == [0]
    assert late.samples_of is second and (late.sequences, late.counts, late.samples) == ([row], [1], [1])
    assert scheduler.take_done() == [second]
    outputs = {output.request_id: output.token_ids for output in land(scheduler, second) + land(scheduler, late)}
    assert outputs == {"row": [7], "neighbour": [7]} and row.constraint.tokens == [7, 7]
    row.constraint.close()


@pytest.mark.parametrize(("run_ahead", "expected"), [(0, 200), (1, 199), (2, 99), (3, 66)])
def test_with_one_step_ahead_a_constrained_row_gets_a_token_in_every_step(run_ahead, expected):
    """As its neighbours do. A row has one token at most that is not sampled, so with more steps ahead of the one that is
    read it is in every second or third of them."""
    scheduler, _ = build_scheduler(num_pages=1000)
    row, neighbour = (build_sequence(name, 3, 2000) for name in ("row", "neighbour"))
    row.constraint = Constraint(length=2000)
    in_flight = deque()
    for sequence in (row, neighbour):
        scheduler.add(sequence)

    for _ in range(200):
        if row.awaits_mask:
            in_flight += answer(scheduler, row)
        in_flight.append(scheduler.plan())
        while sum(plan.samples_of is None for plan in in_flight) > run_ahead or (in_flight and in_flight[0].samples_of):
            land(scheduler, in_flight.popleft())

    assert len(neighbour.output_token_ids) == 200 - run_ahead
    assert len(row.output_token_ids) == expected
    row.constraint.close()


def test_a_row_whose_mask_is_late_misses_steps_and_its_neighbour_does_not():
    """Its logits are kept until the mask is there. Then it samples from them, and is in the next step."""
    scheduler, _ = build_scheduler()
    row, neighbour = constrained("row"), build_sequence("neighbour", 3, 9)
    for sequence in (row, neighbour):
        scheduler.add(sequence)
    plans = [scheduler.plan(), scheduler.plan()]

    for step in range(3):
        land(scheduler, plans[step])
        plans.append(scheduler.plan())

    assert [plan.sequences for plan in plans[2:]] == [[neighbour]] * 3 and len(neighbour.output_token_ids) == 3
    assert scheduler.plan_late() == scheduler.take_done() == []
    (late,) = answer(scheduler, row)
    assert late.samples_of is plans[1] and row in scheduler.plan().sequences
    row.constraint.close()


def test_logits_are_kept_of_a_few_steps_only():
    """While as many steps have rows with late masks, a row is planned when it has its mask, as no logits are kept then."""
    scheduler, _ = build_scheduler(max_num_seqs=MOST_KEPT + 1, budget=99)
    rows, plans = [constrained(str(number)) for number in range(MOST_KEPT + 1)], []
    for row in rows:
        scheduler.add(row)
        plans.append(scheduler.plan())
        land(scheduler, plans[-1])

    assert [len(plan.late) for plan in plans] == [0] + [1] * MOST_KEPT
    assert scheduler.plan() is None
    last = rows[-1]
    assert answer(scheduler, last) == []
    plan = scheduler.plan()
    assert (plan.sequences, plan.constrained, plan.late) == ([last], [0], [])
    for row in rows:
        scheduler.finish(row.request_id)
    assert scheduler.take_done() == plans[1:]


def test_nobody_waits_for_the_pages_of_one_whose_mask_is_late():
    """Its last token by length is as good as in flight, but nobody knows when it comes: who needs a page takes its."""
    scheduler, _ = build_scheduler(num_pages=4, page_size=4)
    neighbour, row = build_sequence("neighbour", 4, 6), constrained("row", max_tokens=2)
    for sequence in (neighbour, row):
        scheduler.add(sequence)
    land(scheduler, scheduler.plan())
    late = scheduler.plan()
    assert late.late == [1] and row.ends_by_length and row.awaits_mask
    land(scheduler, late)

    while neighbour.status is not SequenceStatus.FINISHED:
        land(scheduler, scheduler.plan())

    assert row.status is SequenceStatus.WAITING and scheduler.preemptions == {"pages": 1}
    scheduler.finish("row")
    assert scheduler.take_done() == [late]


@pytest.mark.parametrize("how", ["complete", "failed", "aborted", "preempted", "lost"])
def test_who_loses_its_slot_samples_from_no_logits(how):
    """Its forward pass was for nothing; nobody reads the logits that were kept, and who goes on computes them again."""
    scheduler, _ = build_scheduler(max_num_seqs=1)
    row = constrained("row", length=1 if how == "complete" else 9, fails_at=1 if how == "failed" else None)
    scheduler.add(row)
    first, second = scheduler.plan(), scheduler.plan()
    land(scheduler, first)
    assert row.awaits_sample and row.num_in_flight == 1

    if how in ("complete", "failed"):
        row.constraint.answer()
        assert row.constraint.hear(set()) and scheduler.resume(row).finish_reason in ("stop", "error")
    elif how == "aborted":
        assert scheduler.finish("row")
    elif how == "preempted":
        scheduler.add(build_sequence("urgent", 3, 1, priority=-20))
        assert scheduler.plan() is None and scheduler.plan().sequences[0].request_id == "urgent"
    else:
        scheduler.lose_cache()

    assert not row.awaits_sample and row.num_in_flight == 0
    assert scheduler.plan_late() == [] and scheduler.take_done() == [second]
    assert land(scheduler, second) == []
    if how in ("preempted", "lost"):
        scheduler.finish("urgent")
        assert answer(scheduler, row) == []
        again = scheduler.plan()
        assert (again.sequences, again.counts, again.constrained) == ([row], [4], [0])
        row.constraint.close()
    scheduler.check_integrity()


def test_a_complete_output_ends_without_another_token():
    """Its tokens have been given out; what comes is the reason, and the constraint is let go."""
    scheduler, pages = build_scheduler()
    sequence = constrained(length=1, at_once=True)
    scheduler.add(sequence)
    outputs = land(scheduler, scheduler.plan())

    assert sequence.constraint.hear(set())
    end = scheduler.resume(sequence)

    assert [output.finish_reason for output in outputs] == [None]
    assert (end.token_ids, end.finish_reason, end.error) == ([], "stop", None)
    assert sequence.status is SequenceStatus.FINISHED and sequence.constraint.closed and pages.num_owned == 0


def test_a_constraint_that_fails_ends_its_sequence_with_its_words():
    """The reason is error."""
    scheduler, _ = build_scheduler()
    sequence = constrained(fails_at=1, at_once=True)
    scheduler.add(sequence)
    land(scheduler, scheduler.plan())

    assert sequence.constraint.hear(set())
    end = scheduler.resume(sequence)

    assert (end.finish_reason, end.error) == ("error", "too hard") and sequence.constraint.closed


@pytest.mark.parametrize(("max_tokens", "token", "reason"), [(1, 7, "length"), (9, 0, "stop")])
def test_a_last_token_asks_for_no_mask(max_tokens, token, reason):
    """An end by length or by EOS lets the constraint go, and does not tell it the token."""
    scheduler, _ = build_scheduler()
    sequence = constrained(max_tokens=max_tokens)
    scheduler.add(sequence)

    (output,) = land(scheduler, scheduler.plan(), token)

    assert output.finish_reason == reason
    assert sequence.constraint.closed and sequence.constraint.tokens == []


def test_who_is_preempted_before_the_answer_is_admitted_after_it():
    """Its constraint goes on from the tokens that have landed; without the answer nobody knows what it may sample."""
    scheduler, _ = build_scheduler(num_pages=4, page_size=2)
    old, new = build_sequence("old", 2, 5), constrained("new", prompt=1, max_tokens=5)
    scheduler.add(old)
    scheduler.add(new)
    while not scheduler.preemptions:
        land(scheduler, scheduler.plan())
    assert new.awaits_mask and new.status is SequenceStatus.WAITING and new.constraint.suspended
    while old.status is not SequenceStatus.FINISHED:
        land(scheduler, scheduler.plan())

    assert scheduler.plan() is None
    new.constraint.answer()
    assert new.constraint.hear(set()) and scheduler.resume(new) is None
    resumed = scheduler.plan()

    assert resumed.sequences == [new] and resumed.counts == [new.num_tokens] and resumed.constrained == [0]
    new.constraint.close()


def test_a_constraint_is_told_a_token_that_lands_after_its_sequence_was_preempted():
    """It does without a matcher while the sequence waits, which is admitted again after the answer."""
    scheduler, _ = build_scheduler(max_num_seqs=2)
    new = constrained("new")
    scheduler.add(build_sequence("old", 3, 9))
    scheduler.add(new)
    first = scheduler.plan()
    scheduler.add(build_sequence("urgent", 3, 1, priority=-10))
    second, third = scheduler.plan(), scheduler.plan()
    assert new.status is SequenceStatus.WAITING and new.num_in_flight == 1 and not new.constraint.suspended

    land(scheduler, first)
    assert new.constraint.tokens == [7] and new.constraint.suspended and new.awaits_mask
    for plan in (second, third):
        land(scheduler, plan)
    assert new not in scheduler.plan().sequences
    new.constraint.answer()
    assert new.constraint.hear(set()) and scheduler.resume(new) is None

    assert new in scheduler.plan().admitted
    new.constraint.close()


def test_a_late_mask_is_waited_for_once_and_then_looked_for(monkeypatch):
    """A step has a little patience with a fresh token; after that it only looks."""
    waits = []
    monkeypatch.setattr(awaited_masks, "PATIENCE", 0.001)
    monkeypatch.setattr(awaited_masks, "_poll", lambda awaited, seconds: waits.append(len(awaited)))
    masks, slow, quick = AwaitedMasks(), constrained("slow"), constrained("quick", at_once=True)
    for sequence in (slow, quick):
        sequence.constraint.advance(7)
        masks.add(sequence)

    assert masks.hear() == [quick] and set(waits) == {1} and len(masks) == 1
    waits.clear()
    assert masks.hear() == [] and waits == []
    slow.constraint.answer()
    assert masks.hear() == [slow] and len(masks) == 0
    for sequence in (slow, quick):
        sequence.constraint.close()


@pytest.mark.parametrize(("in_flight", "longest"), [(8.0, 4.0), (0.002, 0.001), (None, awaited_masks.PATIENCE)])
def test_a_mask_is_waited_for_while_the_device_is_busy(monkeypatch, in_flight, longest):
    """For a share of the time that the steps in flight take, or for little where nobody knows that."""
    waits, masks, slow = [], AwaitedMasks(), constrained("slow")
    monkeypatch.setattr(awaited_masks, "time", SimpleNamespace(monotonic=lambda: 100.0))
    monkeypatch.setattr(awaited_masks, "_poll", lambda _, seconds: waits.append(seconds) or slow.constraint.answer())
    slow.constraint.advance(7)
    masks.add(slow)

    assert masks.hear(in_flight) == [slow]
    assert waits[0] == pytest.approx(longest)
    slow.constraint.close()


def test_who_has_ended_is_waited_for_no_more():
    """An aborted sequence's constraint is closed, and nobody looks at it again."""
    masks, sequence = AwaitedMasks(), constrained()
    masks.add(sequence)
    sequence.status = SequenceStatus.FINISHED
    sequence.constraint.close()

    assert masks.hear() == [] and len(masks) == 0


@pytest.mark.parametrize("run_ahead", [0, 1, 2, 3])
def test_late_masks_change_no_tokens(monkeypatch, run_ahead):
    """Few rows and many sample late, each with the mask of its own place, beside others and preempted; they do while
    requests are aborted, and weights written under those that run."""
    monkeypatch.setattr(awaited_masks, "SHARE", 0.0)
    monkeypatch.setattr(awaited_masks, "PATIENCE", 0.0)
    rng, engine = Random(run_ahead), late_engine(num_pages=9, max_num_seqs=5, budget=9, run_ahead=run_ahead)
    sequences, tokens, late = [], {}, 0
    for number in range(40):
        sequence = late_sequence(
            str(number), [rng.randrange(16) for _ in range(rng.randint(1, 12))], rng.randint(1, 12), seed=number
        )
        sequence.constraint = SomeTokens(rng.choice((0, 0, 1, 4))) if rng.random() < 0.7 else None
        sequences.append(sequence)
        tokens[sequence.request_id] = []
        engine.add(sequence)
    aborted = rng.sample(sequences, 4)
    steps = 0
    while engine.has_work:
        outputs, steps = engine.step(), steps + 1
        if steps % 15 == 0:
            outputs += engine.settle()
            late += sum(sequence.awaits_sample for sequence in sequences)
            engine.update_weights(None, keep_cache=True)
            assert not any(sequence.awaits_sample for sequence in sequences)
        if steps % 9 == 0:
            engine.finish(aborted[steps // 9 % len(aborted)].request_id)
        for output in outputs:
            tokens[output.request_id] += output.token_ids
        engine.check_integrity()

    assert late > 5 and engine.stats().preemptions_by_cause["pages"]
    for sequence in sequences:
        got, whole = tokens[sequence.request_id], completion(sequence)
        assert got == (whole[: len(got)] if sequence in aborted else whole)


def build_engine(run_ahead, num_pages):
    """An engine on a late device, as in test_oengine."""
    pages = HBMPageManager(num_pages)
    scheduler = InferenceScheduler(SequenceMemory(pages, CacheGroups(4)), max_num_seqs=4, max_num_batched_tokens=8)
    runner = LateRunner(num_pages=num_pages, page_size=4, max_num_seqs=4, max_model_len=24)
    return oEngine(scheduler, runner, ServingLimits(24, 16, (0,)), run_ahead=run_ahead)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 12), st.integers(0, 14)), min_size=1, max_size=8),
    num_pages=st.integers(7, 40),
)
def test_constraints_follow_the_tokens_that_land(lengths, num_pages):
    """With any run-ahead, among others and preempted, each is told exactly the tokens of its output, and ends it."""
    results = []
    for run_ahead in (0, 1, 2):
        engine, sequences, tokens, reasons = build_engine(run_ahead, num_pages), [], {}, {}
        for number, (prompt, max_tokens, length) in enumerate(lengths):
            sequence = build_sequence(str(number), prompt, max_tokens)
            sequence.stop_token_ids = frozenset()
            if length:
                sequence.constraint = Constraint(length=length, at_once=True)
            sequences.append(sequence)
            tokens[sequence.request_id] = []
            engine.add(sequence)
        while engine.has_work:
            for output in engine.step():
                tokens[output.request_id] += output.token_ids
                reasons[output.request_id] = output.finish_reason
            engine.check_integrity()
        for sequence, (_, max_tokens, length) in zip(sequences, lengths, strict=True):
            expected = []
            while len(expected) < min(max_tokens, length or max_tokens):
                expected.append(next_token(sequence.prompt_token_ids + expected, sequence.seed))
            assert tokens[sequence.request_id] == expected
            assert reasons[sequence.request_id] == ("stop" if length and length < max_tokens else "length")
            if sequence.constraint is not None:
                assert sequence.constraint.closed and sequence.constraint.tokens == expected[: max_tokens - 1]
        results.append(tokens)

    assert results[0] == results[1] == results[2]
