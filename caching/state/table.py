"""The slots of a step's rows: where each reads its state, and where it writes it.

A layer's states are arrays ``[slots, ...]``, a slot for each state. The first slot is the sink: it
reads as zeros, the state of a sequence's beginning, whatever padding rows have written.
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
    """The states of a step's rows. All i32; ``cu_q_lens`` and ``num_seqs`` are PageTable's.

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
        return cls(jnp.zeros(rows, jnp.int32), numbers[1:], numbers * np.int32(length), jnp.full(1, rows, jnp.int32))

    @property
    def lengths(self) -> Array:
        """i32[rows] tokens of each row, 0 in padding rows."""
        rows = jnp.arange(self.slots.shape[0], dtype=jnp.int32)
        return jnp.where(rows < self.num_seqs, jnp.diff(self.cu_q_lens), 0)

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
