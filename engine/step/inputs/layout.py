"""The bucket sizes of steps, and the offset of each field in a step's packed array.

Padding is counted as (bucket - tokens) / bucket, the wasted share of a step.

Up to ``max_num_seqs`` a step may be all decodes, of the same size step after step, so sizes are
{4, 5, 6} x 2^k: padding is below a quarter of it, and powers of two have none. A larger step has
a prompt's chunk and, while prompts wait, the whole budget; only a last chunk is padded. Sizes of
{2, 3} x 2^k keep that below a third: each costs a compilation, of seconds for a large model.

Where products and attention skip padding (``Backend.skips_padding``), sizes are powers of two.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from caching.attention.spec import PageTable
from caching.cache_groups import CacheGroups
from caching.metadata import PagedAttentionCacheMetaData, pages_for
from caching.state.table import StateTable
from engine.adapters.slot_arrays import AdapterSizes
from engine.sampling.sampler_inputs import pack_inputs
from engine.scheduling.speculation import most_samples
from engine.speculation.history import History
from engine.speculation.speculative_config import SpeculativeConfig
from engine.step.host_cache.host_budget import HostBudget
from engine.step.inputs.slot_state import Packed, SlotShapes, SlotState, SlotWrites, read, write

PROMPT_BLOCK = 64
"""Prompt tokens per block of log-probabilities: their logits fit in a step's memory anyway."""
DECODE_MANTISSAS = (4, 5, 6)
CHUNK_MANTISSAS = (2, 3)
SMALLEST = (1, 2, 3)
FEW = 8
"""Rows that sample late have a sampler of so many rows to themselves if they are no more."""
LEAST_LOGITS = 8
"""Rows whose logits take little longer than those of one."""
COVERING_RATIO = 8
"""How much larger than its own bucket a step's bucket may be until its own is compiled."""
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


@dataclass(frozen=True)
class StepShapes:
    """Sizes that all compiled functions share."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    cache: PagedAttentionCacheMetaData
    smallest_step: int = 1
    """Tokens below which a step is no faster."""
    skips_padding: bool = False
    """Whether padding costs next to nothing."""
    host: HostBudget | None = None
    """The tier in the host's memory, if there is one."""
    adapters: AdapterSizes | None = None
    """The slots of adapters, if there are such."""
    speculation: SpeculativeConfig | None = None
    """How rows get drafts, if they do."""

    @property
    def most_samples(self) -> int:
        """Tokens that a step samples at most."""
        return most_samples(self.max_num_seqs, self.num_drafts)

    @property
    def num_drafts(self) -> int:
        """The most that a row has."""
        return 0 if self.speculation is None else self.speculation.num_speculative_tokens

    @property
    def draft_rows(self) -> list[int]:
        """The rows that the draft model's programs have, ascending; none without such a model."""
        if self.speculation is None or not self.speculation.has_model:
            return []
        tokens = min(self.most_samples, self.max_num_batched_tokens)
        most = min(self.max_num_seqs, tokens // 2)  # a row with drafts has two at least
        sizes = {1 << power for power in range(most.bit_length())}
        return sorted({size for size in sizes if min(self.smallest_step, most) <= size} | {most})

    def draft_rows_of(self, tokens: int) -> list[int]:
        """Those of a step of up to so many tokens."""
        rows = self.draft_rows
        return rows[: bisect_left(rows, tokens // 2) + 1] if tokens > 1 else []

    @property
    def pages_per_seq(self) -> int:
        """Width of the page table."""
        return pages_for(self.max_model_len, self.cache.page_size)

    @property
    def buckets(self) -> list[int]:
        """The token counts to compile for, ascending."""
        if not self.skips_padding:
            return self.cost_sizes
        budget = self.max_num_batched_tokens
        return sorted({size for size in _sizes((1,), budget) if self.smallest_step <= size < budget} | {budget})

    @property
    def cost_sizes(self) -> list[int]:
        """The token counts by which costs of steps are told apart: the buckets, or where padding
        costs nothing those that would be."""
        return token_buckets(self.most_samples, self.max_num_batched_tokens, self.smallest_step)

    @cached_property
    def groups(self) -> CacheGroups:
        """The page tables of a sequence."""
        return CacheGroups(self.cache.page_size, self.cache.windows, self.max_num_batched_tokens)

    @cached_property
    def slots(self) -> SlotShapes:
        """The state of all slots."""
        groups = len(self.cache.windows)
        earlier = 0 if self.speculation is None else self.speculation.prompt_lookup_history or 0
        return SlotShapes(self.max_num_seqs, groups, self.pages_per_seq, self.max_model_len, self.num_drafts, earlier)

    @property
    def few_rows(self) -> int:
        """Rows of the sampler for few rows."""
        return self._sampling_rows(max(FEW, self.smallest_step))

    def layout(self, tokens: int) -> StepLayout:
        """The packed array of a bucket."""
        return StepLayout(
            tokens,
            self._sampling_rows(tokens),
            self.slots.num_groups,
            self.cache.states is not None,
            self.adapters is not None,
            self.speculation is not None,
        )

    def _sampling_rows(self, tokens: int) -> int:
        return sampling_rows(tokens, self.most_samples, skips_padding=self.skips_padding)


def token_buckets(max_num_seqs: int, max_num_batched_tokens: int, smallest: int = 1) -> list[int]:
    """The token counts of steps whose padding costs what tokens do, ascending; the last is the
    budget.

    ``smallest`` is above 1 if a smaller step is no faster because it is bound by reading weights.
    Padding then costs next to nothing, and decoding steps are powers of two.
    """
    most = max(max_num_seqs, smallest)
    closer = {*SMALLEST, *_sizes(DECODE_MANTISSAS, max_num_batched_tokens)}
    decodes = _sizes((1,), max_num_batched_tokens) if smallest > 1 else closer
    chunks = _sizes(CHUNK_MANTISSAS, max_num_batched_tokens)
    kept = {size for size in decodes if smallest <= size <= most} | {most} | {size for size in chunks if size > most}
    return sorted({size for size in kept if size <= max_num_batched_tokens} | {max_num_batched_tokens})


def covering_buckets(buckets: list[int]) -> list[int]:
    """A few buckets in which every step fits, ascending: the largest and one per magnitude."""
    covering = [buckets[-1]]
    for bucket in reversed(buckets):
        if bucket * COVERING_RATIO <= covering[0]:
            covering.insert(0, bucket)
    return covering


def sampling_rows(tokens: int, max_num_seqs: int, *, skips_padding: bool = False) -> int:
    """Rows of a bucket's sampler: a power of two, or all; of four, if the backend ``skips_padding``.

    Samplers come in several variants that take seconds to compile, but little time to run. Up to
    half of their rows may be padding, or three quarters.
    """
    power = (tokens - 1).bit_length()
    return min(1 << (power + power % 2 if skips_padding else power), max_num_seqs)


def _sizes(mantissas: tuple[int, ...], largest: int) -> set[int]:
    return {mantissa << exponent for mantissa in mantissas for exponent in range(largest.bit_length())}
