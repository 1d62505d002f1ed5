"""All tokens of each slot's sequence, on the device: what steps are fed from, and drafts are looked
for in, where rows speculate.

A sequence's tokens are written when it gets its slot, those that it samples when they are verified.
Behind its last token are its drafts. A step feeds a decoding row the last token and as many of the
drafts as it was granted. Which of them were right is known on the device alone until the step
lands; what the next step needs of it is here.

Behind the room for a sequence's tokens there may be room for texts of earlier requests
(``Sequence.earlier``), written with its own, for drafts to be looked for in.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from engine.sampling.new_tokens import NewTokens
from engine.scheduling.sequence import NO_DRAFT

DRAFTED_LATER = -2
"""Stands for a draft that is made in the step that verifies it."""
PIECE = 1024
"""Tokens of a sequence that one call writes; of earlier texts one writes all."""
PIECE_HEADER = DRAFT_HEADER = 2
"""Before them, and before a row's drafts: the slot, and the place of the first."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class History:
    """Arrays by slot, the dump slot's last. Samplers take them donated and return them."""

    ids: Array
    """i32[slots, width] each sequence's tokens by position, then its drafts, NO_DRAFT or
    DRAFTED_LATER. The last ``earlier_width`` are texts before it, and NO_DRAFT behind each."""
    num_new: Array
    """i32[slots] tokens that its last step gave."""
    num_wrong: Array
    """i32[slots] drafts of its last step that were not right: their positions come again."""
    num_drafts: int = field(metadata={"static": True})
    """The most that a row has."""

    def fed(self, slots: Array, positions: Array) -> Array:
        """i32[n] the tokens at i32[n] positions; 0 where there is none."""
        return jnp.maximum(self.draft(slots, positions), 0)

    def draft(self, slots: Array, positions: Array) -> Array:
        """i32[n] the drafts at i32[n] positions, below 0 where there is none."""
        return _at(self.ids, slots, positions)

    def drafts(self, slots: Array, firsts: Array, counts: Array) -> Array:
        """i32[n, num_drafts] the i32[n] counts of drafts from i32[n] positions on, then NO_DRAFT."""
        places = jnp.arange(self.num_drafts, dtype=jnp.int32)
        drafts = self.draft(slots[:, None], firsts[:, None] + places[None, :])
        return jnp.where(places[None, :] < counts[:, None], drafts, NO_DRAFT)

    def drafted(self, slots: Array, positions: Array, drafts: Array) -> "History":
        """The history with i32[n] drafts, or NO_DRAFT, at i32[n] positions of i32[n] slots."""
        ids = self.ids.at[slots, positions].set(drafts)
        return replace(self, ids=ids)

    def new_tokens(self, slots: Array, owners: Array, decodes: Array, offsets: Array, positions: Array) -> NewTokens:
        """What the states of rows lack that sample at i32[rows] ``positions``.

        A decoding row was given ``num_new`` tokens by the step before, and has been fed ``offsets``
        drafts beside. ``slots`` are those of the rows; see NewTokens for ``owners``.
        """
        back = 1 + jnp.arange(2 * self.num_drafts + 1, dtype=jnp.int32)
        places = jnp.maximum(positions[:, None] - back[None, :], 0)
        counts = jnp.where(decodes, self.num_new[slots] + offsets, 0)
        return NewTokens(_at(self.ids, slots[:, None], places), counts, owners)

    def after(self, piece: Array) -> "History":
        """The history after a ``piece`` of a slot's tokens."""
        at = (piece[0], piece[1])
        ids = jax.lax.dynamic_update_slice(self.ids, piece[None, PIECE_HEADER:], at)
        return replace(self, ids=ids)

    def with_expected(self, rows: Array) -> "History":
        """The history with drafts i32[n, DRAFT_HEADER + num_drafts] that ``expected_rows`` made."""
        places = rows[:, 1:DRAFT_HEADER] + jnp.arange(self.num_drafts, dtype=jnp.int32)[None, :]
        ids = self.ids.at[rows[:, :1], places].set(rows[:, DRAFT_HEADER:])
        return replace(self, ids=ids)


def _at(ids: Array, slots: Array, positions: Array) -> Array:
    found: Array = ids.at[slots, positions].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return found


def own_width(max_model_len: int, num_drafts: int) -> int:
    """Places for a sequence's tokens and drafts, in whole pieces."""
    return -(-(max_model_len + num_drafts + 1) // PIECE) * PIECE


def earlier_width(num_tokens: int) -> int:
    """Places for up to so many tokens of earlier texts, and NO_DRAFT, in whole pieces."""
    return -(-(num_tokens + 1) // PIECE) * PIECE if num_tokens else 0


def own_bytes(max_num_seqs: int, max_model_len: int, num_drafts: int) -> int:
    """Bytes on each device of the places for sequences' tokens and drafts, the dump slot's too."""
    return 4 * (max_num_seqs + 1) * own_width(max_model_len, num_drafts)


def earlier_bytes(max_num_seqs: int, num_tokens: int) -> int:
    """Bytes on each device of so many tokens of earlier texts for each slot, the dump slot's too."""
    return 4 * (max_num_seqs + 1) * earlier_width(num_tokens)


def new_history(num_slots: int, max_model_len: int, num_drafts: int, num_earlier: int) -> History:
    """One without tokens, on the default device, with room for so many of earlier texts."""
    width = own_width(max_model_len, num_drafts) + earlier_width(num_earlier)
    ids = jnp.full((num_slots, width), NO_DRAFT, jnp.int32)
    return History(ids, jnp.zeros(num_slots, jnp.int32), jnp.zeros(num_slots, jnp.int32), num_drafts)


def expected_rows(
    drafts: Iterable[tuple[int, int, ListOf[int]]], max_num_seqs: int, num_drafts: int
) -> NDArray[np.int32]:
    """i32[max_num_seqs, DRAFT_HEADER + num_drafts] that write drafts: of slots, from a place on,
    up to ``num_drafts`` each. Rows that are left write to the dump slot."""
    rows = np.full((max_num_seqs, DRAFT_HEADER + num_drafts), NO_DRAFT, np.int32)
    rows[:, :DRAFT_HEADER] = max_num_seqs, 0
    for row, (slot, first, token_ids) in zip(rows, drafts, strict=False):
        row[:DRAFT_HEADER] = slot, first
        row[DRAFT_HEADER : DRAFT_HEADER + len(token_ids)] = token_ids
    return rows


def pieces(slot: int, token_ids: ListOf[int]) -> Iterator[NDArray[np.int32]]:
    """i32[PIECE_HEADER + PIECE] arrays that write a slot's tokens, and NO_DRAFT behind the last."""
    for start in range(0, len(token_ids), PIECE):
        yield piece(slot, start, token_ids[start : start + PIECE], PIECE)


def piece(slot: int, first: int, token_ids: ListOf[int], width: int) -> NDArray[np.int32]:
    """i32[PIECE_HEADER + width] that writes tokens from place ``first`` on, and NO_DRAFT in what is
    left of ``width`` places."""
    written = np.full(PIECE_HEADER + width, NO_DRAFT, np.int32)
    written[:PIECE_HEADER] = slot, first
    written[PIECE_HEADER : PIECE_HEADER + len(token_ids)] = token_ids
    return written
