"""The slots of a step's rows: where each reads its state, and where it writes it.

A layer's states are arrays ``[slots, ...]``, a slot for each state. The first slot is the sink: it
reads as zeros, the state of a sequence's beginning, whatever padding rows have written.

Where rows may have drafts, a state must be able to go back behind those that turn out wrong. So a
row with drafts writes to its slot the state *before* its tokens, and beside it what each of its
tokens would do to it. Which of them were right is known when the slot is read next: the reader
begins at some token of its sequence, and first computes what the slot has up to there. Nothing is
copied for it, and a state is read and written no more often than its sequence has rows. The slot
says of how many tokens its state is (``base``); it may be read from there up to its row's end.
"""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint

from caching.page_manager import SINK_SLOT


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateTable:
    """The states of a step's rows. All but ``drafted`` i32; ``cu_q_lens`` and ``num_seqs`` are PageTable's.

    No slot that one row writes is read by another.
    """

    sources: Array
    """[rows] the slot read before a row's first token; the sink where its sequence begins."""
    slots: Array
    """[rows] the slot written after its last token."""
    cu_q_lens: Array
    """[rows + 1] where each row's tokens begin; padding rows repeat the total."""
    num_seqs: Array
    """[1] rows that are not padding."""
    starts: Array
    """[rows] tokens of its sequence before a row's first one."""
    drafted: Array
    """bool[rows] whether a row has drafts: all of its tokens but the first may be wrong."""
    behind: Array
    """[rows] tokens between the state that is read and a row's first one; ``after_base`` knows."""
    first: Array | int = 0
    """[] the layer's first slot in an array of several layers."""
    num_slots: int = field(default=0, metadata={"static": True})
    """Slots of a layer, where several share an array."""

    def of_layer(self, layer: Array | None) -> "StateTable":
        """The table of a layer, i32[] of those that share an array; None if it has its own."""
        return self if layer is None else replace(self, first=layer * np.int32(self.num_slots))

    @classmethod
    def of_whole_rows(cls, rows: int, length: int) -> "StateTable":
        """Rows of ``length`` tokens each that begin their sequences, in as many slots and the sink."""
        numbers = jnp.arange(rows + 1, dtype=jnp.int32)
        none, count = jnp.zeros(rows, jnp.int32), jnp.full(1, rows, jnp.int32)
        return cls(none, numbers[1:], numbers * np.int32(length), count, none, none > 0, none)

    @property
    def lengths(self) -> Array:
        """i32[rows] tokens of each row, 0 in padding rows."""
        rows = jnp.arange(self.slots.shape[0], dtype=jnp.int32)
        return jnp.where(rows < self.num_seqs, jnp.diff(self.cu_q_lens), 0)

    def after_base(self, base: Array) -> "tuple[StateTable, Array]":
        """The table with ``behind``, from i32[slots, 1] how many tokens are in each slot's state;
        and those after the step."""
        rows = jnp.arange(self.slots.shape[0], dtype=jnp.int32)
        behind = jnp.where(self.sources == SINK_SLOT, 0, self.starts - self.read(base, rows)[:, 0])
        ends = jnp.where(self.drafted, self.starts, self.starts + self.lengths)
        return replace(self, behind=behind), self.write(base, rows, ends[:, None], self.lengths > 0)

    @property
    def goes_back(self) -> Array:
        """bool[rows] whether a row computes what its slot has behind the state, or leaves such."""
        return (self.lengths > 0) & ((self.behind > 0) | self.drafted)

    def from_slots(self, rows: Array) -> "StateTable":
        """The table in which bool[rows] read the slots that they write."""
        return replace(self, sources=jnp.where(rows, self.slots, self.sources))

    def read(self, states: Array, rows: Array) -> Array:
        """[slots, ...] at the sources of i32[n] ``rows`` -> [n, ...], zeros where one begins."""
        sources = self.sources[rows]
        found = states[sources + self.first]
        begins = (sources == SINK_SLOT).reshape(-1, *[1] * (found.ndim - 1))
        return _in_order(jnp.where(begins, np.array(0, found.dtype), found))

    def write(self, states: Array, rows: Array, new: Array, is_written: Array) -> Array:
        """[slots, ...] with [n, ...] ``new`` in the slots of i32[n] ``rows`` that bool[n] selects."""
        outside = states.shape[0] + jnp.arange(rows.shape[0], dtype=jnp.int32)
        slots = jnp.where(is_written, self.slots[rows] + self.first, outside)
        return states.at[slots].set(_in_order(new.astype(states.dtype)), mode="drop", unique_indices=True)


def _in_order(states: Array) -> Array:
    """The same, its axes in order in memory: else XLA:TPU may turn all slots to what one wants."""
    constrained: Array = with_layout_constraint(states, Layout(tuple(range(states.ndim))))
    return constrained
