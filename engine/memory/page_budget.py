"""The number of pages that fit in memory, and the context length they allow."""

import logging
from dataclasses import replace
from functools import cached_property

from caching.cache_groups import CacheGroups
from caching.metadata import PagedAttentionCacheMetaData, pages_for
from engine.adapters.slot_arrays import AdapterSizes
from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.models.partition import Partition
from engine.models.spec import ModelSpec
from engine.sampling.operations import SamplingOperations
from engine.scheduling.speculation import most_samples
from engine.speculation.history import earlier_bytes, own_bytes
from engine.step.backend import Backend
from engine.step.host_cache.host_budget import host_budget
from engine.step.sampling_programs import sampling_bytes
from engine.step.step_shapes import StepShapes

logger = logging.getLogger(__name__)

BACK_OFF = 8
"""If the device refuses a pool, the next one has fewer pages and kept states by 1/BACK_OFF."""
KEPT_EVERY = 4096
"""Tokens in pages, or the longest sequence's if that is less, for which memory is set aside for one
kept recurrent state: about a conversation, which needs its pages and a state to go on from."""
KEPT_AT_MOST = 3
"""Kept states for each sequence that may run, or at full length one every KEPT_EVERY: behind its
last page, at its prompt's end, and where it branched off."""


class CachePlanner:
    """Sizes the pool: as many pages as were asked for, or as fit besides weights and scratch.

    It is never larger than all sequences at full length need. Recurrent states of sequences that
    run have their slots first, and then the pages of one at full length; of the rest, pages have as
    much as KEPT_EVERY tokens take beside a kept state. It is made before the weights are loaded.
    Raises ConfigurationError if the context asked for is longer than the model's.
    """

    def __init__(
        self,
        config: EngineConfig,
        partition: Partition,
        one_page: PagedAttentionCacheMetaData,
        weight_bytes: int,
        budget: int,
        operations: SamplingOperations,
    ) -> None:
        self._config = config
        self._partition = partition
        self._one_page = one_page
        self._asked_context = _asked_context(config, partition.model)
        self.groups = CacheGroups(one_page.page_size, one_page.windows, config.max_num_batched_tokens)
        """The page tables of a sequence."""
        self._needed = config.max_num_seqs * self.groups.pages_of(self._asked_context) + 1
        self._budget = budget
        self._weights = weight_bytes
        self._scratch = _step_scratch(config, partition)
        self._sampling = _sampling_bytes(config, partition, self._asked_context, operations)
        self._page = one_page.bytes_per_page
        spec = config.speculation
        self.earlier_bytes = earlier_bytes(config.max_num_seqs, 0 if spec is None else spec.prompt_lookup_history or 0)
        """Of the texts of earlier sequences that slots have."""
        self._slot, self._running_slots, self._kept = 0, 0, 0
        if one_page.states is not None:
            self._slot, self._running_slots = one_page.states.bytes_per_slot, config.max_num_seqs + 1
            each = max(KEPT_AT_MOST, pages_for(self._asked_context, KEPT_EVERY))
            self._kept = each * config.max_num_seqs if config.enable_prefix_caching else 0
        conversation = self.groups.pages_of(min(KEPT_EVERY, self._asked_context))
        self.host = host_budget(config, one_page, partition.devices, conversation)
        """The tier in the host's memory, if one was asked for."""

    @cached_property
    def pool(self) -> PagedAttentionCacheMetaData:
        """The pool. Raises ConfigurationError if a sequence that may run has no page in a group."""
        return self._plan()

    @property
    def max_model_len(self) -> int:
        """Tokens of the pool's longest sequence. ConfigurationError if the operator wants more."""
        available = self.groups.tokens_in(self.pool.num_usable_pages, self._asked_context)
        if self._config.max_model_len is not None and available < self._asked_context:
            raise ConfigurationError(
                f"the pool holds {available} tokens, which is less than max_model_len {self._asked_context}: lower "
                f"max_model_len, or give more memory (hbm_utilization, num_pages)"
            )
        if available < 2:
            raise ConfigurationError(
                f"a context of {available} token has no room for a prompt and an answer: raise max_model_len or num_pages"
            )
        return available

    def shapes(self, backend: Backend, adapters: AdapterSizes | None) -> StepShapes:
        """The sizes of steps over the pool. Raises as ``pool`` and ``max_model_len`` do."""
        return StepShapes(
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            cache=self.pool,
            smallest_step=backend.smallest_step,
            skips_padding=backend.skips_padding and self.pool.states is None,
            host=self.host,
            adapters=adapters,
            speculation=self._config.speculation,
        )

    def fits(self, scratch_bytes: int) -> bool:
        """Whether the pool leaves ``scratch_bytes`` free for compiled steps; else it shrinks."""
        self._scratch = max(self._scratch, scratch_bytes)
        left = self._plan()
        if left.num_bytes >= self.pool.num_bytes:
            return True
        logger.warning(
            "a compiled step takes %s bytes beside weights and pages, more than was reckoned with: %s pages instead of %s",
            f"{scratch_bytes:,}", f"{left.num_pages:,}", f"{self.pool.num_pages:,}",
        )  # fmt: skip
        self.pool = left
        return False

    def back_off(self, why: str) -> None:
        """Shrink a pool that the device has refused. Raises ConfigurationError if it cannot."""
        refused = self.pool.num_pages
        size = f"{refused:,} pages ({refused * self._page:,} bytes) {self._beside()}"
        if self._config.num_pages is not None:
            raise ConfigurationError(f"the device has no memory for {size}: lower num_pages ({why})")
        kept = self.pool.states.num_slots - self._running_slots if self.pool.states else 0
        self.pool = self._of(refused - max(1, refused // BACK_OFF), kept - kept // BACK_OFF)
        logger.warning(
            "the device has no memory for %s: trying %s. A lower hbm_utilization, or num_pages, asks for less from the "
            "start; a lower max_num_batched_tokens needs less scratch (%s)",
            size, f"{self.pool.num_pages:,}", why,
        )  # fmt: skip

    @property
    def least(self) -> int:
        """The fewest pages of a pool."""
        return self._config.max_num_seqs * len(self.groups.windows) + 1

    @property
    def least_in_words(self) -> str:
        """What each of them is for, but for the sink."""
        count, tables = self._config.max_num_seqs, len(self.groups.windows)
        each = "" if tables == 1 else f" in each of {tables} groups of layers"
        return f"for each of max_num_seqs {count} sequences{each}"

    @property
    def least_bytes(self) -> int:
        """Bytes of the smallest pool."""
        return self.least * self._page + self.running_states_bytes

    @property
    def least_described(self) -> str:
        """What these bytes are for, in words."""
        pages = f"{self.least} pages of {self._page:,} (one {self.least_in_words}, and the sink)"
        return f"{pages}{self._states_in_words}"

    @property
    def running_states_bytes(self) -> int:
        """Bytes of the recurrent states of all sequences that may run, and of the sink."""
        return self._running_slots * self._slot

    @property
    def reserved(self) -> int:
        """Bytes reserved for the largest step, the sampler, earlier texts, and pages and states on
        their way to the host and from it."""
        staged = 0 if self.host is None else self.host.device_pages * self._page
        if self.host is not None and self.host.states is not None:
            staged += self.host.states.device_pages * self._slot
        return self._scratch + self._sampling + self.earlier_bytes + staged

    def _plan(self) -> PagedAttentionCacheMetaData:
        asked, taken = self._config.num_pages, self._weights + self.reserved + self.running_states_bytes
        left = max(0, self._budget - taken)
        if asked is not None and asked > left // self._page:
            raise ConfigurationError(
                f"num_pages {asked} takes {asked * self._page:,} bytes, but only {left:,} are left {self._beside()}: lower "
                f"num_pages, or raise hbm_utilization"
            )
        if asked is not None:
            return self._of(asked, min(self._kept, (left - asked * self._page) // max(1, self._slot)))
        kept = self._kept_beside_pages(left) if self._kept else 0
        return self._of(min(self._needed, (left - kept * self._slot) // self._page), kept)

    def _kept_beside_pages(self, left: int) -> int:
        """The kept states that have a part of so many bytes."""
        longest = self._asked_context
        every = self.groups.pages_of(min(KEPT_EVERY, longest)) * self._page + self._slot
        beyond = left - (self.groups.pages_of(longest) + 1) * self._page
        return min(self._kept, left // every, max(0, beyond) // self._slot)

    def _beside(self) -> str:
        return f"beside {self._weights:,} bytes of weights and {self.reserved:,} of scratch{self._states_in_words}"

    @property
    def _states_in_words(self) -> str:
        count, states = self._config.max_num_seqs, self._running_slots
        each = f"(one for each of max_num_seqs {count} sequences, and the sink)"
        return f" and {states} states of {self._slot:,} {each}" if states else ""

    def _of(self, num_pages: int, kept: int) -> PagedAttentionCacheMetaData:
        if num_pages < self.least:
            raise ConfigurationError(
                f"{num_pages} pages of {self._page:,} bytes are too few for one page {self.least_in_words} and the sink, "
                f"{self._beside()}: lower max_num_seqs, or give more memory (hbm_utilization, num_pages)"
            )
        states = self._one_page.states
        if states is not None:
            states = replace(states, num_slots=self._running_slots + kept)
        return replace(self._one_page, num_pages=num_pages, states=states)


def check_page_table(backend: Backend, pages_per_seq: int) -> None:
    """Raises ConfigurationError if the attention kernel has no room for a sequence's page table."""
    most = backend.most_pages_per_seq
    if most is not None and pages_per_seq > most:
        raise ConfigurationError(
            f"the attention kernel has room for {most:,} pages of a sequence, not for {pages_per_seq:,}: raise page_size, or "
            "lower max_model_len"
        )


def _asked_context(config: EngineConfig, model: ModelSpec) -> int:
    """The operator's context length, or the model's."""
    asked = config.max_model_len
    if asked is not None and asked > model.max_position:
        raise ConfigurationError(
            f"max_model_len {asked} is more than the {model.max_position} positions the model was made for: lower it"
        )
    return asked or model.max_position


def _step_scratch(config: EngineConfig, partition: Partition) -> int:
    """An upper estimate of the largest step's float32 scratch, besides weights and pages."""
    model = partition.model
    devices = partition.devices
    each = 8 * model.hidden_size + model.mixer_scratch(devices) + model.feed_forward_scratch(devices)
    return 4 * config.max_num_batched_tokens * each


def _sampling_bytes(config: EngineConfig, partition: Partition, context: int, operations: SamplingOperations) -> int:
    """What the samplers have for all slots, and take beside it for the most rows of a step."""
    slots, drafts = config.max_num_seqs, 0 if config.speculation is None else config.speculation.num_speculative_tokens
    history = own_bytes(slots, context, drafts) if drafts else 0
    rows, vocab_size = most_samples(slots, drafts), partition.model.vocab_size
    return history + sampling_bytes(slots, rows, vocab_size, partition.devices, operations)
