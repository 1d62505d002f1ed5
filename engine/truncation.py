"""Which tokens top-k, top-p and min-p keep, found without sorting.

The k-th largest of a row, and the value from which on its probabilities sum to p, are built bit by bit: thirty-two times,
what is at or above a candidate is counted, or its weights are summed. Both are exact, and read each time what a core's
cache holds, where sorting a vocabulary of 32,000 takes a CPU 10 ms a row.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

SIGN = np.int32(-(2**31))
"""The least of keys: below any float's."""


def keeps(scaled: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """bool[rows, vocab]: whether each row's parameters keep a token of f32[rows, vocab] logits.

    Tokens equal to the last one kept are kept too. top_k 0 is all of them. top-p weighs what top-k has left; min-p is
    relative to the best.
    """
    rows = (scaled, top_k, top_p, min_p)
    # One row after the other stays in a CPU's cache.
    kept: Array = (
        jax.lax.map(lambda row: _keeps(*row), rows) if jax.default_backend() == "cpu" else jax.vmap(_keeps)(*rows)
    )
    return kept


def _keeps(scaled: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """The same of one row."""
    keys = _keys(scaled)

    def at_least_k(key: Array) -> Array:
        return jnp.sum((keys >= key).astype(jnp.int32)) >= jnp.minimum(top_k, scaled.size)

    kth = jax.lax.cond(top_k > 0, lambda: _largest(at_least_k), lambda: jnp.asarray(SIGN))
    best = jnp.max(scaled)
    weights = jnp.where(keys >= kth, jnp.exp(scaled - best), np.float32(0))
    mass = top_p * jnp.sum(weights)

    def at_least_p(key: Array) -> Array:
        return jnp.sum(jnp.where(keys >= key, weights, np.float32(0))) >= mass

    crossing = jax.lax.cond(top_p < 1, lambda: _largest(at_least_p), lambda: jnp.asarray(SIGN))
    return (keys >= jnp.maximum(kth, crossing)) & (scaled >= best + jnp.log(min_p))


def _keys(values: Array) -> Array:
    """i32 in the order of the f32 values, zeros of either sign equal."""
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, np.float32(0), values), jnp.int32)
    return jnp.where(bits < 0, bits ^ np.int32(2**31 - 1), bits)


def _largest(holds: Callable[[Array], Array]) -> Array:
    """The largest key for which it holds, of those from ``SIGN`` on; it holds up to some key and for none above."""

    def decide(step: Array, key: Array) -> Array:
        candidate = key ^ jnp.left_shift(np.int32(1), np.int32(31) - step)
        return jnp.where(holds(candidate), candidate, key)

    largest: Array = jax.lax.fori_loop(jnp.int32(0), jnp.int32(32), decide, jnp.asarray(SIGN))
    return largest
