"""Reductions of rows over the vocabulary, a block of tokens at a time.

On a CPU a block is folded in halves. XLA:CPU vectorises that but not a reduction over the
innermost axis, which takes three to eight times as long. It also fixes the order of a sum.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from engine.vocabulary import VOCABULARY_BLOCK

BLOCK = VOCABULARY_BLOCK
"""Tokens reduced together; one of them is then chosen within its block."""


def in_blocks(x: Array, padding: float) -> Array:
    """f32[rows, vocab] -> [rows, blocks, BLOCK], padded."""
    rows, vocab = x.shape
    return jnp.pad(x, ((0, 0), (0, -vocab % BLOCK)), constant_values=padding).reshape(rows, -1, BLOCK)


def highest(blocks: Array) -> Array:
    """The maximum of each block, f32[rows, blocks, BLOCK] -> f32[rows, blocks]."""
    return _folded(blocks, jnp.maximum, lambda blocks: jnp.max(blocks, axis=-1))


def total(blocks: Array) -> Array:
    """The sum of each block, f32[rows, blocks, BLOCK] -> f32[rows, blocks]."""
    return _folded(blocks, jnp.add, lambda blocks: jnp.sum(blocks, axis=-1))


def _folded(blocks: Array, combine: Callable[[Array, Array], Array], reduce: Callable[[Array], Array]) -> Array:
    def fold(blocks: Array) -> Array:
        while (size := blocks.shape[-1]) > 1:
            blocks = combine(blocks[..., : size // 2], blocks[..., size // 2 :])
        return blocks[..., 0]

    reduced: Array = jax.lax.platform_dependent(blocks, cpu=fold, default=reduce)
    return reduced
