"""From logits to the next token of each row.

Order: temperature, top-k, top-p (keeps the token that crosses p), min-p, draw. Each row follows its own parameters,
whatever its neighbours do; a row at temperature 0 is the argmax.
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
"""In place of a token id: the row's logits hold NaN or infinity, and it has no next token."""

WEIGHTLESS = np.float32(-87)
"""Logit, relative to the best, from which on a token weighs nothing: exp would give numbers that some devices take for 0."""


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


def sample(
    logits: Array, rows: SamplingRows, key: Array, vocabulary: Vocabulary = WHOLE, *, draws: bool = True
) -> Array:
    """i32[rows] token ids drawn from f32[rows, vocab] logits, or NO_TOKEN; ``key`` is the engine's.

    Without ``draws`` every row is greedy, and the program is a small one.
    """
    finite = _are_finite(logits, vocabulary)
    drawn = best = argmax(logits, vocabulary)
    if draws:
        logits = jnp.where(finite[:, None], logits, np.float32(0))  # a search for a cut would have no end among NaN
        drawn = _draw(weigh(logits, rows, vocabulary), rows, key, vocabulary)
        drawn = jnp.where(_are_greedy(rows), best, drawn)
    return jnp.where(finite, drawn, NO_TOKEN)


def weigh(logits: Array, rows: SamplingRows, vocabulary: Vocabulary = WHOLE) -> Array:
    """How likely each token is to be drawn, f32[rows, vocab], the best 1 and what is cut 0; undefined for greedy rows.

    Cuts are looked for only where some row has one.
    """
    greedy = _are_greedy(rows)
    # From the best on down, so that no temperature, however small, makes it infinite or puts it below what is removed.
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
    """i32[rows], the first of the highest in each row of f32[rows, vocab].

    XLA:CPU walks an argmax element by element but vectorises a maximum: look for the block with the highest first.
    """
    blocks = in_blocks(x, -jnp.inf)
    block = jnp.argmax(vocabulary.gather(highest(blocks)), axis=-1).astype(jnp.int32)
    inside = jnp.argmax(vocabulary.take(blocks, block), axis=-1).astype(jnp.int32)
    return block * BLOCK + inside


def _draw(weights: Array, rows: SamplingRows, key: Array, vocabulary: Vocabulary) -> Array:
    """i32[rows] tokens, each as often as it weighs: first a block of tokens, then a token of it.

    Two uniform numbers a row, which seed and position determine whatever else runs; a float has too few digits for
    one to choose among all tokens.
    """

    def uniform(seed: Array, position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, seed), position), (2,))

    numbers = jax.vmap(uniform)(rows.seeds, rows.positions)
    blocks = in_blocks(weights, 0.0)
    block = choose(vocabulary.gather(total(blocks)), numbers[:, 0])
    return block * BLOCK + choose(vocabulary.take(blocks, block), numbers[:, 1])


def choose(weights: Array, numbers: Array) -> Array:
    """i32[rows] the place in f32[rows, n] that a share of f32[rows], from 0 to 1, of the row's weights lies in.

    Its weight is above 0 if any is: a sum up to a place may be less than that up to an earlier one, or differ from it
    where nothing is added, as XLA does not add up in order.
    """
    sums, places = jnp.cumsum(weights, axis=-1), jnp.arange(weights.shape[-1], dtype=jnp.int32)[None, :]
    weighs = weights > 0
    passes = weighs & (sums > numbers[:, None] * sums[:, -1:])
    first = jnp.min(jnp.where(passes, places, np.int32(weights.shape[-1])), axis=-1)
    last = jnp.max(jnp.where(weighs, places, np.int32(0)), axis=-1)
    return jnp.minimum(first, last)


def _are_greedy(rows: SamplingRows) -> Array:
    """bool[rows]. Numbers that some devices take for 0 are, so that none divides by them."""
    return rows.temperature < np.finfo(np.float32).tiny


def _are_finite(logits: Array, vocabulary: Vocabulary) -> Array:
    """bool[rows] whether all of f32[rows, vocab] are: 0 times any other is NaN, and so is a sum with it.

    A maximum would not tell, as XLA:CPU's may pass over NaN; and it takes a sum over the same place in all blocks, which
    it can vectorise, half the time of a search for NaN.
    """
    sums = jnp.sum(in_blocks(logits * np.float32(0), 0.0), axis=1)
    return jnp.isfinite(vocabulary.total(jnp.sum(sums, axis=-1)))
