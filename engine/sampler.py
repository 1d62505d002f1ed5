"""From logits to the next token of each row.

Order: temperature, top-k, top-p (keeps the token that crosses p), min-p, draw. Each row follows its own parameters,
whatever its neighbours do; a row at temperature 0 is the argmax.
"""

from dataclasses import dataclass
from enum import Enum

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from engine.truncation import keeps

ARGMAX_BLOCK = 128

REMOVED = -1e30
"""Logit of a token that may not be drawn."""


class SamplingVariant(Enum):
    """What the rows of a step need; each is compiled apart, so that a greedy step pays for nothing else."""

    GREEDY = "greedy"
    TEMPERATURE = "temperature"
    TRUNCATED = "truncated"
    """Some row uses top-k, top-p or min-p."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingRows:
    """The parameters of each row, [rows]; a padding row is all zeros, which is greedy."""

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    seeds: Array
    positions: Array
    """The place in its sequence of the token to be drawn."""


def variant_for(
    temperature: NDArray[np.float32],
    top_k: NDArray[np.int32],
    top_p: NDArray[np.float32],
    min_p: NDArray[np.float32],
) -> SamplingVariant:
    """The cheapest variant that serves all these rows."""
    drawn = temperature > 0
    if not drawn.any():
        return SamplingVariant.GREEDY
    truncated = drawn & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    return SamplingVariant.TRUNCATED if truncated.any() else SamplingVariant.TEMPERATURE


def sample(logits: Array, rows: SamplingRows, key: Array, variant: SamplingVariant) -> Array:
    """i32[rows] token ids drawn from f32[rows, vocab] logits; ``key`` is the engine's."""
    best = argmax(logits)
    if variant is SamplingVariant.GREEDY:
        return best
    greedy = rows.temperature <= 0
    # From the best on down, so that no temperature, however small, makes it infinite or puts it below REMOVED.
    below = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = below / jnp.where(greedy, np.float32(1), rows.temperature)[:, None]
    if variant is SamplingVariant.TRUNCATED:
        scaled = truncate(scaled, rows)
    drawn = argmax(scaled + _noise(rows, key, logits.shape[-1]))
    return jnp.where(greedy, best, drawn)


def argmax(x: Array) -> Array:
    """i32[rows], the first of the highest in each row of f32[rows, vocab].

    XLA:CPU walks an argmax element by element but vectorises a maximum: look for the block with the highest first.
    """
    rows, vocab = x.shape
    x = jnp.pad(x, ((0, 0), (0, -vocab % ARGMAX_BLOCK)), constant_values=-jnp.inf)
    blocks = x.reshape(rows, -1, ARGMAX_BLOCK)
    block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1).astype(jnp.int32)
    inside = jnp.argmax(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], axis=-1).astype(jnp.int32)
    return block * ARGMAX_BLOCK + inside


def truncate(scaled: Array, rows: SamplingRows) -> Array:
    """Logits f32[rows, vocab] with the tokens outside top-k, top-p and min-p removed."""
    return jnp.where(keeps(scaled, rows.top_k, rows.top_p, rows.min_p), scaled, REMOVED)


def _noise(rows: SamplingRows, key: Array, vocab: int) -> Array:
    """Gumbel noise f32[rows, vocab]: argmax of logits plus it is a draw (Gumbel 1954), and the same for a seed and
    position whatever else runs."""

    def one(seed: Array, position: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(key, seed), position), (vocab,), jnp.float32)

    return jax.vmap(one)(rows.seeds, rows.positions)
