"""The offset of each field in a step's packed array, and what the device makes of it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from caching.attention.spec import PageTable
from caching.state.table import StateTable
from engine.sampling.sampler_inputs import pack_inputs
from engine.speculation.history import History
from engine.step.inputs.slot_state import Packed, SlotState, SlotWrites, read, write

LEAST_LOGITS = 8
"""Rows whose logits take little longer than those of one."""
FROM_SLOT = -1
"""Stands for a token id: the last token sampled in the row's slot, which is on the device."""
MOST_ADMISSIONS = 8
LEAST_PAGES, PAGE_TOKENS = 8, 8
"""A step's room for sequences that got a slot, and for new pages: of 256 rows, each group of
layers has room for 32 where 16 are new on average in pages of 16 tokens."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelInputBatch:
    """The model's view of a step: T tokens of at most ``rows`` sequences, and rows <= T."""

    token_ids: Array
    """i32[T]; those of decoding rows come first."""
    positions: Array
    """i32[T], each token's position in its sequence; 0 in padding."""
    sampled: Array
    """i32[model_rows] the tokens that logits may be computed of."""
    num_logits: Array
    """i32[], of how many of them, the first ones, logits are needed."""
    table: PageTable


@dataclass(frozen=True)
class StepLayout:
    """Field offsets of the packed array, for ``tokens`` tokens and ``rows`` rows of the sampler.

    The model has no more rows than tokens. ``num_groups`` are the page tables of a sequence.
    """

    tokens: int
    rows: int
    num_groups: int = 1
    has_states: bool = False
    """Whether the model has recurrent states."""
    has_adapters: bool = False
    """Whether rows may have adapters."""
    has_drafts: bool = False
    """Whether rows may have drafts."""

    @property
    def model_rows(self) -> int:
        """Tokens that the model computes logits of: a row's last one, or of a row with drafts
        several. The sampler's further rows are padding."""
        return min(self.tokens, self.rows)

    def logit_rows(self, smallest_step: int) -> list[int]:
        """The numbers of rows that logits are computed of, ascending: the first that holds those
        that need them. Where a smaller step is no faster, it is none of them or all."""
        if self.model_rows <= LEAST_LOGITS:
            return [self.model_rows]
        powers = (1 << power for power in range(self.model_rows.bit_length()))
        fewer = [] if smallest_step > 1 else [rows for rows in powers if LEAST_LOGITS <= rows < self.model_rows]
        return [0, *fewer, self.model_rows]

    @cached_property
    def writes(self) -> SlotWrites:
        """Room for the changes that most steps bring: in a table a page for every PAGE_TOKENS."""
        pages = max(LEAST_PAGES, self.tokens // PAGE_TOKENS)
        return SlotWrites(min(self.model_rows, MOST_ADMISSIONS), self.num_groups * pages)

    @cached_property
    def fields(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Offset and shape by name, all int32.

        Row i has ``counts[i]`` tokens of the sequence in ``slots[i]``, of which the last
        ``samples[i]`` get logits; where that is negative, as many that do not sample in this step.
        Padding rows have the dump slot and no tokens.
        ``adapters[i]`` is the slot of its adapter, -1 if it has none. ``looks_up`` is 1 if drafts
        are looked for behind what the step samples, else 0.
        """
        shapes: dict[str, tuple[int, ...]] = {
            "slots": (self.rows,),
            "counts": (self.rows,),
            "samples": (self.rows,),
            "writes": (self.writes.size,),
            "state_sources": (self.model_rows * self.has_states,),
            "state_slots": (self.model_rows * self.has_states,),
            "adapters": (self.model_rows * self.has_adapters,),
            "looks_up": (int(self.has_drafts),),
            "token_ids": (self.tokens,),
        }
        offset, fields = 0, {}
        for name, shape in shapes.items():
            fields[name] = (offset, shape)
            offset += math.prod(shape)
        return fields

    @cached_property
    def size(self) -> int:
        """Entries of the packed array."""
        offset, shape = self.fields["token_ids"]
        return offset + math.prod(shape)

    @cached_property
    def _spans(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        return {name: (slice(at, at + math.prod(shape)), shape) for name, (at, shape) in self.fields.items()}

    def view(self, packed: Packed, name: str) -> Packed:
        """A field of the packed array; on the host, a writable view."""
        span, shape = self._spans[name]
        return packed[span] if len(shape) == 1 else packed[span].reshape(shape)

    def unpack(self, packed: Array, state: SlotState, fed: Array | History) -> tuple[SlotState, ModelInputBatch, Array]:
        """The state after the step, the model's part, and the sampler's as ``pack_inputs`` gives it.

        ``state`` is that before the step. ``fed`` is what decoding rows are fed: i32[slots] the
        token that each slot sampled last, or where rows may have drafts the history.
        """
        state = state.after(self.writes, self.view(packed, "writes"))
        if isinstance(fed, History):
            return self._unpack_drafts(packed, state, fed)
        return self._unpack_last(packed, state, fed)

    def _unpack_last(
        self, packed: Array, state: SlotState, last_token: Array
    ) -> tuple[SlotState, ModelInputBatch, Array]:
        """A decoding row has one token, whose index is the row's."""
        slots, counts, samples, given = (
            self.view(packed, name) for name in ("slots", "counts", "samples", "token_ids")
        )
        lens, rows = read(state.num_tokens.at[slots]) + counts, slice(self.model_rows)
        begins = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts[rows], dtype=jnp.int32)])
        decodes = given[rows] == FROM_SLOT
        first = jnp.where(decodes, read(last_token.at[slots[rows]]), given[rows])
        batch = ModelInputBatch(
            token_ids=jnp.concatenate([first, given[self.model_rows :]]),
            positions=self._positions(begins, lens[rows]),
            sampled=jnp.maximum(begins[1:] - 1, 0),
            num_logits=jnp.max(jnp.where(samples[rows] != 0, 1 + jnp.arange(self.model_rows, dtype=jnp.int32), 0)),
            table=_table(state, slots[rows], counts, lens[rows], begins),
        )
        decodes = jnp.pad(decodes.astype(jnp.int32), (0, self.rows - self.model_rows))
        inputs = pack_inputs(slots, samples, decodes, lens, state.parameters)
        return replace(state, num_tokens=write(state.num_tokens.at[slots], lens)), batch, inputs

    def _unpack_drafts(
        self, packed: Array, state: SlotState, history: History
    ) -> tuple[SlotState, ModelInputBatch, Array]:
        """A decoding row has a token and its drafts, and rows of the sampler for all of them."""
        most = slice(self.model_rows)
        slots, counts, samples = (self.view(packed, name)[most] for name in ("slots", "counts", "samples"))
        given = self.view(packed, "token_ids")
        begins = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
        firsts = given[jnp.minimum(begins[:-1], np.int32(self.tokens - 1))]
        decodes = (counts > 0) & (firsts == FROM_SLOT)
        lens = read(state.num_tokens.at[slots]) - jnp.where(decodes, history.num_wrong[slots], 0) + counts
        positions = self._positions(begins, lens)
        row, _ = self._rows_of_tokens(begins)
        own = history.fed(slots[row], positions)

        index = jnp.arange(self.model_rows, dtype=jnp.int32)
        logits = jnp.abs(samples)
        ends = jnp.cumsum(logits, dtype=jnp.int32)
        of_row = jnp.searchsorted(ends, index, side="right", method="compare_all").astype(jnp.int32)
        is_real = of_row < self.model_rows
        of_row = jnp.where(is_real, of_row, 0)
        rests = jnp.where(is_real, ends[of_row] - 1 - index, 0)
        offsets = jnp.where(is_real, logits[of_row] - 1 - rests, 0)
        dump = np.int32(state.num_tokens.shape[0] - 1)
        columns = (
            jnp.where(is_real, slots[of_row], dump), is_real & (samples[of_row] > 0), is_real & decodes[of_row],
            jnp.where(is_real, lens[of_row] - rests, 0), offsets, rests,
            jnp.broadcast_to(self.view(packed, "looks_up"), is_real.shape),
        )  # fmt: skip
        padding = (0, self.rows - self.model_rows)
        of_slot, real, fed_back, num_tokens, *drafts = (
            jnp.pad(column.astype(jnp.int32), padding, constant_values=dump if number == 0 else 0)
            for number, column in enumerate(columns)
        )
        batch = ModelInputBatch(
            token_ids=jnp.where(given == FROM_SLOT, own, given),
            positions=positions,
            sampled=jnp.where(is_real, begins[of_row + 1] - 1 - rests, 0),
            num_logits=ends[-1],
            table=_table(state, slots, counts, lens, begins),
        )
        inputs = pack_inputs(of_slot, real, fed_back, num_tokens, state.parameters, *drafts)
        return replace(state, num_tokens=write(state.num_tokens.at[slots], lens)), batch, inputs

    def unpack_states(self, packed: Array, table: PageTable, num_slots: int) -> StateTable | None:
        """The rows' slots, of ``num_slots``; None without recurrent states."""
        if not self.has_states:
            return None
        sources, slots = self.view(packed, "state_sources"), self.view(packed, "state_slots")
        starts = table.kv_lens - jnp.diff(table.cu_q_lens)
        drafted = jnp.abs(self.view(packed, "samples")[: self.model_rows]) > 1
        rows = sources, slots, table.cu_q_lens, table.num_seqs, starts, drafted
        return StateTable(*rows, behind=jnp.zeros_like(starts), num_slots=num_slots)

    def unpack_adapters(self, packed: Array, table: PageTable) -> Array:
        """i32[T] the slot of each token's adapter; -1 if it has none."""
        row, is_real = self._rows_of_tokens(table.cu_q_lens)
        return jnp.where(is_real, self.view(packed, "adapters")[row], -1)

    def _positions(self, begins: Array, lens: Array) -> Array:
        """i32[T] positions of rows that begin at i32[rows + 1] tokens and end i32[rows] long."""
        row, is_real = self._rows_of_tokens(begins)
        first = (lens - begins[1:])[row]
        return jnp.where(is_real, first + jnp.arange(self.tokens, dtype=jnp.int32), 0)

    def _rows_of_tokens(self, begins: Array) -> tuple[Array, Array]:
        """i32[T] each token's row, and bool[T] whether it has one; 0 in padding."""
        token = jnp.arange(self.tokens, dtype=jnp.int32)
        row = jnp.searchsorted(begins[1:], token, side="right", method="compare_all").astype(jnp.int32)
        is_real = row < self.model_rows
        return jnp.where(is_real, row, 0), is_real


Unpack = Callable[[StepLayout, Array, SlotState, Array | History], tuple[SlotState, ModelInputBatch, Array]]
"""``StepLayout.unpack``, or what a backend has in its place."""


def _table(state: SlotState, slots: Array, counts: Array, lens: Array, begins: Array) -> PageTable:
    """Of i32[rows] slots, tokens in this step and in all, and i32[rows + 1] where rows begin."""
    return PageTable(
        kv_lens=lens,
        page_indices=state.tables_of(slots),
        cu_q_lens=begins,
        num_seqs=jnp.sum(counts > 0, dtype=jnp.int32)[None],
    )
