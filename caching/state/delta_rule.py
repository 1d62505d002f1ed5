"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464), a Recurrence.

A head's state S maps keys to values. A token makes of it ``S' = exp(log_decay) S``, then ``S' + k
beta (v - S'^T k)^T``, and reads ``S^T q``. Within a chunk, what the tokens add to the state solves
a unit lower triangular system; all else are products of matrices.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

NORM_EPS = np.float32(1e-6)
"""Added to squared lengths of queries and keys."""
EXACT = jax.lax.Precision.HIGHEST
"""By default a TPU rounds the factors of float32 products to bfloat16."""


class DeltaInputs(NamedTuple):
    """Each key head serves ``group`` value heads. Queries and keys are of any length."""

    q: Array
    """f[T, key_heads, key_dim]"""
    k: Array
    """Like q."""
    v: Array
    """f[T, key_heads, group, value_dim]"""
    log_decay: Array
    """f32[T, key_heads, group], not above 0."""
    beta: Array
    """f32[T, key_heads, group], from 0 to 1, or to 2."""


class GatedDeltaRule:
    """States are f32[heads, key_dim, value_dim], outputs f32[heads, value_dim]."""

    def step(self, states: Array, inputs: DeltaInputs) -> tuple[Array, Array]:
        """See Recurrence."""
        q, k = _queries_and_keys(inputs)
        grouped = states.reshape(*inputs.v.shape[:3], *states.shape[-2:])
        decayed = grouped * jnp.exp(inputs.log_decay)[..., None, None]
        k, q = (x[:, :, None, :, None] for x in (k, q))
        missing = inputs.v.astype(jnp.float32) - jnp.sum(decayed * k, axis=-2)
        new = decayed + k * (missing * inputs.beta[..., None])[..., None, :]
        read = jnp.sum(new * q, axis=-2)
        return new.reshape(states.shape), read.reshape(states.shape[0], -1, states.shape[-1])

    def chunk(self, state: Array, inputs: DeltaInputs) -> tuple[Array, Array]:
        """See Recurrence."""
        q, k = _queries_and_keys(inputs)
        both, v, count = jnp.concatenate([k, q]), inputs.v.astype(jnp.float32), len(inputs.v)
        grouped = state.reshape(*v.shape[1:3], *state.shape[-2:])
        beta, decay = (jnp.moveaxis(x, 0, -1) for x in (inputs.beta, inputs.log_decay))
        between = decay_between(decay)
        products = jnp.einsum("ihd,jhd->hij", both, k, precision=EXACT)[:, None]
        read = jnp.einsum("ihd,hgdv->hgiv", both, grouped, precision=EXACT)
        since = jnp.exp(jnp.cumsum(decay, axis=-1))[..., None]
        missing = jnp.moveaxis(v, 0, 2) - since * read[:, :, :count]
        later = np.tril(np.ones((count, count), np.bool_), -1)[None, None]
        among = jnp.where(later, beta[..., None] * products[:, :, :count] * between, np.float32(0))
        added = jnp.matmul(inverse_of_unit_lower(among), beta[..., None] * missing, precision=EXACT)
        scores = products[:, :, count:] * between
        out = since * read[:, :, count:] + jnp.matmul(scores, added, precision=EXACT)
        until = between[..., -1, :, None]
        summed = jnp.einsum("ihd,hgiv->hgdv", k, until * added, precision=EXACT)
        new = since[..., -1:, :] * grouped + summed
        return new.reshape(state.shape), jnp.moveaxis(out, 2, 0).reshape(count, -1, state.shape[-1])


def decay_between(log_decay: Array) -> Array:
    """f32[..., n] of each token -> f32[..., to, from], 0 to earlier tokens.

    Differences of running sums would lose the digits of small decays behind large ones.
    """
    lower = np.tril(np.ones((log_decay.shape[-1],) * 2, np.float32))
    behind = np.tril(lower, -1).reshape((1,) * (log_decay.ndim - 1) + lower.shape)
    sums = jnp.einsum("it,...tj->...ij", lower, log_decay[..., None] * behind, precision=EXACT)
    return jnp.exp(jnp.where(lower.reshape(behind.shape) > 0, sums, -jnp.inf))


def inverse_of_unit_lower(strict: Array) -> Array:
    """The inverse of I + ``strict``, f32[..., n, n], which is strictly lower; n is a power of two.

    Pairs of inverted blocks on the diagonal become one, of twice the size. Unlike a series of
    powers of ``strict``, whose terms can be enormous, this is as exact as substitution.
    """
    size, n = 1, strict.shape[-1]
    blocks = np.arange(n)
    inverse = jnp.broadcast_to(np.eye(n, dtype=np.float32), strict.shape)
    while size < n:
        of_pair = blocks[:, None] // (2 * size) == blocks // (2 * size)
        below = (of_pair & (blocks[:, None] // size > blocks // size)).reshape((1,) * (strict.ndim - 2) + (n, n))
        corner = jnp.where(below, strict, np.float32(0))
        if size > 1:
            corner = jnp.matmul(jnp.matmul(inverse, corner, precision=EXACT), inverse, precision=EXACT)
        inverse, size = inverse - corner, 2 * size
    return inverse


def _queries_and_keys(inputs: DeltaInputs) -> tuple[Array, Array]:
    """Both of unit length, and queries divided by the square root of their dimensions."""
    q, k = _of_unit_length(inputs.q), _of_unit_length(inputs.k)
    return q * np.float32(q.shape[-1] ** -0.5), k


def _of_unit_length(x: Array) -> Array:
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.sum(jnp.square(wide), axis=-1, keepdims=True) + NORM_EPS)
