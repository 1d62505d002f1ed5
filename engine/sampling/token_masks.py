"""Masks of the tokens that may be drawn, a bit each, and how they act on logits."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from engine.sampling.logit_floors import MASKED_OUT
from engine.scheduling.plan import NextIterationPlan
from engine.vocabulary import WHOLE, Vocabulary

WORD_BITS = 32


def mask_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // WORD_BITS)


def pack_masks(plan: NextIterationPlan, rows: int, vocab_size: int) -> NDArray[np.int32]:
    """i32[rows, words] of what the constraints of a plan allow; rows without one may draw anything."""
    masks = np.full((rows, mask_words(vocab_size)), -1, np.int32)
    for row in plan.constrained:
        constraint = plan.sequences[row].constraint
        assert constraint is not None
        masks[row, : len(constraint.mask)] = constraint.mask  # what pads the vocabulary is never drawn anyway
    return masks


def mask_logits(logits: Array, masks: Array, vocabulary: Vocabulary = WHOLE) -> Array:
    """f32[rows, vocab] logits, MASKED_OUT where the i32[rows, words] masks have no bit."""
    if vocabulary.axis is not None:  # a device's part of the vocabulary is whole words
        words = logits.shape[1] // WORD_BITS
        masks = jax.lax.dynamic_slice_in_dim(masks, vocabulary.first(words), words, axis=1)
    bits = masks[:, :, None] >> jnp.arange(WORD_BITS, dtype=jnp.int32)[None, None, :] & jnp.int32(1)
    allowed = bits.reshape(masks.shape[0], -1)[:, : logits.shape[1]]
    return jnp.where(allowed > 0, logits, MASKED_OUT)
