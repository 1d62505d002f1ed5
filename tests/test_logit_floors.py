"""Logits of tokens that are not to be drawn keep their order, whatever else a request asks for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.sampling.logit_bias import apply_bias, bias_of, neutral_bias
from engine.sampling.logit_floors import MASKED_OUT, NOT_ALLOWED, REMOVED
from engine.sampling.new_tokens import last_sampled
from engine.sampling.penalties import apply_penalties, penalties_of
from engine.sampling.sampler import SamplingRows, cuts_of
from engine.sampling.token_masks import mask_logits
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence
from engine.vocabulary import NO_TOKEN_LOGIT

MASKED, PADDING, FORBIDDEN, BANNED, WORST, BEST = range(6)
"""Tokens, each to be drawn only where all after it are out of question."""
LOGITS = np.array([[50, NO_TOKEN_LOGIT, 50, 50, -1000, 1000]], np.float32)
weigh = jax.jit(lambda logits, rows: cuts_of(logits, jnp.max(logits, axis=-1), rows).weigh(logits))
ORDER = [MASKED_OUT, NO_TOKEN_LOGIT, NOT_ALLOWED, REMOVED]


def changed_logits(**extremes):
    """LOGITS after all that changes logits before the sampler, all tokens generated before."""
    allowed = [BANNED, WORST, BEST]
    params = SamplingParams(allowed_token_ids=allowed, **extremes)
    output = [MASKED, FORBIDDEN, BANNED, WORST, BEST]
    sequence = Sequence("a", [BEST], params, frozenset(), 99, seed=0, bad_word_token_ids=((BANNED,),))
    sequence.output_token_ids = output
    vocab, slots = LOGITS.shape[1], np.zeros(1, np.int32)
    num_tokens = np.full(1, sequence.num_tokens, np.int32)
    new = last_sampled(jnp.full(1, BEST, jnp.int32), jnp.asarray(slots), jnp.zeros(1, bool))
    state = bias_of(sequence, vocab)
    _, logits = jax.jit(apply_bias)(LOGITS, _as_slots(state), slots, new, num_tokens)
    _, logits = jax.jit(apply_penalties)(logits, _as_slots(penalties_of(sequence, vocab)), slots, new)
    return jax.jit(mask_logits)(logits, jnp.full((1, 1), ~(1 << MASKED), jnp.int32))


def _as_slots(row):
    """The state of one slot."""
    return type(row)(**{name: jnp.asarray(value)[None] for name, value in vars(row).items()})


def weights_of(logits, temperature):
    """What a row weighs."""
    f32 = np.float32
    rows = SamplingRows(*(jnp.asarray([value]) for value in (f32(temperature), 0, f32(1), f32(0), np.uint32(0), 0)))
    return np.asarray(weigh(logits, rows))[0]


def test_the_order_is_that_of_who_has_the_last_word():
    """A constraint, then the vocabulary, then what is allowed, then what is banned; none is infinite."""
    assert np.isfinite(ORDER).all() and sorted(ORDER) == ORDER and len(set(ORDER)) == len(ORDER)
    assert (neutral_bias(4).values == 0).all()


@pytest.mark.parametrize("temperature", [0.001, 1, 100])
@pytest.mark.parametrize("bias", [-100, 100])
@pytest.mark.parametrize("penalty", [-2, 2])
@pytest.mark.parametrize("repetition", [0.01, 10])
def test_no_parameter_changes_the_order(temperature, bias, penalty, repetition):
    """Each token weighs nothing beside any that comes after it in the order, at the extremes of all parameters."""
    logits = changed_logits(
        logit_bias=dict.fromkeys(range(6), bias),
        presence_penalty=penalty,
        frequency_penalty=penalty,
        repetition_penalty=repetition,
    )

    assert np.isfinite(logits).all()
    for token in (PADDING, FORBIDDEN, BANNED, WORST):
        among = jnp.where(jnp.arange(6)[None, :] <= token, logits, MASKED_OUT)
        assert np.flatnonzero(weights_of(among, temperature)).tolist() == [token]
