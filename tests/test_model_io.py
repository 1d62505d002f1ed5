"""ModelIOProcessor and SlotState: what a plan says arrives on the device, and little else travels."""

from contextlib import suppress
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caching.cpu_kernels import KernelsUnavailable
from engine.sampling.needs import Need
from engine.sampling.sampler_inputs import SamplerInputs
from engine.sampling_params import SamplingParams
from engine.scheduling.plan import NextIterationPlan
from engine.scheduling.sequence import Sequence
from engine.step.commands import encode
from engine.step.cpu import unpack as kernel
from engine.step.inputs.layout import StepLayout
from engine.step.inputs.model_io import ModelIOProcessor
from engine.step.inputs.slot_state import SEPARATE, SlotShapes

SHAPES = SlotShapes(max_num_seqs=4, num_groups=2, pages_per_seq=3)
LAST_TOKEN = np.array([50, 51, 52, 53, 0], np.int32)


def build_sequence(number, *, prompt=6, computed=0, slot=0, **params):
    """A sequence with pages 10, 11, ... times its number, and 100 more in the second group."""
    sequence = Sequence(str(number), list(range(prompt)), SamplingParams(**params), frozenset(), 9, seed=2**32 - number)
    sequence.slot, sequence.num_computed_tokens = slot, computed
    sequence.pages, sequence.first_pages = (
        [[10 * number, 10 * number + 1], [100 + 10 * number, 101 + 10 * number]],
        [0, 0],
    )
    return sequence


def build_plan(decoding=(), chunks=(), admitted=None):
    """A plan that runs these sequences, and admits all of them or those; ``chunks`` are (sequence, count)."""
    plan = NextIterationPlan()
    for sequence in decoding:
        sequence.num_in_flight = 1
        plan.add(sequence, 1)
    plan.num_decodes = len(decoding)
    for sequence, count in chunks:
        plan.add(sequence, count)
    plan.admitted = list(plan.sequences) if admitted is None else admitted
    return plan


class Device:
    """The state of the slots, and what the model and the sampler get of each step."""

    def __init__(self, shapes=SHAPES):
        self.io, self.state, self.shapes = (
            ModelIOProcessor(shapes, vocab_size=40, few_rows=2),
            shapes.new_state(),
            shapes,
        )

    def run(self, plan, tokens=8, rows=None):
        """The model's inputs, the sampler's, and the step's needs."""
        layout = StepLayout(tokens, rows or min(tokens, self.shapes.max_num_seqs), self.shapes.num_groups)
        step, _ = self.io.prepare(plan, layout)
        for changes in step.changes:
            self.state = self.state.after(SEPARATE, jnp.asarray(changes))
        told = jnp.asarray(step.packed), self.state, jnp.asarray(LAST_TOKEN)
        self.state, batch, sampling = unpacked = jax.jit(layout.unpack)(*told)
        assert_kernel_agrees(layout, told, unpacked)
        return batch, SamplerInputs.unpack(sampling, self.shapes.num_slots), step.needs


def assert_kernel_agrees(layout, told, unpacked):
    """A CPU's kernel gives the same, if this machine can have it."""
    with suppress(KernelsUnavailable):
        kernel.prepare()
        by_kernel = jax.jit(partial(kernel.unpack, layout), donate_argnums=1)(
            told[0], jax.tree.map(jnp.copy, told[1]), told[2]
        )
        jax.tree.map(np.testing.assert_array_equal, by_kernel, unpacked)


@pytest.mark.parametrize("tokens", [1, *(pytest.param(tokens, marks=pytest.mark.thorough) for tokens in (2, 3))])
def test_a_step_may_have_more_rows_of_the_sampler_than_tokens(tokens):
    """They are padding, which has the dump slot."""
    device = Device()

    batch, sampling, _ = device.run(build_plan(chunks=[(build_sequence(1, slot=2), tokens)]), tokens, rows=4)

    assert batch.token_ids.tolist() == list(range(tokens)) == batch.positions.tolist()
    assert len(batch.sampled) == tokens and sampling.slots.tolist() == [4] * 4


def test_a_mixed_step_is_laid_out_as_planned():
    """Decoding rows take their token from their slot, chunks from the prompt; padding goes nowhere."""
    device, decoding = Device(), build_sequence(1, slot=2)
    whole, part = build_sequence(2, computed=4, slot=0), build_sequence(3, slot=1)
    device.run(build_plan(chunks=[(decoding, 6)]))

    batch, sampling, _ = device.run(build_plan([decoding], [(whole, 2), (part, 3)], admitted=[whole, part]))

    assert batch.token_ids.tolist() == [52, 4, 5, 0, 1, 2, 0, 0]
    assert batch.positions.tolist() == [6, 4, 5, 0, 1, 2, 0, 0]
    assert batch.table.kv_lens.tolist() == [7, 6, 3, 0]
    assert batch.table.cu_q_lens.tolist() == [0, 1, 3, 6, 6]
    assert batch.table.num_seqs.tolist() == [3]
    assert batch.table.page_indices[0].tolist() == [[10, 11, 0], [20, 21, 0], [30, 31, 0], [0, 0, 0]]
    assert batch.table.page_indices[1].tolist() == [[110, 111, 0], [120, 121, 0], [130, 131, 0], [0, 0, 0]]
    assert sampling.slots.tolist() == [2, 0, 4, 4]
    assert sampling.decodes.tolist() == [True, False, False, False]


def test_every_row_brings_its_own_sampling_parameters():
    """A prompt's first token is sampled by its own parameters, not its neighbours' (an ancestor's fault)."""
    plain = build_sequence(1, temperature=0)
    hot = build_sequence(2, temperature=1.5, top_k=-1, top_p=0.25, min_p=0.125, seed=7, slot=3)

    _, sampling, needs = Device().run(build_plan(chunks=[(plain, 2), (hot, 6)]))

    rows = sampling.rows
    assert rows.temperature.tolist() == [0, 1.5, 0, 0]
    assert rows.top_k.tolist() == [0, 0, 0, 0]
    assert rows.top_p.tolist()[:2] == [1, 0.25] and rows.min_p.tolist()[:2] == [0, 0.125]
    assert rows.seeds.tolist()[:2] == [2**32 - 1, 2**32 - 2]
    assert rows.positions.tolist() == [2, 6, 0, 0]
    assert needs == Need.DRAW


def test_bias_and_penalties_are_of_rows_that_sample_and_have_any():
    """All others work in the dump slot, which changes nothing."""
    biased, counted = build_sequence(1, logit_bias={3: 1.0}), build_sequence(2, slot=1, presence_penalty=1)
    both = build_sequence(3, slot=2, logit_bias={3: 1.0}, presence_penalty=1)

    _, sampling, needs = Device().run(build_plan(chunks=[(biased, 6), (counted, 6), (both, 2)]), tokens=14)

    assert sampling.slots_that(Need.BIAS).tolist() == [0, 4, 4, 4]
    assert sampling.slots_that(Need.PENALTIES).tolist() == [4, 1, 4, 4]
    assert needs == Need.DRAW | Need.BIAS | Need.PENALTIES


def test_a_greedy_step_needs_only_the_greedy_sampler():
    """Truncation that a greedy row carries does not matter, nor padding, nor a prompt's chunk that samples nothing."""
    _, _, greedy = Device().run(build_plan(chunks=[(build_sequence(1, prompt=2, temperature=0, top_k=3), 2)]))
    _, _, drawn = Device().run(build_plan(chunks=[(build_sequence(1, prompt=2), 2)]))
    _, _, unread = Device().run(build_plan(chunks=[(build_sequence(1), 2)]))

    assert (greedy, drawn, unread) == (Need(0), Need.DRAW, Need(0))


def test_rows_with_drafts_are_drafted_before_the_step_and_others_fed_to_the_draft_model():
    """Those with most drafts come first; what is new of slots is there by then, and so it is not in the step."""
    layout = StepLayout(8, 4, SHAPES.num_groups)
    io = ModelIOProcessor(SHAPES, 40, few_rows=2, draft_rows=[1, 4], feeds_drafts=True)
    few, many, none = (build_sequence(number, slot=number) for number in (1, 2, 3))
    io.prepare(build_plan(chunks=[(few, 2), (many, 2), (none, 2)]), layout)
    for sequence in (few, many, none):
        sequence.pages[0].append(7)

    def prepared(sequences, drafts):
        plan = NextIterationPlan(grown=sequences)
        plan.add_decodes(sequences, drafts)
        return io.prepare(plan, layout)[0]

    mixed, all_drafted, plain = prepared([none, few, many], [0, 1, 3]), prepared([many], [2]), prepared([none], [0])

    assert (
        mixed.drafted.tolist() == [[2, 1, 4, 4], [3, 1, 0, 0]] and mixed.feeds_draft_model and len(mixed.changes) == 1
    )
    assert all_drafted.drafted.tolist() == [[2], [2]] and not all_drafted.feeds_draft_model
    assert plain.drafted is None and plain.feeds_draft_model
    without = ModelIOProcessor(SHAPES, 40, few_rows=2)
    step, _ = without.prepare(build_plan(chunks=[(none, 2)]), layout)
    assert step.drafted is None and not step.feeds_draft_model


def test_a_sequence_that_comes_again_begins_in_its_new_slot():
    """Preempted and admitted in one plan, it is computed anew, its output with its prompt, in other pages."""
    device, sequence = Device(), build_sequence(1, slot=3)
    device.run(build_plan(chunks=[(sequence, 6)]))
    sequence.slot, sequence.num_computed_tokens, sequence.output_token_ids = 1, 4, [31, 32]
    sequence.pages, sequence.first_pages = [[7, 8], [0, 9]], [0, 1]

    batch, _, _ = device.run(build_plan(chunks=[(sequence, 4)]))

    assert batch.token_ids.tolist()[:4] == [4, 5, 31, 32] and batch.positions.tolist()[:4] == [4, 5, 6, 7]
    assert batch.table.page_indices[:, 0].tolist() == [[7, 8, 0], [0, 9, 0]]


def test_a_slot_inherits_nothing_that_is_read():
    """Its tokens are counted from the prefix hit on, and the pages that its sequence has are its own."""
    device, predecessor, successor = Device(), build_sequence(1, slot=2), build_sequence(2, slot=2, computed=4)
    predecessor.pages[0].append(12)
    device.run(build_plan(chunks=[(predecessor, 6)]))

    batch, _, _ = device.run(build_plan(chunks=[(successor, 2)]))

    assert batch.table.kv_lens.tolist() == [6, 0, 0, 0]
    assert batch.table.page_indices[0, 0, :2].tolist() == [20, 21]


def test_pages_come_as_they_are_given():
    """A page of a decoding sequence in each group, and those by which the window of a prompt moves."""
    device, decoding, prompt = Device(), build_sequence(1, slot=1), build_sequence(2, slot=0)
    device.run(build_plan(chunks=[(decoding, 6), (prompt, 2)]))
    decoding.pages[0].append(12), decoding.pages[1].append(112), prompt.pages[1].append(122)
    prompt.pages[1][0], prompt.first_pages[1] = 0, 1
    plan = build_plan([decoding], [(prompt, 3)], admitted=[])
    plan.grown = [decoding]

    batch, _, _ = device.run(plan)

    assert batch.table.page_indices[0, :2].tolist() == [[10, 11, 12], [20, 21, 0]]
    assert batch.table.page_indices[1, :2, 1:].tolist() == [[111, 112], [121, 122]]
    assert batch.positions.tolist() == [6, 2, 3, 4, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "pages", [16, 17, 5000, *(pytest.param(pages, marks=pytest.mark.thorough) for pages in (1, 15, 2048, 2049))]
)
def test_a_table_of_any_length_arrives(pages):
    """Changes that a step has no room for come before it, in as many parts as they need."""
    device, sequence = Device(SlotShapes(2, 1, 5000)), build_sequence(1, slot=1)
    sequence.pages, sequence.first_pages = [list(range(1, pages + 1))], [0]

    batch, _, _ = device.run(build_plan(chunks=[(sequence, 6)]))

    assert batch.table.page_indices[0, 0, :pages].tolist() == sequence.pages[0]
    assert not np.asarray(device.state.page_tables[[0, 2], :]).any()


def test_more_sequences_than_a_step_has_room_for_are_admitted():
    """As after a failed step, when all come again at once."""
    device = Device(SlotShapes(100, 2, 3))
    sequences = [build_sequence(number, slot=number - 1) for number in range(1, 101)]

    batch, sampling, _ = device.run(build_plan(chunks=[(sequence, 6) for sequence in sequences]), tokens=600)

    assert batch.table.page_indices[0, :, 0].tolist() == [10 * number for number in range(1, 101)]
    assert sampling.rows.seeds.tolist() == [2**32 - number for number in range(1, 101)]


@pytest.mark.thorough
@settings(max_examples=max(12, settings.default.max_examples // 6))  # each size is compiled
@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(0, 9))
def test_positions_follow_from_counts(counts, padding):
    """For any rows, also where the bucket has neither rows nor tokens to spare."""
    counts = [1] * counts.count(0) + sorted(count for count in counts if count)
    device = Device(SlotShapes(len(counts) + padding % 2, 1, 3))
    sequences = [build_sequence(slot + 1, slot=slot, prompt=9, computed=slot) for slot in range(len(counts))]
    for sequence in sequences:
        del sequence.pages[1], sequence.first_pages[1]
    plan = build_plan(chunks=list(zip(sequences, counts, strict=True)))

    batch, _, _ = device.run(plan, tokens=sum(counts) + padding)

    expected = [slot + index for slot, count in enumerate(counts) for index in range(count)]
    assert batch.positions.tolist() == expected + [0] * padding
    assert device.state.num_tokens.tolist()[: len(counts)] == [slot + count for slot, count in enumerate(counts)]
    assert not device.state.num_tokens[-1]


@pytest.mark.parametrize(("rows", "context", "page_size"), [(64, 2**17, 128), (256, 2**17, 128), (256, 2**17, 16)])
def test_what_travels_does_not_grow_with_the_context(rows, context, page_size):
    """A step of decodes is some bytes a row for each host; whole page tables would be up to 8 MB."""
    io = ModelIOProcessor(SlotShapes(rows, 1, context // page_size), vocab_size=40, few_rows=2)
    sequences = [build_sequence(1, slot=slot, computed=6) for slot in range(rows)]
    for sequence in sequences:
        sequence.pages, sequence.first_pages = [[1]], [0]
    io.prepare(build_plan(sequences), StepLayout(rows, rows))

    step, _ = io.prepare(build_plan(sequences, admitted=[]), StepLayout(rows, rows))

    assert len(encode(step)) < 24 * rows + 500


def test_each_step_has_an_array_of_its_own():
    """The device may still read the last step's array while the next is written."""
    io, layout = ModelIOProcessor(SHAPES, 40, few_rows=2), StepLayout(8, 4, 2)
    first = io.prepare(build_plan(chunks=[(build_sequence(1), 4)]), layout)[0].packed
    second = io.prepare(build_plan(chunks=[(build_sequence(2, slot=1), 4)]), layout)[0].packed

    assert not np.shares_memory(first, second)


def test_a_step_copies_no_page_tables():
    """They are changed in place, whatever their size."""
    shapes, layout = SlotShapes(8, 2, 4096), StepLayout(8, 8, 2)
    arguments = (
        jax.ShapeDtypeStruct((layout.size,), np.int32),
        jax.eval_shape(shapes.new_state),
        jax.eval_shape(shapes.new_fed),
    )

    step = jax.jit(lambda *inputs: layout.unpack(*inputs)[0], donate_argnums=1).lower(*arguments).compile()

    assert step.memory_analysis().temp_size_in_bytes < 2 * 8 * 4096
