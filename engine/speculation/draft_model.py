"""Drafts of a smaller model of the same vocabulary (Leviathan et al. 2023, Chen et al. 2023).

Its layers have pages of their own under the page numbers of the model's: one page table is for
both, and whatever finds, keeps, copies or frees a page does so for both. Its programs are in
engine/step/drafts/draft_programs.py.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from engine.speculation.history import DRAFTED_LATER


@dataclass(frozen=True)
class DraftModel:
    """A Drafter whose drafts are made in the step that verifies them, as many as it grants: those
    of a draft model, or of a draft head."""

    num_drafts: int

    def drafts(self, ids: Array, slots: Array, lengths: Array, looks_up: Array) -> tuple[Array, Array]:  # noqa: ARG002 - all are made later
        """See Drafter."""
        later = jnp.full((len(lengths), self.num_drafts), DRAFTED_LATER, jnp.int32)
        return later, jnp.zeros(len(lengths), bool)
