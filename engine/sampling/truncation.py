"""The cut of top-k, top-p and min-p in a row's tokens, without a sort.

Most cuts are among a row's few likeliest tokens, which ``lax.top_k`` finds in about one pass over
the logits. Otherwise bisection over the values of a float finds the cut: it counts the tokens at
or above a candidate, or sums their weights. A CPU sort of 64 rows of 32,000 or 152,000 tokens
takes more than ten times as long as either.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from engine.sampling.row_blocks import in_blocks, total
from engine.vocabulary import WHOLE, Vocabulary

TOP = 64
"""The likeliest tokens, which are searched for the cut first."""


def lowest_kept(below: Array, top_k: Array, top_p: Array, min_p: Array, vocabulary: Vocabulary = WHOLE) -> Array:
    """f32[rows] the lowest logit that each row's parameters keep.

    ``below`` f32[rows, vocab] is relative to each row's best. Ties with the last token kept are
    kept. top_k 0 is no limit; top-p weighs the tokens that top-k keeps; min-p is relative to the
    best.
    """
    vocab = vocabulary.length(below)
    top_k = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab)
    known, cut = _cut_among_top(below, top_k, top_p, vocabulary)
    cut = jax.lax.cond(
        jnp.all(known),
        lambda: cut,
        lambda: jnp.where(
            known, cut, _bisect(below, jnp.where(known, vocab, top_k), jnp.where(known, 1, top_p), vocabulary)
        ),
    )
    # The best token is kept, however small top_p is.
    return jnp.minimum(jnp.maximum(cut, jnp.log(min_p)), np.float32(0))


def _cut_among_top(below: Array, top_k: Array, top_p: Array, vocabulary: Vocabulary) -> tuple[Array, Array]:
    """bool[rows] whether the TOP likeliest tokens determine top-k's and top-p's cut; the cut."""
    vocab = vocabulary.length(below)
    # If nothing reads the indices, XLA:CPU makes it a sort; the barrier reads them.
    top, _ = jax.lax.optimization_barrier(vocabulary.top(below, TOP))
    size = top.shape[-1]
    kth = jnp.take_along_axis(top, jnp.minimum(top_k, size)[:, None] - 1, axis=-1)
    everything, counts = (top_k == vocab)[:, None], (top_k <= size)[:, None]
    # Tokens equal to the last of these may be missing from them.
    certain = everything | (counts & (kth > top[:, -1:])) if size < vocab else jnp.ones_like(everything)
    weights = jnp.where(everything | (top >= kth), jnp.exp(top), np.float32(0))
    all_weights = vocabulary.total(jnp.sum(total(in_blocks(jnp.exp(below), 0.0)), axis=-1, keepdims=True))
    enough = top_p[:, None] * jnp.where(everything, all_weights, jnp.sum(weights, axis=-1, keepdims=True))
    before = jnp.cumsum(weights, axis=-1) - weights
    kept = (before < enough) & (weights > 0)
    crossing = jnp.min(jnp.where(kept, top, jnp.inf), axis=-1, keepdims=True)
    whole = (top_p >= 1)[:, None]
    certain &= whole | (before[:, -1:] + weights[:, -1:] >= enough) | ~everything
    cut = jnp.where(whole, jnp.where(everything, -jnp.inf, kth), crossing)
    return certain[:, 0], cut[:, 0]


def _bisect(below: Array, top_k: Array, top_p: Array, vocabulary: Vocabulary) -> Array:
    """f32[rows] the cut anywhere in a row; its lowest logit if neither top_k nor top_p cuts."""
    vocab = vocabulary.length(below)

    def one(row: tuple[Array, Array, Array]) -> Array:
        below, top_k, top_p = row
        keys = _keys(below)
        lowest, ones, count = vocabulary.min(keys), jnp.ones_like(below), top_k.astype(jnp.float32)
        kth = jax.lax.cond(top_k < vocab, lambda: _last_kept(keys, ones, lowest, count, vocabulary), lambda: lowest)
        weights = jnp.where(keys >= kth, jnp.exp(below), np.float32(0))
        enough = top_p * _total(weights, vocabulary)
        crossing = jax.lax.cond(top_p < 1, lambda: _last_kept(keys, weights, kth, enough, vocabulary), lambda: kth)
        return _as_float(crossing)

    rows = (below, top_k, top_p)
    # A CPU runs row by row, each from its cache, and skips the cuts that a row does not have.
    cut: Array = jax.lax.platform_dependent(
        *rows, cpu=lambda *rows: jax.lax.map(one, rows), default=lambda *rows: jax.vmap(one)(rows)
    )
    return cut


def _last_kept(keys: Array, weights: Array, low: Array, enough: Array, vocabulary: Vocabulary) -> Array:
    """The highest key such that it and those above weigh at least ``enough``; ``low`` does."""

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = high - (high - low) // 2
        holds = _total(jnp.where(keys >= middle, weights, np.float32(0)), vocabulary) >= enough
        return jnp.where(holds, middle, low), jnp.where(holds, high, middle - 1)

    bounds = low, vocabulary.max(keys)
    found: Array = jax.lax.while_loop(lambda bounds: bounds[0] < bounds[1], halve, bounds)[0]
    return found


def _total(weights: Array, vocabulary: Vocabulary) -> Array:
    """The sum of f32[vocab]; without the barrier XLA:CPU makes one reduction, not vectorised."""
    by_place = jax.lax.optimization_barrier(jnp.sum(in_blocks(weights[None], 0.0)[0], axis=0))
    return vocabulary.total(jnp.sum(by_place))


def _keys(below: Array) -> Array:
    """f32 that are not above 0 -> i32 in the same order; zeros of either sign are equal."""
    bits = jax.lax.bitcast_convert_type(jnp.where(below == 0, np.float32(0), below), jnp.int32)
    return jnp.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)


def _as_float(keys: Array) -> Array:
    """The inverse of ``_keys``."""
    return jax.lax.bitcast_convert_type(jnp.where(keys < 0, keys ^ np.int32(0x7FFFFFFF), keys), jnp.float32)
