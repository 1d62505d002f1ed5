"""Drafts of a smaller model of the same vocabulary (Leviathan et al. 2023, Chen et al. 2023).

Its layers have pages of their own under the page numbers of the model's: one page table is for
both, and whatever finds, keeps, copies or frees a page does so for both. Its programs are in
engine/step/drafts/draft_programs.py.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import Array

from engine.errors import ConfigurationError
from engine.models.layers.cache_layout import cache_layout
from engine.models.spec import ModelSpec
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


def draft_spec(draft: ModelSpec, model: ModelSpec, name: str) -> ModelSpec:
    """A model as it drafts for another: it keeps the keys and values of all tokens.

    Raises ConfigurationError unless it can draft for ``model``; ``name`` is the draft model's.
    """
    if draft.vocab_size != model.vocab_size:
        raise ConfigurationError(
            f"speculative_config: the draft model {name} has a vocabulary of {draft.vocab_size:,} tokens, and the model "
            f"one of {model.vocab_size:,}: choose a draft model of the same vocabulary"
        )
    if cache_layout(draft.blocks).states:
        raise ConfigurationError(
            f"speculative_config: the draft model {name} has recurrent layers, whose states cannot go back behind a "
            "wrong draft: choose another"
        )
    _check_pages(model)
    return replace(draft, keeps_all=True)


def checked_head(head: ModelSpec, model: ModelSpec) -> ModelSpec:
    """A draft head. Raises ConfigurationError if the model has no pages for it."""
    _check_pages(model)
    return head


def _check_pages(model: ModelSpec) -> None:
    if None not in cache_layout(model.blocks).windows:
        raise ConfigurationError(
            "speculative_config: a draft model needs pages of all tokens, and all layers of this model have windows: "
            "choose the method ngram"
        )
