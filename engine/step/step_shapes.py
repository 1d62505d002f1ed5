"""The sizes of steps that are compiled: buckets of tokens, and rows of the sampler and of drafts.

Padding is counted as (bucket - tokens) / bucket, the wasted share of a step.

Up to ``max_num_seqs`` a step may be all decodes, of the same size step after step, so sizes are
{4, 5, 6} x 2^k: padding is below a quarter of it, and powers of two have none. A larger step has
a prompt's chunk and, while prompts wait, the whole budget; only a last chunk is padded. Sizes of
{2, 3} x 2^k keep that below a third: each costs a compilation, of seconds for a large model.

Where products and attention skip padding (``Backend.skips_padding``), sizes are powers of two.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

from caching.cache_groups import CacheGroups
from caching.metadata import PagedAttentionCacheMetaData, pages_for
from engine.adapters.slot_arrays import AdapterSizes
from engine.scheduling.speculation import most_samples
from engine.speculation.speculative_config import SpeculativeConfig
from engine.step.host_cache.host_budget import HostBudget
from engine.step.inputs.layout import StepLayout
from engine.step.inputs.slot_state import SlotShapes

DECODE_MANTISSAS = (4, 5, 6)
CHUNK_MANTISSAS = (2, 3)
SMALLEST = (1, 2, 3)
FEW = 8
"""Rows that sample late have a sampler of so many rows to themselves if they are no more."""
COVERING_RATIO = 8
"""How much larger than its own bucket a step's bucket may be until its own is compiled."""


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


def token_buckets(max_num_seqs: int, max_num_batched_tokens: int, smallest: int) -> list[int]:
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


def sampling_rows(tokens: int, max_num_seqs: int, *, skips_padding: bool) -> int:
    """Rows of a bucket's sampler: a power of two, or all; of four, if the backend ``skips_padding``.

    Samplers come in several variants that take seconds to compile, but little time to run. Up to
    half of their rows may be padding, or three quarters.
    """
    power = (tokens - 1).bit_length()
    return min(1 << (power + power % 2 if skips_padding else power), max_num_seqs)


def _sizes(mantissas: tuple[int, ...], largest: int) -> set[int]:
    return {mantissa << exponent for mantissa in mantissas for exponent in range(largest.bit_length())}
