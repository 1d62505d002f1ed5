"""Mamba-2's state-space duality (Dao and Gu 2024, arXiv:2405.21060), a Recurrence.

A head's state S has a row for each dimension of a head. A token makes of it ``exp(log_decay) S +
dt x b^T``, and reads ``S c``. Heads of a group share b and c.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from caching.state.delta_rule import EXACT, decay_between


class StateSpaceInputs(NamedTuple):
    """A group has ``each`` heads."""

    x: Array
    """f[T, groups, each, head_dim]"""
    b: Array
    """f[T, groups, state_size]"""
    c: Array
    """Like b."""
    dt: Array
    """f32[T, groups, each], the time of a token, not below 0."""
    log_decay: Array
    """Like dt, not above 0."""


class StateSpace:
    """States are f32[heads, head_dim, state_size], outputs f32[heads, head_dim]."""

    def step(self, states: Array, inputs: StateSpaceInputs) -> tuple[Array, Array]:
        """See Recurrence."""
        x, b, c = (part.astype(jnp.float32) for part in (inputs.x, inputs.b, inputs.c))
        grouped = states.reshape(*x.shape, -1)
        added = (x * inputs.dt[..., None])[..., None] * b[:, :, None, None]
        new = grouped * jnp.exp(inputs.log_decay)[..., None, None] + added
        read = jnp.sum(new * c[:, :, None, None], axis=-1)
        return new.reshape(states.shape), read.reshape(states.shape[:-1])

    def chunk(self, state: Array, inputs: StateSpaceInputs) -> tuple[Array, Array]:
        """See Recurrence."""
        x, b, c = (part.astype(jnp.float32) for part in (inputs.x, inputs.b, inputs.c))
        grouped = state.reshape(*x.shape[1:], -1)
        log_decay = jnp.moveaxis(inputs.log_decay, 0, -1)
        between = decay_between(log_decay)
        timed = jnp.moveaxis(x * inputs.dt[..., None], 0, 2)
        scores = jnp.einsum("ign,jgn->gij", c, b, precision=EXACT)[:, None] * between
        since = jnp.exp(jnp.cumsum(log_decay, axis=-1))[..., None]
        read = jnp.einsum("ign,ghpn->ghip", c, grouped, precision=EXACT)
        out = since * read + jnp.matmul(scores, timed, precision=EXACT)
        until = between[..., -1, :, None]
        summed = jnp.einsum("ghjp,jgn->ghpn", until * timed, b, precision=EXACT)
        new = since[..., -1:, :] * grouped + summed
        return new.reshape(state.shape), jnp.moveaxis(out, 2, 0).reshape(len(x), *state.shape[:-1])
