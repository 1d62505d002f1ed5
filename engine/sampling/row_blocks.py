"""Reductions of rows over the vocabulary, a block of tokens at a time.

On a CPU a block is folded in halves. XLA:CPU vectorises that but not a reduction over the
innermost axis, which takes three to eight times as long. It also fixes the order of a sum.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from engine.vocabulary import VOCABULARY_BLOCK, Vocabulary

BLOCK = VOCABULARY_BLOCK
"""Tokens reduced together; one of them is then chosen within its block."""

PADDING = float(np.finfo(np.float32).min)
"""What the last block is filled up with: finite, and the logit of no token."""


def in_blocks(x: Array, padding: float = PADDING) -> Array:
    """f32[rows, vocab] -> [rows, blocks, BLOCK], padded."""
    rows, vocab = x.shape
    return jnp.pad(x, ((0, 0), (0, -vocab % BLOCK)), constant_values=padding).reshape(rows, -1, BLOCK)


def copied_in_blocks(logits: Array) -> Array:
    """``in_blocks``, once for all that reads them: a TPU has blocks in another order than rows, and
    keeps the copy on the chip where it fits."""
    blocks: Array = jax.lax.optimization_barrier(in_blocks(logits))
    return blocks


def highest(blocks: Array) -> Array:
    """The maximum of each block, f32[rows, blocks, BLOCK] -> f32[rows, blocks]."""
    return _folded(blocks, jnp.maximum, lambda blocks: jnp.max(blocks, axis=-1))


def total(blocks: Array) -> Array:
    """The sum of each block, f32[rows, blocks, BLOCK] -> f32[rows, blocks]."""
    return _folded(blocks, jnp.add, lambda blocks: jnp.sum(blocks, axis=-1))


def top(blocks: Array, count: int, vocabulary: Vocabulary) -> tuple[Array, Array]:
    """The ``count`` highest of each row of f32[rows, blocks, BLOCK] (all if there are fewer), the
    first of equals first, and their ids i32. Padding is behind all tokens.

    As many blocks have them all: those of the highest maxima. Little is so left to sort.
    """
    high, ids = _top_here(blocks, min(count, blocks.shape[1] * BLOCK))
    if vocabulary.axis is None:
        return high, ids
    high, ids = vocabulary.gather(high), vocabulary.gather(ids + vocabulary.first(blocks.shape[1] * BLOCK))
    high, places = jax.lax.top_k(high, min(count, high.shape[-1]))
    return high, jnp.take_along_axis(ids, places, axis=-1)


def _top_here(blocks: Array, count: int) -> tuple[Array, Array]:
    rows = blocks.shape[0]
    if blocks.shape[1] <= count:
        return jax.lax.top_k(blocks.reshape(rows, -1), count)
    _, chosen = jax.lax.top_k(highest(blocks), count)
    chosen = jnp.sort(chosen, axis=-1)  # so that equals stay in order
    some = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1)
    high, places = jax.lax.top_k(some.reshape(rows, -1), count)
    return high, jnp.take_along_axis(chosen, places // BLOCK, axis=-1) * BLOCK + places % BLOCK


def _folded(blocks: Array, combine: Callable[[Array, Array], Array], reduce: Callable[[Array], Array]) -> Array:
    def fold(blocks: Array) -> Array:
        while (size := blocks.shape[-1]) > 1:
            blocks = combine(blocks[..., : size // 2], blocks[..., size // 2 :])
        return blocks[..., 0]

    reduced: Array = jax.lax.platform_dependent(blocks, cpu=fold, default=reduce)
    return reduced
