"""What drafts come from: the one thing that ``verify`` knows of a method."""

from typing import Protocol

from jax import Array

from engine.speculation.draft_model import DraftModel
from engine.speculation.history import earlier_width
from engine.speculation.prompt_lookup import PromptLookup
from engine.speculation.speculative_config import SpeculativeConfig


class Drafter(Protocol):
    """One method. It drafts when tokens have been verified, as PromptLookup does, from the history
    alone, or has programs that draft in the step that verifies, as DraftModel does."""

    def drafts(self, ids: Array, slots: Array, lengths: Array, looks_up: Array) -> tuple[Array, Array]:
        """i32[rows, num_drafts] what may follow the first i32[rows] ``lengths`` tokens of i32[rows]
        ``slots`` in i32[slots, width] ``ids``, and bool[rows] whether they are of earlier texts. A
        lookup has none unless bool[] ``looks_up``.

        NO_DRAFT is none. DRAFTED_LATER is one that a program writes to the history before it is
        fed, if the step grants it.
        """


def drafter_of(config: SpeculativeConfig) -> Drafter:
    """The drafter of a method."""
    if config.has_model:
        return DraftModel(config.num_speculative_tokens)
    width = earlier_width(config.prompt_lookup_history or 0)
    return PromptLookup(config.num_speculative_tokens, *config.lookup_sizes, width)
