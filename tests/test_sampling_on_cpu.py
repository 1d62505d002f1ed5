"""What a CPU's kernels make of a step's logits, and of the state of slots, against XLA's operations."""

from dataclasses import fields, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels_needed import kernels_needed

from engine.sampling import cpu_sampler
from engine.sampling.cpu_sampler import CPU_SAMPLING
from engine.sampling.logit_bias import ANY, MAX_BANS, MAX_HIDDEN, NONE, RECENT, LogitBias
from engine.sampling.logit_floors import MASKED_OUT, NOT_ALLOWED, REMOVED
from engine.sampling.operations import XLA_SAMPLING
from engine.sampling.penalties import Penalties
from engine.sampling.sampler import NO_TOKEN
from engine.sampling.sampler_inputs import PARAMETERS, SamplerInputs, pack_inputs
from engine.sampling.token_masks import mask_words
from engine.speculation.history import own_width
from engine.step.inputs.slot_state import SlotShapes

SLOTS, DRAFTS, LENGTH, ROWS, VOCAB = 4, 2, 40, 7, 4139
"""A row is a task of 4,096 tokens, and one of 43, which fill no whole vectors."""
DUMP = SLOTS
KINDS = ["one token", "drafts"]
SEEDS = st.integers(0, 2**32 - 1)
TOKENS = np.array([0, 1, 4095, 4096, VOCAB - 1])
"""Of few different ones, so that much repeats."""


@pytest.fixture(autouse=True, scope="module")
def _has_kernels():
    with kernels_needed():
        cpu_sampler.prepare()


def in_turn(change, logits, state, packed, fed):
    """A change as a step's program has it."""
    return change(logits, state, SamplerInputs.unpack(packed, SLOTS + 1), fed)


KEY = jax.random.key(3)
BIAS, PENALTIES, MASK, WRITE, DRAW, SAMPLE = (
    [jax.jit(made(getattr(each, name))) for each in (XLA_SAMPLING, CPU_SAMPLING)]
    for name, made in (
        ("apply_bias", lambda change: partial(in_turn, change)),
        ("apply_penalties", lambda change: partial(in_turn, change)),
        ("mask_logits", lambda change: change),
        ("write_slot", lambda change: change),
        (
            "draw",
            lambda draw: lambda logits, packed, fed: draw(logits, SamplerInputs.unpack(packed, SLOTS + 1), fed, KEY),
        ),
        ("sample", lambda sample: lambda logits, packed: sample(logits, SamplerInputs.unpack(packed, SLOTS + 1), KEY)),
    )
)


def logits_of(rng):
    """Of all kinds: of a model, those of excluded tokens, and such as are a fault of one row alone."""
    logits = rng.normal(0, 5, (ROWS, VOCAB)).astype(np.float32)
    floors = np.array([0, MASKED_OUT, NOT_ALLOWED, REMOVED], np.float32)
    logits[:, TOKENS] = np.where(rng.random((ROWS, 5)) < 0.5, logits[:, TOKENS], rng.choice(floors, (ROWS, 5)))
    logits[rng.integers(ROWS), rng.choice(TOKENS)] = rng.choice([np.nan, np.inf, 1])
    return logits


def bias_state(rng):
    """Of slots of which each may have all of bias, bans and hidden ends; the dump slot's changes nothing."""
    slots = SLOTS + 1
    values = np.where(rng.random((slots, VOCAB)) < 0.9, 0, rng.normal(0, 9, (slots, VOCAB)))
    values[:, TOKENS] += rng.choice([0, NOT_ALLOWED, REMOVED], (slots, len(TOKENS)))
    after = rng.choice(TOKENS[:2], (slots, MAX_BANS, RECENT))
    any_up_to = rng.integers(RECENT - 3, RECENT + 1, (slots, MAX_BANS, 1))
    recent = rng.choice(TOKENS[:2], (slots, RECENT))
    none_up_to = rng.integers(0, RECENT + 1, (slots, 1))
    places = np.arange(RECENT)
    state = LogitBias(
        values=values.astype(np.float32),
        recent=np.where(places < none_up_to, NONE, recent).astype(np.int32),
        banned_ids=rng.choice([*TOKENS, VOCAB], (slots, MAX_BANS)).astype(np.int32),
        banned_after=np.where(places < any_up_to, ANY, after).astype(np.int32),
        hidden_ids=rng.choice([7, 4137, VOCAB], (slots, MAX_HIDDEN)).astype(np.int32),
        hidden_until=rng.integers(2, 5, slots).astype(np.int32),
    )
    state.values[DUMP], state.banned_ids[DUMP], state.hidden_until[DUMP] = 0, VOCAB, 0
    return state


def penalty_state(rng):
    """Of slots of which each may have all penalties; the dump slot's has none."""
    slots = SLOTS + 1
    choices = {"presence": [0, 0, 2, -0.3], "frequency": [0, 0, 0.5, -2], "repetition": [1, 1.1, 0.7, 10]}
    counts = np.where(rng.random((slots, VOCAB)) < 0.9, 0, rng.integers(0, 9, (slots, VOCAB)))
    state = Penalties(
        counts=counts.astype(np.int32),
        **{name: rng.choice(values, slots).astype(np.float32) for name, values in choices.items()},
    )
    state.presence[DUMP], state.frequency[DUMP], state.repetition[DUMP] = 0, 0, 1
    return state


def steps(rng, kind):
    """What a step's rows are told and fed: rows that sample or not, of all needs, of a slot several where they may have drafts."""
    parameters = np.zeros((len(PARAMETERS), SLOTS + 1), np.int32)
    asked = {"temperature": [0, 1, 2], "top_k": [0, 9], "top_p": [1, 0.9], "min_p": [0, 0.01], "seeds": [0, 2**32 - 1]}
    for number, (name, dtype) in enumerate(PARAMETERS.items()):
        parameters[number] = rng.choice(asked.get(name, range(32)), SLOTS + 1).astype(dtype).view(np.int32)
    groups, most = [], 1 + DRAFTS if kind == "drafts" else 1
    for slot in rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)]:
        size = min(rng.integers(1, most + 1), ROWS - sum(map(len, groups)))
        groups.append([slot] * size)
    slots = np.array([slot for group in groups for slot in group])
    offsets = np.concatenate([np.arange(len(group)) for group in groups])
    rests = np.concatenate([np.arange(len(group))[::-1] for group in groups])
    rows = [(slots, DUMP), (rng.integers(0, 5, SLOTS + 1)[slots] > 0, 0), (rng.integers(0, 4, SLOTS + 1)[slots] > 0, 0)]
    rows += [(rng.integers(1, 6, SLOTS + 1)[slots] + offsets, 0), (offsets, 0), (rests, 0)]
    own = [np.pad(row, (0, ROWS - len(slots)), constant_values=rest).astype(np.int32) for row, rest in rows]
    drafts = [*own[4:], np.ones(ROWS, np.int32)] if kind == "drafts" else []
    packed = pack_inputs(*map(jnp.asarray, own[:4]), jnp.asarray(parameters), *map(jnp.asarray, drafts))
    fed = SlotShapes(SLOTS, 1, 1, LENGTH, DRAFTS if drafts else 0).new_fed()
    if not drafts:
        return packed, jnp.asarray(rng.choice(TOKENS, SLOTS + 1).astype(np.int32))
    ids = rng.choice(TOKENS, (SLOTS + 1, own_width(LENGTH, DRAFTS))).astype(np.int32)
    return packed, replace(
        fed, ids=jnp.asarray(ids), num_new=jnp.asarray(rng.integers(1, 2 + DRAFTS, SLOTS + 1, np.int32))
    )


def as_arrays(state):
    """On the device."""
    return jax.tree.map(jnp.asarray, state)


def assert_same_state(state, expected):
    """But for the dump slot's, which is nobody's."""
    for field in fields(expected):
        found, right = (np.asarray(getattr(each, field.name))[:DUMP] for each in (state, expected))
        np.testing.assert_array_equal(found, right, err_msg=field.name)


@given(seed=SEEDS, kind=st.sampled_from(KINDS))
def test_biases_are_xla_s(seed, kind):
    """Bit for bit, and so are the tokens that bans are looked up by, whatever is asked for in the other rows."""
    rng = np.random.default_rng(seed)
    logits, state = logits_of(rng), as_arrays(bias_state(rng))
    (right_state, right), (found_state, found) = (
        change(logits, state, *steps(np.random.default_rng(seed), kind)) for change in BIAS
    )

    np.testing.assert_array_equal(found, right)
    assert_same_state(found_state, right_state)


@given(seed=SEEDS, kind=st.sampled_from(KINDS))
def test_penalties_are_xla_s(seed, kind):
    """But for one rounding, of frequency times count; counts are equal."""
    rng = np.random.default_rng(seed)
    logits, state = logits_of(rng), as_arrays(penalty_state(rng))
    (right_state, right), (found_state, found) = (
        change(logits, state, *steps(np.random.default_rng(seed), kind)) for change in PENALTIES
    )

    np.testing.assert_allclose(found, right, rtol=1e-6, atol=1e-5)
    plain = np.asarray(state.frequency) == 0
    slots = np.asarray(steps(np.random.default_rng(seed), kind)[0])[0]
    np.testing.assert_array_equal(np.asarray(found)[plain[slots]], np.asarray(right)[plain[slots]])
    assert_same_state(found_state, right_state)


@given(seed=SEEDS, name=st.sampled_from(["bias", "penalties"]))
def test_a_row_is_the_same_in_any_batch(seed, name):
    """Bit for bit: what its neighbours need is nothing to it."""
    rng = np.random.default_rng(seed)
    change, state = (BIAS[1], bias_state(rng)) if name == "bias" else (PENALTIES[1], penalty_state(rng))
    logits, (packed, fed) = logits_of(rng), steps(rng, "one token")
    _, together = change(logits, as_arrays(state), packed, fed)

    for row in range(ROWS):
        _, alone = change(logits[row : row + 1], as_arrays(state), packed[:, row : row + 1], fed)
        assert np.asarray(alone)[0].tobytes() == np.asarray(together)[row].tobytes()


@given(seed=SEEDS, vocab=st.sampled_from([31, 64, 4095, VOCAB]))
def test_masks_are_xla_s(seed, vocab):
    """Whether the last word is whole or not."""
    rng = np.random.default_rng(seed)
    masks = rng.integers(-(2**31), 2**31, (ROWS, mask_words(vocab))).astype(np.int32)
    masks[0] = -1
    right, found = (
        mask(logits_of(rng)[:, :vocab], masks)
        for mask, rng in zip(MASK, map(np.random.default_rng, (seed, seed)), strict=True)
    )

    np.testing.assert_array_equal(found, right)


@given(seed=SEEDS)
def test_tokens_are_xla_s(seed):
    """And stay in the slots of rows that sample: 0 where a row's logits are a fault. Others have no token."""
    rng = np.random.default_rng(seed)
    logits, (packed, fed) = logits_of(rng), steps(rng, "one token")

    (right, right_last), (found, found_last) = (draw(logits, packed, fed) for draw in DRAW)

    np.testing.assert_array_equal(found, np.where(packed[1] > 0, right, NO_TOKEN))
    np.testing.assert_array_equal(found_last[:DUMP], right_last[:DUMP])


@given(seed=SEEDS, kind=st.sampled_from(KINDS))
def test_tokens_that_are_not_kept_are_the_same(seed, kind):
    """What is drawn to be verified, and by a draft model."""
    rng = np.random.default_rng(seed)
    logits, (packed, _) = logits_of(rng), steps(rng, kind)

    right, found = (sample(logits, packed) for sample in SAMPLE)

    np.testing.assert_array_equal(found, np.where(packed[1] > 0, right, NO_TOKEN))


@pytest.mark.parametrize("state", [bias_state, penalty_state])
@pytest.mark.parametrize("slot", [0, 2])
def test_a_sequence_s_state_is_written_into_its_slot_alone(state, slot):
    """All of its fields."""
    rng = np.random.default_rng(slot)
    before, row = state(rng), jax.tree.map(lambda leaf: leaf[1], state(rng))

    right, found = (write(as_arrays(before), np.int32(slot), row) for write in WRITE)

    jax.tree.map(np.testing.assert_array_equal, found, right)


def test_state_that_is_not_donated_is_kept():
    """XLA copies it first: whoever has it still sees what it was."""
    rng = np.random.default_rng(0)
    state = as_arrays(penalty_state(rng))
    before, row = np.asarray(state.counts).copy(), jax.tree.map(lambda leaf: leaf[1], penalty_state(rng))

    after = WRITE[1](state, np.int32(0), row)

    np.testing.assert_array_equal(state.counts, before)
    np.testing.assert_array_equal(after.counts[0], row.counts)
