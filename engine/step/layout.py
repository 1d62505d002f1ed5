"""The bucket sizes of steps, and the offset of each field in a step's packed array.

Padding is counted as (bucket - tokens) / bucket, the wasted share of a step.

Up to ``max_num_seqs`` a step may be all decodes, of the same size step after step, so sizes are
{4, 5, 6} x 2^k: padding is below a quarter of it, and powers of two have none. A larger step has
a prompt's chunk and, while prompts wait, the whole budget; only a last chunk is padded. Sizes of
{2, 3} x 2^k keep that below a third: each costs a compilation, of seconds for a large model.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from caching.attention.spec import PageTable
from caching.cache_groups import CacheGroups
from caching.metadata import PagedAttentionCacheMetaData, pages_for
from caching.page_manager import SINK_PAGE
from engine.sampling.sampler import SamplingRows

PROMPT_BLOCK = 64
"""Prompt tokens per block of log-probabilities: their logits fit in a step's memory anyway."""
DECODE_MANTISSAS = (4, 5, 6)
CHUNK_MANTISSAS = (2, 3)
SMALLEST = (1, 2, 3)
COVERING_RATIO = 8
"""How much larger than its own bucket a step's bucket may be until its own is compiled."""
FROM_SLOT = -1
"""Stands for a token id: the last token sampled in the row's slot, which is on the device."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelInputBatch:
    """The model's view of a step: T tokens of at most ``rows`` sequences, and rows <= T."""

    token_ids: Array
    """i32[T]; FROM_SLOT in decoding rows, whose tokens come first."""
    positions: Array
    """i32[T], each token's position in its sequence; 0 in padding."""
    slots: Array
    """i32[rows], where a row's sampled token is stored; the dump slot if it samples none."""
    table: PageTable


@dataclass(frozen=True)
class StepLayout:
    """Field offsets of the packed array, for ``tokens`` tokens and ``rows`` rows of the sampler.

    The sampler's fields come first and depend on ``rows`` alone, so that buckets with equally many
    rows share samplers. The model has no more rows than tokens.
    """

    tokens: int
    rows: int
    pages_per_seq: int
    widths: tuple[int, ...] = ()
    """Pages that travel of each group's table, one after the other; without any, one whole table.

    Of a table with a window, these are the pages from the row's ``first_pages`` on."""

    @property
    def model_rows(self) -> int:
        """Rows that the model computes logits for. The sampler's further rows are padding."""
        return min(self.tokens, self.rows)

    @cached_property
    def fields(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Offset and shape by name. Every entry has four bytes."""
        tokens, rows = (self.tokens,), (self.rows,)
        shapes: dict[str, tuple[int, ...]] = {
            "slots": rows,
            "bias_slots": rows,
            "penalty_slots": rows,
            "kv_lens": rows,
            "temperature": rows,
            "top_k": rows,
            "top_p": rows,
            "min_p": rows,
            "seeds": rows,
            "token_ids": tokens,
            "positions": tokens,
            "page_indices": (self.model_rows, sum(self._widths)),
            "first_pages": (self.model_rows, len(self.windowed)),
            "cu_q_lens": (self.model_rows + 1,),
            "num_seqs": (1,),
        }
        offset, fields = 0, {}
        for name, shape in shapes.items():
            fields[name] = (offset, shape)
            offset += math.prod(shape)
        return fields

    @cached_property
    def table_columns(self) -> list[slice]:
        """By group, its columns of ``page_indices``."""
        ends = list(accumulate(self._widths, initial=0))
        return [slice(*columns) for columns in pairwise(ends)]

    @cached_property
    def windowed(self) -> list[int]:
        """The groups of which a part of the table travels."""
        return [group for group, width in enumerate(self._widths) if width < self.pages_per_seq]

    @property
    def _widths(self) -> tuple[int, ...]:
        return self.widths or (self.pages_per_seq,)

    @cached_property
    def size(self) -> int:
        """Entries of the packed array."""
        offset, shape = self.fields["num_seqs"]
        return offset + math.prod(shape)

    @cached_property
    def _spans(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        return {name: (slice(at, at + math.prod(shape)), shape) for name, (at, shape) in self.fields.items()}

    @property
    def sampling_size(self) -> int:
        """Entries of the sampler's part."""
        return self.fields["token_ids"][0]

    def view(self, packed: NDArray[np.int32], name: str, dtype: type[np.generic] = np.int32) -> NDArray[Any]:
        """A field of the packed array on the host, as a writable view."""
        span, shape = self._spans[name]
        field = packed[span] if len(shape) == 1 else packed[span].reshape(shape)
        return field if dtype is np.int32 else field.view(dtype)

    def take(self, packed: Array, name: str, dtype: type[np.generic] = np.int32) -> Array:
        """A field of the packed array on the device."""
        offset, shape = self.fields[name]
        field = packed[offset : offset + math.prod(shape)].reshape(shape)
        return field if dtype is np.int32 else jax.lax.bitcast_convert_type(field, jnp.dtype(dtype))

    def unpack(self, packed: Array) -> ModelInputBatch:
        """The model's part, inside a compiled function."""
        return ModelInputBatch(
            token_ids=self.take(packed, "token_ids"),
            positions=self.take(packed, "positions"),
            slots=self.take(packed, "slots")[: self.model_rows],
            table=PageTable(
                kv_lens=self.take(packed, "kv_lens")[: self.model_rows],
                page_indices=self._tables(packed),
                cu_q_lens=self.take(packed, "cu_q_lens"),
                num_seqs=self.take(packed, "num_seqs"),
            ),
        )

    def _tables(self, packed: Array) -> Array:
        """i32[groups, rows, pages_per_seq], the sink where a part does not reach."""
        parts, firsts = self.take(packed, "page_indices"), self.take(packed, "first_pages")
        tables = [parts[:, columns] for columns in self.table_columns]
        for number, group in enumerate(self.windowed):
            part = jnp.pad(tables[group], ((0, 0), (0, 1)), constant_values=SINK_PAGE)
            place = jnp.arange(self.pages_per_seq, dtype=jnp.int32)[None, :] - firsts[:, number, None]
            outside = np.int32(self._widths[group])
            place = jnp.where((place < 0) | (place > outside), outside, place)
            tables[group] = jnp.take_along_axis(part, place, axis=1, mode="promise_in_bounds")
        return jnp.stack(tables)

    def unpack_sampling(self, packed: Array) -> tuple[Array, SamplingRows]:
        """The sampler's part, the first ``sampling_size`` entries: slots and parameters."""
        rows = SamplingRows(
            temperature=self.take(packed, "temperature", np.float32),
            top_k=self.take(packed, "top_k"),
            top_p=self.take(packed, "top_p", np.float32),
            min_p=self.take(packed, "min_p", np.float32),
            seeds=self.take(packed, "seeds", np.uint32),
            # The position of the next token: its sequence's tokens so far are 0..kv_len-1.
            positions=self.take(packed, "kv_lens"),
        )
        return self.take(packed, "slots"), rows


@dataclass(frozen=True)
class StepShapes:
    """Sizes that all compiled functions share."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    cache: PagedAttentionCacheMetaData
    smallest_step: int = 1
    """Tokens below which a step is no faster."""

    @property
    def pages_per_seq(self) -> int:
        """Width of the page table."""
        return pages_for(self.max_model_len, self.cache.page_size)

    @property
    def buckets(self) -> list[int]:
        """The token counts to compile for, ascending."""
        return token_buckets(self.max_num_seqs, self.max_num_batched_tokens, self.smallest_step)

    @cached_property
    def groups(self) -> CacheGroups:
        """The page tables of a sequence."""
        return CacheGroups(self.cache.page_size, self.cache.windows, self.max_num_batched_tokens)

    def layout(self, tokens: int) -> StepLayout:
        """The packed array of a bucket."""
        pages = self.pages_per_seq
        widths = tuple(min(pages, most or pages) for most in self.groups.most)
        return StepLayout(tokens, sampling_rows(tokens, self.max_num_seqs), pages, widths)


def token_buckets(max_num_seqs: int, max_num_batched_tokens: int, smallest: int = 1) -> list[int]:
    """The token counts of compiled steps, ascending; the last is the budget.

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


def sampling_rows(tokens: int, max_num_seqs: int) -> int:
    """Rows of a bucket's sampler: a power of two, or all.

    Samplers come in several variants that take seconds to compile, but little time to run. Up to
    half of their rows may be padding.
    """
    return min(1 << (tokens - 1).bit_length(), max_num_seqs)


def _sizes(mantissas: tuple[int, ...], largest: int) -> set[int]:
    return {mantissa << exponent for mantissa in mantissas for exponent in range(largest.bit_length())}
