"""Masks of tokens: packed by row, and what they do to logits."""

import jax.numpy as jnp
import numpy as np
import pytest

from engine.sampling.logit_floors import MASKED_OUT
from engine.sampling.token_masks import mask_logits, pack_masks
from engine.sampling_params import SamplingParams
from engine.scheduling.plan import NextIterationPlan
from engine.scheduling.sequence import Sequence


class Fixed:
    """A constraint that always allows the same tokens."""

    def __init__(self, allowed, vocab_size):
        bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
        bits[allowed] = 1
        self.mask = np.packbits(bits, bitorder="little").view(np.int32)


def build_plan(*constraints):
    """A row for each, decoding."""
    plan = NextIterationPlan()
    for number, constraint in enumerate(constraints):
        sequence = Sequence(str(number), [1], SamplingParams(), frozenset(), 9, seed=0, constraint=constraint)
        plan.add(sequence, 1)
    return plan


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 400])
def test_a_constrained_row_keeps_the_logits_of_its_tokens_alone(vocab_size):
    """Each bit is a token's, the 31st of a word and the last of the vocabulary included; other rows keep all."""
    rng = np.random.default_rng(vocab_size)
    allowed = sorted({0, vocab_size - 1, min(31, vocab_size - 1), *rng.integers(0, vocab_size, 5).tolist()})
    logits = rng.normal(size=(4, vocab_size)).astype(np.float32)

    masks = pack_masks(build_plan(None, Fixed(allowed, vocab_size), None), range(3), 4, vocab_size)
    masked = np.asarray(mask_logits(jnp.asarray(logits), jnp.asarray(masks)))

    assert np.flatnonzero(masked[1] > MASKED_OUT).tolist() == allowed
    assert np.array_equal(masked[1][allowed], logits[1][allowed])
    assert np.array_equal(masked[[0, 2, 3]], logits[[0, 2, 3]])


def test_a_chunk_that_does_not_sample_needs_no_mask():
    """Only the rows that sample are constrained."""
    plan = NextIterationPlan()
    prompt = Sequence("a", [1] * 9, SamplingParams(), frozenset(), 9, seed=0, constraint=Fixed([1], 8))

    plan.add(prompt, 4)
    assert plan.constrained == []
    plan.add(prompt, 5)
    assert plan.constrained == [1]
