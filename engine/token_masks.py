"""Masks of the tokens that may be drawn, a bit each, and how they act on logits."""

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from engine.plan import NextIterationPlan

WORD_BITS = 32
FORBIDDEN = -3e38
"""Logit of a token that a constraint rules out: below what other parameters give one that they rule out, so that among
those the constraint has the last word; and finite, as a row that is not has no next token."""


def mask_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // WORD_BITS)


def pack_masks(plan: NextIterationPlan, rows: int, vocab_size: int) -> NDArray[np.int32]:
    """i32[rows, words] of what the constraints of a plan allow; rows without one may draw anything."""
    masks = np.full((rows, mask_words(vocab_size)), -1, np.int32)
    for row in plan.constrained:
        constraint = plan.sequences[row].constraint
        assert constraint is not None
        masks[row] = constraint.mask
    return masks


def mask_logits(logits: Array, masks: Array) -> Array:
    """f32[rows, vocab] logits, FORBIDDEN where the i32[rows, words] masks have no bit."""
    bits = masks[:, :, None] >> jnp.arange(WORD_BITS, dtype=jnp.int32)[None, None, :] & jnp.int32(1)
    allowed = bits.reshape(masks.shape[0], -1)[:, : logits.shape[1]]
    return jnp.where(allowed > 0, logits, np.float32(FORBIDDEN))
