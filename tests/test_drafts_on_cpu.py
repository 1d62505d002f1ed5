"""The CPU's kernels of steps whose rows have drafts, against XLA's operations."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels_needed import kernels_needed

from engine.sampling.sampler_inputs import PARAMETERS, SamplerInputs, pack_inputs
from engine.scheduling.sequence import NO_DRAFT
from engine.speculation import cpu_verification
from engine.speculation.drafter import drafter_of
from engine.speculation.history import own_width
from engine.speculation.speculative_config import SpeculativeConfig
from engine.speculation.verification import verify
from engine.step.cpu import unpack as cpu_unpack
from engine.step.inputs.layout import FROM_SLOT, StepLayout
from engine.step.inputs.slot_state import SlotShapes

SLOTS, DRAFTS, LENGTH = 3, 3, 40
SHAPES = SlotShapes(SLOTS, 2, 5, LENGTH, DRAFTS, num_earlier=50)
LAYOUT = StepLayout(16, 10, SHAPES.num_groups, has_drafts=True)
METHODS = {
    "ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "ngram of many tokens": {"prompt_lookup_min": 1, "prompt_lookup_max": 12},
    "ngram of earlier requests": {"prompt_lookup_min": 2, "prompt_lookup_max": 4, "prompt_lookup_history": 50},
    "draft_model": {"model": "small"},
}


@pytest.fixture(autouse=True, scope="module")
def _has_kernels():
    with kernels_needed():
        cpu_unpack.prepare()
        cpu_verification.prepare()


@cache
def both_verifications(method):
    """XLA's and the kernel's."""
    config = SpeculativeConfig(method=method.split()[0], num_speculative_tokens=DRAFTS, **METHODS[method])

    def run(verification, sampled, packed, history):
        return verification(sampled, SamplerInputs.unpack(packed, SHAPES.num_slots), history, drafter_of(config))

    return [jax.jit(partial(run, each), donate_argnums=2) for each in (verify, cpu_verification.verify)]


@st.composite
def histories(draw, shapes=SHAPES):
    """Of few different tokens, so that much repeats, some of it in long runs that go round, with texts of earlier requests
    behind them."""
    history, rng = shapes.new_fed(), np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = rng.integers(0, draw(st.integers(1, 4)), history.ids.shape, dtype=np.int32)
    period = draw(st.sampled_from([0, 0, 1, 2, 3, 5]))
    if period:
        others = rng.random(ids.shape) < draw(st.sampled_from([0.0, 0.03, 0.1]))
        ids = np.where(others, ids, ids[:, np.arange(ids.shape[1]) % period])
    earlier = ids[:, own_width(LENGTH, DRAFTS) :]
    earlier[rng.random(earlier.shape) < 0.3] = NO_DRAFT
    earlier[:, draw(st.integers(0, 60)) :] = NO_DRAFT
    wrong = jnp.asarray(rng.integers(0, DRAFTS, shapes.num_slots, dtype=np.int32))
    return replace(history, ids=jnp.asarray(ids), num_wrong=wrong)


@pytest.mark.parametrize(
    "method",
    [
        name if name in ("ngram of earlier requests", "draft_model") else pytest.param(name, marks=pytest.mark.thorough)
        for name in METHODS
    ],
)
@given(st.data())
def test_a_kernel_verifies_as_xla_does(method, data):
    """The same text, and the same drafts behind it, whatever repeats."""
    history, looks_up = data.draw(histories()), data.draw(st.booleans())
    history = replace(history, ids=history.ids[:, : 2048 if "earlier" in method else 1024])
    rows = []
    for slot in data.draw(st.permutations(range(SLOTS))):
        count, samples = data.draw(st.integers(1, 1 + DRAFTS)), data.draw(st.booleans())
        length = data.draw(st.integers(1, LENGTH - DRAFTS))
        rows += [(slot, samples, length + place, place, count - 1 - place) for place in range(count)]
    rows += [(SLOTS, 0, 0, 0, 0)] * ((SLOTS + 1) * (DRAFTS + 1) - len(rows))
    slots, samples, lens, offsets, rests = (jnp.asarray(column, jnp.int32) for column in zip(*rows, strict=True))
    parameters = jnp.zeros((len(PARAMETERS), SHAPES.num_slots), jnp.int32)
    packed = pack_inputs(slots, samples, samples, lens, parameters, offsets, rests, jnp.full_like(slots, looks_up))
    guesses = history.ids[slots, lens]
    sampled = jnp.where(
        jnp.asarray(data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))), guesses, 1
    )

    (right, after), (found, after_too) = (
        each(sampled, packed, jax.tree.map(jnp.copy, history)) for each in both_verifications(method)
    )

    np.testing.assert_array_equal(found[0], right[0])
    firsts = np.flatnonzero((offsets == 0) & (samples > 0))
    np.testing.assert_array_equal(found[1][firsts], right[1][firsts])
    for of_slots, as_well in zip(jax.tree.leaves(after), jax.tree.leaves(after_too), strict=True):
        np.testing.assert_array_equal(as_well[:SLOTS], of_slots[:SLOTS])


both_unpacked = [jax.jit(partial(each, LAYOUT), donate_argnums=1) for each in (StepLayout.unpack, cpu_unpack.unpack)]


@given(histories(), st.data())
def test_a_kernel_takes_apart_what_a_step_is_told_as_xla_does(history, data):
    """Decoding rows with drafts, some that do not sample, chunks of prompts, and padding."""
    rng, packed = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1))), np.zeros(LAYOUT.size, np.int32)
    state = jax.tree.map(lambda leaf: rng.integers(9, 20, leaf.shape, dtype=np.int32), SHAPES.new_state())
    slots, counts, samples, token_ids = (
        LAYOUT.view(packed, name) for name in ("slots", "counts", "samples", "token_ids")
    )
    LAYOUT.view(packed, "writes")[:] = LAYOUT.writes.blank(SHAPES)
    LAYOUT.view(packed, "looks_up")[:] = data.draw(st.booleans())
    slots[:], at = SLOTS, 0
    decodes = data.draw(st.integers(0, SLOTS))
    for row, slot in enumerate(data.draw(st.permutations(range(SLOTS)))[: data.draw(st.integers(decodes, SLOTS))]):
        count = data.draw(st.integers(1, 3))
        slots[row], counts[row] = slot, count
        sampled = count if row < decodes else data.draw(st.integers(0, 1))
        samples[row] = sampled * data.draw(st.sampled_from([1, -1]))
        token_ids[at : at + count] = FROM_SLOT if row < decodes else 7
        at += count

    right, found = (each(jnp.asarray(packed), jax.tree.map(jnp.array, state), history) for each in both_unpacked)

    dump = SHAPES.dump_slot
    jax.tree.map(np.testing.assert_array_equal, found[1:], right[1:])
    np.testing.assert_array_equal(found[0].num_tokens[:dump], right[0].num_tokens[:dump])
    np.testing.assert_array_equal(found[0].page_tables, right[0].page_tables)
    np.testing.assert_array_equal(found[0].parameters, right[0].parameters)
