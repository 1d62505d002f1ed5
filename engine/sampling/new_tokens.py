"""Tokens that the states of bias and penalties do not have yet.

The states are by slot, and a step's newest tokens may be known to the device alone.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NewTokens:
    """By row that samples, the tokens before the one to sample that its slot's state lacks."""

    ids: Array
    """i32[rows, most], the newest first."""
    counts: Array
    """i32[rows] how many of them there are."""
    owners: Array
    """i32[rows] the slot whose state is to have them from now on; the dump slot where they are
    drafts, which may be wrong, or another row of the same slot hands them over."""

    def at(self, places: Array) -> Array:
        """i32[rows, n] the tokens at i32[rows, n] places, counted from the newest."""
        return jnp.take_along_axis(self.ids, jnp.clip(places, 0, self.ids.shape[1] - 1), axis=1)

    @property
    def are_there(self) -> Array:
        """bool[rows, most] whether a token counts."""
        places = jnp.arange(self.ids.shape[1], dtype=jnp.int32)
        return (places[None, :] < self.counts[:, None]) & (self.ids >= 0)


def last_sampled(last_token: Array, slots: Array, decodes: Array) -> NewTokens:
    """The token that each slot sampled last, i32[slots], where bool[rows] ``decodes``: a row that
    was fed prompt tokens has all its tokens in the state."""
    return NewTokens(last_token[slots][:, None], decodes.astype(np.int32), slots)
