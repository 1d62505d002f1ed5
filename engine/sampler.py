"""From logits to the next token of each row.

Order: temperature, top-k, top-p (keeps the token that crosses p), min-p, draw. Each row follows its own parameters,
whatever its neighbours do; a row at temperature 0 is the argmax.

Nothing is sorted. Most cuts lie among a row's few likeliest tokens, which ``lax.top_k`` finds in about one reading of the
logits; where one does not, it is found by bisection over the values that a float can have. On a CPU, at 64 rows of 32,000
or 152,000 logits, a sort takes more than ten times as long as either.
"""

from dataclasses import dataclass
from enum import Enum

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

REMOVED = -1e30
"""Logit of a token that may not be drawn."""

TOP = 64
"""Tokens among which a cut is looked for first."""

BLOCK = 128
"""Tokens among which the second half of a draw chooses."""


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


def sample(logits: Array, rows: SamplingRows, key: Array, variant: SamplingVariant) -> Array:
    """i32[rows] token ids drawn from f32[rows, vocab] logits; ``key`` is the engine's."""
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if variant is SamplingVariant.GREEDY:
        return best
    return jnp.where(rows.temperature <= 0, best, _draw(weigh(logits, rows, variant), rows, key))


def weigh(logits: Array, rows: SamplingRows, variant: SamplingVariant) -> Array:
    """How likely each token is to be drawn, f32[rows, vocab], the best 1 and what is cut 0; undefined for greedy rows."""
    greedy = rows.temperature <= 0
    # From the best on down, so that no temperature, however small, makes it infinite or puts it below what is removed.
    below = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = below / jnp.where(greedy, np.float32(1), rows.temperature)[:, None]
    weights = jnp.exp(scaled)
    if variant is SamplingVariant.TRUNCATED:
        weights = jnp.where(scaled >= _cut(scaled, rows)[:, None], weights, np.float32(0))
    return weights


def _cut(scaled: Array, rows: SamplingRows) -> Array:
    """The logit f32[rows] of the last token that top-k, top-p and min-p keep; those equal to it are kept too.

    top-p weighs what top-k has left; min-p is relative to the best, which is 0.
    """
    drawn, vocab = rows.temperature > 0, scaled.shape[-1]
    top_k = jnp.where(drawn & (rows.top_k > 0), jnp.minimum(rows.top_k, vocab), vocab)
    top_p = jnp.where(drawn, rows.top_p, np.float32(1))
    known, cut = _cut_among_top(scaled, top_k, top_p)
    cut = jax.lax.cond(
        jnp.all(known),
        lambda: cut,
        lambda: jnp.where(known, cut, _bisect(scaled, jnp.where(known, vocab, top_k), jnp.where(known, 1, top_p))),
    )
    return jnp.maximum(cut, jnp.log(rows.min_p))


def _cut_among_top(scaled: Array, top_k: Array, top_p: Array) -> tuple[Array, Array]:
    """Whether each row's cut by top-k and top-p is certain from its TOP likeliest tokens, bool[rows], and where it is."""
    vocab = scaled.shape[-1]
    # Where nobody reads the indices, XLA:CPU makes a sort of it; the barrier reads them.
    top, _ = jax.lax.optimization_barrier(jax.lax.top_k(scaled, min(TOP, vocab)))
    size = top.shape[-1]
    kth = jnp.take_along_axis(top, jnp.minimum(top_k, size)[:, None] - 1, axis=-1)
    everything, counts = (top_k == vocab)[:, None], (top_k <= size)[:, None]
    # Tokens equal to the last one in sight may be out of sight.
    certain = everything | (counts & (kth > top[:, -1:])) if size < vocab else jnp.ones_like(everything)
    weights = jnp.where(everything | (top >= kth), jnp.exp(top), np.float32(0))
    total = jnp.where(everything, jnp.sum(jnp.exp(scaled), axis=-1, keepdims=True), jnp.sum(weights, -1, keepdims=True))
    enough = top_p[:, None] * total
    before = jnp.cumsum(weights, axis=-1) - weights
    kept = (before < enough) & (weights > 0)
    crossing = jnp.min(jnp.where(kept, top, jnp.inf), axis=-1, keepdims=True)
    whole = (top_p >= 1)[:, None]
    certain &= whole | (before[:, -1:] + weights[:, -1:] >= enough) | ~everything
    cut = jnp.where(whole, jnp.where(everything, -jnp.inf, kth), crossing)
    return certain[:, 0], cut[:, 0]


def _bisect(scaled: Array, top_k: Array, top_p: Array) -> Array:
    """The cut of each row, f32[rows], wherever it is; none for top_k of the whole vocabulary and top_p of 1."""
    vocab = scaled.shape[-1]

    def one(row: tuple[Array, Array, Array]) -> Array:
        scaled, top_k, top_p = row
        keys = _ordered(scaled)
        lowest, ones, count = jnp.min(keys), jnp.ones_like(scaled), top_k.astype(jnp.float32)
        kth = jax.lax.cond(top_k < vocab, lambda: _last_kept(keys, ones, lowest, count), lambda: lowest)
        weights = jnp.where(keys >= kth, jnp.exp(scaled), np.float32(0))
        crossing = jax.lax.cond(top_p < 1, lambda: _last_kept(keys, weights, kth, top_p * _total(weights)), lambda: kth)
        return _as_float(crossing)

    # A CPU takes the rows one by one, each from its cache, and skips what a row does not ask for.
    rows = (scaled, top_k, top_p)
    cut: Array = jax.lax.map(one, rows) if jax.default_backend() == "cpu" else jax.vmap(one)(rows)
    return cut


def _last_kept(keys: Array, weights: Array, low: Array, enough: Array) -> Array:
    """The highest key of which it and those above weigh at least ``enough``; all from ``low`` on do."""

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = high - (high - low) // 2
        holds = _total(jnp.where(keys >= middle, weights, np.float32(0))) >= enough
        return jnp.where(holds, middle, low), jnp.where(holds, high, middle - 1)

    bounds = low, jnp.max(keys)
    found: Array = jax.lax.while_loop(lambda bounds: bounds[0] < bounds[1], halve, bounds)[0]
    return found


def _total(weights: Array) -> Array:
    """The sum; as a product, which XLA:CPU computes several times faster than a reduction."""
    return weights @ jnp.ones_like(weights)


def _ordered(values: Array) -> Array:
    """Integers i32 in the order of these floats, none of which is above 0."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)


def _as_float(keys: Array) -> Array:
    """The inverse of ``_ordered``."""
    return jax.lax.bitcast_convert_type(jnp.where(keys < 0, keys ^ np.int32(0x7FFFFFFF), keys), jnp.float32)


def _draw(weights: Array, rows: SamplingRows, key: Array) -> Array:
    """i32[rows] tokens, each as often as it weighs: first a block of tokens, then a token of it.

    Two uniform numbers a row, which seed and position determine whatever else runs; a float has too few digits for
    one to choose among all tokens.
    """

    def uniform(seed: Array, position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, seed), position), (2,))

    count, vocab = weights.shape
    numbers = jax.vmap(uniform)(rows.seeds, rows.positions)
    blocks = jnp.pad(weights, ((0, 0), (0, -vocab % BLOCK))).reshape(count, -1, BLOCK)
    block = _choose(jnp.sum(blocks, axis=-1), numbers[:, 0])
    within = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * BLOCK + _choose(within, numbers[:, 1])


def _choose(weights: Array, numbers: Array) -> Array:
    """i32[rows] the first place that a share of f32[rows] of the weights f32[rows, n] lies before; its weight is not 0."""
    before = jnp.cumsum(weights, axis=-1)
    return jnp.sum((before <= numbers[:, None] * before[:, -1:]).astype(jnp.int32), axis=-1)
