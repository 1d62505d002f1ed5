"""ModelIOProcessor: the packed array says what the plan says."""

import jax.numpy as jnp
import numpy as np

from engine.sampling.needs import Need
from engine.sampling_params import SamplingParams
from engine.scheduling.plan import NextIterationPlan
from engine.scheduling.sequence import Sequence
from engine.step.layout import FROM_SLOT, StepLayout
from engine.step.model_io import ModelIOProcessor


def build_sequence(number, *, prompt=6, computed=0, slot=0, **params):
    """A sequence with pages 10, 11, ... times its number."""
    sequence = Sequence(str(number), list(range(prompt)), SamplingParams(**params), frozenset(), 9, seed=2**32 - number)
    sequence.slot, sequence.num_computed_tokens = slot, computed
    sequence.pages, sequence.first_pages = [[10 * number, 10 * number + 1]], [0]
    return sequence


def build_plan(decoding=(), chunks=()):
    """A plan that admits and runs these sequences; ``chunks`` are (sequence, count)."""
    plan = NextIterationPlan()
    for sequence in decoding:
        sequence.num_in_flight = 1
        plan.add(sequence, 1)
    plan.num_decodes = len(decoding)
    for sequence, count in chunks:
        plan.add(sequence, count)
    plan.admitted = list(plan.sequences)
    return plan


def build_io():
    """For four sequences of at most twelve tokens."""
    return ModelIOProcessor(max_num_seqs=4, max_model_len=12, pages_per_seq=3, vocab_size=40)


def prepare(plan, layout=None):
    """The unpacked step and what it needs of the sampler."""
    layout = layout or StepLayout(tokens=8, rows=4, pages_per_seq=3)
    step, _ = build_io().prepare(plan, layout)
    sampling = jnp.asarray(step.packed[: layout.sampling_size])
    return layout.unpack(jnp.asarray(step.packed)), layout.unpack_sampling(sampling), step.needs


def test_a_mixed_step_is_laid_out_as_planned():
    """Decoding rows take their token from their slot, chunks from the prompt; padding goes nowhere."""
    decoding = build_sequence(1, computed=6, slot=2)
    whole, part = build_sequence(2, computed=4, slot=0), build_sequence(3, slot=1)

    batch, (slots, _), _ = prepare(build_plan([decoding], [(whole, 2), (part, 3)]))

    assert batch.token_ids.tolist() == [FROM_SLOT, 4, 5, 0, 1, 2, 0, 0]
    assert batch.positions.tolist() == [6, 4, 5, 0, 1, 2, 0, 0]
    assert batch.table.kv_lens.tolist() == [7, 6, 3, 0]
    assert batch.table.cu_q_lens.tolist() == [0, 1, 3, 6, 6]
    assert batch.table.num_seqs.tolist() == [3]
    assert batch.table.page_indices[0, :3, :2].tolist() == [[10, 11], [20, 21], [30, 31]]
    assert slots.tolist() == batch.slots.tolist() == [2, 0, 4, 4]


def test_every_row_brings_its_own_sampling_parameters():
    """A prompt's first token is sampled by its own parameters, not its neighbours' (an ancestor's fault)."""
    plain = build_sequence(1, temperature=0)
    hot = build_sequence(2, temperature=1.5, top_k=-1, top_p=0.25, min_p=0.125, seed=7)

    _, (_, rows), needs = prepare(build_plan(chunks=[(plain, 2), (hot, 6)]))

    assert rows.temperature.tolist() == [0, 1.5, 0, 0]
    assert rows.top_k.tolist() == [0, 0, 0, 0]
    assert rows.top_p.tolist()[:2] == [1, 0.25] and rows.min_p.tolist()[:2] == [0, 0.125]
    assert rows.seeds.tolist()[:2] == [2**32 - 1, 2**32 - 2]
    assert rows.positions.tolist() == [2, 6, 0, 0]
    assert needs == Need.DRAW


def test_a_greedy_step_needs_only_the_greedy_sampler():
    """Truncation that a greedy row carries does not matter, nor padding, nor a prompt's chunk that samples nothing."""
    _, _, greedy = prepare(build_plan(chunks=[(build_sequence(1, prompt=2, temperature=0, top_k=3), 2)]))
    _, _, drawn = prepare(build_plan(chunks=[(build_sequence(1, prompt=2), 2)]))
    _, _, unread = prepare(build_plan(chunks=[(build_sequence(1), 2)]))

    assert (greedy, drawn, unread) == (Need(0), Need.DRAW, Need(0))


def test_released_sequences_leave_before_new_ones_come():
    """A sequence that is preempted and admitted again in one plan has one row, with its new slot."""
    io = build_io()
    layout = StepLayout(tokens=8, rows=4, pages_per_seq=3)
    sequence = build_sequence(1, slot=3)
    io.prepare(build_plan(chunks=[(sequence, 4)]), layout)
    sequence.slot, sequence.num_computed_tokens = 1, 0
    again = build_plan(chunks=[(sequence, 6)])
    again.released = [sequence]

    packed = io.prepare(again, layout)[0].packed

    assert layout.view(packed, "slots").tolist() == [1, 4, 4, 4]


def test_no_more_of_the_page_tables_is_copied_than_is_in_use():
    """Past the longest row's pages a step's table is untouched: whole, those of a long context are megabytes a step."""
    io, layout = build_io(), StepLayout(8, 4, 3)
    predecessor, successor = build_sequence(1), build_sequence(2)
    predecessor.pages[0].append(12)
    io.prepare(build_plan(chunks=[(predecessor, 4)]), layout)
    plan = build_plan(chunks=[(successor, 4)])
    plan.released = [predecessor]

    packed = io.prepare(plan, layout)[0].packed

    assert layout.view(packed, "page_indices").tolist() == [[20, 21, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]


def test_a_step_holds_no_token_matrix():
    """What travels to the device grows with tokens, rows and pages, never with rows times max_model_len."""
    layout = StepLayout(tokens=8, rows=4, pages_per_seq=100)

    assert layout.size == 9 * 4 + 2 * 8 + 4 * 100 + 5 + 1


def test_each_step_has_an_array_of_its_own():
    """The device may still read the last step's array while the next is written."""
    io, layout = build_io(), StepLayout(8, 4, 3)
    first = io.prepare(build_plan(chunks=[(build_sequence(1), 4)]), layout)[0].packed
    second = io.prepare(build_plan(chunks=[(build_sequence(2, slot=1), 4)]), layout)[0].packed

    assert not np.shares_memory(first, second)
