"""Drafts from what the sequence has said before (Saxena 2023, "Prompt Lookup Decoding").

The longest run of last tokens that occurs earlier is looked for, of several the latest, and what
followed it there is the draft. Where that comes to the sequence's end it goes on from the run:
what goes round in a loop is drafted as a loop.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array

from engine.speculation.history import NO_DRAFT


@dataclass(frozen=True)
class PromptLookup:
    """A Drafter; runs of ``shortest`` to ``longest`` tokens are looked for."""

    num_drafts: int
    shortest: int
    longest: int

    def drafts(self, ids: Array, lengths: Array) -> Array:
        """See Drafter; there are none where no run of ``shortest`` tokens occurs twice, and a run of
        more than ``longest`` counts as such."""
        rows, width = ids.shape
        places = jnp.arange(width, dtype=jnp.int32)
        ends = places[None, :] < lengths[:, None] - 1
        length, alike = jnp.zeros((rows, width), jnp.int32), ends
        for back in range(self.longest):
            last = jnp.take_along_axis(ids, jnp.maximum(lengths - 1 - back, 0)[:, None], axis=1)
            moved = jnp.pad(ids, ((0, 0), (back, 0)), constant_values=NO_DRAFT)[:, :width]
            alike = alike & (moved == last) & (places[None, :] >= back)
            length += alike.astype(jnp.int32)
        best = jnp.max(jnp.where(length >= self.shortest, length * np.int32(width) + places[None, :], -1), axis=1)
        found = best >= 0
        follows = jnp.where(found, best % np.int32(width), 0) + 1
        period = jnp.maximum(lengths - follows, 1)
        steps = jnp.arange(self.num_drafts, dtype=jnp.int32)[None, :] % period[:, None]
        drafts = jnp.take_along_axis(ids, jnp.minimum(follows[:, None] + steps, width - 1), axis=1)
        return jnp.where(found[:, None], drafts, NO_DRAFT)
