"""Rows over the vocabulary in blocks of tokens, each reduced to a number.

A CPU folds blocks by halves: XLA:CPU vectorises that, but no reduction of the innermost axis, which takes it three to eight
times as long; and the order of a sum is then written here.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from engine.vocabulary import VOCABULARY_BLOCK

BLOCK = VOCABULARY_BLOCK
"""Tokens that are looked at together, first for the best or for their sum and then one by one."""


def in_blocks(x: Array, padding: float) -> Array:
    """f32[rows, vocab] as [rows, blocks, BLOCK]."""
    rows, vocab = x.shape
    return jnp.pad(x, ((0, 0), (0, -vocab % BLOCK)), constant_values=padding).reshape(rows, -1, BLOCK)


def highest(blocks: Array) -> Array:
    """f32[rows, blocks] of each block of f32[rows, blocks, BLOCK]."""
    return _folded(blocks, jnp.maximum, lambda blocks: jnp.max(blocks, axis=-1))


def total(blocks: Array) -> Array:
    """f32[rows, blocks], the sum of each block of f32[rows, blocks, BLOCK]."""
    return _folded(blocks, jnp.add, lambda blocks: jnp.sum(blocks, axis=-1))


def _folded(blocks: Array, combine: Callable[[Array, Array], Array], reduce: Callable[[Array], Array]) -> Array:
    def fold(blocks: Array) -> Array:
        while (size := blocks.shape[-1]) > 1:
            blocks = combine(blocks[..., : size // 2], blocks[..., size // 2 :])
        return blocks[..., 0]

    reduced: Array = jax.lax.platform_dependent(blocks, cpu=fold, default=reduce)
    return reduced
