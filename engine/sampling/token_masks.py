"""Masks of the allowed tokens, a bit per token, and their effect on logits."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from engine.sampling.logit_floors import MASKED_OUT
from engine.scheduling.plan import NextIterationPlan
from engine.vocabulary import VOCABULARY_BLOCK, WHOLE, Vocabulary

WORD_BITS = 32


def mask_words(vocab_size: int) -> int:
    """The i32 words of a mask."""
    return -(-vocab_size // WORD_BITS)


def pack_masks(plan: NextIterationPlan, sampler_rows: Sequence[int], rows: int, vocab_size: int) -> NDArray[np.int32]:
    """i32[rows, words] masks of a plan's constraints; all bits set in rows without one.

    ``sampler_rows`` are, by row of the plan, the row that samples its token, and behind that those
    of its drafts.
    """
    masks = np.full((rows, mask_words(vocab_size)), -1, np.int32)
    for row in plan.constrained:
        constraint = plan.sequences[row].constraint
        assert constraint is not None
        behind = constraint.expected_masks[: len(plan.expected[row])] if row in plan.expected else ()
        for place, mask in enumerate((constraint.mask, *behind), sampler_rows[row]):
            masks[place, : len(mask)] = mask  # padding of the vocabulary is never sampled, whatever its bits
    return masks


def mask_logits(logits: Array, masks: Array, vocabulary: Vocabulary = WHOLE) -> Array:
    """f32[rows, vocab] logits, MASKED_OUT where the i32[rows, words] masks have no bit."""
    if vocabulary.axis is not None:  # a device's part of the vocabulary is whole words
        words = logits.shape[1] // WORD_BITS
        masks = jax.lax.dynamic_slice_in_dim(masks, vocabulary.first(words), words, axis=1)
    vocab = logits.shape[1]
    shifts = jnp.arange(vocab, dtype=jnp.int32) % WORD_BITS
    bits = _by_token(masks)[:, :vocab] >> shifts[None, :] & jnp.int32(1)
    return jnp.where(bits > 0, logits, MASKED_OUT)


def _by_token(words: Array) -> Array:
    """i32[rows, words] -> i32[rows, at least WORD_BITS * words], each token's word.

    A TPU's registers hold blocks of tokens, and a word for each would fill one: to spread words
    over WORD_BITS tokens at once would take four times the memory of logits.
    """
    each = VOCABULARY_BLOCK // WORD_BITS
    blocks = jnp.pad(words, ((0, 0), (0, -words.shape[1] % each))).reshape(len(words), -1, each)
    number = jnp.arange(VOCABULARY_BLOCK, dtype=jnp.int32)[None, None, :] // WORD_BITS
    of_token = blocks[:, :, :1]
    for place in range(1, each):
        of_token = jnp.where(number >= place, blocks[:, :, place : place + 1], of_token)
    return of_token.reshape(len(words), -1)
