"""The cut of top-k, top-p and min-p in a row's tokens, without a sort.

Most cuts are among a row's few likeliest tokens, which ``top`` finds in a pass over the logits.
Rows with another cut are searched, a few at a time, which are small enough to stay in a chip's or
a core's own memory: each turn sums up what lies at or above a few values between two bounds.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from engine.sampling.row_blocks import in_blocks, top, total
from engine.vocabulary import Vocabulary

TOP = 64
"""The likeliest tokens, which are searched for the cut first."""

MOST_SEARCHED = 2**20
"""Logits that a chip searches at once, unless those of eight rows are more: they have to stay in
its own memory, and each turn has one exchange between chips, however many rows it is for."""

WEIGHTLESS = np.float32(-87)
"""The relative logit up to which a token's weight is 0: some devices flush its exp to 0."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scale:
    """How logits become relative ones: 0 for a row's best token, below 0 for others."""

    best: Array
    """f32[rows], each row's highest logit."""
    temperature: Array
    """f32[rows] above 0."""

    def __call__(self, logits: Array) -> Array:
        """f32[rows, ...] of f32[rows, ...] logits."""
        # The best is 0 at any temperature: neither infinite nor below the removed tokens.
        return (logits - by_row(self.best, logits)) / by_row(self.temperature, logits)


def by_row(values: Array, x: Array) -> Array:
    """f32[rows] in a shape that spreads over x[rows, ...]."""
    return values.reshape(-1, *(1 for _ in x.shape[1:]))


def lowest_kept(logits: Array, scale: Scale, top_k: Array, top_p: Array, min_p: Array, vocabulary: Vocabulary) -> Array:
    """f32[rows] the lowest relative logit that each row's parameters keep of f32[rows, vocab].

    Ties with the last token kept are kept. top_k 0 is no limit; top-p weighs the tokens that top-k
    keeps; min-p is relative to the best. Tokens without a weight may be on either side.
    """
    vocab = vocabulary.length(logits)
    top_k = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab)
    known, cut = _cut_among_top(logits, scale, top_k, top_p, vocabulary)
    top_k, top_p = jnp.where(known, vocab, top_k), jnp.where(known, np.float32(1), top_p)
    cut = jax.lax.cond(jnp.all(known), lambda: cut, lambda: _search_rows(logits, scale, top_k, top_p, cut, vocabulary))
    # The best token is kept, however small top_p is.
    return jnp.minimum(jnp.maximum(cut, jnp.log(min_p)), np.float32(0))


def _cut_among_top(
    logits: Array, scale: Scale, top_k: Array, top_p: Array, vocabulary: Vocabulary
) -> tuple[Array, Array]:
    """bool[rows] whether the TOP likeliest tokens determine top-k's and top-p's cut; the cut, or
    the last one of these."""
    vocab, blocks = vocabulary.length(logits), in_blocks(logits)
    # If nothing reads the indices, XLA:CPU makes it a sort; the barrier reads them.
    likeliest, _ = jax.lax.optimization_barrier(top(blocks, TOP, vocabulary))
    below = scale(likeliest)
    size = below.shape[-1]
    kth = jnp.take_along_axis(below, jnp.minimum(top_k, size)[:, None] - 1, axis=-1)
    everything, counts = (top_k == vocab)[:, None], (top_k <= size)[:, None]
    # Tokens equal to the last of these may be missing from them.
    certain = everything | (counts & (kth > below[:, -1:])) if size < vocab else jnp.ones_like(everything)
    weights = jnp.where(everything | (below >= kth), jnp.exp(below), np.float32(0))
    whole = (top_p >= 1)[:, None]
    all_weights = jax.lax.cond(
        jnp.any(everything & ~whole),
        lambda: vocabulary.total(jnp.sum(total(jnp.exp(scale(blocks))), axis=-1, keepdims=True)),
        lambda: jnp.zeros_like(kth),
    )
    enough = top_p[:, None] * jnp.where(everything, all_weights, jnp.sum(weights, axis=-1, keepdims=True))
    before = jnp.cumsum(weights, axis=-1) - weights
    kept = (before < enough) & (weights > 0)
    crossing = jnp.min(jnp.where(kept, below, jnp.inf), axis=-1, keepdims=True)
    certain &= whole | (before[:, -1:] + weights[:, -1:] >= enough) | ~everything
    cut = jnp.where(whole, jnp.where(everything, -jnp.inf, kth), crossing)
    return certain[:, 0], jnp.where(certain, cut, below[:, -1:])[:, 0]


def _search_rows(logits: Array, scale: Scale, top_k: Array, top_p: Array, cut: Array, vocabulary: Vocabulary) -> Array:
    """f32[rows] the cuts, or ``cut`` of rows that neither limits; of others that is ``_search``'s
    ``highest``."""
    eight = max(1, MOST_SEARCHED // (8 * logits.shape[-1])) * 8
    found: Array = jax.lax.platform_dependent(
        *(logits, scale, top_k, top_p, cut),
        cpu=partial(_search_groups, size=1, parts=2, vocabulary=vocabulary),
        default=partial(_search_groups, size=eight, parts=8, vocabulary=vocabulary),
    )
    return found


def _search_groups(
    logits: Array,
    scale: Scale,
    top_k: Array,
    top_p: Array,
    cut: Array,
    *,
    size: int,
    parts: int,
    vocabulary: Vocabulary,
) -> Array:
    """``_search_rows``, up to ``size`` rows at a time, and none of those where no row is limited."""
    count, size = len(cut), min(size, len(cut))
    limited = (top_k < vocabulary.length(logits)) | (top_p < 1)

    def search(group: Array, cut: Array) -> Array:
        def rows(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, group * size, size)

        def found() -> Array:
            below = Scale(rows(scale.best), rows(scale.temperature))(rows(logits))
            cuts = _search(below, rows(top_k), rows(top_p), rows(cut), parts, vocabulary)
            return jnp.where(rows(limited), cuts, rows(cut))

        cuts = jax.lax.cond(jnp.any(rows(limited)), found, lambda: rows(cut))
        return jax.lax.dynamic_update_slice_in_dim(cut, cuts, group * size, 0)

    searched: Array = jax.lax.fori_loop(0, -(-count // size), search, cut)
    return searched


def _search(below: Array, top_k: Array, top_p: Array, highest: Array, parts: int, vocabulary: Vocabulary) -> Array:
    """f32[n] the cuts in f32[n, vocab]; WEIGHTLESS if they are not above that.

    Top-k's is not above f32[n] ``highest``, and neither is top-p's where there is no top-k.
    """
    keys, high, has_k = _keys(below), _keys(highest), top_k < vocabulary.length(below)
    floor = jnp.minimum(_keys(jnp.full_like(highest, WEIGHTLESS)), high)
    kth = jax.lax.cond(
        jnp.any(has_k),
        lambda: _last_kept(keys, jnp.ones_like(below), (floor, high), top_k.astype(jnp.float32), parts, vocabulary),
        lambda: floor,
    )
    weights = jnp.where(keys >= kth[:, None], jnp.exp(below), np.float32(0))
    bounds = kth, jnp.where(has_k, 0, high)
    crossing = jax.lax.cond(
        jnp.any(top_p < 1),
        lambda: _last_kept(keys, weights, bounds, top_p * vocabulary.total(_total(weights)), parts, vocabulary),
        lambda: kth,
    )
    return _as_float(jnp.where(top_p < 1, crossing, kth))


def _last_kept(
    keys: Array, weights: Array, bounds: tuple[Array, Array], enough: Array, parts: int, vocabulary: Vocabulary
) -> Array:
    """i32[n] the highest keys within ``bounds`` such that they and those above weigh at least
    ``enough``, f32[n]; the lower bound if none does.

    Each turn cuts what is between the bounds into so many parts.
    """

    def narrow(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        step = (high - low) // parts + 1
        begins = [jnp.minimum(low + step * part, high) for part in range(1, parts)]
        sums = [_total(jnp.where(keys >= begin[:, None], weights, np.float32(0))) for begin in begins]
        holds = vocabulary.total(jnp.stack(sums)) >= enough[None, :]
        low = jnp.minimum(low + step * jnp.sum(holds, axis=0, dtype=jnp.int32), high)
        return low, jnp.minimum(low + step - 1, high)

    found: Array = jax.lax.while_loop(lambda bounds: jnp.any(bounds[0] < bounds[1]), narrow, bounds)[0]
    return found


def _total(weights: Array) -> Array:
    """f32[n] the sums of this device's f32[n, vocab]."""
    # Without the barrier XLA:CPU makes one reduction of it, which it does not vectorise.
    by_place = jax.lax.optimization_barrier(jnp.sum(in_blocks(weights, 0.0), axis=1))
    return jnp.sum(by_place, axis=-1)


def _keys(below: Array) -> Array:
    """f32 that are not above 0 -> i32 in the same order; zeros of either sign are equal."""
    bits = jax.lax.bitcast_convert_type(jnp.where(below == 0, np.float32(0), below), jnp.int32)
    return jnp.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)


def _as_float(keys: Array) -> Array:
    """The inverse of ``_keys``."""
    return jax.lax.bitcast_convert_type(jnp.where(keys < 0, keys ^ np.int32(0x7FFFFFFF), keys), jnp.float32)
