"""From logits to the next token of each row.

The order is temperature, top-k, top-p (with the token that crosses p), min-p, sampling. Each row
depends on its own parameters only; a row at temperature 0 is the argmax.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from engine.sampling.row_blocks import BLOCK, copied_in_blocks, highest, total
from engine.sampling.truncation import WEIGHTLESS, Scale, by_row, lowest_kept
from engine.vocabulary import WHOLE, Vocabulary

NO_TOKEN = -1
"""Instead of a token id: the row's logits have NaN or infinity, and there is no next token."""


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


def sample(logits: Array, rows: SamplingRows, key: Array, vocabulary: Vocabulary = WHOLE) -> Array:
    """i32[rows] token ids sampled from f32[rows, vocab] logits, or NO_TOKEN.

    ``key`` is the engine's. Where all rows are greedy, ``greedy`` gives the same.
    """
    blocks = copied_in_blocks(logits)
    best = _greedy(blocks, vocabulary)
    cuts = cuts_of(logits, vocabulary.max(highest(blocks)), rows, vocabulary)
    drawn = _draw(blocks, cuts, rows, key, vocabulary)
    return jnp.where(_are_greedy(rows) | (best == NO_TOKEN), best, drawn)


def greedy(logits: Array, vocabulary: Vocabulary = WHOLE) -> Array:
    """i32[rows] the best token ids of f32[rows, vocab] logits, the first of equals, or NO_TOKEN."""
    return _greedy(copied_in_blocks(logits), vocabulary)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cuts:
    """How logits become weights."""

    scale: Scale
    lowest: Array
    """f32[rows] the lowest relative logit that is kept."""

    def weigh(self, logits: Array) -> Array:
        """f32[rows, ...] probabilities of f32[rows, ...] logits relative to the best token's: 1 for
        it, 0 for cut tokens. Greedy rows are undefined."""
        below = self.scale(logits)
        kept = (below > WEIGHTLESS) & (below >= by_row(self.lowest, below))
        return jnp.where(kept, jnp.exp(below), np.float32(0))


def cuts_of(logits: Array, best: Array, rows: SamplingRows, vocabulary: Vocabulary = WHOLE) -> Cuts:
    """Those of each row of f32[rows, vocab], whose highest logits are f32[rows] ``best``.

    They are searched for only if some row has one. ``logits`` are not in blocks, as XLA:TPU would
    write blocks to memory for the conditional.
    """
    greedy, one = _are_greedy(rows), np.float32(1)
    scale = Scale(best, jnp.where(greedy, one, rows.temperature))
    top_k, top_p = jnp.where(greedy, 0, rows.top_k), jnp.where(greedy, one, rows.top_p)
    min_p = jnp.where(greedy, np.float32(0), rows.min_p)
    lowest = jax.lax.cond(
        jnp.any((top_k > 0) | (top_p < 1) | (min_p > 0)),
        lambda: lowest_kept(logits, scale, top_k, top_p, min_p, vocabulary),
        lambda: jnp.full_like(top_p, -jnp.inf),
    )
    return Cuts(scale, lowest)


def _greedy(blocks: Array, vocabulary: Vocabulary) -> Array:
    """XLA:CPU vectorises a maximum but not an argmax, so this finds the block with it first."""
    block = jnp.argmax(vocabulary.gather(highest(blocks)), axis=-1).astype(jnp.int32)
    inside = jnp.argmax(vocabulary.take(blocks, block), axis=-1).astype(jnp.int32)
    return jnp.where(_are_finite(blocks, vocabulary), block * BLOCK + inside, NO_TOKEN)


def _draw(blocks: Array, cuts: Cuts, rows: SamplingRows, key: Array, vocabulary: Vocabulary) -> Array:
    """i32[rows] tokens by their weights: first a block of tokens, then one of it.

    Seed and position alone determine a row's two uniform numbers; one float has too few digits to
    choose among all tokens.
    """

    def uniform(seed: Array, position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, seed), position), (2,))

    numbers = jax.vmap(uniform)(rows.seeds, rows.positions)
    block = choose(vocabulary.gather(total(cuts.weigh(blocks))), numbers[:, 0])
    # That block's weights are made again: to keep all of them would take memory and its traffic.
    inside = cuts.weigh(vocabulary.take(blocks, block))
    return block * BLOCK + choose(inside, numbers[:, 1])


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


def _are_finite(blocks: Array, vocabulary: Vocabulary) -> Array:
    """bool[rows] whether all of f32[rows, blocks, BLOCK] are finite: otherwise the sum of 0 * x is
    NaN.

    XLA:CPU's maximum may ignore NaN. It vectorises a sum over the blocks, in half the time of a
    search for NaN.
    """
    sums = jnp.sum(blocks * np.float32(0), axis=1)
    return jnp.isfinite(vocabulary.total(jnp.sum(sums, axis=-1)))
