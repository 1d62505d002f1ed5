"""How many pages the memory holds."""

import logging
from dataclasses import replace

import jax
import psutil

from caching.metadata import PagedAttentionCacheMetaData, pages_for
from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.models.config import ModelConfig

logger = logging.getLogger(__name__)

ACCELERATOR_UTILIZATION = 0.9
CPU_UTILIZATION = 0.4
"""A host's memory is shared with everything else that runs on it, an accelerator's is ours."""


BACK_OFF = 8
"""Where the device refuses a pool, the next one to be tried has this part of its pages less."""


class CachePlanner:
    """How many pages there are to be: what was asked for, or what the memory has room for beside weights and scratch.

    Never more than every sequence at full length needs. Made before the weights are loaded.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        max_model_len: int,
        one_page: PagedAttentionCacheMetaData,
        weight_bytes: int,
        budget: int,
    ) -> None:
        self._config = config
        self._model = model
        self._one_page = one_page
        self._needed = config.max_num_seqs * pages_for(max_model_len, one_page.page_size) + 1
        self._budget = budget
        self._weights = weight_bytes
        self._scratch = _step_scratch(config, model)
        self._page = one_page.bytes_per_page

    def plan(self) -> PagedAttentionCacheMetaData:
        """The pool. Raises ConfigurationError when there is not one page for each sequence that may run."""
        asked, left = self._config.num_pages, max(0, self._budget - self._weights - self.reserved)
        fitting = left // self._page
        if asked is not None and asked > fitting:
            raise ConfigurationError(
                f"num_pages {asked} takes {asked * self._page:,} bytes, but only {left:,} are left {self._beside()}: lower "
                f"num_pages, or raise hbm_utilization"
            )
        return self._of(asked or min(self._needed, fitting))

    def count_scratch(self, step_bytes: int) -> None:
        """The compiled step takes so much beside weights and pages: plan with that, where it is more than was guessed."""
        self._scratch = max(self._scratch, step_bytes)

    def back_off(self, refused: PagedAttentionCacheMetaData, why: str) -> PagedAttentionCacheMetaData:
        """The pool to try when the device has refused one; says so. Raises ConfigurationError where that is no answer."""
        size = f"{refused.num_pages:,} pages ({refused.num_pages * self._page:,} bytes) {self._beside()}"
        if self._config.num_pages is not None:
            raise ConfigurationError(f"the device has no memory for {size}: lower num_pages ({why})")
        smaller = self._of(refused.num_pages - max(1, refused.num_pages // BACK_OFF))
        logger.warning(
            "the device has no memory for %s: trying %s. A lower hbm_utilization, or num_pages, asks for less from the "
            "start; a lower max_num_batched_tokens needs less scratch (%s)",
            size, f"{smaller.num_pages:,}", why,
        )  # fmt: skip
        return smaller

    @property
    def reserved(self) -> int:
        """Bytes kept free for the largest step and the sampler."""
        return self._scratch + _sampling_scratch(self._config, self._model)

    def _beside(self) -> str:
        return f"beside {self._weights:,} bytes of weights and {self.reserved:,} of scratch"

    def _of(self, num_pages: int) -> PagedAttentionCacheMetaData:
        least = self._config.max_num_seqs + 1
        if num_pages < least:
            raise ConfigurationError(
                f"{num_pages} pages of {self._page:,} bytes are too few for one page for each of max_num_seqs "
                f"{least - 1} sequences and the sink, {self._beside()}: lower max_num_seqs, or give more memory "
                f"(hbm_utilization, num_pages)"
            )
        return replace(self._one_page, num_pages=num_pages)


def memory_budget(config: EngineConfig, devices: int = 1) -> int:
    """Bytes that we may use of each of so many devices of this host: of the one that has the fewest left, weights included."""
    return min(_left_on(device, devices, config.hbm_utilization) for device in jax.local_devices()[:devices])


def _left_on(device: jax.Device, devices: int, utilization: float | None) -> int:
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] * (utilization or ACCELERATOR_UTILIZATION)) - int(stats.get("bytes_in_use", 0))
    return int(psutil.virtual_memory().available * (utilization or CPU_UTILIZATION)) // devices


def _step_scratch(config: EngineConfig, model: ModelConfig) -> int:
    """A generous guess at what the largest compiled step needs besides weights and pages, in float32."""
    split = 4 * model.intermediate_size + 4 * model.num_heads * model.head_dim
    return 4 * config.max_num_batched_tokens * (8 * model.hidden_size + split // model.tensor_parallel_size)


def _sampling_scratch(config: EngineConfig, model: ModelConfig) -> int:
    """The same of the sampler's working set, and what it keeps of each slot."""
    return 4 * config.max_num_seqs * (4 + 2) * model.padded_vocab_size // model.tensor_parallel_size
