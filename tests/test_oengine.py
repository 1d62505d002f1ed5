"""oEngine with everything real but the device, which is numpy and so late that it reads a step only when it is asked for."""

import hashlib
import os
from collections import deque
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caching.cache_groups import CacheGroups
from caching.metadata import pages_for
from caching.page_manager import HBMPageManager
from engine.devices.device_errors import DeviceError
from engine.oengine import oEngine
from engine.request_limits import ServingLimits
from engine.sampling.sampler import NO_TOKEN
from engine.sampling.sampler_inputs import PARAMETERS
from engine.sampling_params import SamplingParams
from engine.scheduling.constraints import awaited_masks
from engine.scheduling.plan import StepResult
from engine.scheduling.scheduler import InferenceScheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_memory import SequenceMemory
from engine.step.inputs.layout import FROM_SLOT, StepLayout
from engine.step.inputs.model_io import ModelIOProcessor
from engine.step.inputs.slot_state import SEPARATE, SlotShapes
from engine.step.pending_step import PendingStep
from engine.step.timing.step_gap import StepGaps

VOCAB_SIZE, EOS = 16, 0


ANYTHING = -1
"""The mask with all tokens."""


def next_token(context, seed, allowed=ANYTHING):
    """What the model says after these tokens: every one of them, their order and the row's seed count, and what is allowed."""
    tokens = [token for token in range(VOCAB_SIZE) if allowed >> token & 1]
    return tokens[hashlib.blake2b(bytes([*context, seed]), digest_size=1).digest()[0] % len(tokens)]


def completion(sequence):
    """What a sequence is to get, computed without pages, steps or neighbours."""
    tokens = []
    while len(tokens) < sequence.max_tokens and not (tokens and tokens[-1] in sequence.stop_token_ids):
        allowed = ANYTHING if sequence.constraint is None else allowed_after(tokens)
        tokens.append(next_token(sequence.prompt_token_ids + tokens, sequence.seed, allowed))
    return tokens


class PlainSlots:
    """The plain twin of SlotState, in numpy."""

    def __init__(self, shapes):
        self._shapes = shapes
        self.num_tokens, self.last_token = np.zeros((2, shapes.num_slots), np.int32)
        self.tables = np.zeros((shapes.num_slots, shapes.pages_per_seq), np.int32)
        self.seeds = np.zeros(shapes.num_slots, np.int32)

    def write(self, writes, packed):
        """Changes as ``SlotWrites.pack`` has packed them; what fills the rest up is the dump slot's."""
        admitted, places, pages = writes.split(packed)
        for slot, start, *parameters in admitted.tolist():
            self.num_tokens[slot], self.seeds[slot] = start, parameters[list(PARAMETERS).index("seeds")]
        self.tables.ravel()[places] = pages
        assert not self.tables[self._shapes.dump_slot].any() and not self.num_tokens[self._shapes.dump_slot]

    def spoil(self):
        """What a failed step leaves behind."""
        self.num_tokens[:], self.tables[:], self.last_token[:], self.seeds[:] = 3, 5, 7, 9


class LateRunner:
    """Keeps what ``dispatch`` was given and computes it, in order, only when ``collect`` waits for it.

    Its pages hold token ids, and a row's next token follows from what its pages hold, so whatever is written to a wrong
    place, read from one, or changed under a step in flight, comes out as a wrong token.

    ``fault`` is what the next step to be dispatched ("refused") or collected ("lost") will meet, after which all
    memory is spoilt; "nan" spoils one row of the next to be collected.
    """

    host = adapters = None
    """There is neither a tier in the host's memory nor a slot for an adapter."""

    def __init__(self, *, num_pages, page_size, max_num_seqs, max_model_len):
        self._pages = np.full((num_pages, page_size), 255, np.int32)
        self._shapes = SlotShapes(max_num_seqs, 1, pages_for(max_model_len, page_size))
        self._slots = PlainSlots(self._shapes)
        self.fault, self.spoilt = None, []
        self._io = ModelIOProcessor(self._shapes, VOCAB_SIZE, few_rows=2)
        self._queue = deque()
        self._kept = {}
        self.gaps = StepGaps()

    def dispatch(self, plan):
        """Write the step out as for a real device, in a bucket a little too large."""
        tokens = plan.num_tokens + 1
        layout = StepLayout(tokens, min(tokens, self._shapes.max_num_seqs))
        step = self._io.prepare(plan, layout)[0]
        if self._met("refused", plan.sequences):
            return PendingStep(plan, failure=DeviceError("refused"))
        self._queue.append(partial(self._run, layout, step))
        return PendingStep(plan)

    def sample(self, plan):
        """Sample late from what a step has kept."""
        command, places = self._io.prepare_late(plan)
        if self._met("refused late", plan.sequences):
            return PendingStep(plan, failure=DeviceError("refused"))
        self._queue.append(partial(self._sample, command))
        return PendingStep(plan, places=places)

    def forget_logits(self, plan):
        """As it is; what is dispatched has them still."""
        command = self._io.forget_logits(plan)
        if command is not None:
            self._queue.append(partial(self._forget, command.number))

    def collect(self, step):
        """Now compute the oldest step."""
        if step.failure is not None or self._met("lost", step.plan.sequences):
            self._pages[:] = 77
            self._slots.spoil()
            raise DeviceError("lost")
        ids = None
        while ids is None:
            ids = self._queue.popleft()()
        ids = ids[: step.plan.num_rows] if step.places is None else [ids[place] for place in step.places]
        if step.plan.samples[-1] and self._met("nan", step.plan.sequences[-1:]):
            ids[-1] = NO_TOKEN
        return StepResult([[token] if samples else [] for token, samples in zip(ids, step.plan.samples, strict=True)])

    def write_weights(self, staged):
        """None."""

    def reset(self):
        """As new."""
        self._queue.clear()
        self._kept.clear()
        self._io.lose_logits()
        self._pages[:], self._slots = 255, PlainSlots(self._shapes)

    def _met(self, fault, sequences):
        if self.fault != fault:
            return False
        self.fault, self.spoilt = None, [sequence.request_id for sequence in sequences]
        return True

    def _run(self, layout, step):
        size, state = self._pages.shape[1], self._slots
        for changes in step.changes:
            state.write(SEPARATE, changes)
        names = ("slots", "counts", "samples", "token_ids", "writes")
        slots, counts, samples, token_ids, writes = (layout.view(step.packed, name) for name in names)
        state.write(layout.writes, writes)
        rows, ends = range(np.count_nonzero(counts)), np.cumsum(counts)
        for row in rows:
            ids = token_ids[ends[row] - counts[row] : ends[row]]
            ids = np.where(ids == FROM_SLOT, state.last_token[slots[row]], ids)
            where = state.num_tokens[slots[row]] + np.arange(counts[row])
            self._pages[state.tables[slots[row], where // size], where % size] = ids
            state.num_tokens[slots[row]] += counts[row]
        contexts, sampled = [], []
        for row in rows:
            where = np.arange(state.num_tokens[slots[row]])
            contexts.append(self._pages[state.tables[slots[row], where // size], where % size].tolist())
            allowed = ANYTHING if step.masks is None else int(step.masks[row, 0])
            sampled.append(next_token(contexts[row], int(state.seeds[slots[row]]), allowed))
            if samples[row] > 0:
                state.last_token[slots[row]] = sampled[-1]
        if step.kept is not None:
            of = range(layout.rows) if step.kept.rows is None else step.kept.rows
            self._kept[step.kept.number] = [contexts[row] if row < len(contexts) else [] for row in of]
        return sampled

    def _sample(self, command):
        slots, samples, decodes, lens, *parameters = command.sampling
        seeds = parameters[list(PARAMETERS).index("seeds")]
        contexts = self._kept[command.number]
        assert len(contexts) == command.sampling.shape[1] == len(command.masks)
        tokens = [
            next_token(context, int(seed), int(mask))
            for context, seed, (mask,) in zip(contexts, seeds, command.masks, strict=True)
        ]
        for place in np.flatnonzero(samples):
            assert decodes[place] and lens[place] == len(contexts[place]), "another's logits"
            self._slots.last_token[slots[place]] = tokens[place]
        return tokens

    def _forget(self, number):
        del self._kept[number]


def allowed_after(tokens):
    """The tokens that SomeTokens allows after others, as the bits of a mask: all that it was told count."""
    some = hashlib.blake2b(bytes(tokens), digest_size=2).digest()
    return int.from_bytes(some) | 1 << len(tokens) % VOCAB_SIZE


class SomeTokens:
    """A constraint that allows other tokens after each token, and answers when it is asked for the ``delay + 1``st time."""

    complete, error, internal = False, None, False
    expected = expected_masks = ()
    num_forced, guess_acceptance = 0, 0.5
    waits_at = os.open(os.devnull, os.O_RDONLY)

    def __init__(self, delay=0):
        self.told, self._delay, self._asked = [], delay, 0
        self.mask = self.mask_after([])

    def mask_after(self, tokens):
        return np.array([allowed_after(tokens)], np.int32)

    def advance(self, *token_ids, guess=()):  # noqa: ARG002
        self.told += token_ids
        self._asked = 0

    def hear(self, received):  # noqa: ARG002
        self._asked += 1
        if self._asked > self._delay:
            self.mask = self.mask_after(self.told)
        return self._asked > self._delay

    def fileno(self):
        return self.waits_at

    def suspend(self): ...

    def close(self): ...


class ThirdOfTokens(SomeTokens):
    """The same of a larger vocabulary: every third token, from one on for which all tokens before count, and one never."""

    def __init__(self, delay, vocab_size, *, never=0):
        self._vocab_size, self._never = vocab_size, never
        super().__init__(delay)

    def mask_after(self, tokens):
        bits = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
        bits[
            int.from_bytes(hashlib.blake2b(repr(tokens).encode(), digest_size=1).digest()) % 3 : self._vocab_size : 3
        ] = 1
        bits[self._never] = 0
        return np.packbits(bits, bitorder="little").view(np.int32)


def build_engine(*, num_pages=40, page_size=4, max_num_seqs=4, budget=8, max_model_len=24, run_ahead=1):
    """An engine on a late device."""
    pages = HBMPageManager(num_pages)
    scheduler = InferenceScheduler(
        SequenceMemory(pages, CacheGroups(page_size)), max_num_seqs=max_num_seqs, max_num_batched_tokens=budget
    )  # fmt: skip
    max_model_len = min(max_model_len, pages.num_total * page_size)
    runner = LateRunner(
        num_pages=num_pages, page_size=page_size, max_num_seqs=max_num_seqs, max_model_len=max_model_len
    )  # fmt: skip
    limits = ServingLimits(max_model_len, VOCAB_SIZE, (EOS,))
    return oEngine(scheduler, runner, limits, run_ahead=run_ahead)


def build_sequence(request_id, prompt, max_tokens=6, *, stop_token_ids=(), seed=0):
    """A sequence that ends by length, unless it is given stop tokens."""
    return Sequence(request_id, prompt, SamplingParams(), frozenset(stop_token_ids), max_tokens, seed)


def run(engine, sequences):
    """Serve these from now to the end; the tokens of each."""
    tokens = {sequence.request_id: [] for sequence in sequences}
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
        engine.check_integrity()
    return tokens


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("page_size", [4, 5, 24, 64])
@pytest.mark.parametrize("prompt", [1, 4, 8, 23])
def test_a_sequence_may_fill_the_context_to_its_last_token(prompt, page_size, run_ahead):
    """Prompt and output reach max_model_len exactly, on page, chunk and bucket edges alike, and nothing is overwritten
    (an ancestor's sequence at its limit wrote over its last page)."""
    engine = build_engine(page_size=page_size, max_num_seqs=1, num_pages=7, run_ahead=run_ahead)
    sequence = build_sequence("a", [3] * prompt, max_tokens=24 - prompt, seed=5)

    tokens = run(engine, [sequence])

    assert tokens == {"a": completion(sequence)}
    assert engine.stats().pages_owned == 0


def test_pages_given_to_another_are_written_by_nobody_else():
    """A sequence is aborted with steps in flight, and what takes its slot and pages reads only its own tokens (an
    ancestor's stale page table went on writing into pages issued anew)."""
    engine = build_engine(max_num_seqs=1, num_pages=7, run_ahead=3)
    engine.add(build_sequence("gone", [1] * 7, max_tokens=16))
    for _ in range(3):
        engine.step()
    successor = build_sequence("successor", [2] * 8, max_tokens=16)

    assert engine.finish("gone")

    assert run(engine, [successor]) == {"successor": completion(successor)}


def test_an_emptied_prefix_cache_is_found_by_nobody_and_taken_from_nobody():
    """What runs keeps its pages and its tokens; whoever comes later computes the prompt again."""
    engine = build_engine()
    first, again, later = (build_sequence(name, [3] * 9) for name in ("first", "again", "later"))
    running = build_sequence("running", [5] * 8, max_tokens=12)

    run(engine, [first])
    run(engine, [again])
    assert again.num_cached_tokens == 8 and engine.stats().pages_cached > 0
    engine.add(running)
    engine.step()
    engine.step()
    owned = engine.stats().pages_owned
    assert engine.reset_prefix_cache() > 0

    assert (engine.stats().pages_cached, engine.stats().pages_owned) == (0, owned)
    engine.check_integrity()
    engine.add(later)
    while engine.has_work:
        engine.step()
    assert later.num_cached_tokens == 0 and later.output_token_ids == completion(later)
    assert running.output_token_ids == completion(running)
    assert engine.reset_prefix_cache() > 0 and engine.stats().pages_free == engine.stats().pages_total


def test_what_an_aborted_sequence_leaves_is_forgotten_when_its_logits_were_not_finite():
    """It gave up its pages while its step was in flight; nobody who begins alike finds what it has spoilt."""
    engine = build_engine()
    engine.add(build_sequence("aborted", [3] * 8))
    engine._runner.fault = "nan"
    while not engine._scheduler.num_running:
        engine.step()
    engine.finish("aborted")
    assert engine.stats().pages_cached == 2

    while engine.has_work:
        assert engine.step() == []

    assert engine._runner.spoilt == ["aborted"] and engine.stats().pages_cached == 0


prompts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=30)
events = st.one_of(
    st.tuples(
        st.just("add"), prompts, st.integers(1, 30), st.booleans(), st.sampled_from([None, None, None, 0, 0, 1, 9])
    ),
    st.tuples(st.just("step")),
    st.tuples(st.just("step")),
    st.tuples(st.just("finish"), st.integers(0, 99)),
    st.tuples(st.just("update"), st.booleans()),
)
fault_after = st.tuples(st.integers(1, 9), st.sampled_from(["refused", "lost", "nan", "refused late"]))


@pytest.fixture(scope="module", autouse=True)
def no_patience():
    """Nobody waits for a mask: it is there when it is asked for, or late."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(awaited_masks, "SHARE", 0.0)
        patch.setattr(awaited_masks, "PATIENCE", 0.0)
        patch.setattr(awaited_masks, "IDLE_PATIENCE", 0.0)
        yield


@given(
    num_pages=st.integers(7, 30),
    page_size=st.integers(1, 7),
    max_num_seqs=st.integers(1, 6),
    extra_budget=st.integers(0, 12),
    max_model_len=st.integers(2, 40),
    run_ahead=st.integers(0, 3),
    history=st.lists(events, max_size=60),
    faults=st.lists(fault_after, max_size=6),
)
def test_any_history_gives_every_sequence_the_tokens_it_gets_alone(
    num_pages, page_size, max_num_seqs, extra_budget, max_model_len, run_ahead, history, faults
):
    """Random arrivals, steps, aborts, faults and updates, in pools so small that sequences are preempted: whoever was not aborted
    and not in a step that failed gets exactly its own tokens, ends by the right reason, and nothing is left in the engine.
    """
    engine = build_engine(
        num_pages=num_pages, page_size=page_size, max_num_seqs=max_num_seqs,
        budget=max_num_seqs + extra_budget, max_model_len=max_model_len, run_ahead=run_ahead,
    )  # fmt: skip
    runner, due = engine._runner, 0
    alive, tokens, reasons = {}, {}, {}

    def step():
        nonlocal due
        if faults and engine.stats().steps >= due:  # no three fail with none landed between them
            gap, runner.fault = faults.pop()
            due = engine.stats().steps + gap
        take(engine.step())

    def take(outputs):
        for output in outputs:
            tokens[output.request_id] += output.token_ids
            if output.finish_reason == "error":
                assert output.internal and output.request_id in runner.spoilt
                failed = alive.pop(output.request_id)
                assert tokens[failed.request_id] == completion(failed)[: len(tokens[failed.request_id])]
            elif output.finish_reason:
                reasons[output.request_id] = (alive.pop(output.request_id), output.finish_reason)
        engine.check_integrity()
        assert not set(runner.spoilt) & set(alive)

    for number, (event, *details) in enumerate(history):
        if event == "add":
            prompt, max_tokens, stops, delay = details
            prompt = prompt[: engine.limits.max_model_len - 1]
            max_tokens = min(max_tokens, engine.limits.max_model_len - len(prompt))
            sequence = build_sequence(
                f"{number}", prompt, max_tokens, stop_token_ids=[EOS] if stops else [], seed=number
            )  # fmt: skip
            sequence.constraint = None if delay is None else SomeTokens(delay)
            alive[sequence.request_id], tokens[sequence.request_id] = sequence, []
            engine.add(sequence)
        elif event == "finish" and alive:
            aborted = list(alive)[details[0] % len(alive)]
            assert engine.finish(aborted)
            expected = completion(alive.pop(aborted))
            assert tokens[aborted] == expected[: len(tokens[aborted])]
        elif event == "update":
            take(engine.settle())
            engine.update_weights(None, keep_cache=details[0])
            assert not any(sequence.awaits_sample for sequence in alive.values())
        elif engine.has_work:
            step()
    for _ in range(5000):
        if not engine.has_work:
            break
        step()

    assert not engine.has_work and not alive and engine.stats().pages_owned == 0
    for request_id, (sequence, reason) in reasons.items():
        assert tokens[request_id] == completion(sequence)
        assert reason == ("stop" if tokens[request_id][-1] in sequence.stop_token_ids else "length")
