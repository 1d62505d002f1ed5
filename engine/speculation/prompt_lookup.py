"""Drafts from what the sequence has said before (Saxena 2023, "Prompt Lookup Decoding").

The longest run of last tokens that occurs earlier is looked for, of several the latest, and what
followed it there is the draft. Where that comes to the sequence's end it goes on from the run:
what goes round in a loop is drafted as a loop. Earlier texts of the tenant count as what was said
before the sequence's first token: of runs as long, one of the sequence's own goes before.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from engine.scheduling.sequence import NO_DRAFT


@dataclass(frozen=True)
class PromptLookup:
    """A Drafter; runs of ``shortest`` to ``longest`` tokens are looked for, in the sequence's own
    tokens and in ``earlier_width`` places of earlier texts, the last ones."""

    num_drafts: int
    shortest: int
    longest: int
    earlier_width: int = 0

    def drafts(self, ids: Array, slots: Array, lengths: Array, looks_up: Array) -> tuple[Array, Array]:
        """See Drafter; there are none where no run of ``shortest`` tokens occurs twice, and a run of
        more than ``longest`` counts as such."""
        none = jnp.full((len(slots), self.num_drafts), NO_DRAFT, jnp.int32)
        of_nobody = none, jnp.zeros(len(slots), bool)
        found: tuple[Array, Array] = jax.lax.cond(
            looks_up, lambda: self._look_up(ids[slots], lengths), lambda: of_nobody
        )
        return found

    def _look_up(self, ids: Array, lengths: Array) -> tuple[Array, Array]:
        """i32[rows, num_drafts] and bool[rows] of i32[rows, width] tokens."""
        rows, width = ids.shape
        places, own_width = jnp.arange(width, dtype=jnp.int32), width - self.earlier_width
        is_own = places < own_width
        offsets = jnp.where(is_own, places, places - np.int32(own_width))
        order = jnp.where(is_own, places + np.int32(self.earlier_width), offsets)
        follows = jnp.pad(ids[:, 1:], ((0, 0), (0, 1)), constant_values=NO_DRAFT) >= 0
        ends = jnp.where(is_own[None, :], places[None, :] < lengths[:, None] - 1, follows)
        length, alike = jnp.zeros((rows, width), jnp.int32), ends
        for back in range(self.longest):
            last = jnp.take_along_axis(ids, jnp.maximum(lengths - 1 - back, 0)[:, None], axis=1)
            moved = jnp.pad(ids, ((0, 0), (back, 0)), constant_values=NO_DRAFT)[:, :width]
            is_run = (moved == last) & (lengths > back)[:, None] & (offsets[None, :] >= back)
            alike = alike & is_run
            length += alike.astype(jnp.int32)
        best = jnp.max(jnp.where(length >= self.shortest, length * np.int32(width) + order[None, :], -1), axis=1)
        found, at = best >= 0, best % np.int32(width)
        in_own = at >= self.earlier_width
        first = jnp.where(in_own, at - np.int32(self.earlier_width), at + np.int32(own_width)) + 1
        first = jnp.where(found, first, 0)
        period = jnp.where(in_own, jnp.maximum(lengths - first, 1), np.int32(width))
        steps = jnp.arange(self.num_drafts, dtype=jnp.int32)[None, :] % period[:, None]
        drafts = jnp.take_along_axis(ids, jnp.minimum(first[:, None] + steps, width - 1), axis=1)
        has_ended = jnp.cumsum(drafts < 0, axis=1, dtype=jnp.int32) > 0
        return jnp.where(found[:, None] & ~has_ended, drafts, NO_DRAFT), found & ~in_own
