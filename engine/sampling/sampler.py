"""From logits to the next token of each row.

The order is temperature, top-k, top-p (with the token that crosses p), min-p, sampling. Each row
depends on its own parameters only; a row at temperature 0 is the argmax.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from engine.sampling.row_blocks import BLOCK, highest, in_blocks, total
from engine.sampling.truncation import lowest_kept
from engine.vocabulary import WHOLE, Vocabulary

NO_TOKEN = -1
"""Instead of a token id: the row's logits have NaN or infinity, and there is no next token."""

WEIGHTLESS = np.float32(-87)
"""The relative logit up to which a token's weight is 0: some devices flush its exp to 0."""


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
    """The index in its sequence of the token to sample."""


def sample(
    logits: Array, rows: SamplingRows, key: Array, vocabulary: Vocabulary = WHOLE, *, draws: bool = True
) -> Array:
    """i32[rows] token ids sampled from f32[rows, vocab] logits, or NO_TOKEN.

    ``key`` is the engine's. Without ``draws`` every row is greedy, and the program is small.
    """
    finite = _are_finite(logits, vocabulary)
    drawn = best = argmax(logits, vocabulary)
    if draws:
        # Bisection would not terminate on NaN.
        logits = jnp.where(finite[:, None], logits, np.float32(0))
        drawn = _draw(weigh(logits, rows, vocabulary), rows, key, vocabulary)
        drawn = jnp.where(_are_greedy(rows), best, drawn)
    return jnp.where(finite, drawn, NO_TOKEN)


def weigh(logits: Array, rows: SamplingRows, vocabulary: Vocabulary = WHOLE) -> Array:
    """f32[rows, vocab] probabilities relative to the best token's: 1 for it, 0 for cut tokens.

    Greedy rows are undefined. Cuts are computed only if some row has one.
    """
    greedy = _are_greedy(rows)
    # The best is so 0 at any temperature: neither infinite nor below the removed tokens.
    below = logits - vocabulary.max(highest(in_blocks(logits, -jnp.inf)))[:, None]
    scaled = below / jnp.where(greedy, np.float32(1), rows.temperature)[:, None]
    top_k, top_p = jnp.where(greedy, 0, rows.top_k), jnp.where(greedy, np.float32(1), rows.top_p)
    min_p = jnp.where(greedy, np.float32(0), rows.min_p)
    lowest = jax.lax.cond(
        jnp.any((top_k > 0) | (top_p < 1) | (min_p > 0)),
        lambda: lowest_kept(scaled, top_k, top_p, min_p, vocabulary),
        lambda: jnp.full_like(top_p, -jnp.inf),
    )
    return jnp.where((scaled > WEIGHTLESS) & (scaled >= lowest[:, None]), jnp.exp(scaled), np.float32(0))


def argmax(x: Array, vocabulary: Vocabulary = WHOLE) -> Array:
    """i32[rows], the first maximum of each row of f32[rows, vocab].

    XLA:CPU vectorises a maximum but not an argmax, so this finds the block with the maximum first.
    """
    blocks = in_blocks(x, -jnp.inf)
    block = jnp.argmax(vocabulary.gather(highest(blocks)), axis=-1).astype(jnp.int32)
    inside = jnp.argmax(vocabulary.take(blocks, block), axis=-1).astype(jnp.int32)
    return block * BLOCK + inside


def _draw(weights: Array, rows: SamplingRows, key: Array, vocabulary: Vocabulary) -> Array:
    """i32[rows] tokens by f32[rows, vocab] weights: first a block of tokens, then one of it.

    Seed and position alone determine a row's two uniform numbers; one float has too few digits to
    choose among all tokens.
    """

    def uniform(seed: Array, position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, seed), position), (2,))

    numbers = jax.vmap(uniform)(rows.seeds, rows.positions)
    blocks = in_blocks(weights, 0.0)
    block = choose(vocabulary.gather(total(blocks)), numbers[:, 0])
    return block * BLOCK + choose(vocabulary.take(blocks, block), numbers[:, 1])


def choose(weights: Array, numbers: Array) -> Array:
    """i32[rows] indices into f32[rows, n] weights, at f32[rows] shares from 0 to 1 of their sum.

    The chosen weight is above 0 if any is. XLA does not add up in order: a prefix sum may be less
    than an earlier one, or differ from it though nothing was added.
    """
    sums, places = jnp.cumsum(weights, axis=-1), jnp.arange(weights.shape[-1], dtype=jnp.int32)[None, :]
    weighs = weights > 0
    passes = weighs & (sums > numbers[:, None] * sums[:, -1:])
    first = jnp.min(jnp.where(passes, places, np.int32(weights.shape[-1])), axis=-1)
    last = jnp.max(jnp.where(weighs, places, np.int32(0)), axis=-1)
    return jnp.minimum(first, last)


def _are_greedy(rows: SamplingRows) -> Array:
    """bool[rows]. A subnormal temperature counts as 0, as some devices would divide by 0."""
    return rows.temperature < np.finfo(np.float32).tiny


def _are_finite(logits: Array, vocabulary: Vocabulary) -> Array:
    """bool[rows] whether all of f32[rows, vocab] are finite: otherwise the sum of 0 * x is NaN.

    XLA:CPU's maximum may ignore NaN. It vectorises a sum over the blocks, in half the time of a
    search for NaN.
    """
    sums = jnp.sum(in_blocks(logits * np.float32(0), 0.0), axis=1)
    return jnp.isfinite(vocabulary.total(jnp.sum(sums, axis=-1)))
